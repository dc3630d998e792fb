"""Requests larger than the pool, by the CUDA executor; on a GPU, and with its kernels emulated where there is none."""

from __future__ import annotations

import dataclasses
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coldblock.engine_core.control.plan import NO_TOKENS, BlockMove, Chunk, Direction, SampledToken, StepPlan
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device import cold_attention
from coldblock.engine_core.device.cold_attention import ColdAttention, ColdMemory
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cuda_batch import TokenArrays
from coldblock.engine_core.device.cuda_executor import LEAST_ROWS, CudaExecutor
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.kv_layout import FormatName, KVShape
from coldblock.kernels import gather
from coldblock.kernels.prefill_attention import paged_prefill_reference
from coldblock.kernels.rotated_bias import RotatedBias
from coldblock.tools.large_bias import large_bias
from cuda_on_cpu import emulate, gather_slices
from streams import Streams
from tiny_models import chunk, copy_blocks, quantize, run_step, save_tiny

ASKED = Sampling(temperature=0.0, logprobs=5)
CLOSE = 0.03  # log-probabilities that differ by rounding
PROMPT = [random.Random(i).randrange(320) for i in range(180)]
TABLE = [11, 3, 7, 20, 5, 31, 30, 12, 13, 14, 1, 60]
COLD = [6, 2, 9, 0, 1, 13, 8, 7, 5, 4]
OTHERS = {"b": [8, 1, 2], "c": [77] * 16, "d": list(range(100, 190))}
TABLES = {"b": [40, 41], "c": [42, 43], "d": [50, 51, 52, 53, 54, 55]}

Make = Callable[..., CudaExecutor]


@pytest.fixture(scope="module", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Pieces of two blocks, tiles of a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "emulated":
            emulate(patch)
        patch.setattr(cold_attention, "PIECE_TOKENS", 32)
        patch.setattr(cold_attention, "_MOST_SCORES", 4 * 7 * 32)
        yield "cpu" if request.param == "emulated" else "cuda"


@pytest.fixture(scope="module")
def make(device: str) -> Make:
    def make(path: Path, **changes: Any) -> CudaExecutor:
        small = {"num_gpu_blocks": 64, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
        options = {"compute_dtype": "fp16", "cpu_offload_bytes": 2 << 20, "allow_oversize": True}
        return CudaExecutor(ExecutorConfig(path, **{**small, **options, **changes}))

    return make


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "qwen2", head_dim=64, hidden_size=128, intermediate_size=192)
    return folder


def go_cold(executor: CudaExecutor, end: int, begin: int = 0) -> None:
    """Move the first blocks, those not moved yet, to the CPU tier, and let NaN take their place."""
    if begin < end:
        copy_blocks(executor, BlockMove(1, Direction.OUT, tuple(TABLE[begin:end]), tuple(COLD[begin:end])))
        with torch.inference_mode():
            executor._pool.gpu[TABLE[begin:end]] = 0xFF
            if executor._pool.gpu.is_cuda:
                torch.cuda.synchronize()


def part(tokens: Sequence[int], start: int, cold: int, sampling: Sampling | None = ASKED) -> Chunk:
    one = chunk("a", tokens, start, TABLE[cold:], sampling)
    return one._replace(cold_blocks=array("i", COLD[:cold]))


def answers(executor: CudaExecutor, cold: int, split: int, company: bool) -> list[SampledToken]:
    """The first `split` tokens hot; then the rest, a chunk and four single tokens, over cold blocks."""
    for first in range(0, split, 80):
        run_step(executor, [part(PROMPT[first : min(first + 80, split)], first, 0, sampling=None)])
    go_cold(executor, cold)
    single = [chunk("b", OTHERS["b"][:1], 0, TABLES["b"], ASKED)] if company else []
    longer = [chunk("d", OTHERS["d"], 0, TABLES["d"], ASKED)] if company else []
    made = [run_step(executor, [*single, part(PROMPT[split:-4], split, cold), *longer]).tokens["a"]]
    for i in range(len(PROMPT) - 4, len(PROMPT)):
        made.append(run_step(executor, [part(PROMPT[i : i + 1], i, cold), *single, *longer]).tokens["a"])
    return made


def assert_close(got: Sequence[SampledToken], wanted: Sequence[SampledToken]) -> None:
    for one, other in zip(got, wanted, strict=True):
        ours, theirs = dict(one.top), dict(other.top)
        assert len(ours.keys() & theirs.keys()) >= 4
        assert max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()) < CLOSE


