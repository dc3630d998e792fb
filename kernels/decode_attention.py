"""Attention of one query token per sequence over the paged KV pool, and how its work is cut into parts.

Owns: the kernel's wrapper, `DecodeSplits` (its plan and workspace), the reference in plain torch. Does not know: who
fills the pool, where the block tables come from, which queries belong to whom.

A sequence's tokens are cut into parts; a work item is one part for one KV head's queries. The grid is fixed, and each
block begins with one item, the long ones first. Where the parts are about alike the next items are dealt out in turn;
where they are not, each block claims one when it has ended another, so that all end at about the same time. One
captured CUDA graph serves all context lengths: the host only writes the plan and the block tables anew.

The kernel reads much before the kernel in front of it has ended. So the plan, the block tables, and the K and V of all
tokens but a sequence's last B must be written by copies or by work that ended before that kernel began; q and the last
tokens are read afterwards. (Rows of one pass may be neighbouring tokens of a sequence, hence B.)

Reduction order: within a part it is fixed; across parts it depends on how the sequence is cut. With a fixed
`split_tokens` every sequence's result is therefore the same, bit by bit, in any batch.

B is sequences, H query heads, D the head dimension; a group is up to 8 or 16 query heads that share a KV head.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .checks import ACTIVATIONS, check_multiple, check_tensor
from .errors import KernelArgumentError
from .loader import Function, Variant, load
from .pages import FORMAT_NUMBERS, HEAD_DIMS, KVPages, PageFormat, stored_keys_and_values
from .rotated_bias import TILED_ROWS, RotatedBias

DETERMINISTIC_SPLIT = 512
"""`split_tokens` where results must not depend on the batch."""

_TILE = 16  # tokens; parts begin at multiples of it
_SHORTEST = 128
_MOST_PARTS = 128  # of a sequence
_FEWEST_ROUNDS = 4  # of a block, in a long part beside which there are short ones
_EXTRA_WAVES = 6  # items that splitting may add, in grids
_FULL_WAVE = 0.9  # of what all blocks could read while one reads a part: good enough to look no further
# What an item, a claim, and a level of the tree that merges parts cost besides reading: in tokens that a block could
# read. Fitted on an H200, where a block reads 60 in a microsecond if all do.
_ITEM_COST, _CLAIM_COST, _MERGE_COST = 128, 16, 100
_ALONE = 0.6  # what reading a part takes where most blocks are idle
_FAN = 16  # parts that a node of that tree merges
_PARTS_OF_LEVELS = (1, _FAN, _FAN**2)  # more need another level
_PART_FIELDS = 6
_L2_SHARE = 0.5  # of the L2 cache, for what is read ahead
_MOST_TURNS_BYTES = 16 << 10  # measured on an H200: two steps at a head_dim of 128; more take longer to copy


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """How the work of a step is cut, and the memory for merging it: made once, before any graph is captured.

    The host writes `plan_for(...)` into the beginning of `plan` before each step. Not for two streams at a time.
    """

    plan: Tensor
    """int32 [1 + parts, 6], flat: the number of parts, and whether blocks claim items; then of each part, in the order
    in which they are begun, the sequence, which of its parts, of how many, how many parts come before the sequence's,
    first token, end."""
    partials: Tensor
    """fp32 [slots, group heads, D]: what the work items of split sequences have gathered."""
    statistics: Tensor
    """fp32 [slots, group heads, 2]: their largest scores and sums of weights."""
    counters: Tensor
    """int32 [1 + slots]: the claimed items; how many parts of what is to be merged are there. Zero between calls."""
    max_batch: int
    groups: int
    """Groups of query heads, each a work item per part."""
    blocks: int
    """The grid."""
    round_tokens: int
    """What a block's warps take in turn before the first is due again."""
    ahead: int
    """Tiles per warp that are brought into the L2 cache ahead."""
    split_tokens: int | None
    """Fixed, or None where the plan may choose."""

    @classmethod
    def allocate(
        cls, pages: KVPages, num_heads: int, max_batch: int, max_tokens: int, deterministic: bool = False
    ) -> DecodeSplits:
        """For up to `max_batch` sequences that have `max_tokens` tokens in all, on the pool's device.

        Raises KernelArgumentError for a shape that the kernel does not have.
        """
        heads, groups = _group(pages, num_heads)
        device = pages.pool.device
        properties = torch.cuda.get_device_properties(device)
        macros = _macros(False, pages.format, pages.head_dim, heads // 8)
        blocks = properties.multi_processor_count * macros["BLOCKS_PER_SM"]
        tile_bytes = 2 * _TILE * pages.plane_bytes // pages.block_size
        fixed = DETERMINISTIC_SPLIT if deterministic else None
        parts = max_batch + (_EXTRA_WAVES * blocks // groups if fixed is None else max_tokens // fixed)
        return cls(
            plan=torch.zeros(_PART_FIELDS * (1 + parts), dtype=torch.int32, device=device),
            partials=torch.empty(parts * groups, heads, pages.head_dim, device=device),
            statistics=torch.empty(parts * groups, heads, 2, device=device),
            counters=torch.zeros(1 + parts * groups, dtype=torch.int32, device=device),
            max_batch=max_batch,
            groups=groups,
            blocks=blocks,
            round_tokens=macros["WARPS"] * macros["TILES"] * _TILE,
            ahead=min(32, int(_L2_SHARE * properties.L2_cache_size / (blocks * macros["WARPS"] * tile_bytes))),
            split_tokens=fixed,
        )

    def plan_for(self, context_lens: np.ndarray) -> np.ndarray:
        """What to write into the beginning of `plan` for context_lens [B] (0 for a padding row)."""
        if self.split_tokens is None:
            cut = choose_cut(context_lens, self.groups, self.blocks, self.round_tokens)
        else:
            cut = Cut(self.split_tokens, self.split_tokens)
        return plan_parts(context_lens, cut, self.groups, self.blocks)


@dataclass(frozen=True, slots=True)
class Cut:
    """Sequences are cut into long parts as often as one fits, and what is left over into short ones."""

    long: int
    short: int


def plan_parts(context_lens: np.ndarray, cut: Cut, groups: int, blocks: int) -> np.ndarray:
    """The plan for context_lens [B], int32: see `DecodeSplits.plan`. Every sequence has at least one part."""
    longs = context_lens // cut.long
    counts = np.maximum(longs - (longs * cut.long - context_lens) // cut.short, 1)
    rows, ends_before = np.arange(len(counts), dtype=np.int32), counts.cumsum()
    longer = cut.long - cut.short
    sequences = np.empty((len(counts), _PART_FIELDS), np.int32)
    fields = (rows, 0, counts, ends_before - counts, longs * longer, context_lens)
    for field, values in enumerate(fields):
        sequences[:, field] = values
    plan = np.empty((1 + int(ends_before[-1]), _PART_FIELDS), np.int32)
    plan[0] = (len(plan) - 1, 0, 0, 0, 0, 0)
    parts = plan[1:]
    sequences.take(rows.repeat(counts), axis=0, out=parts, mode="clip")
    numbers = np.arange(len(parts), dtype=np.int32) - parts[:, 3]
    begins, ends = numbers * cut.short, (numbers + 1) * cut.short
    if longer:
        begins += np.minimum(numbers * longer, parts[:, 4])
        ends += np.minimum((numbers + 1) * longer, parts[:, 4])
    parts[:, 1], parts[:, 4] = numbers, begins
    np.minimum(ends, parts[:, 5], out=parts[:, 5])
    if len(parts) * groups > blocks:
        sizes = parts[:, 4] - parts[:, 5]  # below 0
        if sizes.min() < sizes.max():
            order = sizes.argsort(kind="stable")
            plan[1:] = parts.take(order, axis=0)
            plan[0, 1] = _should_claim(-sizes[order], groups, blocks)
    return plan.ravel()


def _should_claim(sizes: np.ndarray, groups: int, blocks: int) -> bool:
    """Whether parts of these sizes, the longest first, are done earlier if blocks claim items than if they get them in
    turn, the first block the longest ones."""
    in_turn = [int(sizes[item // groups]) for item in range(0, len(sizes) * groups, blocks)]
    evenly = int(sizes.sum()) * groups / blocks
    claimed = max(evenly, int(sizes[(blocks - 1) // groups]) + in_turn[1])
    return sum(in_turn) > claimed + len(in_turn) * _CLAIM_COST


def choose_cut(context_lens: np.ndarray, groups: int, blocks: int, round_tokens: int) -> Cut:
    """The cut, of a few candidates, that should end first on `blocks` blocks.

    Long parts leave blocks idle, short ones cost merging. So either all parts are alike, or most tokens are in long
    parts, and the rest in short ones that blocks which end early take over.
    """
    longest, total = max(int(context_lens.max()), 1), int(context_lens.sum()) * groups
    one_wave = blocks // (len(context_lens) * groups)  # parts of each sequence that are one
    if longest <= _SHORTEST:
        return Cut(_SHORTEST, _SHORTEST)
    if 1 <= one_wave <= _FAN:
        long = _round_up(longest / one_wave)
        if long >= round_tokens and total >= _FULL_WAVE * blocks * long:
            return Cut(long, long)
    return _cheapest_cut(context_lens, groups, blocks, round_tokens, longest, total)


def _round_up(tokens: float, step: int = _TILE) -> int:
    return math.ceil(tokens / step) * step


def _alike(tokens: float, round_tokens: int) -> int:
    """The length of parts that are to be alike. A round that is not full takes as long and leaves warps without work,
    which shows where rounds are few."""
    return _round_up(tokens, round_tokens if tokens <= 2 * round_tokens else _TILE)


def _cheapest_cut(
    context_lens: np.ndarray, groups: int, blocks: int, round_tokens: int, longest: int, total: int
) -> Cut:
    share = total / blocks
    numbers = (1, 2, _FAN, *(math.ceil(waves * longest / share) for waves in (0.5, 0.7, 0.9, 1, 2)))
    cuts = [(long, long) for long in {_alike(longest / min(n, _MOST_PARTS), round_tokens) for n in numbers}]
    rounds = int(share / round_tokens)
    if rounds > _FEWEST_ROUNDS:
        cuts += [((rounds - fewer) * round_tokens, max(round_tokens, _SHORTEST)) for fewer in (0, 1)]
    long, short = np.array(cuts, float).T[:, :, None]
    in_longs = np.maximum(context_lens, 1) / long
    longs = np.floor(in_longs)
    counts = longs + np.ceil((in_longs - longs) * (long / short * 0.999999))  # a whole number of short ones stays that
    longs = np.where(long == short, counts, longs)  # a sequence's last part may be as good as a long one
    items, long_items = (counts.sum(axis=1) * groups).tolist(), (longs.sum(axis=1) * groups).tolist()
    most_parts, most_items = counts.max(axis=1).tolist(), len(context_lens) * groups + _EXTRA_WAVES * blocks
    fitting = [i for i in range(len(cuts)) if items[i] <= most_items]
    costs = [_cost(*cuts[i], share, items[i] / blocks, long_items[i] / blocks, most_parts[i]) for i in fitting]
    return Cut(*cuts[fitting[costs.index(min(costs))]])


def _cost(long: int, short: int, share: float, waves: float, long_waves: float, most_parts: float) -> float:
    """When the last block ends, in tokens that one reads until then. `share` are a block's tokens if all have as many,
    `waves` and `long_waves` its items and its long ones, `most_parts` those of the longest sequence."""
    claimed = max(share + waves * (_ITEM_COST + _CLAIM_COST), math.ceil(long_waves) * (long + _ITEM_COST))
    claimed += max(share - long_waves * long, 0) / max(waves - long_waves, 1e-9) / 4
    if long == short:  # wave by wave; the last one is faster if it leaves blocks idle
        whole = math.ceil(waves) - 1
        in_turn = whole * (long + _ITEM_COST) + min(max(waves - whole + 0.05, _ALONE), 1) * long + _ITEM_COST
        claimed = min(claimed, in_turn)
    levels = sum(most_parts > parts for parts in _PARTS_OF_LEVELS)
    return claimed + levels * _MERGE_COST


def paged_decode(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, context_lens: Tensor, splits: DecodeSplits,
    out: Tensor, k_bias: RotatedBias | None = None,
) -> None:  # fmt: skip
    """Attention of each sequence's newest token to all its tokens, itself included, whose K and V are in the pool.

    q fp16 or bf16 [B, H, D]; block_tables int32 [B, max_blocks]; context_lens int32 [B], 0 for a padding row, whose
    output is zeros; out [B, H * D] in q's dtype. `splits.plan` holds the plan for these lengths. Scores are scaled by
    1 / sqrt(D). Tensor cores work in fp16, with a bf16 pool in bf16. `k_bias`: what the pool's K lacks; its scores are
    about as exact as if an fp16 pool held it. Raises KernelArgumentError.
    """
    check_tensor("q", q, ACTIVATIONS, (("B", None), ("H", None), ("D", pages.head_dim)))
    batch, num_heads = q.shape[0], q.shape[1]
    heads, groups = _group(pages, num_heads)
    pages.check(layer)
    check_tensor("block_tables", block_tables, torch.int32, (("B", batch), ("max_blocks", None)), alignment=4)
    check_tensor("context_lens", context_lens, torch.int32, (("B", batch),), alignment=4)
    check_tensor("out", out, q.dtype, (("B", batch), ("H * D", num_heads * pages.head_dim)))
    _check_splits(splits, batch, groups, heads, pages.head_dim)
    if k_bias is not None:
        k_bias.check(pages)
    macros = _macros(q.dtype is torch.bfloat16, pages.format, pages.head_dim, heads // 8, k_bias is not None)
    kernel = load("paged_decode", **macros)
    blocks, step_bytes, steps = macros["BLOCKS_PER_SM"], 2 * macros["TILES"] * _TILE * pages.head_dim, 0
    if k_bias is not None:
        steps = _turned_steps(kernel, step_bytes, blocks, macros["WARPS"] * macros["TILES"] * _TILE)
    shared_bytes = steps * step_bytes
    kernel.prefer_l1(blocks, shared_bytes)
    kernel.launch(
        (splits.blocks,),
        32 * macros["WARPS"],
        (
            *(q, pages.pool, block_tables, splits.plan),
            *(splits.partials, splits.statistics, splits.counters, out),
            *(batch, splits.plan.numel() // _PART_FIELDS - 1, block_tables.shape[1], num_heads, pages.num_kv_heads),
            *(pages.block_size, pages.block_bytes, pages.layer_offset(layer), _inverse(pages.block_size)),
            *(splits.ahead, math.log2(math.e) / math.sqrt(pages.head_dim)),
            *(() if k_bias is None else (k_bias.values, k_bias.rotary, len(k_bias.rotary))),
            *(() if k_bias is None else (k_bias.turns.tiles, len(k_bias.turns.tiles), steps)),
        ),
        shared_bytes,
    )


def _inverse(block_size: int) -> int:
    """With which the kernel divides: token // block_size is 2 * token * this >> 32."""
    return -(-(1 << 31) // block_size)


@functools.cache
def _turned_steps(kernel: Function, step_bytes: int, blocks: int, stride: int) -> int:
    """For how many steps of a warp, `stride` tokens apart, there are turns, `step_bytes` each: as many as `blocks` have
    room for, up to a point. Where they have none, as with a head_dim of 256 on SM86, one block fewer runs at a time."""
    most = min(_MOST_TURNS_BYTES, kernel.shared_room(blocks)) // step_bytes
    return max(1, min(most, TILED_ROWS // stride))


def _check_splits(splits: DecodeSplits, batch: int, groups: int, heads: int, head_dim: int) -> None:
    if splits.groups != groups or splits.partials.shape[1:] != (heads, head_dim):
        raise KernelArgumentError("splits were allocated for another number of heads or another head_dim")
    if batch > splits.max_batch:
        raise KernelArgumentError(f"q has {batch} sequences; splits were allocated for {splits.max_batch}")


def _group(pages: KVPages, num_heads: int) -> tuple[int, int]:
    """(query heads that a work item has room for, groups of them in all). Raises KernelArgumentError."""
    check_multiple("H", num_heads, pages.num_kv_heads)
    shared_by = num_heads // pages.num_kv_heads
    heads = 16 if shared_by > 8 and pages.head_dim <= 128 else 8
    return heads, pages.num_kv_heads * -(-shared_by // heads)


@functools.cache
def _macros(bf16: bool, kv_format: PageFormat, head_dim: int, head_tiles: int, biased: bool = False) -> dict[str, int]:
    """`head_tiles`: eights of query heads; `biased`: K lacks a bias. As many warps and tokens under way as there are
    registers for."""
    if 8 * head_tiles * head_dim > 1024:
        warps, blocks, tiles = 4, 2, 1
    elif kv_format in ("fp16", "bf16") or head_tiles > 1:
        warps, blocks, tiles = 8, 1, 2
    else:
        warps, blocks, tiles = 6, 2, 2
    return {
        "ACTIVATION_BF16": int(bf16),
        "KV_FORMAT": FORMAT_NUMBERS[kv_format],
        "HEAD_DIM": head_dim,
        "HEAD_TILES": head_tiles,
        "WARPS": warps,
        "BLOCKS_PER_SM": blocks,
        "TILES": tiles,
        **({"K_BIAS": 1} if biased else {}),
    }


VARIANTS = tuple(
    Variant("paged_decode", _macros(bf16, kv_format, head_dim, head_tiles, biased))
    for bf16, kv_format, head_dim, head_tiles, biased in itertools.product(
        (False, True), FORMAT_NUMBERS, HEAD_DIMS, (1, 2), (False, True)
    )
    if head_tiles == 1 or head_dim <= 128
)


# ---- Reference ------------------------------------------------------------------------------------------------------


def paged_decode_reference(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, context_lens: Tensor, k_bias: RotatedBias | None = None
) -> Tensor:
    """The same in fp64 on what the pool's bytes say, on any device: fp64 [B, H * D]."""
    out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.float64, device=q.device)
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        k, v = (x.double().transpose(0, 1) for x in stored_keys_and_values(pages, layer, block_tables[row], length))
        if k_bias is not None:
            k_bias.add_to(k, 0)
        heads = q[row].double().view(pages.num_kv_heads, -1, pages.head_dim)
        weights = torch.softmax(heads @ k.transpose(1, 2) / math.sqrt(pages.head_dim), dim=-1)
        out[row] = (weights @ v).flatten()
    return out
