"""One tier's blocks: references, the cache of kept content, holds of copies."""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.block_pool import BlockPool, PoolExhausted, PoolUse


def test_blocks_move_between_free_used_and_in_flight() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and pool.use() == PoolUse(4, used=3, cached=0, in_flight=0, free=1)
    pool.hold(blocks[:2])
    pool.hold(blocks[:1])
    assert pool.use() == PoolUse(4, used=1, cached=0, in_flight=2, free=1)
    pool.unhold(blocks[:2])
    assert pool.use().in_flight == 1
    pool.unhold(blocks[:1])
    pool.release(blocks)
    assert pool.use() == PoolUse(4, used=0, cached=0, in_flight=0, free=4)


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert pool.refs(block) == 1 and pool.available == 0
    pool.release([block])
    assert pool.available == 1


def test_more_than_available_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(PoolExhausted, match="2 blocks wanted, 1 of 2 available"):
        pool.allocate(2)
    assert pool.use().free == 1


def test_kept_blocks_are_cached_and_evicted_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, evicted.append)
    a, b, c = pool.allocate(3)
    for block in (a, b, c):
        pool.keep(block)
    pool.release([b])
    pool.release([a])
    assert pool.use() == PoolUse(3, used=1, cached=2, in_flight=0, free=0)
    assert pool.allocate(1) == [b] and evicted == [b]
    pool.share([a])
    assert pool.refs(a) == 1 and pool.available == 0


def test_free_blocks_are_taken_before_cached_ones() -> None:
    evicted: list[int] = []
    pool = BlockPool(2, evicted.append)
    a, b = pool.allocate(2)
    pool.keep(a)
    pool.release([a, b])
    assert pool.allocate(1) == [b] and evicted == []


def test_forgotten_content_is_not_cached() -> None:
    evicted: list[int] = []
    pool = BlockPool(2, evicted.append)
    used, cached = pool.allocate(2)
    for block in (used, cached):
        pool.keep(block)
    pool.release([cached])
    pool.forget(cached)
    pool.forget(used)
    pool.forget(used)
    assert evicted == [cached, used] and pool.use().free == 1
    pool.release([used])
    assert pool.use() == PoolUse(2, used=0, cached=0, in_flight=0, free=2)


def test_the_reference_of_a_running_copy_cannot_be_released() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.hold(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_a_tier_of_no_blocks_is_legal() -> None:
    pool = BlockPool(0)
    assert pool.available == 0 and pool.allocate(0) == []
