"""The benchmarks of swaps: who counts as a victim, their figures on made-up timelines, and both commands in full."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from coldblock.protocol.client import AsyncClient
from coldblock.protocol.messages import Finished, Metric, Sample, SwapEvent
from coldblock.tools.bench import engines, jitter, link, pressure, swap, swap_load, swap_long, swap_pairs, swap_prefix
from coldblock.tools.bench.link import Link
from coldblock.tools.bench.measure import Timeline
from coldblock.tools.bench.report import Spread, Table
from coldblock.tools.errors import ToolError
from fake_engine import MODEL, FakeEngine, swap_event, usage
from msgspec.structs import replace
from report_pages import check_page

LINK = Link(50.0, 40.0, 1 << 28)


def timeline(*arrivals: float, events: tuple[SwapEvent, ...] = (), request_id: str = "r", **totals: Any) -> Timeline:
    finished = Finished("length", usage(**{"prefill_s": 0.0, **totals}))
    tokens = list(range(len(arrivals)))
    return Timeline(0.0, request_id, tokens, list(arrivals), list(events), finished)


def widest(tables: list[Table]) -> int:
    return max(len(line) for table in tables for line in table.text().splitlines()[1:])


def copy(phase: str, size: float, seconds: float, **changes: Any) -> SwapEvent:
    return swap_event(phase=phase, **{"bytes": int(size), "blocks": 3, "seconds": seconds, **changes})


def observed(timelines: list[Timeline], seconds: float, **changes: Any) -> pressure.Observed:
    values = {"model": MODEL, "copies": [], "counters": dict.fromkeys(engines.COUNTERS, 0), "clock_offset": 0.0}
    return pressure.Observed(timelines=timelines, seconds=seconds, **{**values, **changes})


# ---------------------------------------------------------------- who is a victim, and how requests fared


@pytest.mark.parametrize(
    ("phases", "totals", "victim"),
    [
        (("swapping_out", "swapped", "swapping_in", "resumed"), {}, True),
        (("swapping_out",), {}, True),
        ((), {"recomputes": 1}, True),
        (("rejected",), {}, False),
        ((), {"moved_bytes": 1000}, False),
    ],
)
def test_a_victim_left_or_was_recomputed(phases: tuple[str, ...], totals: dict[str, int], victim: bool) -> None:
    line = timeline(1.0, 2.0, events=tuple(swap_event(phase=phase) for phase in phases), **totals)
    assert line.is_victim is victim
    groups = pressure.grouped([timeline(1.0)], [line])
    assert [len(groups[name]) for name in ("room for all", "bystanders", "victims")] == [1, not victim, victim]


def test_a_groups_figures_have_one_value_a_request() -> None:
    lines = [timeline(0.0, 1.0, 2.0, stall_s=0.0), timeline(0.0, 1.0, 6.0, stall_s=4.0)]
    group = pressure.summarize_group(lines)
    assert group["tpot_s"]["count"] == 2
    assert (group["tpot_s"]["p50"], group["tpot_s"]["max"]) == (2.0, 3.0)
    assert (group["stall_s"]["p50"], group["longest_gap_s"]["p95"]) == (2.0, pytest.approx(4.8))
    tpot, stall, _ = pressure.group_tables([("fp8", {"victims": group})])
    assert tpot.rows == (("fp8", "victims", 2, 2000.0, *(pytest.approx(ms) for ms in (2900.0, 2980.0, 3000.0))),)
    assert [heading.better for heading in stall.headings] == [None] * 3 + ["lower"] * 3 + [None]
    assert pressure.group_tables([("", {"victims": group})])[0].rows[0][:2] == ("victims", 2)


def test_the_small_pool_holds_one_request_and_not_all() -> None:
    settings = pressure.PressureSettings(requests=2, prompt_tokens=32, new_tokens=96)
    assert settings.pools(0.6) == (9, 16)
    assert settings.pools(0.1) == (8, 16)
    for blocks, allowed in ((7, "from 8"), (16, "to 15")):
        with pytest.raises(ToolError, match=f"--num-gpu-blocks {blocks}: .*{allowed}"):
            settings.model_copy(update={"num_gpu_blocks": blocks}).pools(0.6)


@pytest.mark.parametrize("flag", ["--num-gpu-blocks=9", "--block-size 32", "--threads 1 --kv-cache-dtype int8"])
def test_flags_that_the_benchmark_sets_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        jitter.main([f"--engine-flags={flag}"])
    assert end.value.code == 2
    assert "the benchmark's to choose" in capsys.readouterr().err


# ---------------------------------------------------------------- copies against the link


def test_copies_are_held_against_the_link_without_their_waits() -> None:
    copies = [
        copy("swapped", 3e9, 0.075, queued_s=0.5),
        copy("copied_out", 1e9, 0.025, queued_s=0.1, reason="write_behind"),
    ]
    found = link.summarize_copies(copies, 50.0)
    assert (found["copies"], found["bytes"], found["seconds"]) == (2, 4_000_000_000, pytest.approx(0.1))
    assert (found["gb_per_s"], found["share_of_link"]) == (pytest.approx(40.0), pytest.approx(0.8))
    assert (found["largest_bytes"], found["largest_gb_per_s"]) == (3_000_000_000, pytest.approx(40.0))
    assert (found["queued_s"]["p50"], found["queued_s"]["max"]) == (pytest.approx(0.3), 0.5)
    assert found["bytes_by_reason"] == {"growth": 3_000_000_000, "write_behind": 1_000_000_000}


def test_no_copies_are_no_figures() -> None:
    found = link.summarize_copies([], 50.0)
    assert (found["copies"], found["gb_per_s"], found["largest_bytes"]) == (0, 0.0, 0)
    json.dumps(found, allow_nan=False)


async def test_the_cpus_link_is_its_memory() -> None:
    found = await link.measure_link(MODEL)
    assert found.size == MODEL.num_gpu_blocks * MODEL.kv_block_bytes
    assert found.out_gb_per_s == found.in_gb_per_s > 0
    assert LINK.seconds(10**9, 10**9) == pytest.approx(1 / 50 + 1 / 40)


async def test_a_bus_that_cannot_be_measured_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ToolError, match="between GPU and CPU memory could not be measured"):
        await link.measure_link(replace(MODEL, device="cuda"))


@pytest.mark.gpu
async def test_the_bus_is_measured_both_ways() -> None:
    found = await link.measure_link(replace(MODEL, device="cuda"))
    assert min(found.out_gb_per_s, found.in_gb_per_s) > 0.5


# ---------------------------------------------------------------- the load


def test_a_load_compares_both_pools_and_sorts_copies_by_direction() -> None:
    calm = observed([timeline(1.0, 2.0), timeline(1.0, 2.0)], 2.0, model=replace(MODEL, num_gpu_blocks=9))
    victim = timeline(1.0, 4.0, events=(swap_event(phase="swapped"),), stall_s=2.0)
    copies = [copy("swapped", 2e9, 0.05), copy("copied_out", 2e9, 0.05), copy("resumed", 1e9, 0.05)]
    pressed = observed([timeline(1.0, 2.0), victim], 4.0, copies=copies)
    result = swap_load.summarize("fp16", 2, calm, pressed, LINK)
    assert (result.tokens_per_s_with_room, result.tokens_per_s, result.ratio) == (2.0, 1.0, 0.5)
    assert (result.blocks, result.blocks_for_all, result.completed) == (64, 9, 2)
    assert {name: group["tpot_s"]["p50"] for name, group in result.groups.items()} == {
        "room for all": 1.0,
        "bystanders": 1.0,
        "victims": 3.0,
    }
    assert (result.copies["out"]["share_of_link"], result.copies["in"]["share_of_link"]) == (
        pytest.approx(40 / 50),
        pytest.approx(20 / 40),
    )
    assert result.passed and not swap_load.summarize("fp16", 3, calm, pressed, LINK).passed
    assert widest(swap_load.tables([asdict(result)])) <= 100


# ---------------------------------------------------------------- a long request, a prefix


def test_a_long_requests_copies_are_all_of_its_own_and_no_others() -> None:
    moments = {"swapping_out": 10.0, "swapped": 10.25, "swapping_in": 12.0, "resumed": 12.5}
    long = timeline(
        1.0, 2.0, events=tuple(swap_event("long", phase, time=at) for phase, at in moments.items()), request_id="long"
    )
    copies = [
        copy("copied_out", 3e9, 0.06, blocks=60, request_id="long", reason="write_behind"),
        copy("swapped", 1e9, 0.03, blocks=4, request_id="long"),
        copy("copied_in", 2e9, 0.05, blocks=32, request_id="long", reason="prefetch"),
        copy("resumed", 2e9, 0.08, blocks=32, request_id="long"),
        copy("copied_out", 9e9, 9.0, blocks=64, request_id="other", reason="write_behind"),
        copy("copied_out", 9e9, 9.0, blocks=64, request_id="", reason="write_behind"),
    ]
    result = swap_long.summarize("fp16", 1024, long, copies, LINK, completed=True)
    assert (result.blocks, result.blocks_out, result.blocks_in) == (64, 64, 64) and result.passed
    assert (result.copy_out_s, result.copy_in_s) == (pytest.approx(0.09), pytest.approx(0.13))
    assert result.link_s == pytest.approx(4 / 50 + 4 / 40)
    assert result.ratio == pytest.approx(0.22 / 0.18)
    assert (result.left_s, result.returned_s) == (0.25, 0.5)
    assert not swap_long.summarize("fp16", 1024, long, copies[1:], LINK, completed=True).passed
    assert not swap_long.summarize("fp16", 1024, long, copies, LINK, completed=False).passed
    assert not swap_long.summarize("fp16", 1024, long, [], LINK, completed=True).passed
    assert widest(swap_long.tables([asdict(result)])) <= 100


async def test_the_other_one_comes_at_the_long_ones_first_token() -> None:
    with FakeEngine(lambda prompt: range(10, 90), delay_s=0.001) as engine:
        async with AsyncClient(engine.endpoint) as client:
            await client.ready()
            long, other = await swap_long.run_pair(client, [1, 2], [3, 4])
    assert other.submitted >= long.arrivals[0]
    assert (len(long.token_ids), len(other.token_ids)) == (swap_long.NEW_TOKENS, swap_long.OTHERS_TOKENS)


def test_a_prefixs_repeats_are_held_against_its_first_times() -> None:
    first = [timeline(at) for at in (0.8, 1.0, 5.0)]
    repeats = [timeline(at, cached_tokens=cached) for at, cached in ((0.1, 1008), (0.125, 992), (0.9, 1008))]
    result = swap_prefix.summarize("fp16", 1024, first, repeats, 190)
    assert (result.first_ttft_s, result.repeat_ttft_s, result.ratio, result.cached_tokens) == (1.0, 0.125, 0.125, 992)
    computed, again = swap_prefix.tables([asdict(result)])[0].rows[0][2:4]
    assert result.passed and (computed, again) == (Spread(1000.0, 800.0, 5000.0), Spread(125.0, 100.0, 900.0))
    assert not swap_prefix.summarize("fp16", 1024, first, repeats, 60).passed, "it was still in the pool"
    repeats[1] = timeline(0.125)
    assert not swap_prefix.summarize("fp16", 1024, first, repeats, 190).passed, "it was computed again"


# ---------------------------------------------------------------- bystanders beside copies


def steps(*times: float, **changes: Any) -> Timeline:
    return timeline(*times, **changes)


def test_gaps_beside_copies_are_compared_with_those_without() -> None:
    copies = [(2.1, 2.2), (7.0, 7.5)]
    found = jitter.beside_copies([steps(0.0, 1.0, 2.0, 3.5, 4.5)], copies)
    assert (found["beside"]["count"], found["without"]["count"], found["compared"]) == (1, 3, 1)
    assert found["ratio"] == pytest.approx(1.5)


def test_steps_of_different_size_are_not_compared() -> None:
    """Two requests until 3.0, in steps of 2 seconds beside a copy or not; then one alone, in steps of 1."""
    both = [0.0, 2.0, 4.0]
    lines = [steps(*both, 5.0, 6.0, 7.0), steps(*both)]
    found = jitter.beside_copies(lines, [(2.5, 3.0)])
    assert found["ratio"] == pytest.approx(1.0) and found["compared"] == 2
    assert jitter.beside_copies(lines, [(0.0, 4.0)])["ratio"] is None, "there is no step of two without a copy"


def test_victims_and_gaps_with_prompts_are_left_out() -> None:
    victim = steps(0.0, 9.0, events=(swap_event(phase="swapped"),))
    newcomer = steps(2.9, 4.0, prefill_s=0.8)
    found = jitter.beside_copies([steps(0.0, 1.0, 2.0, 3.0), victim, newcomer], [(2.5, 2.6), (0.1, 0.2)])
    assert (found["beside"]["count"], found["without"]["count"]) == (1, 2), "0 to 1; 1 to 2, and 2.9 to 4.0"


def test_copies_last_from_their_order_to_the_word_of_their_end() -> None:
    events = [
        copy("swapped", 1, 0.5, queued_s=0.25, time=110.0),
        copy("resumed", 1, 0.5, queued_s=0.0, time=109.5),
        copy("resumed", 1, 1.0, queued_s=0.0, time=120.0),
    ]
    assert jitter.copy_spans(events, 100.0) == [(9.0, 10.0), (19.0, 20.0)]


def test_a_request_is_out_until_it_is_back_or_goes_on_otherwise() -> None:
    events = [swap_event(phase=phase, time=at) for phase, at in (("swapping_out", 102.0), ("resumed", 103.0))]
    again = swap_event(phase="swapping_out", time=104.0)
    assert jitter.swapped_out_spans(steps(1.0, 3.5, 6.0, events=(*events, again)), 100.0) == [(2.0, 3.0), (4.0, 6.0)]
    assert jitter.swapped_out_spans(steps(1.0, 3.5), 100.0) == []


# ---------------------------------------------------------------- what an engine publishes


async def test_watching_hears_every_copy_and_counts_from_its_beginning() -> None:
    counted = [3.0]

    class Counting(FakeEngine):
        def stats(self) -> Any:
            metric = Metric("coldblock_requests_swapped_total", "counter", "", (Sample(counted[0]),))
            return replace(super().stats(), metrics=(metric,))

    with Counting(stats_every_s=0.01) as engine:
        async with AsyncClient(engine.endpoint) as client:
            await client.ready()
            async with engines.watched(client) as watch:
                for phase in ("copied_out", "swapping_out", "swapped", "resumed", "rejected", "copied_in"):
                    engine.publish(swap_event(phase=phase))
                engine.publish(swap_event(phase="swapped", blocks=0))  # it had its copies already
                counted[0] = 5.0
    assert [event.phase for event in watch.copies] == ["copied_out", "swapped", "resumed", "copied_in"]
    assert [event.phase for event in engines.outward(watch.copies)] == ["copied_out", "swapped"]
    assert watch.counters["swaps"] == 2 and watch.counters["blocks_in"] == 0


async def test_an_engine_that_publishes_nothing_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "HEARD_WITHIN_S", 0.05)
    with FakeEngine() as engine:
        async with AsyncClient(engine.endpoint) as client:
            await client.ready()
            with pytest.raises(ToolError, match="published no stats"):
                async with engines.watched(client):
                    await asyncio.sleep(0)


# ---------------------------------------------------------------- the commands


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Instead of engines: of every two requests the first one swaps. The flags of each."""
    started: list[tuple[str, ...]] = []

    @asynccontextmanager
    async def fake_running_engine(model: str, *flags: str) -> AsyncIterator[str]:
        started.append(flags)
        seen: list[int] = []

        def script(prompt: list[int]) -> list[object]:
            seen.append(1)
            moves = ["swapping_out", "swapped", "swapping_in", "resumed"] if len(seen) % 2 else []
            return [10, *moves, *range(11, 200)]

        with FakeEngine(script, delay_s=0.001, stats_every_s=0.01) as engine:  # type: ignore[arg-type]
            yield engine.endpoint

    monkeypatch.setattr(engines, "running_engine", fake_running_engine)
    monkeypatch.setattr(engines, "resolve_model", lambda name: Path(name))
    return started


