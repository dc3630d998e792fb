"""Causal attention of prompt chunks over the paged pool, for SM90 (Hopper): tensor cores by warpgroup, copies by TMA.

Owns: the launch of `paged_prefill_hopper`, and which pools it serves. Does not know: what to take instead, see
`prefill_attention`; its `paged_prefill` has the same arguments and meaning.

A query's result depends on its own keys alone: they are summed tile by tile of 128 from its last one down to the first,
wherever a chunk begins and whatever else is in the batch.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from .checks import check_tensor
from .errors import KernelArgumentError
from .loader import device_architecture, load, variants
from .pages import KVPages
from .tensor_map import swizzled_map

ARCHITECTURE = "sm_90a"
HEAD_DIMS = (64, 128)

VARIANTS = variants("paged_prefill_hopper", architectures=(ARCHITECTURE,), ACTIVATION_BF16=(0, 1), HEAD_DIM=HEAD_DIMS)

_QUERIES, _KEYS, _STAGES, _THREADS, _PAGE, _TICKETS = 128, 128, 2, 384, 16, 64  # as in the .cu
_POOL_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_launches = itertools.count()


def supports(pages: KVPages, num_heads: int) -> bool:
    """Whether the current device, this pool and this number of query heads are served."""
    return (
        device_architecture() == ARCHITECTURE
        and pages.head_dim in HEAD_DIMS
        and pages.format in _POOL_DTYPES
        and pages.block_size % _PAGE == 0
        and num_heads % pages.num_kv_heads == 0
    )


def paged_prefill_hopper(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    max_queries: int, max_context: int, out: Tensor,
) -> None:  # fmt: skip
    """Attention of q over the pool, into `out`; arguments as in `prefill_attention.paged_prefill`.

    q fp16 or bf16 [T, H, D], in the pool's dtype; block_tables int32 [S, max_blocks]; query_starts int32 [S + 1];
    context_lens int32 [S]; out [T, H * D] in q's dtype. Sequence s has the queries query_starts[s] to
    query_starts[s + 1], and the last of them sees its first context_lens[s] keys, which are in the pool already. Other
    rows of out are left alone. Raises KernelArgumentError.
    """
    num_sequences = _check(q, pages, layer, block_tables, query_starts, context_lens, out)
    tokens, num_heads, head_dim = q.shape
    tiles = min(tokens // _QUERIES + num_sequences, num_sequences * math.ceil(max_queries / _QUERIES))
    if not tiles:
        return
    kernel = load("paged_prefill_hopper", ACTIVATION_BF16=int(q.dtype is torch.bfloat16), HEAD_DIM=head_dim)
    planes = pages.num_layers * 2 * pages.num_kv_heads
    rows = pages.pool.view(q.dtype).view(-1, head_dim)
    kernel.launch(
        (min(tiles * num_heads, _multiprocessors(q.device)),), _THREADS,
        [
            q, pages.pool, swizzled_map(rows, _PAGE), block_tables, query_starts, context_lens, out,
            num_sequences, block_tables.shape[1], pages.block_size, planes, layer * 2 * pages.num_kv_heads,
            num_heads, pages.num_kv_heads, math.log2(math.e) / math.sqrt(head_dim), next(_launches) % _TICKETS,
        ],
        _shared_bytes(head_dim),
    )  # fmt: skip


def _shared_bytes(head_dim: int) -> int:
    """Of the struct Shared, and what aligning it takes."""
    return 2 * _STAGES * _KEYS * head_dim * 2 + _QUERIES * (head_dim * 2 + 16) + 256 + 1024


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, out: Tensor
) -> int:
    """The number of sequences."""
    if not supports(pages, q.shape[1] if q.ndim == 3 else 0):
        raise KernelArgumentError(
            f"not served: pages of {pages.format}, head_dim {pages.head_dim}, block_size {pages.block_size}; served on "
            f"{ARCHITECTURE}: fp16, bf16, head_dim {HEAD_DIMS}, block_size in steps of {_PAGE}; see prefill_attention"
        )
    dtype = _POOL_DTYPES[pages.format]
    check_tensor("q", q, dtype, [("T", None), ("H", None), ("D", pages.head_dim)])
    tokens, num_heads, head_dim = q.shape
    if not 0 <= layer < pages.num_layers:
        raise KernelArgumentError(f"layer is {layer}; the pool has layers 0 to {pages.num_layers - 1}")
    check_tensor("context_lens", context_lens, torch.int32, [("S", None)], alignment=4)
    num_sequences = context_lens.shape[0]
    check_tensor("query_starts", query_starts, torch.int32, [("S+1", num_sequences + 1)], alignment=4)
    check_tensor("block_tables", block_tables, torch.int32, [("S", num_sequences), ("max_blocks", None)], alignment=4)
    check_tensor("out", out, dtype, [("T", tokens), ("H*D", num_heads * head_dim)])
    return num_sequences
