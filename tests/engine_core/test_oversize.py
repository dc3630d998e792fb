"""Scheduler and executor together: requests larger than the GPU pool get the tokens that a large pool gives them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from coldblock.engine_core.control.plan import SampledToken
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.updates import Counters
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from coldblock.engine_core.device.cuda_executor import CudaExecutor
from cuda_on_cpu import emulate
from scheduled_answers import agreement, finish, scheduler_for
from tiny_models import save_tiny

DELAY = "COLDBLOCK_TEST_COPY_DELAY_STEPS"
FORMATS = ("fp16", "int8", "fp8", "fp8_e5m2")
NEAR_TIE = 0.05  # between two logprobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, head_dim=64)
    return path


@pytest.fixture(params=["cpu", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "emulated":
        emulate(monkeypatch)
    return CpuExecutor if request.param == "cpu" else CudaExecutor


def answers_of(
    kind: Any, model: Path, prompts: Sequence[list[int]], num_gpu_blocks: int, kv_cache_dtype: str
) -> tuple[list[list[SampledToken]], Counters]:
    """Greedy answers to all prompts at once."""
    settings = {"num_gpu_blocks": num_gpu_blocks, "max_model_len": 512, "kv_cache_dtype": kv_cache_dtype}
    executor = kind(
        ExecutorConfig(
            model, **settings, cpu_offload_bytes=1 << 24, deterministic=True, allow_oversize=True, num_threads=1
        )
    )
    scheduler = scheduler_for(executor, swap_or_recompute="swap", allow_oversize=True)
    for index, prompt in enumerate(prompts):
        scheduler.add(str(index), prompt, Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=5))
    answers = finish(scheduler, executor)
    executor.close()
    return answers, scheduler.counters


def ids(answer: list[SampledToken]) -> list[int]:
    return [token.token_id for token in answer]


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("delay", [0, 3])
def test_a_request_of_two_and_a_half_pools_gets_the_tokens_of_a_large_pool(
    kind: Any, model: Path, kv_cache_dtype: str, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(5, 290) for _ in range(length)] for length in (400, 30, 20, 300, 40)]
    wanted, _ = answers_of(kind, model, prompts, 200, kv_cache_dtype)
    monkeypatch.setenv(DELAY, str(delay))
    answers, counters = answers_of(kind, model, prompts, 10, kv_cache_dtype)
    assert counters.offload_blocks >= 36, "the blocks of two requests did not become cold"
    if kind is CudaExecutor and torch.cuda.is_available():
        for answer, other in zip(answers, wanted, strict=True):
            agreement(answer, other, NEAR_TIE)  # cold and hot blocks are summed in two orders there
    else:
        assert [ids(answer) for answer in answers] == [ids(answer) for answer in wanted]
