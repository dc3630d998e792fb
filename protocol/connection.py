"""A peer's line to the engine inside an event loop: frames in, frames out, and the moment the line breaks.

Owns: the DEALER, its monitor, and saying Hello on every new connection.
Does not know: requests, heartbeats, what the frames mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from .sockets import peer_dealer

_BATCH = 256  # frames handled before the event loop gets its turn


def is_ready(sock: zmq.Socket[Any], direction: int) -> bool:
    """Whether the socket can receive (zmq.POLLIN) or send (zmq.POLLOUT) now."""
    return bool(int(sock.getsockopt(zmq.EVENTS)) & direction)


class Connection:
    """Calls `on_frame(bytes)` for each frame received and `on_lost()` when the connection breaks; reconnects by itself.

    `hello` is sent first on every connection. All methods belong to the thread of the event loop.
    """

    def __init__(
        self,
        ctx: zmq.Context[zmq.Socket[Any]],
        endpoint: str,
        hello: bytes,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hello = hello
        self._hello_due = True
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._dealer = peer_dealer(ctx, endpoint)
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        for sock in (self._dealer, self._monitor):
            self._loop.add_reader(sock.fileno(), self._pump)
        self._loop.call_soon(self._pump)

    def send(self, frame: bytes) -> None:
        """Send now. Raises zmq.Again when there is no connection or the queue to the engine is full."""
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        finally:
            self._loop.call_soon(self._pump)  # sending may have swallowed the wake-up of a frame that came in

    def say_hello(self) -> None:
        """Introduce ourselves (again) as soon as the connection takes it."""
        self._hello_due = True
        self._loop.call_soon(self._pump)

    def close(self) -> None:
        """Close the sockets; what was sent still leaves, for as long as LINGER allows."""
        for sock in (self._dealer, self._monitor):
            self._loop.remove_reader(sock.fileno())
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close()

    def _pump(self) -> None:
        """Handle all that is ready. ZeroMQ's descriptors signal changes, not states: stop only when nothing is left."""
        for _ in range(_BATCH):
            if self._dealer.closed:
                return
            if is_ready(self._dealer, zmq.POLLIN):
                self._receive()
            elif is_ready(self._monitor, zmq.POLLIN):
                self._on_monitor_event()
            elif self._hello_due and is_ready(self._dealer, zmq.POLLOUT):
                self._hello_due = False
                self._dealer.send(self._hello, zmq.NOBLOCK)
            else:
                return
        self._loop.call_soon(self._pump)

    def _receive(self) -> None:
        for frame in self._dealer.recv_multipart(zmq.NOBLOCK):
            self._on_frame(frame)

    def _on_monitor_event(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._hello_due = True
            return
        while not self._dealer.closed and is_ready(self._dealer, zmq.POLLIN):
            self._receive()  # what the engine said before the line broke still counts
        self._on_lost()
