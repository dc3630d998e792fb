"""Prefill attention for SM90 against fp32 arithmetic on the stored values. Needs that GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.pages import KVPages
from coldblock.kernels.prefill_attention_hopper import paged_prefill_hopper, supports
from torch import Tensor

pytestmark = pytest.mark.gpu

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
EPSILON = {"fp16": 2.0**-11, "bf16": 2.0**-8}
Sequence = tuple[int, int]  # queries, context


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")


@dataclass
class Case:
    """Sequences in a pool whose other bytes are NaN, block tables whose unused entries are no blocks at all."""

    q: Tensor
    pages: KVPages
    layer: int
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    sequences: list[Sequence]
    keys: list[Tensor]  # fp32 [context, G, D]
    values: list[Tensor]

    def run(self) -> Tensor:
        out = torch.full(
            (self.q.shape[0], self.q.shape[1] * self.q.shape[2]), math.nan, dtype=self.q.dtype, device="cuda"
        )
        paged_prefill_hopper(
            self.q, self.pages, self.layer, self.block_tables, self.query_starts, self.context_lens,
            max(q for q, _ in self.sequences), max(c for _, c in self.sequences), out,
        )  # fmt: skip
        return out

    def expected(self) -> Tensor:
        parts, row = [], 0
        for (queries, context), keys, values in zip(self.sequences, self.keys, self.values, strict=True):
            parts.append(attention(self.q[row : row + queries].float(), keys, values, context - queries))
            row += queries
        return torch.cat(parts)


def attention(q: Tensor, keys: Tensor, values: Tensor, first_position: int) -> Tensor:
    """Causal attention [T, H * D] of q [T, H, D] over keys, values [C, G, D], in fp32."""
    ratio = q.shape[1] // keys.shape[1]
    scores = torch.einsum("thd,chd->htc", q, keys.repeat_interleave(ratio, 1)) / math.sqrt(q.shape[2])
    position = first_position + torch.arange(q.shape[0], device=q.device)
    scores.masked_fill_(torch.arange(len(keys), device=q.device) > position[:, None], -math.inf)
    return torch.einsum("htc,chd->thd", scores.softmax(-1), values.repeat_interleave(ratio, 1)).flatten(1)


def make_case(
    sequences: list[Sequence], kv_format: str = "fp16", heads: tuple[int, int] = (16, 2), head_dim: int = 128,
    block_size: int = 16, layers: tuple[int, int] = (1, 2), seed: int = 0, spread: float = 1.0,
) -> Case:  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = DTYPES[kv_format]
    (num_heads, kv_heads), (layer, num_layers) = heads, layers
    counts = [math.ceil(context / block_size) for _, context in sequences]
    num_blocks = sum(counts) + 3
    pool = torch.full((num_blocks, num_layers, 2, kv_heads, block_size, head_dim), math.nan, dtype=dtype, device="cuda")
    order = torch.randperm(num_blocks, generator=generator, device="cuda").tolist()
    tables = torch.full((len(sequences), max([*counts, 1]) + 2), 2**30, dtype=torch.int32)
    keys, values = [], []
    for s, (_, context) in enumerate(sequences):
        both = torch.randn(2, context, kv_heads, head_dim, generator=generator, device="cuda") * spread
        both = both.to(dtype)
        for b in range(counts[s]):
            block = order.pop()
            tables[s, b] = block
            part = both[:, b * block_size : (b + 1) * block_size]
            pool[block, layer, :, :, : part.shape[1]] = part.transpose(1, 2)
        keys.append(both[0].float())
        values.append(both[1].float())
    starts = torch.tensor([0, *[queries for queries, _ in sequences]]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator, device="cuda") * spread
    pages = KVPages(pool.view(num_blocks, -1).view(torch.uint8), kv_format, block_size, num_layers, kv_heads, head_dim)  # type: ignore[arg-type]
    lens = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    return Case(q.to(dtype), pages, layer, tables.cuda(), starts.cuda(), lens.cuda(), sequences, keys, values)


def assert_right(case: Case) -> None:
    out, expected = case.run().float(), case.expected()
    assert not out.isnan().any()
    epsilon = EPSILON[case.pages.format]
    relative = ((out - expected).norm() / expected.norm()).item()
    largest = (out - expected).abs().max().item()
    assert relative < 2 * epsilon, (relative, largest)
    assert largest < 4 * epsilon * expected.abs().max().item(), (relative, largest)


@pytest.mark.parametrize("kv_format", ["fp16", "bf16"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
def test_one_sequence(length: int, kv_format: str) -> None:
    assert_right(make_case([(length, length)], kv_format))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(16, 2), (9, 3), (4, 4), (14, 1)])
def test_heads(heads: tuple[int, int], head_dim: int) -> None:
    assert_right(make_case([(200, 333), (64, 64)], heads=heads, head_dim=head_dim))


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes(block_size: int) -> None:
    assert_right(make_case([(200, 333), (130, 130), (1, 257)], block_size=block_size, layers=(2, 3)))


@pytest.mark.parametrize("queries", [1, 2, 7, 64, 100, 128, 200])
@pytest.mark.parametrize("context", [201, 256, 300, 511, 1029])
def test_chunk_behind_a_prefix(queries: int, context: int) -> None:
    assert_right(make_case([(queries, context)], heads=(8, 2)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_mixed_lengths(head_dim: int) -> None:
    sequences = [
        (5, 1000),
        (130, 131),
        (0, 40),
        (1, 16),
        (300, 300),
        (257, 513),
        (128, 128),
        (1, 1),
        (0, 0),
        (63, 4000),
    ]
    assert_right(make_case(sequences, head_dim=head_dim))


def test_more_sequences_than_a_warp_has_lanes() -> None:
    sequences = [(1 + 37 * i % 200, 1 + 37 * i % 200 + 11 * i % 70) for i in range(75)]
    assert_right(make_case(sequences, heads=(4, 1)))


@pytest.mark.parametrize("kv_format", ["fp16", "bf16"])
def test_long_context(kv_format: str) -> None:
    assert_right(make_case([(40, 32768), (140, 20001)], kv_format, heads=(2, 1)))


def test_large_scores() -> None:
    assert_right(make_case([(300, 300)], spread=6.0))


def test_8192_tokens() -> None:
    assert_right(make_case([(8192, 8192)], heads=(4, 1)))


def test_result_depends_neither_on_company_nor_on_chunks() -> None:
    alone = make_case([(700, 700)])
    whole = alone.run()
    for begin, end in [(0, 100), (100, 429), (429, 700), (699, 700)]:
        part = make_case([(700, 700)])
        part.q = alone.q[begin:end].contiguous()
        part.sequences = [(end - begin, end)]
        part.query_starts = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        part.context_lens = torch.tensor([end], dtype=torch.int32, device="cuda")
        assert torch.equal(part.run(), whole[begin:end])


def test_many_launches_and_replays_of_a_graph() -> None:
    case = make_case([(200, 450), (333, 333)])
    first = case.run()
    for _ in range(150):
        assert torch.equal(case.run(), first)
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            paged_prefill_hopper(
                case.q, case.pages, case.layer, case.block_tables, case.query_starts, case.context_lens, 333, 450, out
            )
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, first)


def test_refusals() -> None:
    case = make_case([(20, 20)])
    assert supports(case.pages, 16)
    assert not supports(case.pages, 3)
    case.layer = 2
    with pytest.raises(KernelArgumentError, match="layer is 2"):
        case.run()
    case.layer, case.q = 1, case.q.bfloat16()
    with pytest.raises(KernelArgumentError, match="q is torch"):
        case.run()
