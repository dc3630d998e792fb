"""The replies of /dashboard: the page's files, and the stream of what it shows.

Owns: the files' types and the headers that confine the page; when a browser that does not read is cut off.
Does not know: who may ask (`http`), or what the events say.
"""

from __future__ import annotations

import asyncio
from importlib.resources import files

from starlette.responses import Response
from starlette.types import Scope, Send

from ..bounded_http import ABORT
from ..streams import EventStream, send_chunk
from .feed import Feed

INDEX = "index.html"
STUCK_S = 10.0  # a browser that takes nothing for so long is cut off; it comes back by itself if it wakes
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, no text ever taken for markup.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def load_files() -> dict[str, Response]:
    """The reply for each file of the page, by its name."""
    replies = {}
    for file in files(__package__).joinpath("page").iterdir():
        suffix = file.name[file.name.rindex(".") :]
        replies[file.name] = Response(file.read_bytes(), headers=_HEADERS, media_type=_MEDIA_TYPES[suffix])
    return replies


class LiveStream(EventStream):
    """What the feed has, to one browser, until it leaves, does not read, or the frontend stops."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def _stream(self, scope: Scope, send: Send) -> None:
        if scope["method"] != "HEAD":
            with self._feed.watch() as viewer:
                while (chunk := await viewer.take()) is not None:
                    try:
                        async with asyncio.timeout(STUCK_S):
                            await send_chunk(send, chunk)
                    except TimeoutError:
                        scope["state"][ABORT]()
                        return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
