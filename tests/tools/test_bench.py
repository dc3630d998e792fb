"""The benchmarks' statistics and bookkeeping, against scripted engines; and what they leave behind."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
from coldblock.protocol.client import AsyncClient
from coldblock.protocol.errors import ColdblockError, RequestRefused
from coldblock.protocol.messages import Finished, Refused, Submit
from coldblock.tools.bench import jitter, kernels, main, measure, pressure, report, serve, swap, swap_pairs
from coldblock.tools.bench.machine import describe_machine
from coldblock.tools.bench.report import Heading, Spread
from coldblock.tools.errors import ToolError
from fake_engine import MODEL, FakeEngine, swap_event, usage


def timeline(*arrivals: float, phases: tuple[str, ...] = (), stall_s: float = 0.0) -> measure.Timeline:
    return measure.Timeline(
        submitted=0.0,
        token_ids=list(range(len(arrivals))),
        arrivals=list(arrivals),
        swap_events=[swap_event(phase=phase) for phase in phases],
        finished=Finished("length", usage(stall_s=stall_s)),
    )


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (95, 3.85), (100, 4.0)])
def test_percentile_interpolates(percent: float, value: float) -> None:
    assert measure.percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_percentile_of_one_and_of_none() -> None:
    assert measure.percentile([7.0], 99) == 7.0
    assert measure.percentile([], 50) != measure.percentile([], 50)  # nan
    assert measure.distribution([]) == {"count": 0, "p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}


def test_timeline_figures() -> None:
    line = timeline(1.0, 1.5, 3.0, phases=("swapped", "resumed"))
    assert line.ttft == 1.0
    assert line.gaps == [0.5, 1.5]
    assert line.tpot == 1.0
    assert line.count("swapped") == 1
    assert line.copy_seconds("resumed") == pytest.approx(0.0015)


async def test_timed_load_keeps_the_concurrency() -> None:
    with FakeEngine(lambda prompt: [10, 11, "swapped", 12], delay_s=0.005) as engine:
        async with AsyncClient(engine.endpoint) as client:
            model = await client.ready()
            prompts = measure.random_prompts(0, 5, 4, model)
            timelines, seconds = await measure.timed_load(client, prompts, measure.greedy(3), 2)
    assert [line.token_ids for line in timelines] == [[10, 11, 12]] * 5
    assert all(line.count("swapped") == 1 and len(line.arrivals) == 3 for line in timelines)
    assert seconds > 0
    submits = engine.wait_for(Submit, 5)
    assert all(submit.sampling.ignore_eos and submit.sampling.max_tokens == 3 for submit in submits)
    assert len({submit.prompt for submit in submits}) == 5


async def test_refusal_ends_a_load_as_it_is() -> None:
    with FakeEngine(lambda prompt: [Refused("", "prompt", "4", "less")]) as engine:
        async with AsyncClient(engine.endpoint) as client:
            await client.ready()
            with pytest.raises(RequestRefused):
                await measure.timed_load(client, [[1], [2], [3]], measure.greedy(3), 2)


async def test_first_failure_cancels_the_rest() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ColdblockError("no")

    with pytest.raises(ColdblockError, match="no"):
        await measure.all_of(wait(), fail())
    assert cancelled.is_set()


def test_prompts_that_cannot_fit_are_refused_by_flag() -> None:
    with pytest.raises(ToolError, match="--prompt-tokens"):
        measure.random_prompts(0, 1, MODEL.max_request_tokens, MODEL)


def test_decode_rate_counts_while_all_decode() -> None:
    early, late = timeline(0.0, 1.0, 2.0, 3.0), timeline(1.5, 2.5, 3.5, 4.5, 5.5)
    assert serve.decode_rate([early, late]) == pytest.approx(3 / 1.5)  # from 1.5 to 3.0: at 2.0, 2.5 and 3.0
    assert serve.decode_rate([timeline(1.0)]) == 0.0


def test_added_latency_pairs_tokens_of_one_step() -> None:
    direct = [1.0, 2.0, 3.0, 4.0]
    over_http = [2.1, 3.2, 3.9]
    assert serve.added_latency(direct, over_http) == pytest.approx([0.2, -0.1])


def test_level_summary() -> None:
    load = [timeline(1.0, 2.0, 3.0), timeline(2.0, 3.0, 6.0)]
    level = serve.summarize_level(load, 6.0, wave=[timeline(1.0, 2.0, 3.0), timeline(2.0, 3.0, 6.0)], prompt_tokens=8)
    assert (level.concurrency, level.requests) == (2, 2)
    assert (level.tokens_per_s, level.ttft_p50, level.tpot_p50) == (1.0, 1.5, 1.5)
    assert level.decode_tokens_per_s == pytest.approx(2 / 1.0)
    assert level.prefill_tokens_per_s == pytest.approx(16 / 2.0)
    assert level.jitter == pytest.approx(level.gap_p95 - level.gap_p50)


@pytest.mark.parametrize("value", ["0", "1,x", "", "-1"])
def test_wrong_concurrency_is_refused_by_flag(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        serve.main([f"--concurrency={value}"])
    assert end.value.code == 2
    assert "--concurrency" in capsys.readouterr().err


async def test_pair_submits_the_second_at_the_first_token() -> None:
    with FakeEngine(lambda prompt: [10, 11, "swapped", "resumed", 12], delay_s=0.01) as engine:
        async with AsyncClient(engine.endpoint) as client:
            await client.ready()
            first, second = await swap_pairs.run_pair(client, [1, 2], [3, 4])
    assert second.submitted >= first.arrivals[0]
    assert first.count("resumed") == 1


def swapped_pair(new_tokens: int) -> list[measure.Timeline]:
    arrivals = [float(index) for index in range(new_tokens)]
    phases = ("swapping_out", "swapped", "swapping_in", "resumed")
    return [timeline(*arrivals, phases=phases, stall_s=0.5), timeline(*arrivals)]


def test_swap_result_passes_only_when_all_is_as_expected() -> None:
    good = swap_pairs.summarize("fp16", swapped_pair(swap_pairs.NEW_TOKENS) * 5, None)
    assert (good.completed, good.requests, good.swaps, good.resumes, good.stall_s) == (10, 10, 5, 5, 2.5)
    assert good.passed
    assert not swap_pairs.summarize("fp16", swapped_pair(swap_pairs.NEW_TOKENS - 1), None).passed
    assert not swap_pairs.summarize("fp16", swapped_pair(swap_pairs.NEW_TOKENS), False).passed
    assert not swap_pairs.summarize("fp16", swapped_pair(swap_pairs.NEW_TOKENS)[1:] * 2, None).passed
    bad = swap_pairs.summarize("int8", swapped_pair(3), None)
    assert swap_pairs.tables([{**asdict(bad), "passed": bad.passed}])[0].rows[0][-1] == "FAILED"


def test_every_swap_request_fills_three_blocks_all_its_life() -> None:
    written = swap_pairs.PROMPT_TOKENS + swap_pairs.NEW_TOKENS - 1  # the last token's K and V are never needed
    assert -(-swap_pairs.PROMPT_TOKENS // pressure.BLOCK_SIZE) == swap_pairs.BLOCKS
    assert -(-written // pressure.BLOCK_SIZE) == swap_pairs.BLOCKS


def test_missing_matplotlib_is_said_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert swap.main([]) == 1
    assert "coldblock[tools]" in capsys.readouterr().err


def test_flags_that_no_shell_could_read_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        serve.main(["--engine-flags=--model 'open"])
    assert exit_code.value.code == 2
    assert "--engine-flags: " in capsys.readouterr().err


def test_a_shape_without_weights_says_how_to_measure_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--model=qwen2.5-3b"]) == 2
    assert "--load-format dummy" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--http", "--versus-transformers"])
def test_what_a_shape_has_not_is_refused_before_measuring(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--model=qwen2.5-3b", "--load-format=dummy", flag]) == 2
    assert f"{flag} needs a model with weights and tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("command", [serve, swap, jitter, kernels])
def test_a_folder_that_cannot_be_is_refused_before_measuring(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert command.main([f"--out={tmp_path / 'file' / 'results'}"]) == 1
    assert "--out" in capsys.readouterr().err


def test_table_aligns_and_rounds() -> None:
    table = report.Table("title", (Heading("a"), Heading("long")), ((1, 0.123456), ("xyz", 1234.56), (None, 12345)))
    assert table.text().splitlines() == ["title", "  a    long", "  1  0.1235", "xyz   1,235", "  -  12,345"]


def test_a_benchmark_of_swaps_refuses_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        swap.main(["--cases=pairs,nix"])
    assert end.value.code == 2
    assert "--cases: 'pairs,nix' is not allowed: 'nix' is not one of pairs, load" in capsys.readouterr().err


def test_dispatcher_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert "jitter" in capsys.readouterr().out
    assert main.main(["nix"]) == 2
    assert "serve, swap, jitter, monitor, kernels" in capsys.readouterr().err


def test_throughput_is_shown_with_and_without_a_comparison() -> None:
    load = [timeline(1.0, 1.5, 3.0)]
    level = serve.summarize_level(load, 3.0, load, 8)
    results = {"sweep": [{**asdict(level), "jitter": level.jitter}]}
    assert [line.name for line in serve.figures(results)[0].lines] == ["all tokens, steady load", "while all decode"]
    assert len(serve.tables(results)) == 1
    versus = serve.Versus.of_rounds("decode c=1", [2.0, 4.0, 3.0], [1.0, 2.0, 1.5])
    results["versus_transformers"] = [{**asdict(versus), "ratio": versus.ratio}]
    assert serve.figures(results)[0].lines[2].y == (1.5,)
    assert serve.tables(results)[1].rows == (("decode c=1", Spread(3.0, 2.0, 4.0), Spread(1.5, 1.0, 2.0), 2.0),)


def test_the_machine_names_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine()["gpus"] == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 3050 Laptop GPU, 4096 MiB, 580.1'\n")
    tool.chmod(0o755)
    assert describe_machine()["gpus"] == ["NVIDIA GeForce RTX 3050 Laptop GPU, 4096 MiB, 580.1"]
