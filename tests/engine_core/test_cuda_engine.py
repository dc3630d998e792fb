"""Scheduler, step loop and CUDA executor together: one step ahead, in a pool too small; emulated, or on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from coldblock.engine_core.commands import Add, Command, Shutdown
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.scheduler import Scheduler
from coldblock.engine_core.control.updates import FinishedUpdate, SwapUpdate, TokenUpdate, Update
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cuda_executor import CudaExecutor
from coldblock.engine_core.engine import Engine
from cuda_on_cpu import emulate
from scheduler_harness import config
from tiny_models import save_tiny

NEW = 24
VARIED = {
    "greedy": Sampling(temperature=0.0, max_tokens=NEW, ignore_eos=True),
    "drawn": Sampling(temperature=0.9, top_p=0.9, seed=7, max_tokens=NEW, ignore_eos=True),
    "penalized": Sampling(temperature=0.0, repetition_penalty=1.3, max_tokens=NEW, ignore_eos=True),
    "told": Sampling(temperature=0.0, logprobs=2, max_tokens=NEW, ignore_eos=True),
    "ending": Sampling(temperature=0.9, seed=3, min_tokens=3, max_tokens=NEW),
}
PROMPTS = {name: [(31 * i + 7 * k) % 320 for k in range(20 + 9 * i)] for i, name in enumerate(VARIED)}


@pytest.fixture(scope="module", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "qwen2", head_dim=64, hidden_size=128, intermediate_size=192)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "emulated":
            emulate(patch)
        yield path


class Port:
    """All requests at once, then the end; keeps all updates."""

    def __init__(self, commands: list[Command]) -> None:
        self._commands = [*commands, Shutdown(300.0)]
        self.told: list[Update] = []

    def take(self, wait_s: float) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def updates(self, updates: list[Update]) -> None:
        self.told += updates

    def refuse(self, request_id: str, field: str, value: str, allowed: str) -> None:
        raise AssertionError(f"{request_id}: {field} is {value}")

    def report(self, scheduler: Scheduler, peer: bytes | None) -> None: ...


class Meter:
    """Not interested."""

    def arrived(self, request_id: str, now: float) -> None: ...

    def updated(self, updates: list[Update], now: float) -> None: ...

    def stepped(self, seconds: float, executor_s: float) -> None: ...


def answers(model: Path, blocks: int, deterministic: bool, **scheduling: object) -> tuple[dict[str, list[int]], int]:
    """Everybody's tokens, and how many swaps there were."""
    executor = CudaExecutor(
        ExecutorConfig(
            model,
            num_gpu_blocks=blocks,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            cpu_offload_bytes=2 << 20,
            compute_dtype="fp16",
            deterministic=deterministic,
        )
    )
    sizes = {"num_gpu_blocks": blocks, "num_cpu_blocks": executor.capacity.num_cpu_blocks, "vocab_size": 320}
    scheduler = Scheduler(config(max_num_seqs=8, eos_token_ids=(2,), **sizes, **scheduling))
    port = Port([Add(name, PROMPTS[name], sampling, 0) for name, sampling in VARIED.items()])
    Engine(scheduler, executor, port, Meter()).run()
    executor.close()
    tokens: dict[str, list[int]] = defaultdict(list)
    for update in port.told:
        if isinstance(update, TokenUpdate):
            tokens[update.request_id].append(update.token.token_id)
        elif isinstance(update, FinishedUpdate):
            assert update.reason in ("length", "stop"), update
    swaps = sum(isinstance(update, SwapUpdate) and update.phase == "swapped" for update in port.told)
    return dict(tokens), swaps


def test_swaps_change_no_token(model: Path) -> None:
    roomy, none = answers(model, 64, deterministic=True)
    tight, some = answers(model, 9, deterministic=True, prefill_chunk_tokens=16)
    assert (none, some > 0) == (0, True)
    assert tight == roomy
    assert all(len(tokens) == NEW for name, tokens in roomy.items() if name != "ending")


def test_batches_without_determinism(model: Path) -> None:
    """Only rounding may differ: the first token is clear."""
    roomy, _ = answers(model, 64, deterministic=False)
    tight, some = answers(model, 9, deterministic=False)
    assert some > 0
    assert {name: tokens[0] for name, tokens in tight.items()} == {name: tokens[0] for name, tokens in roomy.items()}


@pytest.mark.parametrize("delay", ["0", "3"])
def test_late_copies_change_no_token(model: Path, monkeypatch: pytest.MonkeyPatch, delay: str) -> None:
    roomy, _ = answers(model, 64, deterministic=True)
    monkeypatch.setenv("COLDBLOCK_TEST_COPY_DELAY_STEPS", delay)
    tight, some = answers(model, 9, deterministic=True)
    assert some > 0 and tight == roomy
