"""The benchmark of watching: its figures on made-up loads, and the command in full."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from coldblock.protocol.messages import Hello, Metric, Sample, Stats
from coldblock.tools.bench import engines, monitor
from coldblock.tools.bench.monitor import Load
from coldblock.tools.errors import ToolError
from fake_engine import FakeEngine
from msgspec.structs import replace


def stats(steps: int, seconds: float) -> Stats:
    sample = Sample(counts=(0, steps, 0), sum=seconds)
    metric = Metric(monitor.STEP, "histogram", "", (sample,), (0.1, 1.0))
    return replace(FakeEngine().stats(), metrics=(metric,))


def test_a_mean_is_of_what_came_between_two_snapshots() -> None:
    assert monitor.mean_between(stats(10, 5.0), stats(14, 6.0), monitor.STEP) == (4, 0.25)
    assert monitor.mean_between(stats(10, 5.0), stats(10, 5.0), monitor.STEP) == (0, 0.0)


def test_ratios_are_of_rounds_and_not_of_their_medians() -> None:
    alone = [Load(10, 0.1, 0.01, 100.0), Load(10, 0.2, 0.02, 50.0), Load(10, 0.4, 0.04, 25.0)]
    watched = [Load(10, 0.11, 0.02, 90.0), Load(10, 0.2, 0.02, 50.0), Load(10, 0.4, 0.02, 25.0)]
    found = monitor.summarize(alone, watched, 10)
    assert found["ratios"]["step_s"] == {"median": 1.0, "range": [1.0, pytest.approx(1.1)]}
    assert found["ratios"]["bookkeeping_s"] == {"median": 1.0, "range": [0.5, 2.0]}
    times, ratios = monitor.tables(found)
    assert [row[0] for row in times.rows] == ["nobody", "10 subscribers, 2 stuck"]
    assert "200 (100 to 400)" in times.text() and "1 (1 to 1.1)" in ratios.text()


def test_the_command_compares_loads_with_and_without_subscribers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running: list[Stepping] = []

    class Stepping(FakeEngine):
        """Every snapshot is one step of 10 ms later."""

        steps = 0

        def stats(self) -> Stats:
            self.steps += 1
            sample = Sample(counts=(self.steps,), sum=0.01 * self.steps)
            metrics = tuple(Metric(name, "histogram", "", (sample,)) for name in (monitor.STEP, monitor.BOOKKEEPING))
            return replace(super().stats(), metrics=metrics)

    @asynccontextmanager
    async def fake_running_engine(model: str, *flags: str) -> AsyncIterator[str]:
        with Stepping(lambda prompt: range(10, 90), stats_every_s=0.05) as engine:
            running.append(engine)
            yield engine.endpoint

    monkeypatch.setattr(engines, "running_engine", fake_running_engine)
    monkeypatch.setattr(monitor, "require_model", lambda settings: None)
    flags = ["--subscribers", "3", "--requests", "2", "--new-tokens", "4", "--rounds", "2", "--out", str(tmp_path)]
    assert monitor.main(flags) == 0
    (engine,) = running
    names = Counter(hello.name for hello in engine.messages(Hello))
    assert names == {"bench monitor": 1, "bench subscriber": 2 * (3 + 1), "bench stuck": 2}
    content = json.loads((tmp_path / "bench-monitor.json").read_text())
    assert content["results"]["ratios"]["step_s"]["median"] == pytest.approx(1.0)
    assert {len(rounds) for rounds in content["results"]["rounds"].values()} == {2}
    assert "3 subscribers, 2 stuck" in capsys.readouterr().out


async def test_an_engine_that_publishes_nothing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "HEARD_WITHIN_S", 0.1)
    listeners: Any = monitor._Listeners("ipc:///nowhere/engine.sock", 1)
    with pytest.raises(ToolError, match=r"heard nothing from the engine within 0\.1 s"):
        await listeners.heard()
    listeners.end()
