"""Prefill attention for SM90 against the reference on the stored values. Needs that GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
import torch
from coldblock.engine_core.device.kv_formats import make_format
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.pages import KVPages, PageFormat
from coldblock.kernels.prefill_attention import paged_prefill_reference
from coldblock.kernels.prefill_attention_hopper import paged_prefill_hopper, supports
from torch import Tensor

pytestmark = pytest.mark.gpu

FP16, BF16 = torch.float16, torch.bfloat16
EPSILON = {FP16: 2.0**-11, BF16: 2.0**-8}
KINDS: list[tuple[PageFormat, torch.dtype]] = [
    ("fp16", FP16), ("bf16", BF16),
    ("int8", FP16), ("fp8_e4m3", FP16), ("fp8_e5m2", FP16), ("int8", BF16), ("fp8_e4m3", BF16), ("fp8_e5m2", BF16),
]  # fmt: skip
PADDING = 3  # rows of q that belong to no sequence


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")


@dataclass
class Case:
    """Chunks (queries, context) in a pool whose other bits are all set (NaN, in int8 a NaN scale)."""

    q: Tensor
    pages: KVPages
    layer: int
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    chunks: list[tuple[int, int]]

    def launch(self, out: Tensor) -> None:
        queries, contexts = zip(*self.chunks, strict=True)
        paged_prefill_hopper(
            self.q, self.pages, self.layer, self.block_tables, self.query_starts, self.context_lens,
            max(queries), max(contexts), out,
        )  # fmt: skip

    def run(self) -> Tensor:
        out = torch.full_like(self.q.flatten(1), math.nan)
        self.launch(out)
        return out

    def chunk(self, begin: int, end: int) -> Case:
        """Queries begin..end of a case with one sequence without a prefix."""
        starts, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, end - begin], [end]))
        q = self.q[begin:end].contiguous()
        return Case(q, self.pages, self.layer, self.block_tables, starts, lens, [(end - begin, end)])


def make_case(
    chunks: list[tuple[int, int]], kind: tuple[PageFormat, torch.dtype] = KINDS[0], heads: tuple[int, int] = (16, 2),
    head_dim: int = 128, block_size: int = 16, layers: tuple[int, int] = (1, 2), spread: float = 1.0,
) -> Case:  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    (kv_format, dtype), (num_heads, kv_heads), (layer, num_layers) = kind, heads, layers
    counts = [math.ceil(context / block_size) for _, context in chunks]
    token_bytes = {"fp16": 2 * head_dim, "bf16": 2 * head_dim, "int8": head_dim + 2}.get(kv_format, head_dim)
    block_bytes = num_layers * 2 * kv_heads * block_size * token_bytes
    pool = torch.full((sum(counts) + 3, block_bytes), 255, dtype=torch.uint8)
    pages = KVPages(pool.cuda(), kv_format, block_size, num_layers, kv_heads, head_dim)
    order = torch.randperm(len(pool), generator=generator, device="cuda").cpu()
    tables = torch.full((len(chunks), max([*counts, 1]) + 2), 2**30, dtype=torch.int32)  # no block has that number
    form = make_format(kv_format, block_size, head_dim)
    view = form.view(pool.view(-1))
    for s, (_, context) in enumerate(chunks):
        used = order[sum(counts[:s]) : sum(counts[: s + 1])]
        tables[s, : counts[s]] = used
        position = torch.arange(context)
        planes = (used[position // block_size] * num_layers + layer)[:, None] * 2 * kv_heads + torch.arange(
            2 * kv_heads
        )
        values = torch.randn(context, 2 * kv_heads, head_dim, generator=generator, device="cuda") * spread
        form.write(view, form.slots(planes, (position % block_size)[:, None]), values.cpu())
    pages.pool.copy_(pool)
    starts = torch.tensor([0, *[queries for queries, _ in chunks]]).cumsum(0).int()
    q = torch.randn(int(starts[-1]) + PADDING, num_heads, head_dim, generator=generator, device="cuda") * spread
    lens = torch.tensor([context for _, context in chunks], dtype=torch.int32)
    return Case(q.to(dtype), pages, layer, tables.cuda(), starts.cuda(), lens.cuda(), chunks)


def assert_right(case: Case, tolerance: float = 1.0) -> None:
    out = case.run()
    rows = len(out) - PADDING
    expected = paged_prefill_reference(
        case.q, case.pages, case.layer, case.block_tables, case.query_starts, case.context_lens
    )[:rows]
    assert out[rows:].isnan().all()
    found = out[:rows].float()
    assert torch.isfinite(found).all()
    epsilon = EPSILON[case.q.dtype] * tolerance
    relative = ((found - expected).norm() / expected.norm()).item()
    largest = ((found - expected).abs().max() / expected.abs().max()).item()
    assert relative < 2 * epsilon, (relative, largest)
    assert largest < 4 * epsilon, (relative, largest)
    assert torch.nn.functional.cosine_similarity(found, expected, dim=1).min().item() > 0.9999


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
def test_one_sequence(length: int, kind: tuple[PageFormat, torch.dtype]) -> None:
    assert_right(make_case([(length, length)], kind))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mixed_lengths(kind: tuple[PageFormat, torch.dtype], head_dim: int) -> None:
    chunks = [(5, 1000), (130, 131), (0, 40), (1, 16), (300, 300), (257, 513), (128, 128), (1, 1), (0, 1), (63, 4000)]
    assert_right(make_case(chunks, kind, head_dim=head_dim))


@pytest.mark.parametrize("heads", [(16, 2), (9, 3), (4, 4), (14, 1)], ids=str)
def test_heads(heads: tuple[int, int]) -> None:
    assert_right(make_case([(200, 333), (64, 64)], heads=heads))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[3]], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
def test_block_sizes(block_size: int, kind: tuple[PageFormat, torch.dtype]) -> None:
    assert_right(make_case([(200, 333), (130, 130), (1, 257)], kind, block_size=block_size, layers=(2, 3)))


@pytest.mark.parametrize("queries", [1, 2, 7, 64, 100, 128, 200])
@pytest.mark.parametrize("context", [201, 256, 300, 511, 1029])
def test_chunk_behind_a_prefix(queries: int, context: int) -> None:
    assert_right(make_case([(queries, context)], KINDS[context % 3], heads=(8, 2)))


def test_more_sequences_than_a_warp_has_lanes() -> None:
    chunks = [(1 + 37 * i % 200, 1 + 37 * i % 200 + 11 * i % 70) for i in range(75)]
    assert_right(make_case(chunks, heads=(4, 1)))


@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_long_context(kind: tuple[PageFormat, torch.dtype]) -> None:
    assert_right(make_case([(40, 32768), (140, 20001)], kind, heads=(2, 1)), tolerance=2)


def test_large_scores() -> None:
    assert_right(make_case([(300, 300)], spread=6.0))


def test_values_at_the_edge_of_fp16() -> None:
    for kind in (KINDS[0], KINDS[2]):
        case = make_case([(90, 90)], kind, spread=1e5)
        case.q.zero_()
        assert_right(case)


def test_8192_tokens() -> None:
    assert_right(make_case([(8192, 8192)], heads=(4, 1)))


def test_nan_stays_in_its_sequence() -> None:
    for kind in KINDS[:4]:
        case = make_case([(50, 70), (60, 69), (33, 33)], kind)
        good = case.run()
        case.pages.pool[case.block_tables[1, :5].long()] = 255
        out = case.run()
        assert out[50:110].isnan().all()
        assert torch.equal(out[:50], good[:50])
        assert torch.equal(out[110:143], good[110:143])


def test_company_does_not_matter() -> None:
    chunks = [(300, 700), (700, 700), (64, 1000)]
    together, row = make_case(chunks), 0
    out = together.run()
    for s, (queries, context) in enumerate(chunks):
        starts, lens = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, queries], [context]))
        q, table = together.q[row : row + queries].contiguous(), together.block_tables[s : s + 1].contiguous()
        alone = Case(q, together.pages, together.layer, table, starts, lens, [(queries, context)])
        assert torch.equal(alone.run(), out[row : row + queries])
        row += queries


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[2], KINDS[3]], ids=str)
def test_chunks_do_not_matter(kind: tuple[PageFormat, torch.dtype]) -> None:
    length = 1500
    case = make_case([(length, length)], kind)
    whole = case.run()
    random = Random(1)
    wrong = {}
    for begin, end in [(0, 128), (100, 256), (429, 700), *[sorted(random.sample(range(length), 2)) for _ in range(30)]]:
        differs = (case.chunk(begin, end).run() != whole[begin:end]).any(1)
        if differs.any():
            wrong[begin, end] = (differs.nonzero().flatten() + begin).tolist()
    assert not wrong


def test_many_launches_and_replays_of_a_graph() -> None:
    case = make_case([(200, 450), (333, 333)])
    first = case.run()[:533]
    for _ in range(150):
        assert torch.equal(case.run()[:533], first)
    out = torch.empty_like(case.q.flatten(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            case.launch(out)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out[:533], first)


def test_refusals() -> None:
    case = make_case([(20, 20)])
    assert supports(case.pages, 16, FP16)
    assert not supports(case.pages, 3, FP16)
    assert not supports(case.pages, 16, BF16)
    case.layer = 2
    with pytest.raises(KernelArgumentError, match="layer is 2"):
        case.run()
    case.layer, case.q = 1, case.q.bfloat16()
    with pytest.raises(KernelArgumentError, match="not served: q"):
        case.run()
