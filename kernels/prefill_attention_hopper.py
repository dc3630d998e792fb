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

from .checks import ACTIVATIONS, check_tensor
from .errors import KernelArgumentError
from .loader import device_architecture, load, variants
from .pages import FORMAT_NUMBERS, KVPages, PageFormat
from .tensor_map import swizzled_map

ARCHITECTURE = "sm_90a"
HEAD_DIMS = (64, 128)
_OWN_FORMAT: dict[torch.dtype, PageFormat] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_BYTE_FORMATS: tuple[PageFormat, ...] = ("int8", "fp8_e4m3", "fp8_e5m2")

VARIANTS = tuple(
    variant
    for activation_bf16, own_format in enumerate(_OWN_FORMAT.values())
    for variant in variants(
        "paged_prefill_hopper",
        architectures=(ARCHITECTURE,),
        ACTIVATION_BF16=(activation_bf16,),
        KV_FORMAT=[FORMAT_NUMBERS[name] for name in (own_format, *_BYTE_FORMATS)],
        HEAD_DIM=HEAD_DIMS,
    )
)

# As in the .cu.
_QUERIES = _KEYS = 128
_PAGE = 16
_THREADS = 384
_TICKETS = 64
_launches = itertools.count()


def supports(pages: KVPages, num_heads: int, dtype: torch.dtype) -> bool:
    """Whether the current device, this pool, and activations of this type with this number of heads are served."""
    return (
        device_architecture() == ARCHITECTURE
        and pages.head_dim in HEAD_DIMS
        and pages.format in (_OWN_FORMAT.get(dtype), *_BYTE_FORMATS)
        and dtype in _OWN_FORMAT
        and pages.block_size >= _PAGE
        and pages.block_size.bit_count() == 1
        and num_heads % pages.num_kv_heads == 0
    )


def paged_prefill_hopper(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor,
    max_queries: int, max_context: int, out: Tensor,
) -> None:  # fmt: skip
    """Attention of q [T, H, D] over the pool, into `out` [T, H * D]: arguments as of `prefill_attention.paged_prefill`.

    Of pools of 16-bit formats q has the type. Raises KernelArgumentError, also for what `supports` denies.
    """
    num_sequences = _check(q, pages, layer, block_tables, query_starts, context_lens, out)
    if max_context > block_tables.shape[1] * pages.block_size:
        raise KernelArgumentError(
            f"max_context is {max_context}; block_tables holds {block_tables.shape[1]} blocks of {pages.block_size}"
        )
    tokens, num_heads, head_dim = q.shape
    tiles = min(tokens // _QUERIES + num_sequences, num_sequences * math.ceil(max_queries / _QUERIES))
    if not tiles or not tokens:
        return
    kernel = load(
        "paged_prefill_hopper", ACTIVATION_BF16=int(q.dtype is torch.bfloat16), KV_FORMAT=FORMAT_NUMBERS[pages.format],
        HEAD_DIM=head_dim,
    )  # fmt: skip
    q_map = swizzled_map(q.view(tokens, -1), _QUERIES)
    own = pages.format not in _BYTE_FORMATS
    pool_map = swizzled_map(pages.pool.view(q.dtype).view(-1, head_dim), _PAGE) if own else q_map
    kernel.launch(
        (min(tiles * num_heads, _multiprocessors(q.device)),), _THREADS,
        [
            q_map, pool_map, pages.pool, block_tables, query_starts, context_lens, out,
            num_sequences, block_tables.shape[1], pages.block_size.bit_length() - 1,
            pages.num_layers * 2 * pages.num_kv_heads, layer * 2 * pages.num_kv_heads, num_heads, pages.num_kv_heads,
            math.log2(math.e) / math.sqrt(head_dim), next(_launches) % _TICKETS,
        ],
        _shared_bytes(head_dim, own),
    )  # fmt: skip


def _shared_bytes(head_dim: int, own: bool) -> int:
    """Of the .cu's struct Shared, and what aligning it takes."""
    tile, queries = _KEYS * head_dim * 2, _QUERIES * head_dim * 2
    return queries + (6 * tile if own else 5 * tile + 2 * _KEYS * (head_dim + 2)) + 256 + 1024


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    q: Tensor, pages: KVPages, layer: int, block_tables: Tensor, query_starts: Tensor, context_lens: Tensor, out: Tensor
) -> int:
    """The number of sequences."""
    check_tensor("q", q, ACTIVATIONS, [("T", None), ("H", None), ("D", pages.head_dim)])
    tokens, num_heads, head_dim = q.shape
    if not supports(pages, num_heads, q.dtype):
        raise KernelArgumentError(
            f"not served: q {q.dtype} with {num_heads} heads, pages {pages.format} with {pages.num_kv_heads} KV heads, "
            f"head_dim {head_dim}, block_size {pages.block_size}; prefill_attention.paged_prefill may serve it"
        )
    pages.check(layer)
    check_tensor("context_lens", context_lens, torch.int32, [("S", None)], alignment=4)
    num_sequences = context_lens.shape[0]
    check_tensor("query_starts", query_starts, torch.int32, [("S+1", num_sequences + 1)], alignment=4)
    check_tensor("block_tables", block_tables, torch.int32, [("S", num_sequences), ("max_blocks", None)], alignment=4)
    check_tensor("out", out, q.dtype, [("T", tokens), ("H*D", num_heads * head_dim)])
    return num_sequences
