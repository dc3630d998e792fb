"""One tier's slots: free, taken, and counted with what stands on shelves."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from coldblock.engine_core.control.block_pool import BlockPool, PoolExhausted, PoolUse
from coldblock.engine_core.control.swap import Block


def test_every_slot_is_given_out_once_until_it_is_given_back() -> None:
    pool = BlockPool(3)
    slots = [*pool.take(2), *pool.take(0), *pool.take(1)]
    assert sorted(slots) == [0, 1, 2] and pool.free == 0
    with pytest.raises(PoolExhausted, match="1 slots wanted, 0 of 3 are free"):
        pool.take(1)
    pool.give([slots[2], slots[0]])
    with pytest.raises(PoolExhausted, match="3 slots wanted, 2 of 3 are free"):
        pool.take(3)
    assert pool.take(2) == sorted([slots[0], slots[2]])


def test_what_is_neither_free_nor_cached_nor_in_flight_is_used() -> None:
    pool = BlockPool(8)
    pool.take(6)
    shelves = [OrderedDict.fromkeys([Block(), Block()]), OrderedDict.fromkeys([Block()])]
    assert pool.use(shelves, in_flight=1) == PoolUse(8, used=2, cached=3, in_flight=1, free=2)


def test_a_tier_of_no_blocks_is_legal() -> None:
    assert BlockPool(0).use((), 0) == PoolUse(0, 0, 0, 0, 0)
