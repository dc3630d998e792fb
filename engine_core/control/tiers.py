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

While a copy runs both its ends are held; a block that nobody wants any more is freed when its copy ends. Blocks that
are copied together get their new slots in the order of those they have: neighbours stay neighbours, and go in one copy.

Blocks come by hundreds, and a step waits for each plan: so what is done to one is done to many at once.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from .block_pool import BlockPool, PoolExhausted, PoolUse
from .plan import Direction
from .prefix_index import PrefixIndex
from .request import Request
from .swap import NO_SLOT, Block, BlockEvent, Move, Residency, Shelf, advance
from .tier_log import TierLog
from .updates import SwapReason

_Shelves = tuple[Shelf | None, Shelf | None]  # of a block's slots in either tier
_GPU, _CPU = attrgetter("gpu"), attrgetter("cpu")


class Tiers:
    """The GPU pool, the CPU pool, and the blocks in them. `num_cpu_blocks` 0 means that nothing is ever copied out.

    `log`, if there is one, is told where the index's blocks are.
    """

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, log: TierLog | None = None) -> None:
        self._log = log
        self.index = PrefixIndex()
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
        self._shelves: dict[Residency, Callable[[Block], _Shelves]] = {
            Residency.GPU: self._shelves_on_gpu,
            Residency.BOTH: self._shelves_in_both,
            Residency.CPU: self._shelves_in_cpu,
            Residency.COPYING_OUT: _held,
            Residency.COPYING_IN: _held,
            Residency.NOWHERE: self._discarded,
        }

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

    def giving_way(self, blocks: Iterable[Block]) -> int:
        """So many of the blocks have a GPU slot among those that are `available`."""
        parked = self._dirty_parked
        return len([block for block in blocks if block.gpu_shelf is not None and block.gpu_shelf is not parked])

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
        on_gpu = [block for block in still if block.gpu != NO_SLOT]
        return len(on_gpu) - self.giving_way(on_gpu), sum(
            block.cpu != NO_SLOT and block.cpu_shelf is None for block in still
        )

    def _in_flight(self) -> int:
        return sum(len(move.blocks) for move in self.moves.values())

    # ------------------------------------------------------------ who needs a block

    def allocate(self, count: int) -> list[Block]:
        """New blocks for a request that runs. There must be as many slots available."""
        if count > self.available:
            raise PoolExhausted(f"{count} GPU slots wanted, {self.available} of {self._gpu.total} available")
        nowhere, owners, users = Residency.NOWHERE, 1, 1  # not by keyword, which would take twice as long
        blocks = [Block(nowhere, slot, NO_SLOT, owners, users) for slot in self._gpu_slots(count)]
        advance(blocks, BlockEvent.ALLOCATE)
        return blocks

    def share(self, blocks: Sequence[Block]) -> None:
        """One more request owns and uses these."""
        for block in blocks:
            block.users += 1
        self.own(blocks)

    def own(self, blocks: Sequence[Block]) -> None:
        """One more request owns these, without using them now."""
        for block in blocks:
            block.owners += 1
            if block.owners == 2:
                self._shared.add(block)
        self._settle(blocks)

    def park(self, blocks: Sequence[Block]) -> None:
        """A request that owns these does not run any more. The last one is the first whose slot is given up."""
        for block in blocks:
            block.users -= 1
        self._settle(blocks)

    def unpark(self, blocks: Sequence[Block]) -> None:
        """A request that owns these is to run."""
        for block in blocks:
            block.users += 1
        self._settle(blocks)

    def read_cold(self, blocks: Sequence[Block], used: bool) -> None:
        """A request that owns these will read them from the CPU tier; `used` says that it used them on the GPU."""
        for block in blocks:
            block.readers += 1
            block.users -= used
        self._settle(blocks)

    def stop_reading(self, blocks: Sequence[Block]) -> None:
        """A request that read these from the CPU tier has gone, and no step in flight reads them for it."""
        for block in blocks:
            block.readers -= 1
        self._settle(blocks)

    def release(self, blocks: Sequence[Block], used: bool) -> None:
        """A request gives these up; `used` says that it ran. What nobody owns and the index does not name is freed."""
        for block in blocks:
            block.owners -= 1
            if block.owners == 1:
                self._shared.remove(block)
            block.users -= used
        self._settle(blocks)

    def write(self, block: Block) -> None:
        """Its only user is about to write to this block: a CPU copy would not be one any more."""
        if block.residency is Residency.BOTH:
            self._drop_cpu([block])
        assert block.residency is Residency.GPU, f"a write to a block in {block.residency.name}"

    def name(self, blocks: Sequence[Block], digests: Sequence[bytes], new: range, tokens: array[int]) -> None:
        """Let the `new` ones of a request's blocks be found, unless others with their content are. They are full, and
        `digests` are those of the request's prefixes, `tokens` its tokens.
        """
        for position in new:
            if self.index.insert(digests[position], blocks[position]) and self._log is not None:
                self._log.named(blocks[position], digests, position, tokens)

    def forget(self, block: Block) -> None:
        """The content of this block is not to be found any more, in either tier."""
        if self._log is not None:
            self._log.forgotten(block)
        self.index.drop(block)
        self._settle([block])

    # ------------------------------------------------------------ copies

    def begin_out(self, blocks: Sequence[Block], reason: SwapReason, request: Request | None, ahead: bool) -> Move:
        """Begin to copy these blocks out; `ahead` of need. There must be as many CPU slots to be had."""
        for block, slot in zip(sorted(blocks, key=_GPU), self._cpu_slots(len(blocks), ahead), strict=True):
            block.cpu = slot
        return self._begin(BlockEvent.BEGIN_OUT, blocks, reason, request)

    def begin_in(self, blocks: Sequence[Block], reason: SwapReason, request: Request | None) -> Move:
        """Begin to copy these blocks in. There must be as many GPU slots available."""
        for block, slot in zip(sorted(blocks, key=_CPU), self._gpu_slots(len(blocks)), strict=True):
            block.gpu = slot
        return self._begin(BlockEvent.BEGIN_IN, blocks, reason, request)

    def complete(self, move_id: int) -> Move:
        """All bytes have arrived: the blocks are in both tiers."""
        move = self._end(move_id, BlockEvent.COPIED)
        if self._log is not None:
            self._log.arrived(move.blocks, "CPU" if move.direction is Direction.OUT else "GPU")
        # What comes in ahead of its turn goes last of all that may be given up, what leaves goes first.
        self._settle(move.blocks, first=move.direction is Direction.OUT)
        return move

    def fail(self, move_id: int) -> Move:
        """The copy failed: the content stays where it came from, and the slots it was going to are free."""
        move = self._end(move_id, BlockEvent.FAILED)
        if move.direction is Direction.OUT:
            self._free_cpu(move.blocks)
        else:
            self._free_gpu(move.blocks)
        self._settle(move.blocks)
        return move

    def _begin(self, event: BlockEvent, blocks: Sequence[Block], reason: SwapReason, request: Request | None) -> Move:
        self._moves_begun += 1
        direction = Direction.OUT if event is BlockEvent.BEGIN_OUT else Direction.IN
        move = self.moves[self._moves_begun] = Move(self._moves_begun, direction, list(blocks), reason, request)
        advance(blocks, event)
        for block in blocks:
            block.move = move
        self._settle(blocks)
        return move

    def _end(self, move_id: int, event: BlockEvent) -> Move:
        move = self.moves.pop(move_id)
        advance(move.blocks, event)
        for block in move.blocks:
            block.move = None
        return move

    # ------------------------------------------------------------ slots

    def _gpu_slots(self, count: int) -> list[int]:
        shelves = self._clean_cached, self._dirty_cached, self._clean_parked
        return _slots(self._gpu, count, shelves, self._drop_gpu)

    def _cpu_slots(self, count: int, ahead: bool) -> list[int]:
        shelves = (self._cpu_cached,) if ahead else (self._cpu_cached, self._both_cached, self._spare)
        return _slots(self._cpu, count, shelves, self._drop_cpu)

    def _drop_gpu(self, blocks: Collection[Block]) -> None:
        if self._log is not None:
            self._log.left(blocks, "GPU")
        advance(blocks, BlockEvent.DROP_GPU)
        self._free_gpu(blocks)
        self._settle(blocks)

    def _drop_cpu(self, blocks: Collection[Block]) -> None:
        if self._log is not None:
            self._log.left(blocks, "CPU")
        advance(blocks, BlockEvent.DROP_CPU)
        self._free_cpu(blocks)
        self._settle(blocks)

    def _free_gpu(self, blocks: Iterable[Block]) -> None:
        self._gpu.give([block.gpu for block in blocks])
        for block in blocks:
            block.gpu = NO_SLOT

    def _free_cpu(self, blocks: Iterable[Block]) -> None:
        self._cpu.give([block.cpu for block in blocks])
        for block in blocks:
            block.cpu = NO_SLOT

    # ------------------------------------------------------------ shelves

    def _settle(self, blocks: Iterable[Block], first: bool = True) -> None:
        """Put the blocks on the shelves that their residency, owners and users call for, or free them. One that stands
        there already keeps its place.

        `first` is about parked blocks, which are given up in another order than cached ones: the last comer first.
        """
        shelves = self._shelves
        for block in blocks:
            gpu, cpu = shelves[block.residency](block)
            if gpu is not block.gpu_shelf:
                if block.gpu_shelf is not None:
                    del block.gpu_shelf[block]
                block.gpu_shelf = gpu
                if gpu is not None:
                    gpu[block] = None
                    if first and block.owners:
                        gpu.move_to_end(block, last=False)
            if cpu is not block.cpu_shelf:
                if block.cpu_shelf is not None:
                    del block.cpu_shelf[block]
                block.cpu_shelf = cpu
                if cpu is not None:
                    cpu[block] = None

    def _shelves_on_gpu(self, block: Block) -> _Shelves:
        if block.users:
            return None, None
        if block.owners:
            return self._dirty_parked, None
        return self._discarded(block) if block.digest is None else (self._dirty_cached, None)

    def _shelves_in_both(self, block: Block) -> _Shelves:
        if block.users:
            return None, None if block.readers else self._spare
        if block.owners > block.readers:
            return self._clean_parked, None
        if block.owners or block.readers:
            return self._clean_cached, None
        return self._discarded(block) if block.digest is None else (self._clean_cached, self._both_cached)

    def _shelves_in_cpu(self, block: Block) -> _Shelves:
        if block.owners or block.readers:
            return None, None
        return self._discarded(block) if block.digest is None else (None, self._cpu_cached)

    def _discarded(self, block: Block) -> _Shelves:
        """Nobody wants this content: free what it takes."""
        self.index.drop(block)
        if block.gpu != NO_SLOT:
            advance([block], BlockEvent.DROP_GPU)
            self._free_gpu([block])
        if block.cpu != NO_SLOT:
            advance([block], BlockEvent.DROP_CPU)
            self._free_cpu([block])
        return None, None


def _held(_block: Block) -> _Shelves:
    """What a copy touches may not be given up."""
    return None, None


def _slots(
    pool: BlockPool, count: int, shelves: Iterable[Shelf], drop: Callable[[Collection[Block]], None]
) -> list[int]:
    """So many slots of a pool, in ascending order: free ones, then what stands first on these shelves loses its own."""
    for shelf in shelves:
        if (lacking := count - pool.free) > 0:
            drop(list(islice(shelf, lacking)))
    return pool.take(count)
