"""Linear layers, embedding and output head on the GPU, and the builder that makes them.

Owns: which kernel multiplies how many rows, and the scratch memory that all of them share.
Does not know: files, names of tensors, what a linear is for.

All memory is passed in, so that every call can be captured in a CUDA graph. In a matrix of gate and up their rows take
turns of 8: a kernel that has computed both finishes silu(gate) * up itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...kernels import fused, w4, w4_wide, w8
from .layers import Int8Weight
from .w4a16 import W4Weight

GATE_UP_TURNS = 8
# Up to how many rows of x each way of multiplying a four-bit matrix is the fastest, as measured on an H200: first
# `w4_linear`, then `w4_wide`; a dense copy from there on, or, without one, `w4_wide` further and then dequantizing.
LINEAR_MOST_ROWS = 8
WIDE_MOST_ROWS_BESIDE_DENSE = 96
WIDE_MOST_ROWS = 512
LINEAR_MOST_ROWS_WITHOUT_WIDE = 64
# The same for an int8 head, which is read once for every 32 rows.
HEAD_MOST_ROWS_BESIDE_DENSE = 32
HEAD_MOST_ROWS = 96
_SLICE_ELEMENTS = 16 << 20  # of a packed matrix, dequantized at once: 32 MiB stay in a large GPU's cache

PackedMatrix = w4.W4Matrix | w8.W8Matrix
EmbeddingTable = Tensor | w8.W8Matrix


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that one linear uses at a time, in the compute dtype: `dense` [elements], `gate_up` [tokens * 2 ffn]."""

    dense: Tensor
    gate_up: Tensor


class PackedProduct(Protocol):
    """out = x W^T + bias for a packed W; with `silu`, silu(gate) * up of it; with `add`, out fp32 += it."""

    def __call__(
        self,
        x: Tensor,
        matrix: w4.W4Matrix,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        silu: bool = False,
        add: bool = False,
    ) -> None: ...


def packed_product(matrix: w4.W4Matrix, rows: int, has_dense: bool) -> PackedProduct | None:
    """The kernel that multiplies so many rows with the packed matrix; None: a dense one is faster.

    `has_dense`: there is a dense copy beside it.
    """
    wide = w4_wide.supports(matrix, rows)
    if rows <= (LINEAR_MOST_ROWS if wide else LINEAR_MOST_ROWS_WITHOUT_WIDE):
        return w4.w4_linear
    most = WIDE_MOST_ROWS_BESIDE_DENSE if has_dense else WIDE_MOST_ROWS
    return w4_wide.w4_wide_linear if wide and rows <= most else None


