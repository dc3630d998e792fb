"""Scheduler and executor together: whatever moves between the tiers, and however late, changes no token.

On the CPU executor, and on the CUDA executor one step ahead: on a GPU, and with its kernels emulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.updates import Counters
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from coldblock.engine_core.device.cuda_executor import CudaExecutor
from cuda_on_cpu import emulate
from scheduled_answers import finish, scheduler_for
from tiny_models import save_tiny

DELAY = "COLDBLOCK_TEST_COPY_DELAY_STEPS"
FORMATS = ("fp16", "int8", "fp8", "fp8_e5m2")

AnyExecutor = CpuExecutor | CudaExecutor


class Executors:
    """Deterministic executors of one tiny model. `runs`: how often it is worth while to repeat a test with them."""

    def __init__(self, kind: Any, path: Path, runs: int) -> None:
        self._kind, self._path, self.runs = kind, path, runs

    def __call__(self, num_gpu_blocks: int, kv_cache_dtype: str) -> AnyExecutor:
        config = ExecutorConfig(
            self._path,
            num_gpu_blocks=num_gpu_blocks,
            max_model_len=512,
            kv_cache_dtype=kv_cache_dtype,
            deterministic=True,
            cpu_offload_bytes=1 << 24,
            num_threads=1,
        )
        executor: AnyExecutor = self._kind(config)
        return executor


@pytest.fixture(scope="module", params=["cpu", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def executors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executors]:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, head_dim=64)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "emulated":
            emulate(patch)
        kind = CpuExecutor if request.param == "cpu" else CudaExecutor
        yield Executors(kind, path, runs=10 if request.param == "gpu" else 1)


def serve(
    executor: AnyExecutor, rounds: Sequence[Sequence[list[int]]], new: int, prefix_cache: bool
) -> tuple[list[list[list[int]]], Counters]:
    """Greedy answers to the prompts of one round after the other, those of a round at once; and what it took."""
    scheduler = scheduler_for(executor, prefix_cache=prefix_cache, swap_or_recompute="swap")
    answers = []
    for prompts in rounds:
        for index, prompt in enumerate(prompts):
            scheduler.add(str(index), prompt, Sampling(max_tokens=new, temperature=0.0, ignore_eos=True))
        answers.append(finish(scheduler, executor))
    return answers, scheduler.counters


def prompts_of(count: int, seed: int) -> list[list[int]]:
    """Some share a beginning of two blocks."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 290) for _ in range(32)]
    own = [[rng.randrange(5, 290) for _ in range(rng.randrange(4, 30))] for _ in range(count)]
    return [(shared if index % 4 == 0 else []) + prompt for index, prompt in enumerate(own)]


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("delay", [0, 3])
def test_sixty_four_on_a_tiny_pool_give_the_tokens_of_a_large_one(
    executors: Executors, kv_cache_dtype: str, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 3, and case 16 where a prefix is found: late copies read and write whatever is there by then."""
    large = executors(2000, kv_cache_dtype)
    monkeypatch.setenv(DELAY, str(delay))
    small = executors(12, kv_cache_dtype)
    for run in range(executors.runs):
        prompts = prompts_of(64, seed=delay + 100 * run)
        wanted, without = serve(large, [prompts], 14, prefix_cache=False)
        answers, counters = serve(small, [prompts], 14, prefix_cache=delay > 0)
        assert answers == wanted
        assert without.offload_blocks == 0
        assert counters.requests_swapped > 0 and counters.write_behind_blocks > 0
    large.close()
    small.close()


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_a_prefix_loaded_from_the_cpu_tier_gives_the_same_answer(executors: Executors, kv_cache_dtype: str) -> None:
    """Cases 10 and 16: computed, found on the GPU, and found in the CPU tier."""
    rng = random.Random(5)
    prompt, filler, other = ([rng.randrange(5, 290) for _ in range(count)] for count in (40, 70, 180))
    executor = executors(12, kv_cache_dtype)
    answers, counters = serve(executor, [[prompt, filler], [prompt], [other], [prompt]], 8, prefix_cache=True)
    executor.close()
    assert answers[0][0] == answers[1][0] == answers[3][0]
    assert (counters.prefix_hits_tokens, counters.prefix_reload_blocks) == (64, 2)
