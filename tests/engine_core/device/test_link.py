"""The link's peak, measured at load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from coldblock.engine_core.control.plan import BlockMove, Direction, MoveDone
from coldblock.engine_core.device import link
from coldblock.engine_core.device.executor import Capacity, LinkPeak
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.device.link import measure_link
from coldblock.engine_core.device.transfer import Transfers
from coldblock.engine_core.errors import EngineError
from coldblock.engine_core.kv_layout import KVShape

MIB = 1 << 20


class TimedTransfers:
    """Copies that take the given seconds, one after another, each found ended by a later poll."""

    def __init__(self, *seconds: float, error: str | None = None, polls: int = 3) -> None:
        self._seconds = list(seconds)
        self._error = error
        self._polls = polls
        self.moves: list[BlockMove] = []

    def begin(self, moves: Sequence[BlockMove]) -> None:
        self.moves += moves
        self._left = self._polls

    def poll(self, wait_s: float = 0.0) -> tuple[MoveDone, ...]:
        self._left -= 1
        return () if self._left else (MoveDone(-1, self._seconds.pop(0), self._error),)


def test_the_best_copy_each_way_counts_but_not_the_first() -> None:
    transfers = TimedTransfers(0.001, 0.001, 0.5, 1.0, 0.25, 2.0)
    assert measure_link(transfers, Capacity(100, 50, MIB)) == LinkPeak(32 * MIB / 0.25, 32 * MIB / 1.0)
    assert [move.direction for move in transfers.moves] == [Direction.OUT, Direction.IN] * 3
    assert {move.gpu_blocks for move in transfers.moves} == {tuple(range(32))}


@pytest.mark.parametrize(("gpu", "cpu", "size", "blocks"), [(3, 50, MIB, 3), (50, 2, MIB, 2), (5, 5, 100 * MIB, 1)])
def test_no_more_blocks_than_there_are(gpu: int, cpu: int, size: int, blocks: int) -> None:
    transfers = TimedTransfers(*[1.0] * 6)
    assert measure_link(transfers, Capacity(gpu, cpu, size)).out_bytes_per_s == blocks * size
    assert len(transfers.moves[0].cpu_blocks) == blocks


def test_no_cpu_tier_no_peak() -> None:
    assert measure_link(TimedTransfers(), Capacity(10, 0, MIB)) == LinkPeak(0.0, 0.0)


def test_copies_that_fail_have_no_peak_and_are_no_reason_not_to_start() -> None:
    assert measure_link(TimedTransfers(0.1, error="not pinned"), Capacity(10, 10, MIB)) == LinkPeak(0.0, 0.0)


def test_a_copy_that_never_ends_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_MOST_S", 0.0)
    with pytest.raises(EngineError, match="a copy of 10485760 bytes from the GPU pool to the CPU tier has not ended"):
        measure_link(TimedTransfers(polls=1 << 30), Capacity(10, 10, MIB))


@pytest.mark.parametrize("delay", ["0", "3"])
def test_nothing_of_it_is_left_for_the_first_step(delay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDBLOCK_TEST_COPY_DELAY_STEPS", delay)
    pool = KVPool(KVShape(2, 2, 8), 4, "fp16", 6, 5)
    transfers = Transfers(pool)
    peak = measure_link(transfers, Capacity(6, 5, pool.block_bytes))
    assert peak.out_bytes_per_s > 0 and peak.in_bytes_per_s > 0
    assert transfers.poll(0.1) == ()
