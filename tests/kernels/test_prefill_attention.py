"""Prefill attention over the paged pool against its reference, and the reference against the CPU's formats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from coldblock.engine_core.device.kv_formats import make_format
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.pages import HEAD_DIMS, KVPages, PageFormat, stored_keys_and_values
from coldblock.kernels.prefill_attention import (
    PrefillSplits,
    _shares,
    paged_prefill,
    paged_prefill_mma,
    paged_prefill_reference,
)
from coldblock.kernels.rotated_bias import RotatedBias
from coldblock.tools.large_bias import large_bias
from rounded_bias import rounded
from torch import Tensor

FORMATS: tuple[PageFormat, ...] = ("fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2")
gpu = pytest.mark.gpu
Prefill = Callable[..., None]


@pytest.fixture(params=[paged_prefill_mma, paged_prefill], ids=["mma", "best"])
def prefill(request: pytest.FixtureRequest) -> Prefill:
    """The kernel of all architectures, and whichever this GPU takes."""
    return request.param


@dataclass
class Case:
    """Chunks of sequences: `chunks` are pairs (new tokens, tokens before them), all in a pool in random order.

    Whatever no sequence uses has all bits set: NaN, or for int8 a NaN scale.
    """

    chunks: Sequence[tuple[int, int]]
    format: PageFormat = "fp16"
    dtype: torch.dtype = torch.float16
    head_dim: int = 128
    heads: tuple[int, int] = (8, 2)
    block_size: int = 16
    num_layers: int = 2
    layer: int = 1
    padding: int = 3
    device: str = "cuda"
    k_bias: RotatedBias | None = None
    q: Tensor = field(init=False)
    pages: KVPages = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(len(self.chunks) + self.head_dim)
        self.contexts = [new + before for new, before in self.chunks]
        counts = [math.ceil(context / self.block_size) for context in self.contexts]
        plane = self.block_size * (self.head_dim * (2 if self.format in ("fp16", "bf16") else 1))
        plane += 2 * self.block_size if self.format == "int8" else 0
        block_bytes = self.num_layers * 2 * self.heads[1] * plane
        pool = torch.full((sum(counts) + 2, block_bytes), 255, dtype=torch.uint8, device=self.device)
        self.pages = KVPages(pool, self.format, self.block_size, self.num_layers, self.heads[1], self.head_dim)
        order = torch.randperm(len(pool), generator=self.generator, device=self.device).int()
        self.block_tables = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32, device=self.device)
        ends = list(itertools.accumulate(counts))
        for s, (count, end) in enumerate(zip(counts, ends, strict=True)):
            self.block_tables[s, :count] = order[end - count : end]
        starts = [0, *itertools.accumulate(new for new, _ in self.chunks)]
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=self.device)
        self.context_lens = torch.tensor(self.contexts, dtype=torch.int32, device=self.device)
        self.q = self.normal(starts[-1] + self.padding, self.heads[0], self.head_dim).to(self.dtype)
        for s, context in enumerate(self.contexts):
            self.store(s, *(self.normal(context, self.heads[1], self.head_dim) for _ in range(2)))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def store(self, sequence: int, k: Tensor, v: Tensor) -> None:
        """Write fp32 [context, G, D] as the engine's formats do; what lies beyond in the last block stays."""
        pages, size = self.pages, self.block_size
        form = make_format(self.format, size, self.head_dim)
        view = form.view(pages.pool.view(-1))
        positions = torch.arange(len(k), device=self.device)
        blocks = self.block_tables[sequence].long()[positions // size]
        first = (blocks * pages.num_layers + self.layer) * 2 * pages.num_kv_heads
        heads = torch.arange(pages.num_kv_heads, device=self.device)
        for part, values in enumerate((k, v)):
            planes = first[:, None] + part * pages.num_kv_heads + heads
            form.write(view, form.slots(planes, (positions % size)[:, None]), values)

    def run(self, prefill: Prefill, splits: PrefillSplits | None = None) -> Tensor:
        out = torch.full((len(self.q), self.heads[0] * self.head_dim), math.nan, dtype=self.dtype, device=self.device)
        self.launch(prefill, out, splits)
        return out

    def launch(self, prefill: Prefill, out: Tensor, splits: PrefillSplits | None = None) -> None:
        options: dict[str, Any] = {} if splits is None else {"splits": splits}
        options |= {} if self.k_bias is None else {"k_bias": self.k_bias}
        prefill(
            self.q, self.pages, self.layer, self.block_tables, self.query_starts, self.context_lens,
            max(new for new, _ in self.chunks), max(self.contexts), out, **options,
        )  # fmt: skip

    @property
    def operands(self) -> torch.dtype:
        """What the products take."""
        return torch.bfloat16 if self.format == "bf16" else torch.float16

    def expected(self, operands: torch.dtype = torch.float32, k_bias: RotatedBias | None = None) -> Tensor:
        return paged_prefill_reference(
            self.q, self.pages, self.layer, self.block_tables, self.query_starts, self.context_lens, operands,
            k_bias or self.k_bias,
        )  # fmt: skip

    def check_biased(self, out: Tensor) -> None:
        """But for a rounding, off by little more than what an fp16 pool that holds K with its bias would be off by."""
        assert self.k_bias is not None
        rows = sum(new for new, _ in self.chunks)
        wanted, kept, found = self.expected()[:rows], self.expected(k_bias=rounded(self.k_bias))[:rows], out[:rows]
        epsilon = 2.0**-8 if torch.bfloat16 in (self.dtype, self.operands) else 2.0**-11
        assert out[rows:].isnan().all()
        relative, allowed = (x / wanted.norm() for x in ((found - wanted).norm(), (kept - wanted).norm()))
        assert relative < epsilon + 2 * allowed, f"relative error {relative:.2e}; of fp16 {allowed:.2e}"

    def check(self, out: Tensor, tolerance: float = 1.0, operands: torch.dtype = torch.float32) -> None:
        """Against the reference, in units of the roundings on the way; padding rows are untouched."""
        rows = sum(new for new, _ in self.chunks)
        wanted, found = self.expected(operands)[:rows], out[:rows].float()
        epsilon = 2.0**-8 if torch.bfloat16 in (self.dtype, self.operands) else 2.0**-11
        assert out[rows:].isnan().all()
        assert torch.isfinite(found).all()
        error = found - wanted
        relative = (error.norm() / wanted.norm()).item()
        assert relative < tolerance * epsilon, f"relative error {relative:.2e}"
        assert error.abs().max().item() < tolerance * 4 * epsilon * wanted.abs().max().item()
        assert torch.nn.functional.cosine_similarity(found, wanted, dim=1).min().item() > 0.9999


MIXED = [(1, 0), (1, 16), (15, 0), (16, 0), (17, 23), (63, 1), (64, 0), (65, 64), (129, 0), (5, 995), (1000, 0)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block_size", [16, 48])
def test_reference_reads_what_the_formats_write(format: PageFormat, block_size: int) -> None:
    case = Case([(3, 50)], format, block_size=block_size, head_dim=64, device="cpu", heads=(4, 2))
    k, v = case.normal(53, 2, 64), case.normal(53, 2, 64)
    case.store(0, k, v)
    found = stored_keys_and_values(case.pages, case.layer, case.block_tables[0], 53)
    limit = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 2.0**-6, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[format]
    for wanted, read in zip((k, v), found, strict=True):
        torch.testing.assert_close(read, wanted, rtol=limit, atol=limit)
    scores = torch.einsum("thd,shd->hts", case.q[:3].float(), found[0].repeat_interleave(2, 1)) / 8
    scores[:, torch.arange(53) > torch.arange(50, 53)[:, None]] = -math.inf
    wanted = torch.einsum("hts,shd->thd", scores.softmax(-1), found[1].repeat_interleave(2, 1)).flatten(1)
    got = paged_prefill_reference(
        case.q, case.pages, case.layer, case.block_tables, case.query_starts, case.context_lens
    )
    torch.testing.assert_close(got[:3], wanted)
    assert got[3:].isnan().all()


def test_arguments_are_refused_by_name() -> None:
    case = Case([(3, 50)], head_dim=64, device="cpu", heads=(4, 2))
    with pytest.raises(KernelArgumentError, match="q is on cpu"):
        case.run(paged_prefill)
    case.q = case.q.float()
    with pytest.raises(KernelArgumentError, match=r"q is torch\.float32"):
        case.run(paged_prefill)


@gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("format", FORMATS)
def test_mixed_chunks(prefill: Prefill, format: PageFormat, head_dim: int) -> None:
    case = Case(MIXED, format, head_dim=head_dim)
    case.check(case.run(prefill))


@gpu
@pytest.mark.parametrize("format", FORMATS)
def test_bf16_activations(prefill: Prefill, format: PageFormat) -> None:
    case = Case(MIXED, format, torch.bfloat16)
    case.check(case.run(prefill))


@pytest.mark.parametrize("positions", [53, 64])
def test_reference_adds_the_bias_that_k_lacks(positions: int) -> None:
    whole, split = (Case([(3, 50)], "fp16", head_dim=64, device="cpu", heads=(4, 2)) for _ in range(2))
    split.k_bias = large_bias(2, 64, positions, "cpu", factor=1.25)
    k, v = whole.normal(53, 2, 64).half().float(), whole.normal(53, 2, 64)
    split.store(0, k, v)
    turns = torch.view_as_complex(split.k_bias.rotary[:53])[:, None]
    bias = torch.view_as_complex(split.k_bias.values.view(2, 32, 2))
    whole.store(0, k + torch.view_as_real(bias * turns).flatten(2), v)
    assert (split.expected() - whole.expected())[:3].norm() < 0.1 * whole.expected()[:3].norm()
    split.k_bias = None
    assert (split.expected() - whole.expected())[:3].norm() > 0.5 * whole.expected()[:3].norm()


def test_spins_and_turns_give_what_the_bias_adds() -> None:
    """As the kernel has them: spins of q and the bias, times the factor, and rows of turns, in half."""
    bias, q = large_bias(1, 64, 500, "cpu", factor=1.25), torch.randn(8, 64)
    z = torch.view_as_complex(bias.values.view(-1, 2)).conj() * torch.view_as_complex(q.view(8, -1, 2))
    spins = torch.view_as_real(z * (bias.rotary[0, 0, 0] / 256)).half().flatten(1)
    keys = torch.zeros(1, 500, 64)
    bias.add_to(keys, 0)
    found, wanted = spins.float() @ bias.turns.rows.float().flatten(1).t(), q @ keys[0].t()
    assert (found - wanted).norm() < 2 * (q @ keys[0].half().float().t() - wanted).norm()


@gpu
@pytest.mark.parametrize("position", [0, 1])
def test_a_bias_at_another_position_is_told_from_rounding(prefill: Prefill, position: int) -> None:
    case = Case(MIXED, "int8", k_bias=large_bias(2, 128, 1000))
    assert case.k_bias is not None
    out, turns = case.run(prefill), case.k_bias.turns
    case.check_biased(out)
    case.k_bias = replace(case.k_bias, rotary=case.k_bias.rotary.roll(1, 0) * position, turns=turns)
    with pytest.raises(AssertionError, match="relative error"):
        case.check_biased(out)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_bias_that_k_lacks(prefill: Prefill, format: PageFormat, head_dim: int, dtype: torch.dtype) -> None:
    case = Case(MIXED, format, dtype, head_dim=head_dim, k_bias=large_bias(2, head_dim, 1000))
    case.check_biased(case.run(prefill))


@gpu
@pytest.mark.parametrize("heads", [(14, 2), (7, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("format", ["fp16", "int8"])
def test_a_bias_with_any_ratio_and_splits(prefill: Prefill, format: PageFormat, heads: tuple[int, int]) -> None:
    case = Case([(5, 3000), (16, 900), (1, 0)], format, heads=heads, k_bias=large_bias(heads[1], 128, 3005, theta=1e4))
    case.check_biased(case.run(prefill))
    case.check_biased(case.run(prefill, PrefillSplits(128, case.q.device)))


@gpu
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (9, 3), (16, 2), (5, 5), (64, 1)], ids=str)
def test_any_ratio(prefill: Prefill, heads: tuple[int, int]) -> None:
    case = Case([(37, 0), (2, 100), (150, 11)], heads=heads)
    case.check(case.run(prefill))


@gpu
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 80, 256])
@pytest.mark.parametrize("format", ["fp16", "int8", "fp8_e4m3"])
def test_block_sizes(prefill: Prefill, format: PageFormat, block_size: int) -> None:
    case = Case([(70, 0), (9, 300), (130, 127)], format, block_size=block_size)
    case.check(case.run(prefill))


@gpu
@pytest.mark.parametrize("new", [1, 15, 16, 17, 63, 64, 65, 129, 1000])
def test_chunks_at_any_place(prefill: Prefill, new: int) -> None:
    case = Case([(new, before) for before in (0, 1, 16, 63, 64, 1000)], "int8", padding=0)
    case.check(case.run(prefill))


@gpu
def test_many_short_prompts_and_empty_chunks(prefill: Prefill) -> None:
    case = Case([(s % 4 * 11, 1 + s % 7 * 5) for s in range(150)], "fp8_e4m3", head_dim=64)
    case.check(case.run(prefill))


@pytest.mark.parametrize(
    ("blocks", "steps", "most", "shares"),
    [(1000, 100, 60, 1), (66, 340, 60, 2), (8, 340, 60, 16), (8, 340, 5, 5), (100, 340, 60, 5), (4, 2, 60, 1)],
)
def test_keys_are_divided_where_tiles_are_few(blocks: int, steps: int, most: int, shares: int) -> None:
    assert _shares(blocks, 132, steps, most) == shares


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_splits(format: PageFormat, head_dim: int) -> None:
    splits = PrefillSplits(head_dim, torch.device("cuda"))
    splits.parts.fill_(math.nan)
    splits.levels.fill_(math.nan)
    case = Case([(40, 3000), (1, 5), (3, 1700), (17, 0)], format, head_dim=head_dim)
    out = case.run(paged_prefill_mma, splits)
    case.check(out)
    rows = len(case.q) * 8
    assert splits.levels[rows : 2 * rows].isfinite().any(), "the keys were not divided"


@gpu
def test_32k_tokens(prefill: Prefill) -> None:
    case = Case([(70, 32698)], "int8", heads=(4, 1))
    case.check(case.run(prefill), tolerance=2)
    case.check(case.run(paged_prefill_mma, PrefillSplits(128, torch.device("cuda"))), tolerance=2)


@gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("factor", [0.0, 0.01, 30.0, 400.0])
def test_extreme_scores(prefill: Prefill, format: PageFormat, factor: float) -> None:
    """From equal weights to a single key that takes all, with keys that grow along the sequence."""
    case = Case([(100, 77), (200, 0)], format)
    k = case.normal(177, 2, 128) * torch.linspace(0, 1, 177, device="cuda")[:, None, None]
    case.store(0, k, case.normal(177, 2, 128))
    case.q *= factor
    case.check(case.run(prefill), tolerance=3 + factor * 0.02, operands=case.operands)


@gpu
@pytest.mark.parametrize("size", [1e-6, 3e-3, 60000.0, 65504.0])
@pytest.mark.parametrize("format", ["fp16", "int8"])
def test_extreme_values(prefill: Prefill, format: PageFormat, size: float) -> None:
    case = Case([(90, 30)], format)
    v = case.normal(120, 2, 128).clamp(-1, 1) * size
    case.store(0, case.normal(120, 2, 128), v)
    wanted = case.expected()[:90]
    out = case.run(prefill)[:90].float()
    assert (out - wanted).abs().max() <= 2e-3 * wanted.abs().max() + 2.0**-24


@gpu
@pytest.mark.parametrize("format", ["fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_nan_stays_in_its_sequence(prefill: Prefill, format: PageFormat) -> None:
    case = Case([(50, 20), (60, 9), (33, 0)], format)
    good = case.run(prefill)
    blocks = case.block_tables[1, : math.ceil(69 / 16)].long()
    case.pages.pool[blocks] = 255
    out = case.run(prefill)
    assert out[50:110].isnan().all()
    assert torch.equal(out[:50], good[:50]) and torch.equal(out[110:143], good[110:143])


@gpu
@pytest.mark.parametrize("with_splits", [False, True])
def test_graph_replays_with_new_contents(with_splits: bool) -> None:
    splits = PrefillSplits(128, torch.device("cuda")) if with_splits else None
    case = Case([(20, 800), (33, 1000)], "fp8_e4m3")
    out = torch.full((len(case.q), 8 * 128), math.nan, dtype=torch.float16, device="cuda")
    case.launch(paged_prefill, out, splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.launch(paged_prefill, out, splits)
    for contexts in ([820, 1033], [400, 1000], [21, 34]):
        case.context_lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        case.q.copy_(case.normal(*case.q.shape))
        out.fill_(math.nan)
        graph.replay()
        case.check(out)