@pytest.mark.parametrize("compute_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "fp8_e5m2"])
def test_cold_blocks_change_nothing_but_rounding(
    make: Make, path: Path, kv_cache_dtype: str, compute_dtype: str
) -> None:
    """Beside a token of another request and a chunk that is too large for rows; in pieces with both kinds of blocks."""
    assert len(OTHERS["d"]) > LEAST_ROWS
    executor = make(path, kv_cache_dtype=kv_cache_dtype, compute_dtype=compute_dtype)
    for split in (160, 170):
        wanted = answers(executor, 0, split, company=False)
        for cold in (1, 4, 9, 10):
            assert_close(answers(executor, cold, split, company=cold != 4), wanted)
    executor.close()


def test_cold_blocks_are_read(make: Make, path: Path) -> None:
    """Or the test above would show nothing."""
    executor = make(path)
    wanted = answers(executor, 5, 160, company=False)
    with torch.inference_mode():
        executor._pool.cpu[COLD[1]] = 0
    got = run_step(executor, [part(PROMPT[-1:], len(PROMPT) - 1, 5)]).tokens["a"]
    assert abs((got.logprob or 0.0) - (wanted[-1].logprob or 0.0)) > 1e-4


def test_others_are_what_they_were(make: Make, path: Path) -> None:
    executor = make(path)
    others = [chunk(n, tokens, 0, TABLES[n], ASKED) for n, tokens in OTHERS.items()]
    wanted = run_step(executor, others).tokens
    answers(executor, 5, 160, company=False)
    run_step(executor, [part(PROMPT[-1:], len(PROMPT) - 1, 5), *others])
    got = run_step(executor, [*others[:1], part(PROMPT[-9:], len(PROMPT) - 9, 5), *others[1:]]).tokens
    assert {name: got[name].top for name in OTHERS} == {name: token.top for name, token in wanted.items()}


def test_a_token_that_the_step_before_samples(make: Make, path: Path) -> None:
    """A cold request runs ahead as others do, and its boundary moves meanwhile."""
    executor = make(path)
    answers(executor, 3, 160, company=False)
    token = run_step(executor, [part(PROMPT[-1:], len(PROMPT) - 1, 3)]).tokens["a"].token_id
    wanted = run_step(executor, [part([token], len(PROMPT), 3)]).tokens["a"]
    go_cold(executor, 4, 3)
    executor.begin_step(StepPlan(1, (part(PROMPT[-1:], len(PROMPT) - 1, 4),), ()))
    ahead = part([0], len(PROMPT), 4)._replace(token_ids=NO_TOKENS, from_previous=True)
    executor.begin_step(StepPlan(2, (ahead,), ()))
    assert executor.complete_step().tokens["a"].token_id == token
    assert_close([executor.complete_step().tokens["a"]], [wanted])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("weights", ["dense", "w4"])
def test_deterministic_whatever_the_chunks_the_company_and_the_cold(
    make: Make, tmp_path: Path, weights: str, kv_cache_dtype: str
) -> None:
    """Bit for bit, once a request has cold blocks."""
    save_tiny(tmp_path, "qwen2", head_dim=64, hidden_size=128, intermediate_size=192)
    if weights == "w4":
        quantize(tmp_path)
    executor, rng = make(tmp_path, deterministic=True, kv_cache_dtype=kv_cache_dtype), random.Random(0)
    answered = []
    for _ in range(5):
        run_step(executor, [part(PROMPT[:100], 0, 0, sampling=None)])
        start, cold = 100, 1
        go_cold(executor, cold)
        while start < len(PROMPT):
            more, size = rng.randint(cold, min(start // 16, 10)), rng.randint(1, min(70, len(PROMPT) - start))
            go_cold(executor, more, cold)
            cold = more
            others = [chunk(n, OTHERS[n], 0, TABLES[n], ASKED) for n in rng.sample(list(OTHERS), rng.randint(0, 3))]
            chunks = sorted([*others, part(PROMPT[start : start + size], start, cold)], key=lambda c: c.num_tokens)
            token = run_step(executor, chunks).tokens["a"]
            start += size
        answered.append(token)
    assert answered == answered[:1] * 5


def test_without_the_setting_there_is_no_memory_for_it(make: Make, path: Path) -> None:
    executor = make(path, allow_oversize=False)
    with pytest.raises(ValueError, match="allow_oversize"):
        executor.begin_step(StepPlan(0, (part([1], 16, 1),), ()))
    assert run_step(executor, [chunk("b", [1], 0, [1], ASKED)]).failed == {}


@pytest.mark.parametrize("device", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
def test_the_memory_it_takes_is_in_the_sum(make: Make, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_attention, "PIECE_TOKENS", 4096)
    monkeypatch.setattr(cold_attention, "_MOST_SCORES", 8 << 20)
    without, with_it = (make(path, allow_oversize=allowed) for allowed in (False, True))
    memory = ColdMemory(with_it._pool.pages, with_it.model_config.num_heads, 256, alone=False)
    size = sum(t.nbytes for t in (memory.kv, memory.scores, memory.sums, *(stage.slices for stage in memory.stages)))
    assert with_it._memory.workspace - without._memory.workspace >= size // 2 > 0


class Sequences:
    """Three sequences over a pool and an arena of random bytes, as a pass of cold chunks meets them."""

    LAYERS, HEADS = 2, 4

    def __init__(self, device: str, kv_format: FormatName, alone: bool = False, pinned: bool = True) -> None:
        self.pool = KVPool(KVShape(self.LAYERS, 2, 64), 16, kv_format, 40, 40, device)
        generator = torch.Generator().manual_seed(0)
        for tier in (self.pool.gpu, self.pool.cpu):
            if kv_format in ("fp16", "bf16"):
                dtype = self.pool.format.dtype
                tier.copy_(torch.randn(40, self.pool.block_bytes // 2, generator=generator).to(dtype).view(torch.uint8))
            else:  # small numbers in every format, scales too
                tier.copy_(torch.randint(0, 0x28, tier.shape, generator=generator, dtype=torch.uint8))
        if not pinned:
            self.pool.arena.pinned = 0
        memory = ColdMemory(self.pool.pages, self.HEADS, 64, alone)
        self.attention = ColdAttention(memory, self.pool)
        ids = random.Random(1)
        self.tables = torch.zeros(8, 12, dtype=torch.int32)
        self.cold: dict[int, array[int]] = {}
        spans = {5: (3, 100, 40), 0: (7, 150, 1), 2: (1, 17, 20)}  # row: cold blocks, first position, tokens
        rows, positions = [], []
        for row, (cold, start, count) in spans.items():
            self.tables[row] = torch.tensor(ids.sample(range(40), 12), dtype=torch.int32)
            self.cold[row] = array("i", self.tables[row, :cold].tolist())
            rows += [row] * count
            positions += range(start, start + count)
        zeros = np.zeros(len(rows), np.int32)
        self.tokens = TokenArrays(zeros, zeros, np.array(positions, np.int32), np.array(rows, np.int32), zeros[:3])
        self.q = torch.randn(len(rows), self.HEADS, 64, generator=generator).half().to(device)
        self.device = device
        self.k_biases: list[RotatedBias | None] = [None] * self.LAYERS

    def attend(self, layers: int = LAYERS) -> list[torch.Tensor]:
        """What each layer gives."""
        shape = len(self.q), self.HEADS * 64
        outs = [torch.empty(shape, dtype=torch.float16, device=self.device) for _ in range(layers)]
        with self.attention.begin(self.tokens, self.tables.to(self.device), self.cold) as attend:
            for layer, out in enumerate(outs):
                attend(layer, self.q, out, self.k_biases[layer])
        return outs

    def wanted(self, layer: int) -> torch.Tensor:
        """By the reference of prefill, over one pool that holds both tiers."""
        pool = KVPool(KVShape(self.LAYERS, 2, 64), 16, self.pool.format_name, 80, 0)  # type: ignore[arg-type]
        pool.gpu.copy_(torch.cat((self.pool.gpu.cpu(), self.pool.cpu)))
        parts = []
        for row in dict.fromkeys(self.tokens.rows.tolist()):
            here = np.flatnonzero(self.tokens.rows == row)
            table = self.tables[row].clone()
            table[: len(self.cold[row])] += 40
            starts = torch.tensor([0, len(here)], dtype=torch.int32)
            context = torch.tensor([self.tokens.positions[here[-1]] + 1], dtype=torch.int32)
            q, k_bias = self.q.cpu()[here[0] : here[-1] + 1], self.k_biases[layer]
            if k_bias is not None:
                k_bias = dataclasses.replace(k_bias, values=k_bias.values.cpu(), rotary=k_bias.rotary.cpu())
            parts.append(paged_prefill_reference(q, pool.pages, layer, table[None], starts, context, k_bias=k_bias))
        return torch.cat(parts)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kv_format", ["fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_attention_equals_the_reference(device: str, kv_format: FormatName, alone: bool, pinned: bool) -> None:
    with torch.inference_mode():
        sequences = Sequences(device, kv_format, alone, pinned)
        for layer, out in enumerate(sequences.attend()):
            torch.testing.assert_close(out.float().cpu(), sequences.wanted(layer), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("positions", [151, 512])
@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_attention_adds_a_bias_that_k_lacks(device: str, kv_format: FormatName, positions: int) -> None:
    """In its layer. The rotary table may end within the last block."""
    with torch.inference_mode():
        sequences = Sequences(device, kv_format)
        without = sequences.wanted(1)
        sequences.k_biases[1] = large_bias(2, 64, positions, device)
        for layer, out in enumerate(sequences.attend()):
            torch.testing.assert_close(out.float().cpu(), sequences.wanted(layer), atol=1e-3, rtol=2e-3)
        assert (sequences.wanted(1) - without).norm() > 0.1 * without.norm()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("seed", range(20))
@torch.inference_mode()
def test_pieces_are_read_as_they_came_whatever_the_streams_do(
    monkeypatch: pytest.MonkeyPatch, seed: int, layers: int
) -> None:
    """A stage is written when it was read, and read when it was written; nothing is fetched behind the pass's end,
    also where the last layer attends nothing, as no token is sampled."""
    monkeypatch.setattr(cold_attention, "PIECE_TOKENS", 32)
    streams = Streams(monkeypatch, seed)
    sequences = Sequences("cpu", "fp16")
    reads = 0

    def queued_gather(source: torch.Tensor, offset: int, blocks: torch.Tensor, target: torch.Tensor) -> None:
        streams.do(lambda: gather_slices(source, offset, blocks, target))

    def check(pages: Any, slices: torch.Tensor, out: torch.Tensor) -> None:
        wanted = expected.pop(0)

        def read() -> None:
            nonlocal reads
            reads += 1
            assert torch.equal(slices, wanted)

        streams.do(read)

    monkeypatch.setattr(gather, "gather_slices", queued_gather)
    monkeypatch.setattr(cold_attention, "dequantize", check)
    expected = []
    for layer in range(layers):
        for row in sequences.cold:
            tokens = int(sequences.tokens.positions[sequences.tokens.rows == row].max()) + 1
            for begin in range(0, math.ceil(tokens / 16), 2):
                blocks = range(begin, min(begin + 2, math.ceil(tokens / 16)))
                ids = [int(sequences.tables[row, block]) for block in blocks]
                tiers = [
                    sequences.pool.cpu if block < len(sequences.cold[row]) else sequences.pool.gpu for block in blocks
                ]
                size = sequences.pool.pages.layer_bytes
                slices = [t[i, layer * size : (layer + 1) * size] for t, i in zip(tiers, ids, strict=True)]
                expected.append(torch.stack(slices))
    count = len(expected)
    sequences.attend(layers)
    streams.current.synchronize()
    assert reads == count and not any(stream.queue for stream in streams.all)
