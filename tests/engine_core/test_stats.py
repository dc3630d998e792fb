"""What the metrics count of a step's updates."""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.plan import SampledToken
from coldblock.engine_core.control.updates import FinishedUpdate, TokenUpdate, Update
from coldblock.engine_core.stats import EngineStats, Histogram
from fake_engine import MODEL


def observed(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), pytest.approx(histogram.sum)


def tokens(*request_ids: str) -> list[Update]:
    return [TokenUpdate(request_id, SampledToken(1)) for request_id in request_ids]


def end(request_id: str) -> FinishedUpdate:
    return FinishedUpdate(request_id, "length", None, None, 2, 3, 0, 0, 0.0, 0.5, 0.5, 4.0)


def test_first_tokens_and_gaps_are_counted_by_request() -> None:
    stats = EngineStats(MODEL, "id", "ipc://e", clock=lambda: 0.0)
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
    stats = EngineStats(MODEL, "id", "ipc://e", clock=lambda: now)
    stats.arrived("a", 0.0)
    for now in (0.5, 1.0, 1.5, 2.5):
        stats.updated(tokens("a"), now)
    assert stats._rate.per_second(2.6) == pytest.approx(3 / 2.5)


def test_a_step_that_the_device_hides_the_host_behind_has_no_bookkeeping() -> None:
    stats = EngineStats(MODEL, "id", "ipc://e")
    stats.stepped(0.010, 0.008)
    stats.stepped(0.010, 0.011)
    assert observed(stats.bookkeeping) == (2, 0.002) and observed(stats.step) == (2, 0.020)
