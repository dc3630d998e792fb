"""Both tiers: whose slots may be given up, in which order, and what copies hold."""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.block_pool import PoolExhausted, PoolUse
from coldblock.engine_core.control.plan import Direction
from coldblock.engine_core.control.swap import Block, Residency
from coldblock.engine_core.control.tiers import Tiers


def indexed(tiers: Tiers, count: int) -> list[Block]:
    """Blocks that a running request has and the index names."""
    blocks = tiers.allocate(count)
    for block in blocks:
        tiers.index.insert(f"digest {id(block)}".encode(), block)
    return blocks


def written(tiers: Tiers, blocks: list[Block]) -> list[Block]:
    """The same, with a CPU copy each."""
    tiers.complete(tiers.begin_out(blocks, "write_behind", None, ahead=True).move_id)
    return blocks


def test_a_copy_out_holds_both_slots_and_leaves_the_block_in_both() -> None:
    tiers = Tiers(6, 4)
    blocks = tiers.allocate(3)
    tiers.park(blocks)
    assert (tiers.available, tiers.parked) == (3, 3)
    move = tiers.begin_out(blocks, "growth", None, ahead=False)
    assert tiers.gpu_use() == PoolUse(6, used=0, cached=0, in_flight=3, free=3)
    assert tiers.cpu_use() == PoolUse(4, used=0, cached=0, in_flight=3, free=1)
    assert (tiers.available, tiers.leaving()) == (3, 3)
    assert (tiers.idle(Direction.OUT), tiers.idle(Direction.IN)) == (False, True)
    tiers.complete(move.move_id)
    assert {block.residency for block in blocks} == {Residency.BOTH}
    assert tiers.gpu_use() == PoolUse(6, used=0, cached=3, in_flight=0, free=3)
    assert tiers.cpu_use() == PoolUse(4, used=3, cached=0, in_flight=0, free=1)
    assert (tiers.available, tiers.leaving(), tiers.parked) == (6, 0, 0)


def test_slots_are_given_up_in_the_order_that_loses_least() -> None:
    tiers = Tiers(8, 8)
    parked = written(tiers, tiers.allocate(2))
    lost = indexed(tiers, 2)
    lives_on = written(tiers, indexed(tiers, 2))
    mine = tiers.allocate(1)
    tiers.park(parked)
    for blocks in (lost, lives_on):
        tiers.release(blocks, used=True)
    gone = []
    for _ in range(tiers.available):
        tiers.allocate(1)
        gone.append([b.residency for b in (*lives_on, *lost, *parked)])
    cpu, both, gpu, nowhere = Residency.CPU, Residency.BOTH, Residency.GPU, Residency.NOWHERE
    assert gone == [
        [both, both, gpu, gpu, both, both],
        [cpu, both, gpu, gpu, both, both],
        [cpu, cpu, gpu, gpu, both, both],
        [cpu, cpu, nowhere, gpu, both, both],
        [cpu, cpu, nowhere, nowhere, both, both],
        [cpu, cpu, nowhere, nowhere, both, cpu],  # the end of who left goes first
        [cpu, cpu, nowhere, nowhere, cpu, cpu],
    ]
    assert mine[0].residency is Residency.GPU and len(tiers.index) == 2
    with pytest.raises(PoolExhausted, match="1 GPU slots wanted, 0 of 8 available"):
        tiers.allocate(1)


def test_who_left_last_gives_up_first_and_what_came_in_ahead_of_its_turn_last() -> None:
    tiers = Tiers(4, 8)
    first, second = written(tiers, tiers.allocate(1)), written(tiers, tiers.allocate(1))
    away = written(tiers, tiers.allocate(2))
    tiers.park(away)
    fillers = tiers.allocate(2)
    assert {block.residency for block in away} == {Residency.CPU}
    tiers.release(fillers, used=True)
    tiers.park(first)
    tiers.park(second)
    tiers.complete(tiers.begin_in(away[:1], "prefetch", None).move_id)
    order = []
    for _ in range(4):
        tiers.allocate(1)
        order.append([block.residency is Residency.BOTH for block in (*second, *first, away[0])])
    assert order == [[True, True, True], [False, True, True], [False, False, True], [False, False, False]]


def test_a_block_that_only_changes_owners_keeps_its_place() -> None:
    tiers = Tiers(3, 3)
    shared, last = written(tiers, tiers.allocate(1)), written(tiers, tiers.allocate(1))
    tiers.own(shared)
    for blocks in (shared, last):
        tiers.park(blocks)
    tiers.release(shared, used=False)
    tiers.allocate(2)
    assert (shared[0].residency, last[0].residency) == (Residency.BOTH, Residency.CPU)


def test_what_is_copied_together_lies_in_the_same_order_in_both_tiers() -> None:
    """So neighbours stay neighbours, and go in one copy."""
    tiers = Tiers(8, 8)
    blocks = tiers.allocate(6)
    assert [block.gpu for block in blocks] == list(range(6))
    written(tiers, blocks[::-1])
    assert [block.cpu for block in blocks] == list(range(6))
    tiers.park(blocks)
    tiers.release(tiers.allocate(8), used=True)
    tiers.begin_in([blocks[i] for i in (3, 0, 5, 2, 4, 1)], "resume", None)
    first = blocks[0].gpu
    assert [block.gpu for block in blocks] == list(range(first, first + 6))


