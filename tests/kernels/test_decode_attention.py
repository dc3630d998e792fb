"""Paged decode attention: the kernel against the reference on the stored bytes, and the plan of its work."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools

import numpy as np
import pytest
import torch
from coldblock.engine_core.device.kv_formats import make_format
from coldblock.engine_core.kv_layout import KVShape, paged_kv_block_bytes
from coldblock.kernels import decode_attention
from coldblock.kernels.decode_attention import (
    DETERMINISTIC_SPLIT,
    Cut,
    DecodeSplits,
    choose_cut,
    paged_decode,
    paged_decode_reference,
    plan_parts,
)
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.fused import rope_and_write, rope_reference
from coldblock.kernels.loader import load
from coldblock.kernels.pages import FORMAT_NUMBERS, HEAD_DIMS, KVPages, stored_keys_and_values
from coldblock.kernels.rotated_bias import RotatedBias
from coldblock.tools.large_bias import large_bias
from rounded_bias import rounded
from torch import Tensor

FORMATS = tuple(FORMAT_NUMBERS)
ONE_BYTE = ("int8", "fp8_e4m3", "fp8_e5m2")
LENGTHS = [0, 1, 15, 16, 17, 100, 1000, 0, 5000, 33]
FP16, BF16 = torch.float16, torch.bfloat16
gpu = pytest.mark.gpu


# ---- A pool in which all that no sequence owns is NaN ----------------------------------------------------------------


def encode(values: Tensor, kv_format: str) -> tuple[Tensor, Tensor]:
    """values fp32 [..., D] as stored: bytes [..., row], and int8's scales as bytes [..., 2]."""
    if kv_format == "int8":
        scales = (values.abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-24).half()
        codes = (values / scales.float()).round().clamp(-127, 127).to(torch.int8)
        return codes.view(torch.uint8), scales.view(torch.uint8)
    dtypes = {"fp16": FP16, "bf16": BF16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return values.to(dtypes[kv_format]).view(torch.uint8), values.new_empty(0, dtype=torch.uint8)


@dataclasses.dataclass
class Case:
    pages: KVPages
    layer: int
    q: Tensor
    block_tables: Tensor
    context_lens: Tensor
    k_bias: RotatedBias | None = None

    def planes(self) -> Tensor:
        """The pool as uint8 [blocks, layers, 2, kv_heads, plane_bytes]."""
        pages = self.pages
        return pages.pool.view(-1, pages.num_layers, 2, pages.num_kv_heads, pages.plane_bytes)

    def token(self, row: int, token: int) -> Tensor:
        """The bytes of a token's elements, a view [2, kv_heads, row]."""
        pages = self.pages
        block = int(self.block_tables[row, token // pages.block_size])
        elements = self.planes()[block, self.layer][..., : pages.block_size * self.row_bytes]
        return elements.view(2, pages.num_kv_heads, pages.block_size, -1)[:, :, token % pages.block_size]

    @property
    def row_bytes(self) -> int:
        return self.pages.head_dim * (2 if self.pages.format in ("fp16", "bf16") else 1)

    def reference(self) -> Tensor:
        return paged_decode_reference(self.q, self.pages, self.layer, self.block_tables, self.context_lens, self.k_bias)


def make_case(
    kv_format: str = "fp16",
    head_dim: int = 128,
    num_heads: int = 16,
    num_kv_heads: int = 2,
    lengths: list[int] = LENGTHS,
    block_size: int = 16,
    dtype: torch.dtype = FP16,
    device: str = "cuda",
    q_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Case:
    """Random K, V and q; blocks in random order; what is no sequence's token is 0xff: NaN, or a scale of NaN."""
    torch.manual_seed(len(lengths) + head_dim + num_heads)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks, layers, layer = sum(counts) + 3, 2, 1
    block_bytes = paged_kv_block_bytes(KVShape(layers, num_kv_heads, head_dim), block_size, kv_format)
    pool = torch.full((num_blocks, block_bytes), 0xFF, dtype=torch.uint8, device=device)
    pages = KVPages(pool, kv_format, block_size, layers, num_kv_heads, head_dim)
    block_tables = torch.full((len(lengths), max(counts) + 1), num_blocks - 1, dtype=torch.int32, device=device)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = (torch.randn(len(lengths), num_heads, head_dim, device=device) * q_scale).to(dtype)
    case = Case(pages, layer, q, block_tables, context_lens)
    order = torch.randperm(num_blocks - 1, device=device)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count == 0:
            continue
        blocks, order = order[:count], order[count:]
        block_tables[row, :count] = blocks.int()
        values = torch.randn(count, 2, num_kv_heads, block_size, head_dim, device=device)
        values[:, 1] *= v_scale
        codes, scales = encode(values, kv_format)
        tail = torch.arange(count * block_size, device=device).view(count, 1, 1, block_size, 1) >= length
        planes = torch.cat([part.masked_fill(tail, 0xFF).flatten(3) for part in (codes, scales) if part.numel()], -1)
        case.planes()[blocks, layer] = planes
    return case


def with_bias(case: Case, positions: int = 5000, **options: float) -> Case:
    """The same stored K, which now lacks a bias."""
    pages = case.pages
    bias = large_bias(pages.num_kv_heads, pages.head_dim, positions, str(case.q.device), **options)
    return dataclasses.replace(case, k_bias=bias)


def make_splits(case: Case, cut: Cut | None = None, deterministic: bool = False) -> DecodeSplits:
    """Splits with their plan written, and a workspace of NaN."""
    lengths = case.context_lens.cpu().numpy()
    splits = DecodeSplits.allocate(case.pages, case.q.shape[1], len(lengths), int(lengths.sum()), deterministic)
    if cut is None:
        plan = splits.plan_for(lengths)
    else:
        plan = plan_parts(lengths, cut, splits.groups, splits.blocks)
        slots = int(plan[0]) * splits.groups
        splits = dataclasses.replace(
            splits,
            plan=splits.plan.new_zeros(len(plan)),
            partials=splits.partials.new_empty(slots, *splits.partials.shape[1:]),
            statistics=splits.statistics.new_empty(slots, *splits.statistics.shape[1:]),
            counters=splits.counters.new_zeros(1 + slots),
        )
    assert len(plan) <= len(splits.plan)
    splits.plan[: len(plan)] = torch.from_numpy(plan).cuda()
    splits.partials.fill_(float("nan"))
    splits.statistics.fill_(float("nan"))
    return splits


def run(case: Case, splits: DecodeSplits | None = None) -> Tensor:
    splits = splits or make_splits(case)
    out = torch.full_like(case.q, float("nan")).flatten(1)
    torch.cuda.synchronize()
    paged_decode(case.q, case.pages, case.layer, case.block_tables, case.context_lens, splits, out, case.k_bias)
    torch.cuda.synchronize()
    assert not splits.counters.any()
    return out


def assert_as_exact_as_fp16_keys(out: Tensor, case: Case) -> None:
    """But for a rounding, off by little more than what an fp16 pool that holds K with its bias would be off by."""
    assert case.k_bias is not None
    reference, kept = case.reference(), dataclasses.replace(case, k_bias=rounded(case.k_bias)).reference()
    unit = 2.0**-8 if BF16 in (case.q.dtype, {"bf16": BF16}.get(case.pages.format)) else 2.0**-11
    error, allowed = out.double() - reference, unit * reference.norm() + 2 * (kept - reference).norm()
    assert error.norm() <= allowed, (error.norm() / reference.norm(), allowed / reference.norm())


def assert_close(out: Tensor, reference: Tensor, dtype: torch.dtype, kv_format: str, slack: float = 1.0) -> None:
    """An error of the size of a rounding: of fp16's, or of bf16's where q or the pool is bf16."""
    unit = slack * (2.0**-8 if BF16 in (dtype, {"bf16": BF16}.get(kv_format)) else 2.0**-11)
    error = out.double() - reference
    assert error.norm() <= unit * reference.norm(), error.norm() / reference.norm()
    assert error.abs().max() <= 2 * unit * reference.abs().max(), error.abs().max() / reference.abs().max()


# ---- Without a GPU --------------------------------------------------------------------------------------------------


BATCHES = [[0], [1], [100] * 256, [8192] * 32, [32768], [5, 0, 9000, 77], [128] * 300 + [32768], [0] * 8, [1024] * 256]


def parts_of(lengths: list[int], cut: Cut, blocks: int = 1) -> tuple[np.ndarray, bool]:
    """The plan's parts [parts, 6]: sequence, number, of how many, how many before the sequence's, begin, end; and
    whether blocks claim items. Of two groups."""
    plan = plan_parts(np.array(lengths, np.int32), cut, 2, blocks)
    assert plan.dtype == np.int32 and len(plan) == 6 * (1 + plan[0]) and plan[1] in (0, 1) and not plan[2:6].any()
    return plan.reshape(-1, 6)[1:], bool(plan[1])


@pytest.mark.parametrize("cut", [None, Cut(512, 512), Cut(1024, 256), Cut(768, 16)], ids=str)
@pytest.mark.parametrize("lengths", BATCHES, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_parts_are_a_sequence_one_after_the_other(lengths: list[int], cut: Cut | None) -> None:
    parts, _ = parts_of(lengths, cut or choose_cut(np.array(lengths), 2, 396, 192))
    slots = parts[:, 3] + parts[:, 1]
    assert sorted(slots) == list(range(len(parts)))
    inside = parts[np.argsort(slots)]
    for row, length in enumerate(lengths):
        own = inside[inside[:, 0] == row]
        assert own[:, 1].tolist() == list(range(len(own))) and (own[:, 2] == len(own)).all() and len(own) > 0
        assert (own[:, 3] == own[0, 3]).all()
        assert own[0, 4] == 0 and own[-1, 5] == length and (own[1:, 4] == own[:-1, 5]).all()
        assert (own[:, 4] % 16 == 0).all()
        assert (own[:, 5] > own[:, 4]).all() or length == 0
    sizes = parts[:, 5] - parts[:, 4]
    assert (sizes[1:] <= sizes[:-1]).all()


@pytest.mark.parametrize("blocks", [16, 132, 396])
@pytest.mark.parametrize("lengths", BATCHES, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_the_chosen_parts_fit_the_workspace(lengths: list[int], blocks: int) -> None:
    parts, _ = parts_of(lengths, choose_cut(np.array(lengths), 2, blocks, 256))
    assert len(parts) <= len(lengths) + decode_attention._EXTRA_WAVES * blocks // 2


def test_what_would_leave_blocks_idle_is_cut() -> None:
    def counts(lengths: list[int]) -> list[int]:
        parts, _ = parts_of(lengths, choose_cut(np.array(lengths), 2, 264, 192))
        return np.bincount(parts[:, 0]).tolist()

    assert counts([100]) == [1]
    assert counts([8192] * 32)[0] >= 4
    assert counts([32768])[0] >= 64
    assert counts([128] * 256) == [1] * 256
    assert counts([128] * 300 + [32768])[-1] > 8


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize(("blocks", "round_tokens"), [(132, 256), (264, 192)])
def test_few_sequences_of_any_length_are_cut_to_rounds(blocks: int, round_tokens: int, count: int) -> None:
    """Most blocks would be idle otherwise. A length need not be a multiple of anything."""
    for length in range(2 * round_tokens + 1, 2000):
        parts, _ = parts_of([length] * count, choose_cut(np.array([length] * count), 2, blocks, round_tokens), blocks)
        assert (parts[:, 5] - parts[:, 4]).max() == round_tokens


def end_of(sizes: list[float], blocks: int, claims: bool) -> float:
    """When the last block ends, if an item takes as long as it has tokens."""
    if not claims:
        return max(sum(sizes[block::blocks]) for block in range(min(blocks, len(sizes))))
    ends = [0.0] * blocks
    for size in sizes:
        heapq.heapreplace(ends, ends[0] + size)
    return max(ends)


@pytest.mark.parametrize(
    "lengths",
    [[length] * 31 + [length - 77] for length in (8192, 8193, 8208, 8256, 8300, 8320, 8400)]
    + [[100, 8192, 500, 3000] * 16, list(range(40, 8192, 256)), [8192] * 24, [3000] * 80],
    ids=lambda lengths: f"{len(lengths)}x{lengths[0]}to{max(lengths)}",
)
@pytest.mark.parametrize(("blocks", "round_tokens"), [(132, 256), (264, 128), (264, 192)])
def test_blocks_end_together(blocks: int, round_tokens: int, lengths: list[int]) -> None:
    """Nearly so: blocks read faster when others are idle."""
    parts, claims = parts_of(lengths, choose_cut(np.array(lengths), 2, blocks, round_tokens), blocks)
    sizes = np.repeat(parts[:, 5] - parts[:, 4], 2).tolist()
    alike = lengths[0] - lengths[-1] == 77
    assert end_of(sizes, blocks, claims) * (1 if alike else decode_attention._ALONE) <= 1.1 * sum(sizes) / blocks


@pytest.mark.parametrize("blocks", [132, 264])
def test_sequences_that_fill_all_blocks_at_once_are_cut_no_further(blocks: int) -> None:
    for length in (8192, 8193, 8320):
        parts, claims = parts_of([length] * 32, choose_cut(np.array([length] * 32), 2, blocks, 192), blocks)
        assert len(parts) * 2 == blocks // 64 * 64 and not claims


def test_items_are_claimed_where_they_are_unequal() -> None:
    assert not parts_of([128] * 256, Cut(128, 128), 132)[1]
    assert not parts_of([8192] * 32, Cut(4096, 4096), 132)[1]
    assert not parts_of([100, 8192] * 16, Cut(8192, 8192), 132)[1]  # a block an item
    assert parts_of([100, 8192, 500, 3000] * 16, Cut(2560, 256), 132)[1]


def test_plan_with_fixed_parts_depends_on_the_sequence_alone() -> None:
    parts, _ = parts_of([0, 512, 513, 1200], Cut(DETERMINISTIC_SPLIT, DETERMINISTIC_SPLIT))
    assert parts.tolist() == [
        [1, 0, 1, 1, 0, 512],
        [2, 0, 2, 2, 0, 512],
        [3, 0, 3, 4, 0, 512],
        [3, 1, 3, 4, 512, 1024],
        [3, 2, 3, 4, 1024, 1200],
        [2, 1, 2, 2, 512, 513],
        [0, 0, 1, 0, 0, 0],
    ]


def test_a_number_of_heads_that_is_no_multiple_is_refused() -> None:
    case = make_case(lengths=[1], device="cpu")
    with pytest.raises(KernelArgumentError, match="H is 15; allowed: multiples of 2"):
        DecodeSplits.allocate(case.pages, 15, 4, 100)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_reference_reads_what_the_engine_stores(kv_format: str) -> None:
    case = make_case(kv_format, head_dim=64, num_heads=4, lengths=[17, 0, 40], device="cpu")
    stored = make_format(kv_format, 16, 64)
    planes = stored.view(case.pages.pool.view(-1))
    torch.manual_seed(1)
    values = torch.randn(40, 4, 64)
    blocks = case.block_tables[2, torch.arange(40) // 16].long()
    first = (blocks * case.pages.num_layers + case.layer) * 4
    slots = stored.slots(first[:, None] + torch.arange(4), (torch.arange(40) % 16)[:, None])
    stored.write(planes, slots, values)
    k, v = values[:, :2], values[:, 2:]
    heads = case.q[2].float().view(2, 2, 64)
    weights = torch.softmax(torch.einsum("gnd,sgd->gns", heads, k) / 8, -1)
    expected = torch.einsum("gns,sgd->gnd", weights, v).flatten()
    out = case.reference()
    coarse = {"fp8_e4m3": 0.05, "fp8_e5m2": 0.1}.get(kv_format, 0.02)
    assert (out[2] - expected).norm() < coarse * expected.norm()
    assert not out[1].any() and out[0].isfinite().all()


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_reference_adds_the_bias_that_k_lacks(factor: float) -> None:
    case = with_bias(make_case(head_dim=64, num_heads=4, lengths=[40], device="cpu"), 50, factor=factor)
    assert case.k_bias is not None
    nothing = torch.zeros(2, 64)
    bias = torch.cat((nothing, case.k_bias.values, nothing)).flatten()
    _, rotated, _ = rope_reference(torch.zeros(40, 6 * 64), bias, case.k_bias.rotary, torch.arange(40), 2, 2)
    k, v = stored_keys_and_values(case.pages, case.layer, case.block_tables[0], 40)
    heads = case.q[0].double().view(2, 2, 64)
    weights = torch.softmax(torch.einsum("gnd,sgd->gns", heads, (k + rotated).double()) / 8, -1)
    expected = torch.einsum("gns,sgd->gnd", weights, v.double()).flatten()
    torch.testing.assert_close(case.reference()[0], expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(case.reference(), dataclasses.replace(case, k_bias=None).reference(), atol=0.1)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_bias_at_another_position_is_told_from_rounding(head_dim: int, kv_format: str) -> None:
    case = with_bias(make_case(kv_format, head_dim, 4, lengths=[40, 700], device="cpu"), 800)
    assert case.k_bias is not None
    later = dataclasses.replace(case.k_bias, rotary=case.k_bias.rotary.roll(1, 0))
    assert_as_exact_as_fp16_keys(case.reference(), case)
    for wrong in (None, later):
        with pytest.raises(AssertionError):
            assert_as_exact_as_fp16_keys(dataclasses.replace(case, k_bias=wrong).reference(), case)


def lane_products(turns: Tensor, spins: Tensor) -> Tensor:
    """The kernel's products of a tile, lane by lane: [16 tokens, 8 heads] of turns [D/16, 32, 8] and complex spins
    [8 heads, D/2]. A's rows g and g + 8 are tokens 2g and 2g + 1."""
    total = torch.zeros(16, 8, dtype=torch.float64)
    for step, lanes in enumerate(turns.double()):
        a, b = torch.zeros(2, 16, 16, dtype=torch.float64)
        for lane, (g, t) in enumerate(itertools.product(range(8), range(4))):
            pair = (step // 2 * 4 + t) * 4 + step % 2 * 2
            for row, pairs in ((g, lanes[lane, [0, 1, 4, 5]]), (g + 8, lanes[lane, [2, 3, 6, 7]])):
                a[row, 2 * t : 2 * t + 2], a[row, 2 * t + 8 : 2 * t + 10] = pairs[:2], pairs[2:]
            for half in range(2):
                spin = spins[g, pair + half]
                b[2 * t + 8 * half, g], b[2 * t + 8 * half + 1, g] = spin.real, spin.imag
        total += a @ b[:, :8]
    return total.view(2, 8, 8).transpose(0, 1).reshape(16, 8)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_spins_and_turns_give_what_the_bias_adds(head_dim: int) -> None:
    bias = large_bias(1, head_dim, 500, "cpu", factor=1.25)
    q = torch.randn(8, head_dim)
    keys = torch.zeros(1, 500, head_dim, dtype=torch.float64)
    bias.add_to(keys, 0)
    z = torch.view_as_complex(bias.values.view(-1, 2)).conj() * torch.view_as_complex(q.view(8, -1, 2))
    for first, later in ((0, 0), (37, 192), (100, 256), (480, 16)):
        spins = z * torch.view_as_complex(bias.rotary)[first].conj()
        found = lane_products(bias.turns.tiles[later // 16], spins) / 256
        wanted = keys[0, first + later : first + later + 16] @ q.double().t()
        torch.testing.assert_close(found[: len(wanted)], wanted, rtol=0, atol=1.0)


def test_there_are_turns_for_a_step_where_blocks_have_no_room() -> None:
    class Crowded:
        def shared_room(self, blocks: int) -> int:
            return 6464  # of SM86, for each of two blocks with a head_dim of 256

    assert decode_attention._turned_steps(Crowded(), 8192, 2, 64) == 1  # type: ignore[arg-type]


def test_a_bias_of_another_shape_is_refused() -> None:
    case = make_case(head_dim=64, num_heads=4, lengths=[1], device="cpu")
    for heads, dim, problem in ((1, 64, r"k_bias\.values has shape"), (2, 128, r"k_bias\.values has shape")):
        with pytest.raises(KernelArgumentError, match=problem):
            large_bias(heads, dim, 8, "cpu").check(case.pages)
    bias = large_bias(2, 64, 8, "cpu")
    with pytest.raises(KernelArgumentError, match=r"k_bias\.rotary has shape"):
        dataclasses.replace(bias, rotary=bias.rotary[:, :16].contiguous()).check(case.pages)
    with pytest.raises(KernelArgumentError, match=r"k_bias\.values is torch\.float16"):
        dataclasses.replace(bias, values=bias.values.half()).check(case.pages)
    with pytest.raises(KernelArgumentError, match=r"k_bias\.turns\.\w+ has shape"):
        dataclasses.replace(bias, turns=large_bias(2, 64, 17, "cpu").turns).check(case.pages)


# ---- On the GPU -----------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_formats_and_head_dims(kv_format: str, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(kv_format, head_dim, dtype=dtype)
    assert_close(run(case), case.reference(), dtype, kv_format)


@gpu
@pytest.mark.parametrize(
    "cut", [Cut(16, 16), Cut(64, 64), Cut(448, 448), Cut(1024, 192), Cut(2048, 16), Cut(8192, 8192)], ids=str
)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_cuts(kv_format: str, cut: Cut) -> None:
    case = make_case(kv_format)
    assert_close(run(case, make_splits(case, cut)), case.reference(), FP16, kv_format)


@gpu
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (9, 3), (14, 2), (16, 1), (17, 1), (24, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_heads_per_kv_head(kv_format: str, head_dim: int, heads: tuple[int, int]) -> None:
    case = make_case(kv_format, head_dim, *heads, lengths=[1, 100, 700, 0, 2049])
    assert_close(run(case, make_splits(case, Cut(256, 256))), case.reference(), FP16, kv_format)


@gpu
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
@pytest.mark.parametrize("kv_format", ["fp16", "int8", "fp8_e4m3"])
def test_block_sizes(kv_format: str, block_size: int) -> None:
    case = make_case(kv_format, block_size=block_size, num_heads=7, num_kv_heads=7)
    assert_close(run(case, make_splits(case, Cut(320, 64))), case.reference(), FP16, kv_format)


@gpu
def test_a_long_sequence() -> None:
    case = make_case("fp8_e4m3", lengths=[32768, 3, 20001])
    assert_close(run(case), case.reference(), FP16, "fp8_e4m3")


@gpu
@pytest.mark.parametrize("kv_format", FORMATS)
def test_peaked_scores(kv_format: str) -> None:
    case = make_case(kv_format, q_scale=60.0)
    assert_close(run(case), case.reference(), FP16, kv_format, slack=4 if kv_format != "bf16" else 16)


@gpu
@pytest.mark.parametrize("q_scale", [1e-30, 1e8])
@pytest.mark.parametrize("kv_format", ["fp16", "int8", "fp8_e4m3"])
def test_queries_beyond_the_range_of_fp16(kv_format: str, q_scale: float) -> None:
    case = make_case(kv_format, dtype=BF16, q_scale=q_scale)
    assert_close(run(case), case.reference(), BF16, kv_format, slack=2)


@gpu
@pytest.mark.parametrize("v_scale", [1e-6, 1e-3, 400.0])
def test_int8_scales_of_any_size(v_scale: float) -> None:
    case = make_case("int8", v_scale=v_scale)
    case.planes()[..., -32:].view(FP16)[::3, case.layer, 1] *= 2.0**-9  # a third of the blocks, much smaller
    reference = case.reference()
    out = run(case)
    error = (out.double() - reference).abs()
    assert (error <= 2.0**-10 * reference.abs().amax(1, keepdim=True) + 2.0**-24).all()


@gpu
@pytest.mark.parametrize("software", [0, 1])
@pytest.mark.parametrize("kv_format", ONE_BYTE)
def test_all_codes(kv_format: str, software: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "load", functools.partial(load, SOFTWARE_FP8=software))
    case = make_case(kv_format, lengths=[1, 1])
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(2, 128)
    case.token(0, 0)[0] = 0
    case.token(0, 0)[1] = codes
    dtype = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_format]
    expected = codes.view(dtype).float()
    if kv_format == "int8":
        block = int(case.block_tables[0, 0])
        expected *= case.planes()[block, case.layer, 1][:, 2048:2050].contiguous().view(FP16).float()
    out = run(case)[0].view(2, 8, 128)
    assert torch.equal(out.nan_to_num(12345.0), expected.half()[:, None].expand(2, 8, 128).nan_to_num(12345.0))
    assert out.isnan().sum() == expected.isnan().sum() * 8
    assert_close(run(case)[1:], case.reference()[1:], FP16, kv_format)


@gpu
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_bias_that_k_lacks(kv_format: str, head_dim: int, dtype: torch.dtype) -> None:
    case = with_bias(make_case(kv_format, head_dim, dtype=dtype))
    assert_as_exact_as_fp16_keys(run(case), case)


@gpu
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (14, 2), (16, 1), (17, 1), (28, 4)], ids=str)
@pytest.mark.parametrize("cut", [Cut(16, 16), Cut(256, 256), Cut(2048, 16), Cut(8192, 8192)], ids=str)
@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_a_bias_with_any_heads_and_cut(kv_format: str, cut: Cut, heads: tuple[int, int]) -> None:
    case = with_bias(make_case(kv_format, 64, *heads, lengths=[1, 100, 700, 0, 2049]))
    assert_as_exact_as_fp16_keys(run(case, make_splits(case, cut)), case)


@gpu
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("positions", [20, 300, 32768])
def test_a_bias_at_any_position(positions: int, theta: float) -> None:
    """The table may be shorter than a step, and a warp may find its spins often."""
    case = with_bias(make_case("int8", lengths=[positions, 3]), positions, theta=theta)
    for cut in (Cut(64, 64), Cut(32768, 32768)):
        assert_as_exact_as_fp16_keys(run(case, make_splits(case, cut)), case)


@gpu
@pytest.mark.parametrize("q_scale", [1e-30, 1e-4, 1e4])
@pytest.mark.parametrize("kv_format", ["fp16", "bf16", "int8", "fp8_e4m3"])
def test_a_bias_with_queries_of_any_size(kv_format: str, q_scale: float) -> None:
    """Scores are of the usual size, all from the bias."""
    case = with_bias(make_case(kv_format, dtype=BF16, q_scale=q_scale), factor=1.25)
    assert case.k_bias is not None
    case.planes()[:, :, 0] = 0
    case.k_bias.values.div_(q_scale)
    assert_close(run(case), case.reference(), BF16, kv_format, slack=2)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_a_bias_of_zero_in_one_kv_head(dtype: torch.dtype) -> None:
    """There nothing says how large spins become; q of 32768 times the largest scale is still a number."""
    case = with_bias(make_case("int8", dtype=dtype))
    assert case.k_bias is not None
    case.k_bias.values[0] = 0
    case.q[:, 0, 0] = 32768
    assert torch.isfinite(run(case)).all()
    case.q[:, 0, 0] = 0
    assert_as_exact_as_fp16_keys(run(case), case)


@gpu
@pytest.mark.parametrize("kv_format", FORMATS)
def test_with_a_bias_a_sequence_is_independent_of_its_batch_and_runs_are_equal(kv_format: str) -> None:
    case = with_bias(make_case(kv_format))
    splits = make_splits(case, deterministic=True)
    together = run(case, splits)
    assert torch.equal(run(case, splits), together)
    alone = dataclasses.replace(
        case, q=case.q[8:9], block_tables=case.block_tables[8:9], context_lens=case.context_lens[8:9]
    )
    assert torch.equal(run(alone, make_splits(alone, deterministic=True))[0], together[8])


@gpu
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("kv_format", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_nan_stays_in_its_sequence(kv_format: str, part: int) -> None:
    case = make_case(kv_format, lengths=[100, 300, 5])
    splits = make_splits(case, Cut(128, 128))
    clean = run(case, splits)
    case.token(1, 200)[part, 0] = 0xFF
    out = run(case, splits)
    assert out[1, : 8 * 128].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]]) and torch.equal(out[1, 8 * 128 :], clean[1, 8 * 128 :])


@gpu
@pytest.mark.parametrize("kv_format", FORMATS)
def test_deterministic_splits_make_a_sequence_independent_of_its_batch(kv_format: str) -> None:
    case = make_case(kv_format)
    together = run(case, make_splits(case, deterministic=True))
    for row in (4, 6, 8):
        alone = dataclasses.replace(
            case,
            q=case.q[row : row + 1],
            block_tables=case.block_tables[row : row + 1],
            context_lens=case.context_lens[row : row + 1],
        )
        assert torch.equal(run(alone, make_splits(alone, deterministic=True))[0], together[row])


@gpu
@pytest.mark.parametrize("cut", [None, Cut(64, 64), Cut(512, 16)], ids=str)
def test_runs_are_equal(cut: Cut | None) -> None:
    case = make_case("fp16", lengths=[5000, 3000, 77] * 8)
    splits = make_splits(case, cut)
    first = run(case, splits)
    for _ in range(20):
        assert torch.equal(run(case, splits), first)


@gpu
@pytest.mark.parametrize("cut", [Cut(48, 48), Cut(512, 16), Cut(1024, 128)], ids=str)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_items_that_are_claimed_or_not_have_the_same_result(kv_format: str, cut: Cut) -> None:
    """More items than blocks, in either way at any time."""
    case = make_case(kv_format, lengths=[5000, 0, 3000, 77, 1] * 24)
    splits = make_splits(case, cut)
    assert int(splits.plan[0]) * splits.groups > splits.blocks
    results = []
    for claims in (0, 1, 1, 0, 1):
        splits.plan[1] = claims
        results.append(run(case, splits))
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(results[0], case.reference(), FP16, kv_format)


@gpu
@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_that_are_neighbours_are_read_after_they_are_written(kv_format: str) -> None:
    """Rows are the last tokens of sequences; the kernel in front of attention writes them, over NaN."""
    contexts = [64, 63, 62, 61, 5000, 4999, 4998, 1025]
    case = make_case(kv_format, lengths=[64, 5000, 1025])
    sequences = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2], dtype=torch.int32, device="cuda")
    positions = torch.tensor(contexts, dtype=torch.int32, device="cuda") - 1
    tables = case.block_tables[sequences.long()].contiguous()
    rows = dataclasses.replace(
        case, q=case.q.new_empty(8, 16, 128), block_tables=tables, context_lens=(positions + 1).int()
    )
    qkv = torch.randn(8, 20 * 128, device="cuda").half()
    rotary = torch.randn(5000, 64, 2, device="cuda")
    splits = make_splits(rows)
    out = torch.empty(8, 16 * 128, device="cuda", dtype=FP16)
    for _ in range(20):
        for row, position in enumerate(positions.tolist()):
            rows.token(row, position).fill_(0xFF)
        torch.cuda.synchronize()
        rope_and_write(qkv, None, rotary, positions, sequences, case.block_tables, case.pages, case.layer, 16, rows.q)
        paged_decode(rows.q, rows.pages, rows.layer, rows.block_tables, rows.context_lens, splits, out)
        torch.cuda.synchronize()
        assert_close(out, rows.reference(), FP16, kv_format)


@gpu
@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_one_graph_serves_all_lengths(kv_format: str) -> None:
    case = make_case(kv_format, lengths=[5000, 1000, 3000, 1])
    splits = make_splits(case)
    out = torch.empty_like(case.q).flatten(1)
    run(case, splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            paged_decode(case.q, case.pages, case.layer, case.block_tables, case.context_lens, splits, out)
    for lengths in ([5000, 1000, 3000, 1], [0, 17, 2999, 0], [4097, 1, 1, 1], [64, 64, 64, 1]):
        plan = splits.plan_for(np.array(lengths))
        splits.plan[: len(plan)] = torch.from_numpy(plan).cuda()
        case.context_lens.copy_(torch.tensor(lengths))
        splits.partials.fill_(float("nan"))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, case.reference(), FP16, kv_format)
        assert not splits.counters.any()


@gpu
def test_arguments_are_refused_by_name() -> None:
    case = make_case(lengths=[20, 30])
    splits = make_splits(case)
    out = torch.empty_like(case.q).flatten(1)

    def refuse(text: str, layer: int = 1, **changes: Tensor) -> None:
        named = {"q": case.q, "block_tables": case.block_tables, "context_lens": case.context_lens, "out": out}
        with pytest.raises(KernelArgumentError, match=text):
            paged_decode(pages=case.pages, layer=layer, splits=splits, **(named | changes))

    refuse("q is torch.float32", q=case.q.float())
    refuse("q has shape", q=case.q[..., :64].contiguous())
    refuse("layer is 2", layer=2)
    refuse("block_tables is torch.int64", block_tables=case.block_tables.long())
    refuse("context_lens has shape", context_lens=case.context_lens[:1])
    refuse("out is torch.bfloat16", out=out.bfloat16())
    refuse("another number of heads", q=case.q.repeat(1, 2, 1), out=out.repeat(1, 2))
