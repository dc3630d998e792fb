"""CUDA streams and events without a GPU: work is done when `turn` is called, in any order that the streams allow."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch


class Streams:
    """From here on torch's streams and events are these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random = random.Random(seed)
        self.all: list[Stream] = []
        self.clock = 0
        self.current = Stream(self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def do(self, work: Callable[[], None]) -> None:
        """Queue work on the current stream."""
        self.current.queue.append((lambda: True, work))

    def turn(self) -> bool:
        """One piece of work of some stream; False when nothing can be done."""
        ready = [stream for stream in self.all if stream.queue and stream.queue[0][0]()]
        if not ready:
            return False
        self.clock += 1
        self.random.choice(ready).queue.popleft()[1]()
        return True

    def turns(self, most: int) -> None:
        """Up to so many pieces of work."""
        for _ in range(most):
            if not self.turn():
                return


class Stream:
    """A queue of (whether it can be done, work)."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        streams.all.append(self)

    def wait_event(self, event: Event) -> None:
        place = event.place
        self.queue.append((lambda: place.at >= 0, lambda: None))

    def synchronize(self) -> None:
        while self.queue:
            assert self.streams.turn(), "a stream waits for ever"


class Place:
    """Where an event was recorded, and when its stream came there."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.at = streams, -1

    def occur(self) -> None:
        self.at = self.streams.clock


class Event:
    """Occurs when its stream has come to where it was recorded last."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.place = streams, Place(streams)

    def record(self, stream: Stream | None = None) -> None:
        self.place = Place(self.streams)
        (stream or self.streams.current).queue.append((lambda: True, self.place.occur))

    def wait(self) -> None:
        self.streams.current.wait_event(self)

    def query(self) -> bool:
        return self.place.at >= 0

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query()
        return float(other.place.at - self.place.at)