class CudaLinear(Protocol):
    """y = x W^T + b for W [n, k] and x [m, k], in the compute dtype. `bias` [n] is None where there is none."""

    n: int
    bias: Tensor | None

    @property
    def nbytes(self) -> int: ...

    @property
    def scratch_elements(self) -> int:
        """What `Scratch.dense` must hold."""
        ...

    def __call__(self, x: Tensor, out: Tensor, scratch: Scratch, *, biased: bool = True) -> None:
        """out [m, n] = y; not `biased`: without the bias, which the caller adds."""
        ...

    def gated(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """out [m, n/2] = silu(gate) * up of y, for a matrix of gate and up."""
        ...

    def add_to(self, residual: Tensor, x: Tensor, scratch: Scratch) -> None:
        """residual fp32 [m, n] += y, which is not rounded before."""
        ...


class CudaHead(Protocol):
    """logits = x W^T for W [V, N] and x [m, N] in the compute dtype."""

    @property
    def nbytes(self) -> int: ...

    @property
    def scratch_elements(self) -> int: ...

    def __call__(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """out fp32 [m, V] = logits, unrounded; rows of out may lie apart."""
        ...


class DenseCudaLinear:
    """A plain matrix. `out` may be fp32: then the products are not rounded."""

    scratch_elements = 0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.n, self.bias = len(weight), bias
        self._weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        return self._weight.nbytes + _nbytes(self.bias)

    def __call__(self, x: Tensor, out: Tensor, scratch: Scratch, *, biased: bool = True) -> None:
        """See CudaLinear."""
        if out.dtype is x.dtype:
            torch.mm(x, self._weight.t(), out=out)
        else:
            torch.mm(x, self._weight.t(), out_dtype=out.dtype, out=out)
        if biased and self.bias is not None:
            out.add_(self.bias)

    def gated(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """See CudaLinear."""
        _gate_apart(self, x, out, scratch)

    def add_to(self, residual: Tensor, x: Tensor, scratch: Scratch) -> None:
        """See CudaLinear."""
        _add_product(residual, x, self._weight)
        if self.bias is not None:
            residual.add_(self.bias)


class DenseValues:
    """A packed matrix in 16 bits, for many rows of x: a `copy` [n, k], or slices that are dequantized for each call."""

    def __init__(self, matrix: PackedMatrix, copy: Tensor | None) -> None:
        self._matrix, self._copy = matrix, copy
        self._slices = _slices(matrix) if copy is None else ()

    @property
    def is_copy(self) -> bool:
        """Whether the values are there already."""
        return self._copy is not None

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory."""
        return _nbytes(self._copy)

    @property
    def scratch_elements(self) -> int:
        """See CudaLinear."""
        return max((part.n * part.k for part in self._slices), default=0)

    def parts(self, scratch: Scratch) -> Iterator[tuple[slice, Tensor]]:
        """Some rows [n', k] at a time: which columns of y they make, and their values."""
        if self._copy is not None:
            yield slice(0, self._matrix.n), self._copy
        first = 0
        for part in self._slices:
            dense = scratch.dense[: part.n * part.k].view(part.n, part.k)
            _dequantize(part, dense)
            yield slice(first, first + part.n), dense
            first += part.n


class W4CudaLinear:
    """A four-bit matrix, and its `dense` values for many rows of x."""

    def __init__(self, matrix: w4.W4Matrix, bias: Tensor | None, dense: DenseValues) -> None:
        self.n, self.bias = matrix.n, bias
        self._matrix, self._dense = matrix, dense

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        return self._matrix.nbytes + _nbytes(self.bias) + self._dense.nbytes

    @property
    def scratch_elements(self) -> int:
        """See CudaLinear."""
        return self._dense.scratch_elements

    def __call__(self, x: Tensor, out: Tensor, scratch: Scratch, *, biased: bool = True) -> None:
        """See CudaLinear."""
        bias = self.bias if biased else None
        packed = self._packed_product(len(x))
        if packed is not None:
            packed(x, self._matrix, out, bias=bias)
            return
        for columns, dense in self._dense.parts(scratch):
            torch.mm(x, dense.t(), out=out[:, columns])
        if bias is not None:
            out.add_(bias)

    def gated(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """See CudaLinear."""
        packed = self._packed_product(len(x))
        if packed is not None:
            packed(x, self._matrix, out, bias=self.bias, silu=True)
        else:
            _gate_apart(self, x, out, scratch)

    def add_to(self, residual: Tensor, x: Tensor, scratch: Scratch) -> None:
        """See CudaLinear."""
        packed = self._packed_product(len(x))
        if packed is not None:
            packed(x, self._matrix, residual, bias=self.bias, add=True)
            return
        for columns, dense in self._dense.parts(scratch):
            _add_product(residual[:, columns], x, dense)
        if self.bias is not None:
            residual.add_(self.bias)

    def _packed_product(self, rows: int) -> PackedProduct | None:
        return packed_product(self._matrix, rows, self._dense.is_copy)


class W8CudaHead:
    """An int8 matrix, and its `dense` values for many rows of x."""

    def __init__(self, matrix: w8.W8Matrix, dense: DenseValues) -> None:
        self._matrix, self._dense = matrix, dense

    @property
    def nbytes(self) -> int:
        """Bytes that the head keeps in memory."""
        return self._matrix.nbytes + self._dense.nbytes

    @property
    def scratch_elements(self) -> int:
        """See CudaLinear."""
        return self._dense.scratch_elements

    def __call__(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """See CudaHead."""
        if len(x) <= (HEAD_MOST_ROWS_BESIDE_DENSE if self._dense.is_copy else HEAD_MOST_ROWS):
            w8.w8_linear(x, self._matrix, out)
            return
        for columns, dense in self._dense.parts(scratch):
            torch.mm(x, dense.t(), out_dtype=out.dtype, out=out[:, columns])


def _gate_apart(linear: CudaLinear, x: Tensor, out: Tensor, scratch: Scratch) -> None:
    """The product first, silu(gate) * up from there."""
    gate_up = scratch.gate_up[: len(x) * linear.n].view(len(x), linear.n)
    linear(x, gate_up, scratch)
    fused.silu_multiply(gate_up, out)


def _add_product(residual: Tensor, x: Tensor, weight: Tensor) -> None:
    """residual fp32 += x weight^T, without rounding in between."""
    torch.addmm(residual, x, weight.t(), out_dtype=torch.float32, out=residual)


def _slices(matrix: PackedMatrix) -> Sequence[PackedMatrix]:
    """The matrix in runs of rows that are dequantized at once."""
    rows = max(1, _SLICE_ELEMENTS // (matrix.k * w4.PADDING)) * w4.PADDING
    units = rows // w4.UNIT_ROWS  # as many as in an int8 matrix
    return [
        replace(matrix, codes=codes, scales=scales, n=min(rows, matrix.n - rows * i))
        for i, (codes, scales) in enumerate(zip(matrix.codes.split(units), matrix.scales.split(units), strict=True))
    ]


def _dequantize(matrix: PackedMatrix, out: Tensor) -> None:
    if isinstance(matrix, w4.W4Matrix):
        w4.w4_dequantize(matrix, out)
    else:
        w8.w8_dequantize(matrix, out)


def _is_packable(weight: W4Weight) -> bool:
    """Whether the kernels know this shape: groups of a power of two, or whole rows."""
    columns, group = 2 * weight.qweight.shape[1], weight.group_size
    return columns % 8 == 0 and (group == columns or (group >= w4.SMALLEST_GROUP and group & (group - 1) == 0))


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


class CudaBuilder:
    """See `weights.Builder`. Tensors arrive on the GPU already. `dense_copies` of packed matrices: fast but large."""

    turns: int | None = GATE_UP_TURNS

    def __init__(self, dtype: torch.dtype, dense_copies: bool) -> None:
        self._dtype, self._dense_copies = dtype, dense_copies

    def norm(self, weight: Tensor) -> Tensor:
        """fp32 [N]."""
        return weight

    def linear(self, weight: Tensor | W4Weight, bias: Tensor | None) -> CudaLinear:
        """Four-bit matrices stay so when the kernels know their groups, else they are dequantized."""
        bias = None if bias is None else bias.to(self._dtype)
        if isinstance(weight, W4Weight) and _is_packable(weight):
            matrix = w4.pack_w4(weight.qweight, weight.scales, weight.mins, weight.qweight.device)
            return W4CudaLinear(matrix, bias, self._dense_values(matrix))
        return DenseCudaLinear(self._plain(weight), bias)

    def _dense_values(self, matrix: PackedMatrix) -> DenseValues:
        if not self._dense_copies:
            return DenseValues(matrix, None)
        copy = torch.empty(matrix.n, matrix.k, dtype=self._dtype, device=matrix.codes.device)
        _dequantize(matrix, copy)
        return DenseValues(matrix, copy)

    def embedding(self, table: Tensor | Int8Weight) -> EmbeddingTable:
        """The rows [V, N], int8 as they are when the kernels know their groups, else in the compute dtype."""
        return self._table(table)

    def head(self, matrix: Tensor | Int8Weight | W4Weight, norm: Tensor, tied: EmbeddingTable | None) -> CudaHead:
        """Int8 or plain, the embedding's own memory when tied: logits want more than four bits."""
        table = self._table(matrix) if tied is None else tied
        if isinstance(table, w8.W8Matrix):
            return W8CudaHead(table, self._dense_values(table))
        return DenseCudaLinear(table, None)

    def _table(self, matrix: Tensor | Int8Weight | W4Weight) -> EmbeddingTable:
        if isinstance(matrix, Int8Weight) and matrix.scales.dtype is torch.float16:
            columns = matrix.qweight.shape[1]
            if w8.is_packable(columns, columns // matrix.scales.shape[1]):
                return w8.pack_w8(matrix.qweight, matrix.scales)
        return self._plain(matrix)

    def _plain(self, matrix: Tensor | Int8Weight | W4Weight) -> Tensor:
        dense = matrix if isinstance(matrix, Tensor) else matrix.dequantize()
        return dense.to(self._dtype).contiguous()
