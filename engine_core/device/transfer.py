"""Copies of whole blocks between the tiers of the CPU device, beside the compute, and their completion.

Owns: copies in flight, and the thread that makes them. Does not know: formats, requests; a block is opaque bytes.

Copies run in the order in which they begin; a step is over when the next one begins, so that no copy meets the work of
a step before its own. `COLDBLOCK_TEST_COPY_DELAY_STEPS=n`, for tests only, makes a copy take place n polls late, source
read and target written only then: whoever reuses a block before its copy is reported done gets wrong bytes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ..control.plan import BlockMove, Direction, MoveDone
from .kv_pool import KVPool


@dataclass(slots=True)
class _Flight:
    move: BlockMove
    polls_left: int
    begun: float
    copy: Future[MoveDone] | None = None


class Transfers:
    """Copies on a thread of its own: numpy copies without the interpreter's lock, and without torch's thread pool."""

    def __init__(self, pool: KVPool) -> None:
        self._gpu, self._cpu = pool.gpu.numpy(), pool.cpu.numpy()
        self._flights: deque[_Flight] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
        self._delay = int(os.environ.get("COLDBLOCK_TEST_COPY_DELAY_STEPS", "0"))

    def begin(self, moves: Sequence[BlockMove]) -> None:
        """Start the copies, in order."""
        for move in moves:
            flight = _Flight(move, self._delay, time.perf_counter())
            if not self._delay:
                flight.copy = self._thread.submit(self._copy, flight)
            self._flights.append(flight)

    def poll(self, wait_s: float = 0.0) -> tuple[MoveDone, ...]:
        """The copies that ended since the last poll, each once. Waits up to `wait_s` for the first, if any runs."""
        running = [flight.copy for flight in self._flights if flight.copy is not None]
        if wait_s and running:
            wait(running, wait_s, FIRST_COMPLETED)
        finished = []
        waiting: deque[_Flight] = deque()
        for flight in self._flights:
            if flight.copy is not None and flight.copy.done():
                finished.append(flight.copy.result())
                continue
            waiting.append(flight)
            if flight.polls_left:
                flight.polls_left -= 1
                if not flight.polls_left:
                    flight.copy = self._thread.submit(self._copy, flight)
        self._flights = waiting
        return tuple(finished)

    def close(self) -> None:
        """Wait for the copies."""
        self._thread.shutdown()

    def _copy(self, flight: _Flight) -> MoveDone:
        begun, move = time.perf_counter(), flight.move
        out = move.direction is Direction.OUT
        source, target = (self._gpu, self._cpu) if out else (self._cpu, self._gpu)
        reads, writes = (move.gpu_blocks, move.cpu_blocks) if out else (move.cpu_blocks, move.gpu_blocks)
        error = None
        try:
            for read, write in zip(reads, writes, strict=True):
                target[write] = source[read]
        except (IndexError, ValueError) as problem:
            error = str(problem)
        return MoveDone(move.move_id, time.perf_counter() - begun, error, queued_s=begun - flight.begun)
