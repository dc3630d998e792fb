"""The HTTP server, which tells the application that it stops before it waits for open replies.

Owns: that moment. Does not know: routes or signals.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn


class HttpServer(uvicorn.Server):
    """`end_streams` ends replies that have no end of their own, or a graceful stop would wait for them in vain."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No new connections; open replies get their time; then the application ends."""
        self._end_streams()
        await super().shutdown(sockets)
