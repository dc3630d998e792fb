"""What the metrics count of a step's updates."""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.plan import SampledToken
from coldblock.engine_core.control.updates import FinishedUpdate, SwapPhase, SwapUpdate, TokenUpdate, Update
from coldblock.engine_core.device.executor import LinkPeak
from coldblock.engine_core.stats import EngineStats, Histogram
from coldblock.protocol.messages import LinkUse, TierUse
from fake_engine import MODEL
from msgspec.structs import replace
from scheduler_harness import Harness

PEAK = LinkPeak(50e9, 40e9)


def observed(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), pytest.approx(histogram.sum)


def tokens(*request_ids: str) -> list[Update]:
    return [TokenUpdate(request_id, SampledToken(1)) for request_id in request_ids]


def end(request_id: str) -> FinishedUpdate:
    return FinishedUpdate(request_id, "length", None, None, 2, 3, 0, 0, 0.0, 0.5, 0.5, 4.0)


def test_first_tokens_and_gaps_are_counted_by_request() -> None:
    stats = EngineStats(MODEL, "id", "ipc://e", PEAK, clock=lambda: 0.0)
    for request_id, at in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        stats.arrived(request_id, at)
    stats.updated(tokens("a", "b"), 3.0)
    stats.updated(tokens("a", "b", "c"), 5.0)
    stats.updated([*tokens("a"), end("a"), *tokens("c")], 8.0)
    assert observed(stats.ttft) == (3, 3.0 + 2.0 + 3.0)
    assert observed(stats.itl) == (4, 2.0 + 2.0 + 3.0 + 3.0)
    assert observed(stats.e2e) == (1, 8.0) and observed(stats.tpot) == (1, 2.0)


def test_the_rate_is_that_of_the_last_two_seconds() -> None:
    now = 0.0
    stats = EngineStats(MODEL, "id", "ipc://e", PEAK, clock=lambda: now)
    stats.arrived("a", 0.0)
    for now in (0.5, 1.0, 1.5, 2.5):
        stats.updated(tokens("a"), now)
    assert stats._tokens.per_second(2.6) == pytest.approx(3 / 2.5)


def test_a_step_that_the_device_hides_the_host_behind_has_no_bookkeeping() -> None:
    stats = EngineStats(MODEL, "id", "ipc://e", PEAK)
    stats.stepped(0.010, 0.008)
    stats.stepped(0.010, 0.011)
    assert observed(stats.bookkeeping) == (2, 0.002) and observed(stats.step) == (2, 0.020)


def copied(phase: SwapPhase, size: int) -> SwapUpdate:
    return SwapUpdate("p/1/a", phase, "growth", size // 1000, size, 0.1, 3, 1000)


def test_copies_are_shown_by_the_half_second_and_against_the_links_peak() -> None:
    now = 0.0
    harness, stats = Harness(), EngineStats(MODEL, "id", "ipc://e", PEAK, clock=lambda: now)
    for now, phase, size in (
        (0.1, "swapping_out", 9000),
        (0.2, "swapped", 4000),
        (0.3, "copied_out", 2000),
        (0.4, "rejected", 0),
        (0.5, "resumed", 1000),
        (0.6, "copied_in", 5000),
    ):
        stats.updated([copied(phase, size)], now)  # type: ignore[arg-type]
    link = stats.snapshot(harness.scheduler, 0)(str.upper).link
    assert (link.out_bytes_per_s, link.in_bytes_per_s) == (pytest.approx(6000 / 0.6), pytest.approx(0.0))
    now = 1.1
    link = stats.snapshot(harness.scheduler, 0)(str.upper).link
    assert (link.out_bytes_per_s, link.in_bytes_per_s) == (0.0, pytest.approx(6000 / 0.6))
    assert (link.peak_out_bytes_per_s, link.peak_in_bytes_per_s) == (50e9, 40e9)


def test_a_snapshot_shows_both_tiers_and_the_way_of_each_request() -> None:
    model = replace(MODEL, num_gpu_blocks=8, num_cpu_blocks=16, kv_block_bytes=1000)
    harness = Harness(num_gpu_blocks=8, num_cpu_blocks=16, max_num_seqs=2, prefix_cache=True)
    stats = EngineStats(model, "id", "ipc://e", PEAK, harness.clock)
    harness.add("peer/1/a", range(33), 60)
    harness.run_until(lambda: bool(harness.tokens["peer/1/a"]))  # b finds its prefix
    harness.add("peer/1/b", range(33), 60)
    harness.add("peer/1/c", range(33), 60)
    harness.run_until(lambda: bool(harness.phases("swapped")) and not harness.scheduler.gpu_use().in_flight)
    harness.clock.now += 0.5
    shown = stats.snapshot(harness.scheduler, 3)(str.upper)
    gpu, cpu = harness.scheduler.gpu_use(), harness.scheduler.cpu_use()
    assert shown.gpu == TierUse(8, gpu.used, gpu.cached, 0, gpu.free, shared=2)
    assert shown.cpu == TierUse(16, cpu.used, cpu.cached, 0, cpu.free) and shown.cpu.used > 0
    counters = harness.scheduler.counters
    assert shown.link == LinkUse(counters.offload_blocks * 1000, 0, 0.0, 0.0, 50e9, 40e9)
    rows = {row.request_id: row for row in shown.requests}
    assert rows.keys() == {"a", "b", "c"} and {row.peer for row in rows.values()} == {"peer"}
    assert rows["a"].peer_name == "PEER/1/A"
    assert rows["c"].state == "waiting" and rows["c"].queue_s == rows["c"].age_s > rows["a"].queue_s
    assert (rows["c"].ttft_s, rows["c"].tpot_s, rows["c"].stalled_s) == (None, None, 0.0)
    (out,) = [row for row in rows.values() if row.state == "swapped"]
    assert out.stalled_s == out.stall_s > 0.4 and out.moved_bytes == shown.link.out_bytes
    (stayed,) = [row for row in rows.values() if row.state == "decode"]
    assert stayed.ttft_s is not None and stayed.tpot_s == pytest.approx(0.01) and stayed.stalled_s == 0.0
    harness.run()
