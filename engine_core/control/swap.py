"""One KV block across both tiers: the one table of its residency, and the copies that change it.

Owns: `Block`, `Move`, and which residency may follow which. Does not know: pools, requests' states, or how bytes are
copied; completions may come many steps later, in any order, or as failures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .plan import BlockMove, Direction

if TYPE_CHECKING:
    from .request import Request
    from .updates import SwapReason

NO_SLOT = -1
Shelf = OrderedDict["Block", None]
"""Blocks whose slot may be given up, in that order."""


class Residency(Enum):
    """Where one block's content is valid. In the two copying states its target is on the way."""

    __hash__ = object.__hash__  # of their names, in Python, as enums have it, takes longer than all else in `advance`

    NOWHERE = "nowhere"
    GPU = "gpu"
    COPYING_OUT = "copying_out"
    BOTH = "both"
    CPU = "cpu"
    COPYING_IN = "copying_in"


class BlockEvent(Enum):
    """What can happen to a block. A write to a block in BOTH drops its CPU copy first."""

    __hash__ = object.__hash__  # as above

    ALLOCATE = "allocate"
    BEGIN_OUT = "begin_out"
    BEGIN_IN = "begin_in"
    COPIED = "copied"
    FAILED = "failed"
    DROP_GPU = "drop_gpu"
    DROP_CPU = "drop_cpu"


RESIDENCY: dict[BlockEvent, dict[Residency, Residency]] = {
    BlockEvent.ALLOCATE: {Residency.NOWHERE: Residency.GPU},
    BlockEvent.BEGIN_OUT: {Residency.GPU: Residency.COPYING_OUT},
    BlockEvent.BEGIN_IN: {Residency.CPU: Residency.COPYING_IN},
    BlockEvent.COPIED: {Residency.COPYING_OUT: Residency.BOTH, Residency.COPYING_IN: Residency.BOTH},
    BlockEvent.FAILED: {Residency.COPYING_OUT: Residency.GPU, Residency.COPYING_IN: Residency.CPU},
    BlockEvent.DROP_GPU: {Residency.GPU: Residency.NOWHERE, Residency.BOTH: Residency.CPU},
    BlockEvent.DROP_CPU: {Residency.BOTH: Residency.GPU, Residency.CPU: Residency.NOWHERE},
}
"""Where a block is after each event, by where it was."""


class IllegalMove(RuntimeError):
    """A block event that its residency does not allow: a fault in who manages the tiers."""


@dataclass(slots=True, eq=False)
class Block:
    """The KV of `block_size` tokens at most, wherever it is. Content is written by one request only, and once it is
    full it never changes; so a copy stays valid as long as it is kept.

    `gpu` and `cpu`: its slot in either tier, or NO_SLOT. `owners`: live requests that have it in their table; `users`:
    those of them that run or are about to, for whom it must stay on the GPU; `readers`: those that read its CPU copy,
    and ones that are gone while a step in flight still does. `digest`: set while the index names it.
    """

    residency: Residency = Residency.NOWHERE
    gpu: int = NO_SLOT
    cpu: int = NO_SLOT
    owners: int = 0
    users: int = 0
    readers: int = 0
    digest: bytes | None = None
    move: Move | None = None
    gpu_shelf: Shelf | None = None  # where its slots stand while they may be given up
    cpu_shelf: Shelf | None = None

    @property
    def readable(self) -> bool:
        """Whether its content is on the GPU now."""
        return self.residency in READABLE

    @property
    def copied(self) -> bool:
        """Whether its content is in the CPU tier now."""
        return self.residency in _COPIED


READABLE = frozenset({Residency.GPU, Residency.COPYING_OUT, Residency.BOTH})
_COPIED = frozenset({Residency.CPU, Residency.COPYING_IN, Residency.BOTH})


def advance(blocks: Iterable[Block], event: BlockEvent) -> None:
    """Move all to the residency that the table gives. Raises IllegalMove for a pair that is not in it."""
    after = RESIDENCY[event]
    for block in blocks:
        try:
            block.residency = after[block.residency]
        except KeyError:
            raise IllegalMove(f"{event.name} on a block in {block.residency.name}") from None


def residing(blocks: Iterable[Block], residency: Residency) -> list[Block]:
    """Those of the blocks that are in this residency."""
    return [block for block in blocks if block.residency is residency]


@dataclass(slots=True, eq=False)
class Move:
    """A running copy: which blocks, and why. `request` is whose it is, None for blocks that nobody owns any more.

    `waiting`: the requests that cannot go on before it ends.
    """

    move_id: int
    direction: Direction
    blocks: list[Block]
    reason: SwapReason
    request: Request | None
    waiting: list[Request] = field(default_factory=list)

    def as_plan(self) -> BlockMove:
        """The copy as the executor is told of it."""
        gpu, cpu = tuple([block.gpu for block in self.blocks]), tuple([block.cpu for block in self.blocks])
        return BlockMove(self.move_id, self.direction, gpu, cpu)
