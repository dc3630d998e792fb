"""Moving a request's blocks between the GPU and the CPU tier: the residency machine, and the manager of the moves.

Owns: the blocks of every swapped request from `begin_swap_out` until `complete_swap_in`, and every running copy.
Does not know: requests, policies, or how bytes are copied; completions may come many steps later, in any order,
or as failures.

The order is always: reserve the CPU budget, copy, and only then free. While a copy runs, both its ends are held, so
that no pool can hand them out; a swap that nobody wants any more is freed when its copy ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from .block_pool import BlockPool
from .plan import BlockMove, Direction


class Residency(Enum):
    """Where one block's valid content is."""

    GPU = "gpu"
    COPYING_OUT = "copying_out"
    BOTH = "both"
    CPU = "cpu"
    COPYING_IN = "copying_in"


class BlockEvent(Enum):
    """What can happen to a block's content. A write to a block in BOTH drops its CPU copy first."""

    BEGIN_OUT = "begin_out"
    BEGIN_IN = "begin_in"
    COPIED = "copied"
    FAILED = "failed"
    DROP_GPU = "drop_gpu"
    DROP_CPU = "drop_cpu"


RESIDENCY: dict[tuple[Residency, BlockEvent], Residency] = {
    (Residency.GPU, BlockEvent.BEGIN_OUT): Residency.COPYING_OUT,
    (Residency.COPYING_OUT, BlockEvent.COPIED): Residency.BOTH,
    (Residency.COPYING_OUT, BlockEvent.FAILED): Residency.GPU,
    (Residency.BOTH, BlockEvent.DROP_GPU): Residency.CPU,
    (Residency.CPU, BlockEvent.BEGIN_IN): Residency.COPYING_IN,
    (Residency.COPYING_IN, BlockEvent.COPIED): Residency.BOTH,
    (Residency.COPYING_IN, BlockEvent.FAILED): Residency.CPU,
    (Residency.BOTH, BlockEvent.DROP_CPU): Residency.GPU,
}


class IllegalMove(RuntimeError):
    """A block event that its residency does not allow: a fault in the swap manager."""


@dataclass(slots=True, eq=False)
class Swap:
    """The blocks of one swapped request; all of them move together, so they share one residency.

    `gpu_blocks[i]` and `cpu_blocks[i]` are the two places of the request's block i; a side without content is empty.
    `room` are GPU blocks reserved behind the content of a swap-in for the tokens to come. `move_id`: the running copy.
    """

    residency: Residency
    gpu_blocks: list[int]
    cpu_blocks: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    move_id: int | None = None
    abandoned: bool = False

    def on(self, event: BlockEvent) -> None:
        """Move to the residency that the table gives. Raises IllegalMove for a pair that is not in it."""
        try:
            self.residency = RESIDENCY[self.residency, event]
        except KeyError:
            raise IllegalMove(f"{event.name} on blocks in {self.residency.name}") from None


class SwapManager:
    """Begins, completes and fails the copies of swaps; the counts of both tiers follow."""

    def __init__(self, gpu: BlockPool, cpu: BlockPool, enabled: bool) -> None:
        self._gpu = gpu
        self._cpu = cpu
        self._enabled = enabled
        self._moves_begun = 0
        self._copying: dict[int, Swap] = {}

    def shortage(self, blocks: int) -> str | None:
        """Why `blocks` blocks cannot be swapped out now, in words with the numbers; None when they can."""
        if not self._enabled:
            return "CPU offload is off"
        if blocks > self._cpu.available:
            return f"{blocks} blocks to offload, {self._cpu.available} of {self._cpu.total} CPU blocks free"
        return None

    def releasing(self) -> int:
        """GPU blocks that become available when the swap-outs now running have ended."""
        leaving = {block for swap in self._copying.values() for block in swap.gpu_blocks if self._leaves(swap, block)}
        return len(leaving)

    def _leaves(self, swap: Swap, block: int) -> bool:
        return swap.residency is Residency.COPYING_OUT and self._gpu.refs(block) == self._gpu.holds(block)

    def begin_swap_out(self, gpu_blocks: Sequence[int]) -> tuple[Swap, BlockMove]:
        """Take over these referenced blocks and begin to copy them out. `shortage` must have said None."""
        swap = Swap(Residency.GPU, list(gpu_blocks), self._cpu.allocate(len(gpu_blocks)))
        return swap, self._begin(swap, BlockEvent.BEGIN_OUT)

    def complete_swap_out(self, swap: Swap) -> None:
        """The content has arrived in the CPU tier: the GPU references go."""
        self._end(swap, BlockEvent.COPIED)
        self._free_gpu(swap)
        swap.on(BlockEvent.DROP_GPU)
        if swap.abandoned:
            self._free_cpu(swap)

    def begin_swap_in(self, swap: Swap, room: int) -> BlockMove:
        """Begin to copy a swapped request back, with `room` more GPU blocks behind its content.

        The GPU pool must have as many blocks available as the content and the room need.
        """
        swap.gpu_blocks = self._gpu.allocate(len(swap.cpu_blocks))
        swap.room = self._gpu.allocate(room)
        return self._begin(swap, BlockEvent.BEGIN_IN)

    def complete_swap_in(self, swap: Swap) -> None:
        """The content is back: the CPU copy goes, and `gpu_blocks` + `room` are the request's table again."""
        self._end(swap, BlockEvent.COPIED)
        self._free_cpu(swap)
        swap.on(BlockEvent.DROP_CPU)
        if swap.abandoned:
            self._free_gpu(swap)

    def fail(self, swap: Swap) -> None:
        """The copy failed: the content stays where it came from, and the blocks it was going to are freed."""
        self._end(swap, BlockEvent.FAILED)
        if swap.residency is Residency.CPU or swap.abandoned:
            self._free_gpu(swap)
        if swap.residency is Residency.GPU or swap.abandoned:
            self._free_cpu(swap)

    def discard(self, swap: Swap) -> None:
        """Nobody wants this swap any more: its blocks are freed now, or when its copy ends."""
        if swap.move_id is not None:
            swap.abandoned = True
        else:
            self._free_gpu(swap)
            self._free_cpu(swap)

    def _begin(self, swap: Swap, event: BlockEvent) -> BlockMove:
        swap.on(event)
        self._gpu.hold(swap.gpu_blocks)
        self._cpu.hold(swap.cpu_blocks)
        self._moves_begun += 1
        swap.move_id = self._moves_begun
        self._copying[swap.move_id] = swap
        direction = Direction.OUT if event is BlockEvent.BEGIN_OUT else Direction.IN
        return BlockMove(swap.move_id, direction, tuple(swap.gpu_blocks), tuple(swap.cpu_blocks))

    def _end(self, swap: Swap, event: BlockEvent) -> None:
        swap.on(event)
        self._gpu.unhold(swap.gpu_blocks)
        self._cpu.unhold(swap.cpu_blocks)
        assert swap.move_id is not None
        del self._copying[swap.move_id]
        swap.move_id = None

    def _free_gpu(self, swap: Swap) -> None:
        # Last block first, so that the cache's LRU gives up the end of a prefix before its beginning.
        self._gpu.release(reversed(swap.gpu_blocks + swap.room))
        swap.gpu_blocks, swap.room = [], []

    def _free_cpu(self, swap: Swap) -> None:
        self._cpu.release(swap.cpu_blocks)
        swap.cpu_blocks = []
