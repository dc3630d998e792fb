"""How K and V are stored: one class per KV format, with its write and its read.

Owns: the numbers inside a plane. Does not know: which block belongs to whom, layers, copies.

A plane is K or V of one KV head in one block and layer: [block_size, head_dim] elements, and with int8 behind them
[block_size] fp16 scales. A pool is a uint8 tensor of planes; a plane's bytes follow from `kv_layout`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kv_layout import FormatName, largest_number

_FLOAT_DTYPES: dict[FormatName, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_FP8_DTYPES: dict[FormatName, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_LARGEST_FP16, _LARGEST_INT8 = largest_number("fp16"), largest_number("int8")


Slots = tuple[Tensor, ...]
"""Where tokens are written, as a format's `slots` computes it: once per step, as it serves every layer."""


class KVFormat(Protocol):
    """Writes and reads the planes of a pool. R is planes, N tokens, P planes per token, B block_size, D head_dim."""

    dtype: torch.dtype
    """What `read` returns."""

    def view(self, pool: Tensor) -> Tensor:
        """The uint8 pool [bytes] as [planes, row], one row per plane in the element dtype that `read` expects."""
        ...

    def slots(self, plane: Tensor, offset: Tensor) -> Slots:
        """For `write`: planes int64 [N, P], and the token's place in its block int64 [N, 1]."""
        ...

    def write(self, planes: Tensor, slots: Slots, values: Tensor) -> None:
        """Store values fp32 [N, P, D] in rows of `view`."""
        ...

    def read(self, rows: Tensor) -> Tensor:
        """Rows [R, row] of `view`, gathered, as [R, B*D] in `dtype`."""
        ...


class FloatFormat:
    """fp32, bf16 or fp16 elements. fp16 saturates at its largest finite value."""

    def __init__(self, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        self.dtype, self._block_size, self._head_dim = dtype, block_size, head_dim

    def view(self, pool: Tensor) -> Tensor:
        """See KVFormat."""
        return pool.view(self.dtype).view(-1, self._block_size * self._head_dim)

    def slots(self, plane: Tensor, offset: Tensor) -> Slots:
        """See KVFormat."""
        return (plane * self._block_size + offset,)

    def write(self, planes: Tensor, slots: Slots, values: Tensor) -> None:
        """See KVFormat."""
        if self.dtype is torch.float16:
            values = values.clamp(-_LARGEST_FP16, _LARGEST_FP16)
        planes.view(-1, self._head_dim).index_put_(slots, values.to(self.dtype))

    def read(self, rows: Tensor) -> Tensor:
        """See KVFormat."""
        return rows


class Fp8Format:
    """float8 elements by direct cast, clamped to the format's range. Handled as bytes, as few operators know float8."""

    def __init__(self, dtype: torch.dtype, limit: float, block_size: int, head_dim: int) -> None:
        self.dtype = torch.float32
        self._stored, self._block_size, self._head_dim = dtype, block_size, head_dim
        self._limit = limit
        self._values = torch.arange(256, dtype=torch.uint8).view(dtype).float()

    def view(self, pool: Tensor) -> Tensor:
        """See KVFormat."""
        return pool.view(-1, self._block_size * self._head_dim)

    def slots(self, plane: Tensor, offset: Tensor) -> Slots:
        """See KVFormat."""
        return (plane * self._block_size + offset,)

    def write(self, planes: Tensor, slots: Slots, values: Tensor) -> None:
        """See KVFormat."""
        codes = values.clamp(-self._limit, self._limit).to(self._stored).view(torch.uint8)
        planes.view(-1, self._head_dim).index_put_(slots, codes)

    def read(self, rows: Tensor) -> Tensor:
        """See KVFormat."""
        return self._values.index_select(0, rows.view(-1).int()).view(rows.shape)


class Int8Format:
    """int8 elements with one fp16 scale per token and head, in the plane behind the elements."""

    def __init__(self, block_size: int, head_dim: int) -> None:
        self.dtype = torch.float32
        self._shape = (block_size, head_dim)
        self._elements = block_size * head_dim

    def view(self, pool: Tensor) -> Tensor:
        """See KVFormat."""
        return pool.view(-1, self._elements + 2 * self._shape[0])

    def slots(self, plane: Tensor, offset: Tensor) -> Slots:
        """See KVFormat."""
        return plane, offset

    def write(self, planes: Tensor, slots: Slots, values: Tensor) -> None:
        """See KVFormat. The scale is rounded to fp16 before it divides: reading multiplies by the same number."""
        finite = values.clamp(-_LARGEST_INT8, _LARGEST_INT8)
        scales = (finite.abs().amax(-1, keepdim=True) / 127).clamp_min_(2.0**-24).half()
        codes = (finite / scales.float()).round_().clamp_(-127, 127).to(torch.int8)
        planes[:, : self._elements].view(torch.int8).view(-1, *self._shape).index_put_(slots, codes)
        planes[:, self._elements :].view(torch.float16).index_put_(slots, scales.squeeze(-1))

    def read(self, rows: Tensor) -> Tensor:
        """See KVFormat."""
        codes = rows[:, : self._elements].view(torch.int8).view(-1, *self._shape)
        scales = rows[:, self._elements :].view(torch.float16).float()
        return torch.mul(codes, scales[..., None]).view(len(rows), -1)


def make_format(name: FormatName, block_size: int, head_dim: int) -> KVFormat:
    """The format of that name for planes of block_size tokens."""
    if name in _FLOAT_DTYPES:
        return FloatFormat(_FLOAT_DTYPES[name], block_size, head_dim)
    if name in _FP8_DTYPES:
        return Fp8Format(_FP8_DTYPES[name], largest_number(name), block_size, head_dim)
    return Int8Format(block_size, head_dim)
