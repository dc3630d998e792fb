"""One tier's slots: which are free.

Owns: the free list. Does not know: blocks, or what the slots that are not free hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass


class PoolExhausted(RuntimeError):
    """More slots were asked for than can be had: the caller did not look first."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Blocks of one tier by state; used + cached + in_flight + free == total.

    Used: somebody needs what is in it. Cached: it may be given up. In flight: a copy reads or writes it.
    """

    total: int
    used: int
    cached: int
    in_flight: int
    free: int


class BlockPool:
    """Slots 0 .. total-1 of one tier."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free slots, in ascending order."""
        kept = len(self._free) - count
        if kept < 0:
            raise PoolExhausted(f"{count} slots wanted, {self.free} of {self.total} are free")
        taken = self._free[kept:]
        del self._free[kept:]
        taken.sort()
        return taken

    def give(self, slots: Iterable[int]) -> None:
        """These slots hold nothing any more."""
        self._free += slots

    def use(self, shelves: Iterable[Sized], in_flight: int) -> PoolUse:
        """The slots by state, given what stands on shelves and what copies touch."""
        cached = sum(len(shelf) for shelf in shelves)
        return PoolUse(self.total, self.total - self.free - cached - in_flight, cached, in_flight, self.free)
