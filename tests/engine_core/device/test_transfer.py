"""Copies between the tiers carry every byte, and are reported once."""

from __future__ import annotations

import pytest
import torch
from coldblock.engine_core.control.plan import BlockMove, Direction, MoveDone
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.device.transfer import Transfers
from coldblock.engine_core.kv_layout import FormatName, KVShape

FORMATS: tuple[FormatName, ...] = ("fp32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2")
DELAY = "COLDBLOCK_TEST_COPY_DELAY_STEPS"


def ended(transfers: Transfers) -> list[MoveDone]:
    """What all copies that run come to."""
    done: list[MoveDone] = []
    while transfers._flights:
        done += transfers.poll(wait_s=1.0)
    return done


def pool_of_noise(kv_format: FormatName = "fp16") -> KVPool:
    pool = KVPool(KVShape(2, 2, 8), 4, kv_format, 6, 5)
    pool.gpu.random_(0, 256)
    pool.cpu.random_(0, 256)
    return pool


@pytest.mark.parametrize("kv_format", FORMATS)
def test_out_and_in_again_bit_for_bit(kv_format: FormatName) -> None:
    pool = pool_of_noise(kv_format)
    before, transfers = pool.gpu.clone(), Transfers(pool)
    transfers.begin([BlockMove(1, Direction.OUT, (4, 0, 2), (1, 3, 0))])
    assert [(done.move_id, done.error) for done in ended(transfers)] == [(1, None)]
    pool.gpu[[4, 0, 2]] = 0
    transfers.begin([BlockMove(2, Direction.IN, (5, 4, 1), (1, 3, 0))])
    assert [done.move_id for done in ended(transfers)] == [2]
    assert torch.equal(pool.gpu[[5, 4, 1]], before[[4, 0, 2]])
    assert torch.equal(pool.gpu[3], before[3])
    assert transfers.poll() == ()


def test_a_block_that_does_not_exist_is_an_error_of_that_move_alone() -> None:
    transfers = Transfers(pool_of_noise())
    transfers.begin([BlockMove(1, Direction.OUT, (0,), (99,)), BlockMove(2, Direction.OUT, (0,), (1,))])
    first, second = ended(transfers)
    assert first.error is not None
    assert second.error is None


def test_seconds_are_measured() -> None:
    transfers = Transfers(pool_of_noise())
    transfers.begin([BlockMove(1, Direction.OUT, (0,), (1,))])
    (done,) = ended(transfers)
    assert 0 < done.seconds < 10 and 0 <= done.queued_s < 10


def test_delayed_copies_read_and_write_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY, "2")
    pool = pool_of_noise()
    transfers, untouched = Transfers(pool), pool.cpu[3].clone()
    transfers.begin([BlockMove(1, Direction.OUT, (0,), (3,))])
    assert transfers.poll() == ()
    pool.gpu[0] = 7  # reused too early: the late copy sees it
    assert torch.equal(pool.cpu[3], untouched) or pool.cpu[3].eq(7).all()
    assert [done.move_id for done in ended(transfers)] == [1]
    assert pool.cpu[3].eq(7).all()
