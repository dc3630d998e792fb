"""Causal attention of prompt chunks over the paged pool, every KV format.

Owns: `paged_prefill`, which picks the kernel; the one for all architectures, `paged_prefill_mma`, with its choice of
tile and its `PrefillSplits`; the plain-torch reference. Does not know: how K and V came into the pool, who schedules
chunks.

Products take fp16 operands (bf16 ones from a bf16 pool): q and int8 values are rounded to them; sums are fp32. A
token's result depends on its chunk, on the batch and on `splits` only through rounding: the order of its sum, and the
power of two that the softmax is relative to. Whoever needs more sends tokens through `decode_attention`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .checks import ACTIVATIONS, check_tensor
from .errors import KernelArgumentError
from .loader import ARCHITECTURES, device_architecture, load, variants
from .pages import FORMAT_NUMBERS, HEAD_DIMS, KVPages, PageFormat, stored_keys_and_values
from .prefill_attention_hopper import paged_prefill_hopper, supports
from .rotated_bias import RotatedBias

_WARP = 32
_MERGED_ROWS = 4
_ASSIGNMENT_BYTES = 128  # as in the .cu
_HOPPER_QUERIES = 128  # of a tile there; chunks below leave it half empty
_STEPS_OF_A_PART = 2  # that take as long as to write a part and merge it
_SPLIT_ROWS = 512  # parts of query rows that `PrefillSplits` holds per multiprocessor
_SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90a": 228, "sm_100": 228, "sm_120": 100}
"""Shared memory of a multiprocessor, of which each block on it costs one KiB more than it asks for."""


@dataclass(frozen=True)
class _Tile:
    """Query rows and keys that a block works on at a time; `blocks` of them run on a multiprocessor together."""

    warps: int
    rows_per_warp: int
    keys: int
    blocks: int

    @property
    def rows(self) -> int:
        return self.warps * self.rows_per_warp

    @property
    def macros(self) -> dict[str, int]:
        return {
            "WARPS": self.warps,
            "ROWS_PER_WARP": self.rows_per_warp,
            "KEYS": self.keys,
            "BLOCKS_PER_SM": self.blocks,
        }

    def shared_bytes(self, page_format: PageFormat, head_dim: int, biased: bool) -> int:
        """As in the .cu: the queries, K and V twice, or once as they are stored and once converted; what is `biased`
        has spins, like the queries, and turns, like K, twice."""
        row = head_dim * 2
        second = {"fp16": row, "bf16": row, "int8": head_dim + 2}.get(page_format, head_dim)
        spins = biased * (self.rows + 2 * self.keys) * row
        return _ASSIGNMENT_BYTES + self.rows * row + spins + self.keys * 2 * (row + second)


# Best first; the first that fits into shared memory is taken. Converting one-byte formats pays off over more rows.
_TILES_OF_TWO_BYTES = {
    64: (_Tile(4, 32, 64, 2), _Tile(4, 32, 32, 2)),
    96: (_Tile(4, 32, 64, 2), _Tile(4, 32, 32, 2), _Tile(4, 16, 32, 2)),
    128: (_Tile(4, 32, 48, 2), _Tile(4, 16, 32, 2), _Tile(4, 16, 32, 1)),
    256: (_Tile(8, 16, 64, 1), _Tile(8, 16, 32, 1), _Tile(4, 16, 32, 1), _Tile(4, 16, 16, 1)),
}
_TILES_OF_ONE_BYTE = _TILES_OF_TWO_BYTES | {
    96: (_Tile(8, 32, 64, 1),),
    128: (_Tile(8, 32, 64, 1), _Tile(4, 16, 32, 2)),
}
_BIASED_TILES = {
    64: (_Tile(4, 32, 64, 2), _Tile(4, 32, 16, 2)),
    96: (_Tile(8, 32, 64, 1), _Tile(8, 16, 64, 1), _Tile(8, 16, 16, 1)),
    128: (_Tile(8, 32, 64, 1), _Tile(8, 16, 64, 1), _Tile(8, 16, 16, 1)),
    256: (_Tile(8, 16, 32, 1), _Tile(4, 16, 32, 1), _Tile(2, 16, 16, 1)),
}


@functools.cache
def _tile(page_format: PageFormat, head_dim: int, architecture: str, biased: bool = False) -> _Tile:
    unbiased = _TILES_OF_TWO_BYTES if page_format in ("fp16", "bf16") else _TILES_OF_ONE_BYTE
    tiles = _BIASED_TILES if biased else unbiased
    limit = _SHARED_KIB[architecture] * 1024
    needs = ((tile, tile.shared_bytes(page_format, head_dim, biased) + 1024) for tile in tiles[head_dim])
    return next(tile for tile, needed in needs if tile.blocks * needed <= limit)


VARIANTS = (
    *(
        variant
        for architecture, head_dim, (page_format, number), biased in product(
            ARCHITECTURES, HEAD_DIMS, FORMAT_NUMBERS.items(), (False, True)
        )
        for variant in variants(
            "paged_prefill",
            architectures=(architecture,),
            ACTIVATION_BF16=(0, 1),
            KV_FORMAT=(number,),
            HEAD_DIM=(head_dim,),
            **{name: (value,) for name, value in _tile(page_format, head_dim, architecture, biased).macros.items()},
            **({"K_BIAS": (1,)} if biased else {}),
        )
    ),
    *variants("paged_prefill_merge", ACTIVATION_BF16=(0, 1), HEAD_DIM=HEAD_DIMS),
)


class PrefillSplits:
    """Workspace with which few queries on long contexts fill the GPU: blocks share a tile's keys, a merge follows.

    One serves all layers, as launches on a stream follow each other. `parts` and `levels` are the kernels'.
    """

    def __init__(self, head_dim: int, device: torch.device) -> None:
        self.rows = _SPLIT_ROWS * _multiprocessors(device)
        self.parts = torch.empty(self.rows, head_dim, dtype=torch.float32, device=device)
        self.levels = torch.empty(self.rows, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class _Plan:
    """A launch: `blocks` tiles of query rows, the keys of each in `shares`; `k_bias` as for `paged_prefill`."""

    k_bias: RotatedBias | None
    tile: _Tile
    blocks: int
    shares: int


def paged_prefill(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    max_queries: int, max_context: int, out: Tensor, splits: PrefillSplits | None = None,
    k_bias: RotatedBias | None = None,
) -> None:  # fmt: skip
    """Attention of q fp16 or bf16 [T, H, D] over the pool, into `out` [T, H * D] of q's dtype.

    Sequence s of S has the queries query_starts[s] up to query_starts[s + 1] (int32 [S + 1]), at most `max_queries`;
    the last of them sees the first context_lens[s] keys (int32 [S]), at most `max_context`, which are all in the pool;
    those before see one less each. block_tables int32 [S, max_blocks]. Rows of q from query_starts[S] on are padding:
    their rows of out are left alone. H is any multiple of the pool's KV heads. Sequences with many keys are best put
    first. `k_bias`: what the pool's K lacks; its scores are about as exact as if an fp16 pool held it.
    Raises KernelArgumentError.
    """
    _check(q, pages, layer, block_tables, query_starts, context_lens, max_context, out, splits, k_bias)
    plan = _plan(q, pages, len(context_lens), max_queries, max_context, splits, k_bias)
    arguments = (q, pages, layer, block_tables, query_starts, context_lens)
    if _suits_hopper(q, pages, max_queries, plan):
        paged_prefill_hopper(*arguments, max_queries, max_context, out)
    else:
        _launch(plan, *arguments, out, splits)


def paged_prefill_mma(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    max_queries: int, max_context: int, out: Tensor, splits: PrefillSplits | None = None,
    k_bias: RotatedBias | None = None,
) -> None:  # fmt: skip
    """`paged_prefill` by the kernel that every architecture has."""
    _check(q, pages, layer, block_tables, query_starts, context_lens, max_context, out, splits, k_bias)
    plan = _plan(q, pages, len(context_lens), max_queries, max_context, splits, k_bias)
    _launch(plan, q, pages, layer, block_tables, query_starts, context_lens, out, splits)


def _suits_hopper(q: Tensor, pages: KVPages, max_queries: int, plan: _Plan) -> bool:
    """Its tiles are full, and it needs nothing, splits or a bias, that it does not have."""
    if plan.k_bias is not None:
        return False
    fills_gpu = q.shape[0] * q.shape[1] >= _HOPPER_QUERIES * _multiprocessors(q.device)
    return max_queries >= _HOPPER_QUERIES and (fills_gpu or plan.shares == 1) and supports(pages, q.shape[1], q.dtype)


def _launch(
    plan: _Plan, q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor,
    context_lens: Tensor, out: Tensor, splits: PrefillSplits | None,
) -> None:  # fmt: skip
    if not plan.blocks:
        return
    tokens, num_heads, head_dim = q.shape
    activation_bf16, sequences, k_bias = int(q.dtype is torch.bfloat16), len(context_lens), plan.k_bias
    kernel = load(
        "paged_prefill", ACTIVATION_BF16=activation_bf16, KV_FORMAT=FORMAT_NUMBERS[pages.format], HEAD_DIM=head_dim,
        **plan.tile.macros, **({} if k_bias is None else {"K_BIAS": 1}),
    )  # fmt: skip
    bias = () if k_bias is None else (k_bias.values, k_bias.rotary, len(k_bias.rotary), k_bias.turns.rows)
    parts, levels = (splits.parts, splits.levels) if splits else (None, None)
    kernel.launch(
        (plan.blocks, plan.shares), plan.tile.warps * _WARP,
        [
            q, pages.pool, block_tables, query_starts, context_lens, out, parts, levels,
            tokens, sequences, num_heads, pages.num_kv_heads, pages.block_size, block_tables.shape[1],
            pages.block_bytes, pages.layer_offset(layer), math.log2(math.e) / math.sqrt(head_dim), *bias,
        ],
        plan.tile.shared_bytes(pages.format, head_dim, k_bias is not None),
    )  # fmt: skip
    if plan.shares > 1:
        merge = load("paged_prefill_merge", ACTIVATION_BF16=activation_bf16, HEAD_DIM=head_dim)
        merge.launch(
            (math.ceil(tokens * num_heads / _MERGED_ROWS),), (head_dim // 4, _MERGED_ROWS),
            [parts, levels, query_starts, out, sequences, tokens, num_heads, plan.shares],
        )  # fmt: skip


def _plan(
    q: Tensor, pages: KVPages, sequences: int, max_queries: int, max_context: int, splits: PrefillSplits | None,
    k_bias: RotatedBias | None,
) -> _Plan:  # fmt: skip
    tokens, num_heads, head_dim = q.shape
    tile = _tile(pages.format, head_dim, device_architecture(), k_bias is not None)
    ratio = num_heads // pages.num_kv_heads
    tiles = min(tokens * ratio // tile.rows + sequences, sequences * math.ceil(max_queries * ratio / tile.rows))
    blocks = tiles * pages.num_kv_heads if tokens else 0
    if splits is None or not blocks:
        return _Plan(k_bias, tile, blocks, 1)
    steps = math.ceil(max_context / tile.keys)
    most = min(splits.rows // (tokens * num_heads), steps)
    return _Plan(k_bias, tile, blocks, _shares(blocks, tile.blocks * _multiprocessors(q.device), steps, most))


@functools.lru_cache(maxsize=256)
def _shares(blocks: int, at_once: int, steps: int, most: int) -> int:
    """Among how many blocks the `steps` of each tile are divided, `most` at most: what takes the least time."""

    def time(shares: int) -> int:
        own_steps = math.ceil(steps / shares) + (_STEPS_OF_A_PART if shares > 1 else 0)
        return math.ceil(blocks * shares / at_once) * own_steps

    return min(range(1, max(most, 1) + 1), key=time)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    max_context: int, out: Tensor, splits: PrefillSplits | None, k_bias: RotatedBias | None,
) -> None:  # fmt: skip
    check_tensor("q", q, ACTIVATIONS, [("T", None), ("H", None), ("D", pages.head_dim)])
    tokens, num_heads, head_dim = q.shape
    if num_heads % pages.num_kv_heads:
        raise KernelArgumentError(f"q has {num_heads} heads; wanted: a multiple of the {pages.num_kv_heads} KV heads")
    pages.check(layer)
    check_tensor("context_lens", context_lens, torch.int32, [("S", None)], alignment=4)
    sequences = context_lens.shape[0]
    check_tensor("query_starts", query_starts, torch.int32, [("S+1", sequences + 1)], alignment=4)
    check_tensor("block_tables", block_tables, torch.int32, [("S", sequences), ("max_blocks", None)], alignment=4)
    if max_context > block_tables.shape[1] * pages.block_size:
        raise KernelArgumentError(
            f"max_context is {max_context}; block_tables holds {block_tables.shape[1]} blocks of {pages.block_size}"
        )
    check_tensor("out", out, q.dtype, [("T", tokens), ("H*D", num_heads * head_dim)])
    if splits is not None and splits.parts.shape[1] != head_dim:
        raise KernelArgumentError(f"splits are for head_dim {splits.parts.shape[1]}; q has {head_dim}")
    if k_bias is not None:
        k_bias.check(pages)


def paged_prefill_reference(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    operands: torch.dtype = torch.float32, k_bias: RotatedBias | None = None,
) -> Tensor:  # fmt: skip
    """What `paged_prefill` computes, in fp32 [T, H * D] from the stored values; rows that it leaves alone are NaN.

    `operands` is what q, K (as stored, without `k_bias`) and V are rounded to first.
    """
    tokens, num_heads, head_dim = q.shape
    ratio = num_heads // pages.num_kv_heads
    out = torch.full((tokens, num_heads * head_dim), math.nan, device=q.device)
    starts = query_starts.tolist()
    for s, length in enumerate(context_lens.tolist()):
        queries = q[starts[s] : starts[s + 1]].to(operands).float()
        stored = stored_keys_and_values(pages, layer, block_tables[s], length)
        k, v = (x.to(operands).float() for x in stored)
        if k_bias is not None:
            k_bias.add_to(k.transpose(0, 1), 0)
        k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", queries, k) / math.sqrt(head_dim)
        positions = torch.arange(length - len(queries), length, device=q.device)
        later = torch.arange(length, device=q.device) > positions[:, None]
        weights = scores.masked_fill_(later, -math.inf).softmax(-1)
        out[starts[s] : starts[s + 1]] = torch.einsum("hts,shd->thd", weights, v).flatten(1)
    return out
