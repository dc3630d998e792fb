"""Copies of whole blocks between GPU and host, in the order of the compute stream, and their completion.

Owns: copies in flight, and the events that tell when they ended. Does not know: formats, requests.

A copy is queued on the current stream: it follows the steps that were begun before it and precedes its own step's
compute. `COLDBLOCK_TEST_COPY_DELAY_STEPS` means what it means in `transfer`: the copy is queued so many polls late.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..control.plan import BlockMove, Direction, MoveDone
from .kv_pool import KVPool


@dataclass(slots=True)
class _Flight:
    """One move. `events`: before and behind its copies once they are queued; `error`: it could not be queued."""

    move: BlockMove
    polls_left: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    error: str | None = None


class CudaTransfers:
    """Queues copies at `begin`; `poll` reports those that have ended, in any order. Call both on the compute stream."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._flights: deque[_Flight] = deque()
        self._delay = int(os.environ.get("COLDBLOCK_TEST_COPY_DELAY_STEPS", "0"))

    def begin(self, moves: Sequence[BlockMove]) -> None:
        """Start the copies, in order."""
        for move in moves:
            flight = _Flight(move, self._delay)
            if not self._delay:
                self._queue(flight)
            self._flights.append(flight)

    def poll(self) -> tuple[MoveDone, ...]:
        """The copies that ended since the last poll, each once."""
        finished = []
        waiting: deque[_Flight] = deque()
        for flight in self._flights:
            if flight.polls_left:
                flight.polls_left -= 1
            elif flight.events is None and flight.error is None:
                self._queue(flight)
            done = self._done(flight)
            if done is None:
                waiting.append(flight)
            else:
                finished.append(done)
        self._flights = waiting
        return tuple(finished)

    def _queue(self, flight: _Flight) -> None:
        move, pool = flight.move, self._pool
        source, target, read, write = pool.gpu, pool.cpu, move.gpu_blocks, move.cpu_blocks
        if move.direction is Direction.IN:
            source, target, read, write = target, source, write, read
        if max(read) >= len(source) or max(write) >= len(target):
            flight.error = "there is no such block"
            return
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        try:
            begun.record()
            for first_read, first_write, count in runs(read, write):
                part = source[first_read : first_read + count]
                target[first_write : first_write + count].copy_(part, non_blocking=True)
            ended.record()
        except RuntimeError as error:
            flight.error = str(error)
        else:
            flight.events = begun, ended

    @staticmethod
    def _done(flight: _Flight) -> MoveDone | None:
        if flight.error is not None:
            return MoveDone(flight.move.move_id, 0.0, flight.error)
        if flight.events is None or not flight.events[1].query():
            return None
        begun, ended = flight.events
        return MoveDone(flight.move.move_id, begun.elapsed_time(ended) / 1e3)


def runs(read: Sequence[int], write: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Pairs of blocks as (first read, first written, count), neighbours on both sides together: one copy each."""
    start = 0
    for i in range(1, len(read) + 1):
        if i == len(read) or read[i] != read[i - 1] + 1 or write[i] != write[i - 1] + 1:
            yield read[start], write[start], i - start
            start = i
