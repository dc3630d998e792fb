"""Attention of one query token per sequence over the paged KV pool, and how its work is cut into pieces.

Owns: the kernel's wrapper, `DecodeSplits` (its plan and workspace), the reference in plain torch. Does not know: who
fills the pool, where the block tables come from, which queries belong to whom.

A sequence's tokens are cut into splits of `split_tokens`; a work item is one split for one KV head's queries. The grid
is fixed and takes the items in turn, so one captured CUDA graph serves all context lengths: the host only writes the
plan, block tables and lengths anew. They must be written by copies or by work that ended before the kernel in front of
this one began, as this kernel reads them before that one has ended; q and the newest K and V it reads afterwards.

Reduction order: within a split it is fixed; across splits it depends on `split_tokens`. With a fixed `split_tokens`
every sequence's result is therefore the same, bit by bit, in any batch.

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
from .loader import Variant, load
from .pages import FORMAT_NUMBERS, HEAD_DIMS, KVPages, PageFormat, stored_keys_and_values

DETERMINISTIC_SPLIT = 512
"""`split_tokens` where results must not depend on the batch."""

_SPLIT_MULTIPLE = 128
_SPLITS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64])  # of the longest sequence
_EXTRA_WAVES = 2  # items that splitting may add, in grids
# What an item, and a level of the tree that merges splits, cost besides reading: in tokens that a block could read.
_ITEM_COST, _MERGE_COST = 256, 192
_SPLITS_OF_LEVELS = np.array([1, 8, 64])


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """How the work of a step is cut, and the memory for merging it: made once, before any graph is captured.

    The host writes `plan_for(...)` into the beginning of `plan` before each step. Not for two streams at a time.
    """

    plan: Tensor
    """int32: split_tokens; [B + 1] how many splits come before each sequence, and, last, are there; [splits] whose."""
    partials: Tensor
    """fp32 [slots, group heads, D]: what the work items of split sequences have gathered."""
    statistics: Tensor
    """fp32 [slots, group heads, 2]: their largest scores and sums of weights."""
    counters: Tensor
    """int32 [slots]: how many parts of what is to be merged are there. Zero between calls."""
    max_batch: int
    groups: int
    """Groups of query heads, each a work item per split."""
    blocks: int
    """The grid."""
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
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        blocks = multiprocessors * _macros(False, pages.format, pages.head_dim, heads // 8)["BLOCKS_PER_SM"]
        fixed = DETERMINISTIC_SPLIT if deterministic else None
        splits = max_batch + (_EXTRA_WAVES * blocks // groups if fixed is None else max_tokens // fixed)
        return cls(
            plan=torch.zeros(2 + max_batch + splits, dtype=torch.int32, device=device),
            partials=torch.empty(splits * groups, heads, pages.head_dim, device=device),
            statistics=torch.empty(splits * groups, heads, 2, device=device),
            counters=torch.zeros(splits * groups, dtype=torch.int32, device=device),
            max_batch=max_batch,
            groups=groups,
            blocks=blocks,
            split_tokens=fixed,
        )

    def plan_for(self, context_lens: np.ndarray) -> np.ndarray:
        """What to write into the beginning of `plan` for context_lens [B] (0 for a padding row)."""
        return plan_splits(context_lens, self.groups, self.blocks, self.split_tokens)


def plan_splits(context_lens: np.ndarray, groups: int, blocks: int, split_tokens: int | None = None) -> np.ndarray:
    """The plan for context_lens [B], int32: see `DecodeSplits.plan`. Every sequence has at least one split.

    Without `split_tokens`, the one of a few candidates that should end first on `blocks` blocks: long splits leave
    blocks idle, short ones cost merging.
    """
    lengths = np.maximum(context_lens, 1)
    if split_tokens is None:
        split_tokens = _choose_split_tokens(lengths.astype(float), groups, blocks)
    splits = -(-lengths // split_tokens)
    head = np.zeros(2 + len(lengths), np.int32)
    head[0] = split_tokens
    np.cumsum(splits, out=head[2:])
    return np.concatenate([head, np.repeat(np.arange(len(lengths), dtype=np.int32), splits)])


def _choose_split_tokens(lengths: np.ndarray, groups: int, blocks: int) -> int:
    longest = lengths.max()
    candidates = np.ceil(longest / (_SPLITS * _SPLIT_MULTIPLE)) * _SPLIT_MULTIPLE
    items = np.ceil(np.multiply.outer(1.0 / candidates, lengths)).sum(axis=1) * groups
    in_waves = np.ceil(items / blocks) * (candidates + _ITEM_COST)
    in_turn = (lengths.sum() * groups + items * _ITEM_COST) / blocks + candidates + _ITEM_COST
    levels = np.searchsorted(_SPLITS_OF_LEVELS, np.ceil(longest / candidates))
    cost = np.minimum(in_waves, in_turn) + levels * _MERGE_COST
    cost[items > len(lengths) * groups + _EXTRA_WAVES * blocks] = math.inf
    return int(candidates[cost.argmin()])


def paged_decode(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, context_lens: Tensor, splits: DecodeSplits, out: Tensor
) -> None:
    """Attention of each sequence's newest token to all its tokens, itself included, whose K and V are in the pool.

    q fp16 or bf16 [B, H, D]; block_tables int32 [B, max_blocks]; context_lens int32 [B], 0 for a padding row, whose
    output is zeros; out [B, H * D] in q's dtype. `splits.plan` holds the plan for these lengths. Scores are scaled by
    1 / sqrt(D). Tensor cores work in fp16, with a bf16 pool in bf16. Raises KernelArgumentError.
    """
    check_tensor("q", q, ACTIVATIONS, (("B", None), ("H", None), ("D", pages.head_dim)))
    batch, num_heads = q.shape[0], q.shape[1]
    heads, groups = _group(pages, num_heads)
    pages.check(layer)
    check_tensor("block_tables", block_tables, torch.int32, (("B", batch), ("max_blocks", None)), alignment=4)
    check_tensor("context_lens", context_lens, torch.int32, (("B", batch),), alignment=4)
    check_tensor("out", out, q.dtype, (("B", batch), ("H * D", num_heads * pages.head_dim)))
    _check_splits(splits, batch, groups, heads, pages.head_dim)
    macros = _macros(q.dtype is torch.bfloat16, pages.format, pages.head_dim, heads // 8)
    load("paged_decode", **macros).launch(
        (splits.blocks,),
        32 * macros["WARPS"],
        (
            *(q, pages.pool, block_tables, context_lens, splits.plan),
            *(splits.partials, splits.statistics, splits.counters, out),
            *(batch, block_tables.shape[1], num_heads, pages.num_kv_heads),
            *(pages.block_size, pages.block_bytes, pages.layer_offset(layer)),
            math.log2(math.e) / math.sqrt(pages.head_dim),
        ),
    )


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
def _macros(bf16: bool, kv_format: PageFormat, head_dim: int, head_tiles: int) -> dict[str, int]:
    """`head_tiles`: eights of query heads. As many warps and tokens under way as there are registers for."""
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
    }


VARIANTS = tuple(
    Variant("paged_decode", _macros(bf16, kv_format, head_dim, head_tiles))
    for bf16, kv_format, head_dim, head_tiles in itertools.product((False, True), FORMAT_NUMBERS, HEAD_DIMS, (1, 2))
    if head_tiles == 1 or head_dim <= 128
)


# ---- Reference ------------------------------------------------------------------------------------------------------


def paged_decode_reference(q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, context_lens: Tensor) -> Tensor:
    """The same in fp64 on what the pool's bytes say, on any device: fp64 [B, H * D]."""
    out = torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=torch.float64, device=q.device)
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        k, v = (x.double().transpose(0, 1) for x in stored_keys_and_values(pages, layer, block_tables[row], length))
        heads = q[row].double().view(pages.num_kv_heads, -1, pages.head_dim)
        weights = torch.softmax(heads @ k.transpose(1, 2) / math.sqrt(pages.head_dim), dim=-1)
        out[row] = (weights @ v).flatten()
    return out