def flag_values(started: list[tuple[str, ...]], flag: str) -> list[str]:
    return [flags[flags.index(flag) + 1] for flags in started]


def test_swap_command_writes_its_results(
    tmp_path: Path, fake_engines: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--iterations", "2", "--deterministic", "--requests", "4", "--new-tokens", "8", "--out", str(tmp_path)]
    assert swap.main(flags) == 0
    shown = capsys.readouterr().out
    assert shown.count("4/4") == len(swap.FORMATS)
    assert max(map(len, shown.splitlines()[:-1])) <= 100
    content = json.loads((tmp_path / "bench-swap.json").read_text())
    assert list(content["results"]) == ["pairs", "load", "capacity"]
    for found in content["results"].values():
        assert [entry["kv_cache_dtype"] for entry in found] == list(swap.FORMATS)
    assert content["results"]["load"][0]["groups"]["victims"]["tpot_s"]["count"] == 2
    assert {"cpu", "cores", "memory_gib", "python", "packages", "date", "revision"} <= content["machine"].keys()
    assert content["model"]["name"] == "fake-model"
    assert content["command"].startswith("coldblock bench swap --requests=4 --new-tokens=8 --iterations=2")
    check_page(tmp_path / "bench-swap.html", content)
    pairs, loads = fake_engines[: 2 * len(swap.FORMATS)], fake_engines[2 * len(swap.FORMATS) :]
    assert all("--deterministic" in flags for flags in pairs) and not any("--deterministic" in f for f in loads)
    assert flag_values(pairs, "--num-gpu-blocks")[:2] == [str(swap_pairs.BLOCKS), str(swap_pairs.LARGE_POOL)]
    assert flag_values(loads, "--num-gpu-blocks")[:2] == ["12", "4"], "room for all first"


def test_what_does_not_swap_fails_the_command(
    tmp_path: Path, fake_engines: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cases=long,prefix", "--kv-cache-dtype=fp8", "--load-format=dummy", "--engine-flags=--threads 1"]
    assert swap.main([*flags, "--long-tokens=64", "--prefix-tokens=64", f"--out={tmp_path}"]) == 1
    assert capsys.readouterr().out.count("FAILED") == 2
    assert len(fake_engines) == 2
    assert all(started[:4] == ("--load-format", "dummy", "--threads", "1") for started in fake_engines)


def test_jitter_command_writes_its_results(
    tmp_path: Path, fake_engines: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert jitter.main(["--requests=4", "--new-tokens=8", "--num-gpu-blocks=5", f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "Bystanders beside copies" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 100
    content = json.loads((tmp_path / "bench-jitter.json").read_text())
    results = content["results"]
    assert {name: gaps["count"] for name, gaps in results["gaps"].items()} == {
        "room for all": 28,
        "bystanders": 14,
        "victims": 14,
    }
    check_page(tmp_path / "bench-jitter.html", content)
    assert flag_values(fake_engines, "--num-gpu-blocks") == ["12", "5"]


def test_the_embedded_model_swaps_and_all_figures_agree(embedded_model: Path, tmp_path: Path) -> None:
    flags = ["--cases=load,long,prefix", "--kv-cache-dtype=int8", "--long-tokens=128", "--prefix-tokens=128"]
    load = ["--requests=4", "--prompt-tokens=24", "--new-tokens=24", "--engine-flags=--threads 1"]
    assert swap.main([f"--model={embedded_model}", *flags, *load, "--seed=3", f"--out={tmp_path}"]) == 0
    content = json.loads((tmp_path / "bench-swap.json").read_text())
    check_page(tmp_path / "bench-swap.html", content)
    (load_result,), (long,), (prefix,), _ = content["results"].values()
    counters, block = load_result["counters"], content["model"]["kv_block_bytes"]
    assert counters["swaps"] + counters["recomputes"] > 0
    for way in ("out", "in"):
        assert load_result["copies"][way]["bytes"] == counters[f"blocks_{way}"] * block
    assert load_result["groups"]["victims"]["tpot_s"]["count"] > 0
    assert long["bytes_out"] == long["blocks_out"] * block and long["left_s"] > 0
    assert prefix["cached_tokens"] == 112 and math.isfinite(prefix["ratio"])
