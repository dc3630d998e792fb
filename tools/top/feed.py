"""Hears what an engine publishes, for as long as a monitor runs: over its end, its restart, and its silence.

Owns: when an engine counts as gone, restarted or silent. Does not know: what is made of what it hears.

Read-only: it subscribes to what is published anyway, and sends nothing but a greeting and heartbeats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from ...protocol.client import AsyncClient
from ...protocol.errors import ColdblockError, EngineUnreachable
from ...protocol.messages import Stats
from .history import History

LOOK_S = 0.5  # between two looks at whether the engine is still the same
SILENT_S = 5.0  # snapshots come twice a second, but not during a long step


async def listen(client: AsyncClient, history: History, changed: Callable[[], None]) -> NoReturn:
    """Tell `history` everything; call `changed` when there is something new to show. Runs until cancelled."""
    while True:
        try:
            await client.ready(LOOK_S)
        except EngineUnreachable:
            history.lost(time.time(), f"no engine answers at {client.endpoint}; waiting for one")
            changed()
        except ColdblockError as error:  # one of another version, for example: it may be replaced
            history.lost(time.time(), f"{error}; waiting for another engine")
            changed()
            await asyncio.sleep(LOOK_S)
        else:
            await _hear(client, history, changed)


async def _hear(client: AsyncClient, history: History, changed: Callable[[], None]) -> None:
    """Hear this engine until another one answers, or none."""
    engine_id, heard_at = client.engine_id, time.monotonic()

    async def read() -> None:
        nonlocal heard_at
        async for message in client.events():
            if isinstance(message, Stats):
                heard_at = time.monotonic()
                history.snapshot(message)
                changed()
            else:
                history.swap(message)
            await asyncio.sleep(0)  # a flood of events must not hold up the keyboard

    reading = asyncio.create_task(read())
    try:
        while client.engine_id == engine_id and not reading.done():
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - heard_at > SILENT_S:
                history.lost(time.time(), f"no snapshot for {SILENT_S:g} s: a long step, or the engine is stuck")
                changed()
    finally:
        reading.cancel()
        await asyncio.wait([reading])
    if not reading.cancelled():
        reading.result()
