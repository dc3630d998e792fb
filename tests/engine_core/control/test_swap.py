"""Block residency, every state with every event, and the swap manager's order: reserve, copy, free."""

from __future__ import annotations

import itertools

import pytest
from coldblock.engine_core.control.block_pool import BlockPool, PoolUse
from coldblock.engine_core.control.plan import Direction
from coldblock.engine_core.control.swap import BlockEvent, IllegalMove, Residency, Swap, SwapManager

EXPECTED = {
    Residency.GPU: {BlockEvent.BEGIN_OUT: Residency.COPYING_OUT},
    Residency.COPYING_OUT: {BlockEvent.COPIED: Residency.BOTH, BlockEvent.FAILED: Residency.GPU},
    Residency.BOTH: {BlockEvent.DROP_GPU: Residency.CPU, BlockEvent.DROP_CPU: Residency.GPU},
    Residency.CPU: {BlockEvent.BEGIN_IN: Residency.COPYING_IN},
    Residency.COPYING_IN: {BlockEvent.COPIED: Residency.BOTH, BlockEvent.FAILED: Residency.CPU},
}


@pytest.mark.parametrize(("residency", "event"), list(itertools.product(Residency, BlockEvent)))
def test_every_pair_is_a_known_step_or_raises(residency: Residency, event: BlockEvent) -> None:
    swap = Swap(residency, [])
    target = EXPECTED[residency].get(event)
    if target is None:
        with pytest.raises(IllegalMove, match=f"{event.name} on blocks in {residency.name}"):
            swap.on(event)
        assert swap.residency is residency
    else:
        swap.on(event)
        assert swap.residency is target


class Tiers:
    """A GPU pool of 6 blocks and a CPU pool of 4, with their manager."""

    def __init__(self, enabled: bool = True) -> None:
        self.gpu, self.cpu = BlockPool(6), BlockPool(4)
        self.manager = SwapManager(self.gpu, self.cpu, enabled)

    def swapped(self, blocks: int) -> Swap:
        swap, _ = self.manager.begin_swap_out(self.gpu.allocate(blocks))
        self.manager.complete_swap_out(swap)
        return swap

    def check_empty(self) -> None:
        assert self.gpu.use() == PoolUse(6, 0, 0, 0, 6) and self.cpu.use() == PoolUse(4, 0, 0, 0, 4)


def test_a_swap_out_frees_the_gpu_only_when_the_copy_has_ended() -> None:
    tiers = Tiers()
    blocks = tiers.gpu.allocate(3)
    swap, move = tiers.manager.begin_swap_out(blocks)
    assert (move.direction, move.gpu_blocks, len(move.cpu_blocks)) == (Direction.OUT, tuple(blocks), 3)
    assert tiers.gpu.use() == PoolUse(6, used=0, cached=0, in_flight=3, free=3)
    assert tiers.cpu.use() == PoolUse(4, used=0, cached=0, in_flight=3, free=1)
    assert tiers.manager.releasing() == 3
    tiers.manager.complete_swap_out(swap)
    assert swap.residency is Residency.CPU and tiers.gpu.use().free == 6 and tiers.cpu.use().used == 3
    assert tiers.manager.releasing() == 0


def test_a_swap_in_brings_content_and_room_and_frees_the_cpu_at_its_end() -> None:
    tiers = Tiers()
    swap = tiers.swapped(2)
    held_by_cpu = tuple(swap.cpu_blocks)
    move = tiers.manager.begin_swap_in(swap, room=1)
    assert (move.direction, move.cpu_blocks, len(move.gpu_blocks)) == (Direction.IN, held_by_cpu, 2)
    assert tiers.gpu.use() == PoolUse(6, used=1, cached=0, in_flight=2, free=3)
    assert tiers.cpu.use().in_flight == 2
    tiers.manager.complete_swap_in(swap)
    assert swap.residency is Residency.GPU and len(swap.gpu_blocks + swap.room) == 3
    assert tiers.gpu.use().used == 3 and tiers.cpu.use().free == 4


def test_shared_blocks_stay_with_their_other_user() -> None:
    tiers = Tiers()
    shared, own = tiers.gpu.allocate(2)
    tiers.gpu.share([shared])
    swap, _ = tiers.manager.begin_swap_out([shared, own])
    assert tiers.manager.releasing() == 1
    tiers.manager.complete_swap_out(swap)
    assert tiers.gpu.refs(shared) == 1 and tiers.gpu.use().free == 5


def test_a_block_leaving_in_two_copies_is_released_by_both_together() -> None:
    tiers = Tiers()
    (block,) = tiers.gpu.allocate(1)
    tiers.gpu.share([block])
    first, _ = tiers.manager.begin_swap_out([block])
    assert tiers.manager.releasing() == 0
    second, _ = tiers.manager.begin_swap_out([block])
    assert tiers.manager.releasing() == 1
    tiers.manager.complete_swap_out(second)
    assert tiers.gpu.use().in_flight == 1
    tiers.manager.complete_swap_out(first)
    assert tiers.gpu.use().free == 6


def test_a_failed_copy_leaves_the_content_where_it_was() -> None:
    tiers = Tiers()
    blocks = tiers.gpu.allocate(2)
    swap, _ = tiers.manager.begin_swap_out(blocks)
    tiers.manager.fail(swap)
    assert (swap.residency, swap.gpu_blocks) == (Residency.GPU, blocks)
    assert tiers.gpu.use().used == 2 and tiers.cpu.use().free == 4
    swap, _ = tiers.manager.begin_swap_out(blocks)
    tiers.manager.complete_swap_out(swap)
    tiers.manager.begin_swap_in(swap, room=2)
    tiers.manager.fail(swap)
    assert (swap.residency, len(swap.cpu_blocks)) == (Residency.CPU, 2)
    assert tiers.gpu.use().free == 6 and tiers.cpu.use().used == 2


@pytest.mark.parametrize("failed", [False, True])
def test_a_discarded_copy_is_freed_when_it_ends(failed: bool) -> None:
    tiers = Tiers()
    out, _ = tiers.manager.begin_swap_out(tiers.gpu.allocate(2))
    back = tiers.swapped(2)
    tiers.manager.begin_swap_in(back, room=1)
    for swap in (out, back):
        tiers.manager.discard(swap)
    assert tiers.gpu.use().in_flight == 4 and tiers.cpu.use().in_flight == 4
    if failed:
        tiers.manager.fail(out)
        tiers.manager.fail(back)
    else:
        tiers.manager.complete_swap_in(back)
        tiers.manager.complete_swap_out(out)
    tiers.check_empty()


def test_a_discarded_swap_that_rests_is_freed_at_once() -> None:
    tiers = Tiers()
    tiers.manager.discard(tiers.swapped(3))
    tiers.check_empty()


def test_the_budget_is_checked_with_the_numbers() -> None:
    assert Tiers().manager.shortage(4) is None
    assert Tiers().manager.shortage(5) == "5 blocks to offload, 4 of 4 CPU blocks free"
    assert Tiers(enabled=False).manager.shortage(1) == "CPU offload is off"
    tiers = Tiers()
    tiers.manager.begin_swap_out(tiers.gpu.allocate(3))
    assert tiers.manager.shortage(2) == "2 blocks to offload, 1 of 4 CPU blocks free"
