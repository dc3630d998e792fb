"""A peer's lines to the engine inside an event loop: frames in, frames out, and the moment the line breaks.

Owns: the DEALER and its monitor, and the SUBs.
Does not know: requests, heartbeats, what the frames mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from .sockets import monitored_dealer, subscriber

_BATCH = 256  # frames handled before the event loop gets its turn


def is_ready(sock: zmq.Socket[Any], direction: int) -> bool:
    """Whether the socket can receive (zmq.POLLIN) or send (zmq.POLLOUT) now."""
    return bool(int(sock.getsockopt(zmq.EVENTS)) & direction)


class Connection:
    """Calls `on_frame(bytes)` for each frame received and `on_lost()` when the connection breaks; reconnects by itself.

    All methods belong to the thread of the event loop.
    """

    def __init__(
        self,
        ctx: zmq.Context[zmq.Socket[Any]],
        endpoint: str,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._due: deque[bytes] = deque()
        self._dealer, self._monitor = monitored_dealer(ctx, endpoint, zmq.EVENT_DISCONNECTED)
        for sock in (self._dealer, self._monitor):
            self._loop.add_reader(sock.fileno(), self._pump)
        self._loop.call_soon(self._pump)

    def send(self, frame: bytes) -> None:
        """Send now. Raises zmq.Again when the queue to the engine is full."""
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        finally:
            self._loop.call_soon(self._pump)  # sending may have swallowed the wake-up of a frame that came in

    def send_soon(self, *frames: bytes) -> None:
        """Send as soon as the queue has room; forgotten when the connection breaks before."""
        self._due.extend(frames)
        self._loop.call_soon(self._pump)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; what was sent has this long to leave."""
        for sock in (self._dealer, self._monitor):
            self._loop.remove_reader(sock.fileno())
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger_ms)

    def _pump(self) -> None:
        """Handle all that is ready. ZeroMQ's descriptors signal changes, not states: stop only when nothing is left."""
        more = True
        try:
            for _ in range(_BATCH):
                more = self._handle_one()
                if not more:
                    return
        finally:
            if more:  # the batch is over, or a callback raised
                self._loop.call_soon(self._pump)

    def _handle_one(self) -> bool:
        """Receive, report or send one thing; False when there was none."""
        if self._dealer.closed:
            return False
        if is_ready(self._dealer, zmq.POLLIN):
            self._receive()
        elif is_ready(self._monitor, zmq.POLLIN):
            self._on_monitor_event()
        elif self._due and is_ready(self._dealer, zmq.POLLOUT):
            self._dealer.send(self._due.popleft(), zmq.NOBLOCK)
        else:
            return False
        return True

    def _receive(self) -> None:
        for frame in self._dealer.recv_multipart(zmq.NOBLOCK):
            self._on_frame(frame)

    def _on_monitor_event(self) -> None:
        self._monitor.recv_multipart(zmq.NOBLOCK)
        while not self._dealer.closed and is_ready(self._dealer, zmq.POLLIN):
            self._receive()  # what the engine said before the line broke still counts
        self._due.clear()
        self._on_lost()


class Subscription:
    """What an engine publishes under these topics, one publication at a time."""

    def __init__(self, ctx: zmq.Context[zmq.Socket[Any]], endpoint: str, topics: Iterable[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._sub = subscriber(ctx, endpoint, topics)
        self._loop.add_reader(self._sub.fileno(), self._changed.set)

    async def receive(self) -> list[bytes] | None:
        """The frames of the next publication (topic, message); None once the subscription is closed."""
        while not self._sub.closed:
            if is_ready(self._sub, zmq.POLLIN):
                return self._sub.recv_multipart(zmq.NOBLOCK)
            self._changed.clear()
            await self._changed.wait()
        return None

    def close(self) -> None:
        """Unsubscribe, and wake who waits. Harmless when repeated."""
        if not self._sub.closed:
            self._loop.remove_reader(self._sub.fileno())
            self._sub.close(linger=0)
            self._changed.set()
