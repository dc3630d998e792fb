"""One tier's blocks: which are free, who refers to them, and which keep content that may be wanted again.

Owns: the free list, the reference counts, the holds of copies, and the LRU of cached blocks.
Does not know: tokens, hashes, requests, or what a block contains; whoever indexes content is told of evictions.

Each block is counted in exactly one place, so that used + cached + in_flight + free == total:
in flight (a copy reads or writes it), else used (referenced), else cached (kept content, evictable), else free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


class PoolExhausted(RuntimeError):
    """More blocks were asked for than are available: the caller did not look at `available` first."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Blocks of one tier by state; used + cached + in_flight + free == total."""

    total: int
    used: int
    cached: int
    in_flight: int
    free: int


class BlockPool:
    """Blocks 0 .. total-1 of one tier. `on_evict` hears of every cached block whose content is given up."""

    def __init__(self, total: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.total = total
        self._on_evict = on_evict
        self._free = list(range(total - 1, -1, -1))
        self._refs = [0] * total
        self._held: dict[int, int] = {}
        self._kept: set[int] = set()
        self._cached: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now: the free ones, and the cached ones by eviction."""
        return len(self._free) + len(self._cached)

    def use(self) -> PoolUse:
        """The tier's blocks by state."""
        free, cached, in_flight = len(self._free), len(self._cached), len(self._held)
        return PoolUse(self.total, self.total - free - cached - in_flight, cached, in_flight, free)

    def refs(self, block: int) -> int:
        """How many requests refer to a block."""
        return self._refs[block]

    def holds(self, block: int) -> int:
        """How many running copies read or write a block."""
        return self._held.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference; cached ones are evicted, oldest first, when none is free."""
        if count > self.available:
            raise PoolExhausted(f"{count} blocks wanted, {self.available} of {self.total} available")
        while len(self._free) < count:
            self.forget(next(iter(self._cached)))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these used or cached blocks."""
        for block in blocks:
            self._refs[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. What reaches zero is cached when its content is kept, else free."""
        for block in blocks:
            assert self._refs[block] > 0 and self._refs[block] > self.holds(block), f"block {block} is not to release"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._kept:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """The content of this used block may be wanted again: cache it when its last reference goes."""
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """The content of this block is not wanted any more; a cached block becomes free."""
        if block not in self._kept:
            return
        self._kept.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
        if self._on_evict is not None:
            self._on_evict(block)

    def hold(self, blocks: Iterable[int]) -> None:
        """A copy that reads or writes these referenced blocks begins."""
        for block in blocks:
            self._held[block] = self._held.get(block, 0) + 1

    def unhold(self, blocks: Iterable[int]) -> None:
        """A copy that read or wrote these blocks has ended."""
        for block in blocks:
            self._held[block] -= 1
            if self._held[block] == 0:
                del self._held[block]
