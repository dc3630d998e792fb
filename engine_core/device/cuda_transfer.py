"""Copies of whole blocks between GPU and host beside the steps, and their completion.

Owns: a stream for either direction, copies in flight, the events that order and time them. Does not know: formats,
requests; a block is opaque bytes.

What orders copies and steps (see `BlockMove`):
* A copy waits on its stream for an event behind every step that was begun before it. All kernels in front of an event
  have ended when it occurs, those included that let their successor start early.
* A step that reads what came in, or writes what went out, was planned after the `MoveDone`: the host saw the copy's
  last event before it launched the step's first kernel. So even attention, which reads old K and V before the kernel in
  front of it has ended, finds them; no stream has to wait for a copy.

`COLDBLOCK_TEST_COPY_DELAY_STEPS` means what it means in `transfer`: the copy is queued so many polls late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels import block_copy
from ...kernels.errors import KernelError
from ..control.plan import BlockMove, Direction, MoveDone
from ..errors import MemoryBudgetError
from .kv_pool import KVPool

JOINED_BYTES = 32 << 20  # to queue a call costs the host as much time as the bus needs for half of that
_QUERY_EVERY_S = 1e-4


@dataclass(slots=True)
class _Flight:
    """Moves in one direction whose copies are queued in one call. `behind`: the steps before them; `arrived`: when they
    were begun; `events`: before and behind the copies once they are queued; `error`: not all of them could be."""

    moves: list[BlockMove]
    polls_left: int
    behind: torch.cuda.Event
    arrived: torch.cuda.Event
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    error: str | None = None


class CudaTransfers:
    """`begin` marks, on the compute stream, what copies wait for; `start` queues them; `poll` reports those that have
    ended, in any order. What is launched between `begin` and `start` runs beside the copies, and is not held up by the
    host's work for them.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._streams = {direction: torch.cuda.Stream() for direction in Direction}
        self._clock = torch.cuda.Stream()  # has nothing else to do: an event there occurs when it is recorded
        self._flights: list[_Flight] = []
        self._delay = int(os.environ.get("COLDBLOCK_TEST_COPY_DELAY_STEPS", "0"))

    def begin(self, moves: Sequence[BlockMove]) -> None:
        """Take moves, in order. They wait for what has been launched so far."""
        if not moves:
            return
        behind, arrived = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
        behind.record()
        arrived.record(self._clock)
        self._flights += [_Flight(together, self._delay, behind, arrived) for together in self._joined(moves)]

    def start(self) -> None:
        """Queue the copies that are not yet, as far as their memory is ready."""
        for flight in self._flights:
            if flight.events is None and flight.error is None and not flight.polls_left:
                self._queue(flight)

    def poll(self, wait_s: float = 0.0) -> tuple[MoveDone, ...]:
        """The copies that ended since the last poll, each once. Waits up to `wait_s` for the first, if any runs."""
        self.start()
        for flight in self._flights:
            flight.polls_left = max(0, flight.polls_left - 1)
        deadline = time.perf_counter() + wait_s
        while not (ended := [flight for flight in self._flights if _ended(flight)]):
            if not self._flights or time.perf_counter() >= deadline:
                return ()
            time.sleep(_QUERY_EVERY_S)
        self._flights = [flight for flight in self._flights if flight not in ended]
        return tuple([done for flight in ended for done in _done(flight)])

    def close(self) -> None:
        """Wait for the copies."""
        for stream in self._streams.values():
            stream.synchronize()

    def _joined(self, moves: Sequence[BlockMove]) -> list[list[BlockMove]]:
        """The moves in order, small ones of a direction together. What may have to wait, or fail, stays alone."""
        pool = self._pool
        pinned = min(pool.arena.pinned // pool.block_bytes, len(pool.cpu))
        groups: list[list[BlockMove]] = []
        room: dict[Direction, tuple[list[BlockMove], int]] = {}
        for move in moves:
            group, left = room.get(move.direction, ([], 0))
            certain = max(move.cpu_blocks) < pinned and max(move.gpu_blocks) < len(pool.gpu)
            if not certain or left <= 0:
                group, left = [], JOINED_BYTES // pool.block_bytes if certain else 0
                groups.append(group)
            group.append(move)
            room[move.direction] = group, left - len(move.gpu_blocks)
        return groups

    def _queue(self, flight: _Flight) -> None:
        """Queue the moves' copies, unless their host memory is not pinned yet; then `poll` comes back to them."""
        pool = self._pool
        gpu = np.array([block for move in flight.moves for block in move.gpu_blocks])
        cpu = np.array([block for move in flight.moves for block in move.cpu_blocks])
        if gpu.max() >= len(pool.gpu) or cpu.max() >= len(pool.cpu):
            flight.error = "there is no such block"
            return
        try:
            if not pool.arena.ready((int(cpu.max()) + 1) * pool.block_bytes):
                return
        except MemoryBudgetError as error:
            flight.error = str(error)
            return
        direction = flight.moves[0].direction
        stream = self._streams[direction]
        stream.wait_event(flight.behind)
        stream.wait_event(flight.arrived)  # or its time might not be known in the end
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record(stream)
        try:
            with torch.cuda.stream(stream):
                self._copy(direction, *runs(gpu, cpu, pool.arena.slab // pool.block_bytes))
        except (KernelError, RuntimeError) as error:
            flight.error = str(error)
        ended.record(stream)  # also behind copies of a move that failed: its blocks are theirs until then
        flight.events = begun, ended

    def _copy(self, direction: Direction, gpu: _Ids, cpu: _Ids, counts: _Ids) -> None:
        pool = self._pool
        arguments = pool.gpu, gpu, pool.cpu, cpu, counts
        if direction is Direction.IN:
            arguments = pool.cpu, cpu, pool.gpu, gpu, counts
        if (cpu + counts).max() * pool.block_bytes <= pool.arena.pinned:
            block_copy.copy_blocks(*arguments)
            return
        source, reads, target, writes, _ = arguments
        for read, write, count in zip(reads, writes, counts, strict=True):
            target[write : write + count].copy_(source[read : read + count], non_blocking=True)


_Ids = NDArray[np.int64]


def runs(gpu: _Ids, cpu: _Ids, slab: int) -> tuple[_Ids, _Ids, _Ids]:
    """Pairs of blocks as (first on the GPU, first on the CPU, count): neighbours on both sides go together, whatever
    the order of the pairs, but for what lies in two slabs of so many CPU blocks."""
    order = gpu.argsort()
    gpu, cpu = gpu[order], cpu[order]
    apart = np.ones(len(gpu) + 1, np.bool_)  # where a run ends and the next begins
    apart[1:-1] = (gpu[1:] - gpu[:-1] != 1) | (cpu[1:] - cpu[:-1] != 1) | (cpu[1:] % slab == 0)
    edges = apart.nonzero()[0]
    first = edges[:-1]
    return gpu[first], cpu[first], edges[1:] - first


def _ended(flight: _Flight) -> bool:
    """Whether nothing touches the move's blocks any more."""
    if flight.events is None:
        return flight.error is not None
    return flight.events[1].query()


def _done(flight: _Flight) -> list[MoveDone]:
    """Of the time that moves took together each has its share by its size."""
    seconds, queued_s = 0.0, 0.0
    if flight.events is not None:
        begun, ended = flight.events
        seconds, queued_s = begun.elapsed_time(ended) / 1e3, flight.arrived.elapsed_time(begun) / 1e3
    blocks = sum(len(move.gpu_blocks) for move in flight.moves)
    shares = [(move, seconds * len(move.gpu_blocks) / blocks) for move in flight.moves]
    return [MoveDone(move.move_id, share, flight.error, queued_s) for move, share in shares]
