"""With `deterministic`, batch, chunking and swaps change nothing, bit for bit.

Log-probabilities are compared: each depends on every logit of its row.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from coldblock.engine_core.control.plan import BlockMove, Direction, SampledToken
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.batch import PagedBatch
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.kv_layout import FormatName, KVShape
from tiny_models import chunk, copy_blocks, make_executor, quantize, run_step, save_biased, save_tiny

ASKED = Sampling(temperature=0.0, logprobs=5)
LENGTHS = {"a": 21, "b": 5, "c": 34, "d": 16}
NEW = 6
BLOCKS = 4


@pytest.fixture(scope="module", params=["dense-fp32", "dense-bf16", "w4", "k-bias-apart"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp(request.param)
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 416,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    if request.param == "k-bias-apart":
        save_biased(path, 400.0, **sizes)
        return path, "bf16"
    save_tiny(path, **sizes)
    if request.param == "w4":
        quantize(path)
    return path, "auto" if request.param == "w4" else request.param.removeprefix("dense-")


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


def prompt(name: str) -> list[int]:
    return [random.Random(f"{name}{i}").randrange(1000) for i in range(LENGTHS[name])]


class Run:
    """Requests that are run in random chunks and batches, and now and then moved to the host and back."""

    def __init__(self, executor: CpuExecutor, names: list[str], seed: int) -> None:
        self.executor, self.rng = executor, random.Random(seed)
        self.free = self.rng.sample(range(64), 64)
        self.tables = {name: [self.free.pop() for _ in range(BLOCKS)] for name in names}
        self.tokens = {name: prompt(name) for name in names}
        self.done = dict.fromkeys(names, 0)
        self.results: dict[str, list[SampledToken]] = {name: [] for name in names}

    def finish(self, swaps: bool) -> dict[str, list[SampledToken]]:
        while unfinished := [name for name, result in self.results.items() if len(result) < NEW]:
            if swaps and self.rng.random() < 0.4:
                self.swap(self.rng.choice(unfinished))
            self.step(self.rng.sample(unfinished, self.rng.randint(1, len(unfinished))))
        return self.results

    def step(self, names: list[str]) -> None:
        chunks = []
        for name in names:
            left = self.tokens[name][self.done[name] :]
            size = self.rng.randint(1, len(left))
            sampling = ASKED if size == len(left) else None
            chunks.append(chunk(name, left[:size], self.done[name], self.tables[name], sampling))
            self.done[name] += size
        result = run_step(self.executor, sorted(chunks, key=lambda c: len(c.token_ids)))
        for name, token in result.tokens.items():
            self.results[name].append(token)
            self.tokens[name].append(token.token_id)

    def swap(self, name: str) -> None:
        there = tuple(range(BLOCKS))
        copy_blocks(self.executor, BlockMove(1, Direction.OUT, tuple(self.tables[name]), there))
        self.free = self.tables[name] + self.free
        self.tables[name] = [self.free.pop() for _ in range(BLOCKS)]
        copy_blocks(self.executor, BlockMove(2, Direction.IN, tuple(self.tables[name]), there))


def test_bit_for_bit(checkpoint: tuple[Path, str], threads: int) -> None:
    executor = make_executor(
        checkpoint[0],
        compute_dtype=checkpoint[1],
        deterministic=True,
        num_threads=threads,
        cpu_offload_bytes=1 << 20,
    )
    alone = {name: Run(executor, [name], 0).finish(swaps=False)[name] for name in LENGTHS}
    for seed in range(2):
        assert Run(executor, list(LENGTHS), seed).finish(swaps=True) == alone


@pytest.mark.parametrize("kv_cache_dtype", ["fp16", "int8", "fp8", "fp8_e5m2"])
def test_every_kv_format(checkpoint: tuple[Path, str], kv_cache_dtype: str) -> None:
    executor = make_executor(
        checkpoint[0],
        compute_dtype=checkpoint[1],
        kv_cache_dtype=kv_cache_dtype,
        deterministic=True,
        cpu_offload_bytes=1 << 20,
    )
    alone = {name: Run(executor, [name], 0).finish(swaps=False)[name] for name in ("a", "b")}
    assert Run(executor, ["a", "b"], 1).finish(swaps=True) == alone


def test_embedded_model_in_full_passes(embedded_model: Path, threads: int) -> None:
    """Widths, thread splits and row counts of a real model: eight prompts at once, in one chunk or in pieces."""
    executor = make_executor(embedded_model, deterministic=True, num_threads=threads, num_gpu_blocks=16)
    prompts = {str(i): [1000 + 37 * i + 5 * k for k in range(6 + 3 * (i % 3))] for i in range(8)}
    tables = {name: [2 * int(name), 2 * int(name) + 1] for name in prompts}

    def first_tokens(names: list[str], pieces: int) -> dict[str, SampledToken]:
        found: dict[str, SampledToken] = {}
        for piece in range(pieces):
            chunks = []
            for name in names:
                tokens = prompts[name]
                start, end = len(tokens) * piece // pieces, len(tokens) * (piece + 1) // pieces
                asked = ASKED if end == len(tokens) else None
                chunks.append(chunk(name, tokens[start:end], start, tables[name], asked))
            found.update(run_step(executor, chunks).tokens)
        return found

    alone = {name: first_tokens([name], len(prompts[name]))[name] for name in prompts}
    assert first_tokens(list(prompts), 1) == alone
    assert first_tokens(list(prompts), 3) == alone


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "bf16", "int8"])
def test_attention_alone_does_not_depend_on_its_company(kv_format: FormatName) -> None:
    """Contexts of many lengths, some of which torch would sum differently in a common, padded batch."""
    generator = torch.Generator().manual_seed(0)
    pool = KVPool(KVShape(1, 2, 64), 16, kv_format, 200, 0)
    pool.gpu.zero_()
    context_lengths = (5, 47, 130, 200, 333, 350, 512, 640)
    free = iter(range(200))
    chunks = [chunk(str(n), [0], n - 1, [next(free) for _ in range(-(-n // 16))], ASKED) for n in context_lengths]

    def random(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, 64, generator=generator)

    for length, one in zip(context_lengths, chunks, strict=True):
        history = one._replace(token_ids=array("i", [0] * length), start=0)
        PagedBatch(pool, [history], alone=True).attend(0, random(length, 6), random(length, 4), None)
    batch = PagedBatch(pool, chunks, alone=True)
    q, kv = random(len(chunks), 6), random(len(chunks), 4)
    together = batch.attend(0, q, kv, None)
    for row, one in enumerate(batch.chunks):
        single = PagedBatch(pool, [one], alone=True).attend(0, q[row : row + 1], kv[row : row + 1], None)
        assert torch.equal(single[0], together[row])
