"""One tier's slots: which are free, and which hold content that may be given up, in which order.

Owns: the free list, and the shelves of blocks whose slot may be taken. Does not know: why a block stands on a shelf,
what becomes of its content, tokens or requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .swap import Block

Shelf = OrderedDict["Block", None]
"""Blocks in an order; the first is the first whose slot is given up."""


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

    def take(self) -> int:
        """A free slot."""
        if not self._free:
            raise PoolExhausted(f"no slot of {self.total} is free")
        return self._free.pop()

    def give(self, slot: int) -> None:
        """A slot holds nothing any more."""
        self._free.append(slot)

    def use(self, shelves: Iterable[Shelf], in_flight: int) -> PoolUse:
        """The slots by state, given what stands on shelves and what copies touch."""
        cached = sum(len(shelf) for shelf in shelves)
        return PoolUse(self.total, self.total - self.free - cached - in_flight, cached, in_flight, self.free)
