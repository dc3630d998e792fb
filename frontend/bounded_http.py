"""The HTTP parser's protocol with an end to how long a request's head may be, and a way to cut a connection.

Owns: the limit, and `ABORT`. Does not know: routes. Bodies are limited by the application, which sees them in parts.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 128 * 1024
ABORT = "abort"
"""A request's `scope["state"]` has under this key the function that cuts its connection, with all that is unsent."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 400 and closes when the request line and headers outgrow the limit; the parser would keep them all."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Bytes from the client; those of a head that is not complete yet are counted."""
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's headers are longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()
        self.scope["state"][ABORT] = self.transport.abort

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_head = False
        super().on_headers_complete()
