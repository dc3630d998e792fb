"""Copies of whole blocks between the tiers, and their completion.

Owns: copies in flight. Does not know: formats, requests; a block is opaque bytes.

`COLDBLOCK_TEST_COPY_DELAY_STEPS=n`, for tests only, makes a copy take place n polls late, source read and target
written only then: whoever reuses a block before its copy is reported done gets wrong bytes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..control.plan import BlockMove, Direction, MoveDone
from .kv_pool import KVPool


@dataclass(slots=True)
class _Flight:
    move: BlockMove
    polls_left: int
    begun: float
    done: MoveDone | None = None


class Transfers:
    """Copies at `begin` and reports at the next `poll`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._flights: deque[_Flight] = deque()
        self._delay = int(os.environ.get("COLDBLOCK_TEST_COPY_DELAY_STEPS", "0"))

    def begin(self, moves: Sequence[BlockMove]) -> None:
        """Start the copies, in order."""
        for move in moves:
            flight = _Flight(move, self._delay, time.perf_counter())
            if not self._delay:
                flight.done = self._copy(flight)
            self._flights.append(flight)

    def poll(self) -> tuple[MoveDone, ...]:
        """The copies that ended since the last poll, each once."""
        finished = []
        waiting: deque[_Flight] = deque()
        for flight in self._flights:
            if flight.polls_left:
                flight.polls_left -= 1
                waiting.append(flight)
            else:
                finished.append(flight.done or self._copy(flight))
        self._flights = waiting
        return tuple(finished)

    def _copy(self, flight: _Flight) -> MoveDone:
        move, pool = flight.move, self._pool
        gpu_blocks, cpu_blocks = torch.tensor(move.gpu_blocks), torch.tensor(move.cpu_blocks)
        source, target, read, write = pool.gpu, pool.cpu, gpu_blocks, cpu_blocks
        if move.direction is Direction.IN:
            source, target, read, write = target, source, write, read
        try:
            target.index_copy_(0, write, source.index_select(0, read))
        except (IndexError, RuntimeError) as error:
            return MoveDone(move.move_id, time.perf_counter() - flight.begun, str(error))
        return MoveDone(move.move_id, time.perf_counter() - flight.begun)
