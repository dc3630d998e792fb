"""KV formats by name, and the bytes they take: the one resolver that config, memory budget and pool share.

Owns: format names, byte arithmetic, the largest number of each format. Does not know: tensors (see
`device/kv_formats.py`), so that a wrong `--kv-cache-dtype` is refused before torch is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

FormatName = Literal["fp16", "bf16", "fp32", "int8", "fp8_e4m3", "fp8_e5m2"]
ComputeDtype = Literal["fp16", "bf16", "fp32"]

_ALIASES: dict[str, FormatName] = {
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "i8": "int8",
    "fp8": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "e5m2": "fp8_e5m2",
}
KV_CACHE_DTYPES = ("auto", *_ALIASES)
_ELEMENT_BYTES: dict[FormatName, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_LARGEST: dict[FormatName, float] = {"fp16": 65504.0, "int8": 65504.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
SCALE_BYTES = 2  # int8 keeps one fp16 scale per token and head, for K and for V


def resolve_kv_cache_dtype(name: str, compute_dtype: ComputeDtype) -> FormatName:
    """The format a user's name stands for; "auto" is the compute dtype. Raises ValueError that lists the names."""
    if name == "auto":
        return compute_dtype
    if name not in _ALIASES:
        raise ValueError(f"kv_cache_dtype {name!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
    return _ALIASES[name]


def largest_number(kv_format: FormatName) -> float:
    """At which the format clamps; infinity if it holds whatever is computed."""
    return _LARGEST.get(kv_format, math.inf)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def paged_kv_block_bytes(shape: KVShape, block_size: int, kv_format: FormatName) -> int:
    """Bytes of one page-major block: K and V of `block_size` tokens in every layer, and int8's scales."""
    per_token_head = shape.head_dim * _ELEMENT_BYTES[kv_format] + (SCALE_BYTES if kv_format == "int8" else 0)
    return shape.num_layers * 2 * shape.num_kv_heads * block_size * per_token_head
