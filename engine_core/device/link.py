"""How fast blocks move between the tiers while nothing else does: the peak that copies are held against later.

Owns: the measurement, made once at load. Does not know: what copies (a GPU's copy engines, a thread), or who asks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ..control.plan import BlockMove, Direction, MoveDone
from ..errors import EngineError
from .executor import IDLE_COPY_WAIT_S, Capacity, LinkPeak

_BYTES = 32 << 20  # of one copy; half as much is as fast on a bus of 55 GB/s
_ROUNDS = 3  # out and in each; the first one commits memory and warms up
_MOST_S = 30.0  # for one copy: what takes longer never ends


class _Transfers(Protocol):
    def begin(self, moves: Sequence[BlockMove]) -> None: ...

    def poll(self, wait_s: float = 0.0) -> tuple[MoveDone, ...]: ...


def measure_link(transfers: _Transfers, capacity: Capacity) -> LinkPeak:
    """The best of a few copies of neighbouring blocks each way, made as all others will be. Overwrites these blocks.

    Zero where there is no CPU tier, or where a copy fails: swaps will tell of that. Raises EngineError for one that
    does not end.
    """
    blocks = min(capacity.num_gpu_blocks, capacity.num_cpu_blocks, max(1, _BYTES // capacity.block_bytes))
    if not blocks:
        return LinkPeak()
    ids, size = tuple(range(blocks)), blocks * capacity.block_bytes
    best = dict.fromkeys(Direction, 0.0)
    for number in range(_ROUNDS):
        for direction in Direction:
            done = _copy(transfers, BlockMove(-1, direction, ids, ids), size)
            if done.error is not None or not done.seconds:
                return LinkPeak()
            if number:
                best[direction] = max(best[direction], size / done.seconds)
    return LinkPeak(best[Direction.OUT], best[Direction.IN])


def _copy(transfers: _Transfers, move: BlockMove, size: int) -> MoveDone:
    transfers.begin([move])
    deadline = time.monotonic() + _MOST_S
    while not (ended := transfers.poll(IDLE_COPY_WAIT_S)):
        if time.monotonic() > deadline:
            way = "from the GPU pool to" if move.direction is Direction.OUT else "to the GPU pool from"
            raise EngineError(f"a copy of {size} bytes {way} the CPU tier has not ended after {_MOST_S:g} s")
    return ended[0]
