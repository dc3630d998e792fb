"""Both tiers and every block in them: who needs a block where, which slots may be given up, which copies run.

Owns: the pools, the one index, the counts of owners and users, the running copies; it alone changes a `Block`.
Does not know: queues, policies, when to copy what (`scheduler`), or how bytes are copied.

A GPU slot can be had while content is left where it is, or lost, in this order:
  free; cached with a CPU copy (which lives on and is found by the index); cached without one (lost); that of a swapped
  request with a CPU copy. What a swapped request has on the GPU alone is copied out first.
A CPU slot: free; cached; the copy of what the GPU tier caches too; the copy of what running requests use. The last
two lose nothing. A copy ahead of need takes only what is free or cached, so that copies never displace one another.

What requests larger than the GPU pool read from the CPU tier keeps its slot there, also when nobody owns it any more,
until they say that they have stopped to read; its GPU slot can be had like a cached one.

While a copy runs both its ends are held; a block that nobody wants any more is freed when its copy ends.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from .block_pool import BlockPool, PoolExhausted, PoolUse
from .plan import Direction
from .prefix_index import PrefixIndex
from .request import Request
from .swap import NO_SLOT, Block, BlockEvent, Move, Residency, Shelf
from .tier_log import TierLog
from .updates import SwapReason


class Tiers:
    """The GPU pool, the CPU pool, and the blocks in them. `num_cpu_blocks` 0 means that nothing is ever copied out.

    `log`, if there is one, is told where the index's blocks are.
    """

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int, log: TierLog | None = None) -> None:
        self._log = log
        self.index = PrefixIndex(block_size)
        self.moves: dict[int, Move] = {}
        self._gpu, self._cpu = BlockPool(num_gpu_blocks), BlockPool(num_cpu_blocks)
        self._clean_cached: Shelf = OrderedDict()
        self._dirty_cached: Shelf = OrderedDict()
        self._clean_parked: Shelf = OrderedDict()
        self._dirty_parked: Shelf = OrderedDict()
        self._cpu_cached: Shelf = OrderedDict()
        self._both_cached: Shelf = OrderedDict()
        self._spare: Shelf = OrderedDict()
        self._shared: set[Block] = set()  # blocks with more than one owner
        self._moves_begun = 0

    # ------------------------------------------------------------ what there is

    @property
    def available(self) -> int:
        """GPU slots that can be had now."""
        return self._gpu.free + len(self._clean_cached) + len(self._dirty_cached) + len(self._clean_parked)

    @property
    def free(self) -> int:
        """GPU slots that hold nothing."""
        return self._gpu.free

    @property
    def parked(self) -> int:
        """Blocks that swapped requests have on the GPU alone, and that no copy touches."""
        return len(self._dirty_parked)

    @property
    def cpu_available(self) -> int:
        """CPU slots that can be had for a copy that is needed."""
        return self.cpu_spare + len(self._both_cached) + len(self._spare)

    @property
    def cpu_spare(self) -> int:
        """CPU slots that can be had for a copy ahead of need."""
        return self._cpu.free + len(self._cpu_cached)

    def leaving(self) -> int:
        """GPU slots that can be had once the running copies have ended."""
        return sum(not block.users for move in self.moves.values() for block in move.blocks)

    def cpu_leaving(self) -> int:
        """CPU slots that can be had once the running copies have ended."""
        moving = [block for move in self.moves.values() for block in move.blocks if not block.readers]
        return sum(block.users > 0 or not block.owners for block in moving)

    def gives_way(self, block: Block) -> bool:
        """Whether the block's GPU slot is among those that are `available`."""
        return block.gpu_shelf is not None and block.gpu_shelf is not self._dirty_parked

    def idle(self, direction: Direction) -> bool:
        """Whether no copy runs in this direction."""
        return all(move.direction is not direction for move in self.moves.values())

    def unwritten(self) -> Iterator[Block]:
        """Cached blocks without a CPU copy, the coldest first."""
        return iter(self._dirty_cached)

    def gpu_use(self) -> PoolUse:
        """The GPU tier's blocks by state."""
        return self._gpu.use((self._clean_cached, self._dirty_cached, self._clean_parked), self._in_flight())

    def cpu_use(self) -> PoolUse:
        """The CPU tier's blocks by state."""
        return self._cpu.use((self._cpu_cached, self._both_cached, self._spare), self._in_flight())

    def shared(self) -> tuple[int, int]:
        """Of the used blocks of the GPU tier, and of the CPU tier, those that more than one request owns.

        Looks at every block that several own: for monitors, not for every step.
        """
        still = [block for block in self._shared if block.move is None]
        on_gpu = sum(block.gpu != NO_SLOT and not self.gives_way(block) for block in still)
        return on_gpu, sum(block.cpu != NO_SLOT and block.cpu_shelf is None for block in still)

    def _in_flight(self) -> int:
        return sum(len(move.blocks) for move in self.moves.values())

    # ------------------------------------------------------------ who needs a block

    def allocate(self, count: int) -> list[Block]:
        """New blocks for a request that runs. There must be as many slots available."""
        if count > self.available:
            raise PoolExhausted(f"{count} GPU slots wanted, {self.available} of {self._gpu.total} available")
        blocks = []
        for _ in range(count):
            block = Block(gpu=self._gpu_slot(), owners=1, users=1)
            block.on(BlockEvent.ALLOCATE)
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[Block]) -> None:
        """One more request owns and uses these."""
        for block in blocks:
            block.users += 1
            self.own(block)

    def own(self, block: Block) -> None:
        """One more request owns this block, without using it now."""
        block.owners += 1
        if block.owners == 2:
            self._shared.add(block)
        self._settle(block)

    def park(self, blocks: Iterable[Block]) -> None:
        """A request that owns these does not run any more. The last one is the first whose slot is given up."""
        for block in blocks:
            block.users -= 1
            self._settle(block)

    def unpark(self, blocks: Iterable[Block]) -> None:
        """A request that owns these is to run."""
        for block in blocks:
            block.users += 1
            self._settle(block)

    def read_cold(self, blocks: Iterable[Block], used: bool) -> None:
        """A request that owns these will read them from the CPU tier; `used` says that it used them on the GPU."""
        for block in blocks:
            block.readers += 1
            block.users -= used
            self._settle(block)

    def stop_reading(self, blocks: Iterable[Block]) -> None:
        """A request that read these from the CPU tier has gone, and no step in flight reads them for it."""
        for block in blocks:
            block.readers -= 1
            self._settle(block)

    def release(self, blocks: Iterable[Block], used: bool) -> None:
        """A request gives these up; `used` says that it ran. What nobody owns and the index does not name is freed."""
        for block in blocks:
            block.owners -= 1
            if block.owners == 1:
                self._shared.remove(block)
            block.users -= used
            self._settle(block)

    def write(self, block: Block) -> None:
        """Its only user is about to write to this block: a CPU copy would not be one any more."""
        if block.residency is Residency.BOTH:
            self._drop_cpu(block)
        assert block.residency is Residency.GPU, f"a write to a block in {block.residency.name}"

    def name(self, block: Block, digests: Sequence[bytes], position: int, tokens: array[int]) -> None:
        """Let this block be found, unless another one with its content is: it is full, with block `position` of
        `tokens`, whose chain is `digests`.
        """
        if self.index.insert(digests[position], block) and self._log is not None:
            self._log.named(block, digests, position, tokens)

    def forget(self, block: Block) -> None:
        """The content of this block is not to be found any more, in either tier."""
        if self._log is not None:
            self._log.forgotten(block)
        self.index.drop(block)
        self._settle(block)

    # ------------------------------------------------------------ copies

    def begin_out(self, blocks: Sequence[Block], reason: SwapReason, request: Request | None, ahead: bool) -> Move:
        """Begin to copy these blocks out; `ahead` of need. There must be as many CPU slots to be had."""
        for block in blocks:
            block.cpu = self._cpu_slot(ahead)
        return self._begin(BlockEvent.BEGIN_OUT, blocks, reason, request)

    def begin_in(self, blocks: Sequence[Block], reason: SwapReason, request: Request | None) -> Move:
        """Begin to copy these blocks in. There must be as many GPU slots available."""
        for block in blocks:
            block.gpu = self._gpu_slot()
        return self._begin(BlockEvent.BEGIN_IN, blocks, reason, request)

    def complete(self, move_id: int) -> Move:
        """All bytes have arrived: the blocks are in both tiers."""
        move = self._end(move_id, BlockEvent.COPIED)
        for block in move.blocks:
            if self._log is not None:
                self._log.arrived(block, "CPU" if move.direction is Direction.OUT else "GPU")
            # What comes in ahead of its turn goes last of all that may be given up, what leaves goes first.
            self._settle(block, first=move.direction is Direction.OUT)
        return move

    def fail(self, move_id: int) -> Move:
        """The copy failed: the content stays where it came from, and the slots it was going to are free."""
        move = self._end(move_id, BlockEvent.FAILED)
        for block in move.blocks:
            if move.direction is Direction.OUT:
                self._free_cpu(block)
            else:
                self._free_gpu(block)
            self._settle(block)
        return move

    def _begin(self, event: BlockEvent, blocks: Sequence[Block], reason: SwapReason, request: Request | None) -> Move:
        self._moves_begun += 1
        direction = Direction.OUT if event is BlockEvent.BEGIN_OUT else Direction.IN
        move = self.moves[self._moves_begun] = Move(self._moves_begun, direction, list(blocks), reason, request)
        for block in blocks:
            block.on(event)
            block.move = move
            self._settle(block)
        return move

    def _end(self, move_id: int, event: BlockEvent) -> Move:
        move = self.moves.pop(move_id)
        for block in move.blocks:
            block.on(event)
            block.move = None
        return move

    # ------------------------------------------------------------ slots

    def _gpu_slot(self) -> int:
        if not self._gpu.free:
            for shelf in (self._clean_cached, self._dirty_cached, self._clean_parked):
                if shelf:
                    self._drop_gpu(next(iter(shelf)))
                    break
        return self._gpu.take()

    def _cpu_slot(self, ahead: bool) -> int:
        if not self._cpu.free:
            for shelf in (self._cpu_cached,) if ahead else (self._cpu_cached, self._both_cached, self._spare):
                if shelf:
                    self._drop_cpu(next(iter(shelf)))
                    break
        return self._cpu.take()

    def _drop_gpu(self, block: Block) -> None:
        if self._log is not None:
            self._log.left(block, "GPU")
        block.on(BlockEvent.DROP_GPU)
        self._free_gpu(block)
        self._settle(block)

    def _drop_cpu(self, block: Block) -> None:
        if self._log is not None:
            self._log.left(block, "CPU")
        block.on(BlockEvent.DROP_CPU)
        self._free_cpu(block)
        self._settle(block)

    def _free_gpu(self, block: Block) -> None:
        self._gpu.give(block.gpu)
        block.gpu = NO_SLOT

    def _free_cpu(self, block: Block) -> None:
        self._cpu.give(block.cpu)
        block.cpu = NO_SLOT

    def _settle(self, block: Block, first: bool = True) -> None:
        """Put the block on the shelves that its residency, owners and users call for, or free it.

        `first` is about parked blocks, which are given up in another order than cached ones: the last comer first.
        """
        if block.gpu_shelf is not None:
            del block.gpu_shelf[block]
            block.gpu_shelf = None
        if block.cpu_shelf is not None:
            del block.cpu_shelf[block]
            block.cpu_shelf = None
        if block.move is not None:
            return
        wanted = (
            block.owners or block.readers or (block.digest is not None and block.residency is not Residency.NOWHERE)
        )
        if not wanted:
            self._discard(block)
            return
        gpu_shelf, cpu_shelf = self._shelves(block)
        if gpu_shelf is not None:
            block.gpu_shelf = gpu_shelf
            gpu_shelf[block] = None
            if first and block.owners:
                gpu_shelf.move_to_end(block, last=False)
        if cpu_shelf is not None:
            block.cpu_shelf = cpu_shelf
            cpu_shelf[block] = None

    def _shelves(self, block: Block) -> tuple[Shelf | None, Shelf | None]:
        residency = block.residency
        if residency is Residency.BOTH:
            gpu = None if block.users else self._clean_parked if block.owners > block.readers else self._clean_cached
            cpu = self._spare if block.users else None if block.owners else self._both_cached
            return gpu, None if block.readers else cpu
        if residency is Residency.GPU:
            if block.users:
                return None, None
            return (self._dirty_parked, None) if block.owners else (self._dirty_cached, None)
        return None, None if block.owners or block.readers else self._cpu_cached

    def _discard(self, block: Block) -> None:
        """Nobody wants this content: free what it takes."""
        self.index.drop(block)
        if block.gpu != NO_SLOT:
            block.on(BlockEvent.DROP_GPU)
            self._free_gpu(block)
        if block.cpu != NO_SLOT:
            block.on(BlockEvent.DROP_CPU)
            self._free_cpu(block)
