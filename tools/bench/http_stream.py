"""Stream a completion over HTTP with as little client code as possible, noting when each token arrives.

Owns: the few lines of HTTP that this takes. Does not know: what the times are compared with.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

from ..errors import ToolError
from .measure import Timeline


async def timed_http(address: tuple[str, int], model: str, prompt: Sequence[int], new_tokens: int) -> Timeline:
    """Exactly `new_tokens` greedy tokens by /v1/completions; one arrival a chunk. Raises ToolError when refused."""
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address)
    try:
        timeline = Timeline(time.perf_counter())
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ToolError(f"the frontend answered {status.decode(errors='replace').strip()}")
        async for line in reader:
            if line.startswith(b"data: {"):
                timeline.arrivals.append(time.perf_counter())
        return timeline
    finally:
        writer.close()