def test_a_copy_ahead_of_need_displaces_only_cached_content() -> None:
    tiers = Tiers(6, 3)
    running = written(tiers, tiers.allocate(1))
    both = written(tiers, indexed(tiers, 1))
    gone = written(tiers, indexed(tiers, 1))
    for blocks in (gone, both):
        tiers.release(blocks, used=True)
    more = tiers.allocate(4)
    assert gone[0].residency is Residency.CPU and both[0].residency is Residency.BOTH
    assert (tiers.cpu_spare, tiers.cpu_available) == (1, 3)
    written(tiers, more[:1])
    assert gone[0].residency is Residency.NOWHERE and tiers.cpu_spare == 0
    move = tiers.begin_out(more[1:3], "growth", None, ahead=False)
    assert [block.residency for block in (both[0], running[0], more[0])] == [
        Residency.GPU,
        Residency.GPU,
        Residency.BOTH,
    ]
    assert tiers.cpu_use().in_flight == 2
    tiers.complete(move.move_id)


def test_a_block_that_nobody_wants_any_more_is_freed_when_its_copy_ends() -> None:
    for ends in (Tiers.complete, Tiers.fail):
        tiers = Tiers(4, 4)
        out, back = tiers.allocate(1), written(tiers, tiers.allocate(1))
        tiers.park(back)
        tiers.release(tiers.allocate(2), used=True)
        filler = tiers.allocate(3)
        assert back[0].residency is Residency.CPU
        tiers.release(filler, used=True)
        moves = [tiers.begin_out(out, "growth", None, False), tiers.begin_in(back, "resume", None)]
        tiers.release(out, used=True)
        tiers.release(back, used=False)
        assert tiers.gpu_use().in_flight == tiers.cpu_use().in_flight == 2
        for move in moves:
            ends(tiers, move.move_id)
        assert tiers.gpu_use() == PoolUse(4, 0, 0, 0, 4) and tiers.cpu_use() == PoolUse(4, 0, 0, 0, 4)


def test_a_failed_copy_leaves_the_content_where_it_was() -> None:
    tiers = Tiers(2, 2)
    blocks = tiers.allocate(2)
    tiers.park(blocks)
    tiers.fail(tiers.begin_out(blocks, "growth", None, False).move_id)
    assert {block.residency for block in blocks} == {Residency.GPU} and tiers.cpu_use().free == 2
    written(tiers, blocks)
    tiers.release(tiers.allocate(2), used=True)
    tiers.fail(tiers.begin_in(blocks, "resume", None).move_id)
    assert {block.residency for block in blocks} == {Residency.CPU}
    assert tiers.gpu_use().free == 2 and tiers.cpu_use().used == 2


def test_a_write_drops_the_copy_and_is_refused_while_the_block_is_read() -> None:
    tiers = Tiers(2, 2)
    (block,) = written(tiers, tiers.allocate(1))
    tiers.write(block)
    assert block.residency is Residency.GPU and tiers.cpu_use().free == 2
    tiers.begin_out([block], "growth", None, False)
    with pytest.raises(AssertionError, match="COPYING_OUT"):
        tiers.write(block)


@pytest.mark.parametrize("copied", [False, True])
def test_forgotten_content_is_not_cached_in_either_tier(copied: bool) -> None:
    tiers = Tiers(3, 3)
    blocks = indexed(tiers, 2)
    if copied:
        written(tiers, blocks)
    tiers.release(blocks[:1], used=True)
    for block in blocks:
        tiers.forget(block)
    assert tiers.gpu_use() == PoolUse(3, used=1, cached=0, in_flight=0, free=2)
    tiers.release(blocks[1:], used=True)
    assert tiers.gpu_use().free == 3 and tiers.cpu_use().free == 3 and len(tiers.index) == 0


def test_a_shared_block_stays_for_its_other_user() -> None:
    tiers = Tiers(2, 2)
    blocks = tiers.allocate(1)
    tiers.share(blocks)
    tiers.park(blocks)
    assert (tiers.available, tiers.parked) == (1, 0)
    tiers.release(blocks, used=True)
    assert (tiers.available, tiers.parked) == (1, 1)
    tiers.release(blocks, used=False)
    assert tiers.available == 2


def test_what_is_read_in_the_cpu_tier_keeps_its_slot_there_and_gives_up_the_other() -> None:
    tiers = Tiers(4, 4)
    cold, lost = written(tiers, tiers.allocate(2)), indexed(tiers, 1)
    assert (tiers.available, tiers.cpu_available) == (1, 4)
    tiers.read_cold(cold, used=True)
    assert (tiers.available, tiers.cpu_available, tiers.cpu_leaving()) == (3, 2, 0)
    tiers.release(lost, used=True)
    tiers.allocate(3)
    assert [block.residency for block in (*cold, *lost)] == [Residency.CPU, Residency.CPU, Residency.GPU]


def test_what_is_read_in_the_cpu_tier_outlives_its_owner_until_nobody_reads_it() -> None:
    for indexed_too in (False, True):
        tiers = Tiers(3, 3)
        cold = written(tiers, indexed(tiers, 2) if indexed_too else tiers.allocate(2))
        tiers.read_cold(cold, used=True)
        tiers.share(cold[:1])  # another request uses it on the GPU
        tiers.release(cold, used=False)
        tiers.release(cold[:1], used=True)
        assert (tiers.cpu_use().used, tiers.cpu_available) == (2, 1)
        tiers.stop_reading(cold)
        assert (tiers.cpu_use().used, tiers.cpu_available) == (0, 3)
        assert tiers.cpu_use().cached == (2 if indexed_too else 0)


def test_a_cpu_tier_of_no_blocks_has_no_room() -> None:
    tiers = Tiers(1, 0)
    assert (tiers.cpu_available, tiers.cpu_spare, tiers.cpu_use()) == (0, 0, PoolUse(0, 0, 0, 0, 0))
