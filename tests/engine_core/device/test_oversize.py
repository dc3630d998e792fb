"""Requests larger than the pool, on the CPU: what lies in the CPU tier is attended as if it lay in the pool."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from coldblock.engine_core.control.plan import BlockMove, Chunk, Direction, SampledToken
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from tiny_models import chunk, copy_blocks, make_executor, quantize, run_step, save_biased, save_tiny

ASKED = Sampling(temperature=0.0, logprobs=5)
FORMATS = ["auto", "fp16", "bf16", "int8", "fp8", "fp8_e5m2"]
PROMPT = [random.Random(i).randrange(320) for i in range(75)]
TABLE = [11, 3, 7, 20, 5]
COLD = [6, 2, 9, 0]


@pytest.fixture(scope="module", params=["dense", "w4", "k-bias-apart"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "k-bias-apart":
        save_biased(folder, 400.0)
        return folder
    save_tiny(folder, "qwen2")
    if request.param == "w4":
        quantize(folder)
    return folder


def make(path: Path, **changes: Any) -> CpuExecutor:
    return make_executor(path, cpu_offload_bytes=1 << 20, allow_oversize=True, **changes)


def go_cold(executor: CpuExecutor, end: int, begin: int = 0) -> None:
    """Move the first blocks, those not moved yet, to the CPU tier, and let NaN take their place."""
    if begin < end:
        copy_blocks(executor, BlockMove(1, Direction.OUT, tuple(TABLE[begin:end]), tuple(COLD[begin:end])))
        with torch.inference_mode():
            executor._pool.gpu[TABLE[begin:end]] = 0xFF


def part(tokens: Sequence[int], start: int, cold: int, name: str = "a", sampling: Sampling | None = ASKED) -> Chunk:
    one = chunk(name, tokens, start, TABLE[cold:], sampling)
    return one._replace(cold_blocks=array("i", COLD[:cold]))


def answers(executor: CpuExecutor, cold: int, split: int) -> list[SampledToken]:
    """The first `split` tokens hot; then the rest, a chunk and three single tokens, over cold blocks, beside others."""
    run_step(executor, [part(PROMPT[:split], 0, 0, sampling=None)])
    go_cold(executor, cold)
    others = [chunk("b", [9], 0, [40], ASKED), chunk("c", [1, 2, 3, 4], 0, [41], ASKED)]
    made = [run_step(executor, [others[0], part(PROMPT[split:-3], split, cold), others[1]]).tokens["a"]]
    for i in range(len(PROMPT) - 3, len(PROMPT)):
        made.append(run_step(executor, [part(PROMPT[i : i + 1], i, cold), *others]).tokens["a"])
    return made


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_cold_blocks_change_no_bit(path: Path, kv_cache_dtype: str, deterministic: bool) -> None:
    """Every number of cold blocks."""
    executor = make(path, kv_cache_dtype=kv_cache_dtype, deterministic=deterministic)
    for split in (64, 70):
        wanted = answers(executor, 0, split)
        for cold in range(1, 5):
            assert answers(executor, cold, split) == wanted


def test_cold_blocks_are_read(path: Path) -> None:
    """Or the test above would show nothing."""
    executor = make(path)
    wanted = answers(executor, 2, 64)
    with torch.inference_mode():
        executor._pool.cpu[COLD[1]] = 0
    assert run_step(executor, [part(PROMPT[-1:], len(PROMPT) - 1, 2)]).tokens["a"] != wanted[-1]


def test_deterministic_whatever_the_chunks_the_company_and_the_cold(path: Path) -> None:
    executor, rng = make(path, deterministic=True), random.Random(0)
    wanted = answers(executor, 0, 64)[-1]
    for _ in range(4):
        start, cold = 64, 0
        run_step(executor, [part(PROMPT[:64], 0, 0, sampling=None)])
        while start < len(PROMPT):
            more, size = rng.randint(cold, 4), rng.randint(1, len(PROMPT) - start)
            go_cold(executor, more, cold)
            cold = more
            others = [chunk(str(i), [i] * rng.randint(1, 20), 0, [30 + i, 40 + i]) for i in range(rng.randint(0, 4))]
            token = run_step(executor, [*others, part(PROMPT[start : start + size], start, cold)]).tokens["a"]
            start += size
        assert token == wanted
