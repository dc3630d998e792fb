"""Four-bit weights: our checkpoint layout, and a linear layer over it on the CPU.

Owns: `W4Weight` (the layout), `W4Linear` (torch's int4 operator for few rows, a dense matrix for many).
Does not know: names of tensors, files, models.

Layout of an [N, K] matrix with groups of g along K: `qweight` uint8 [N, K/2], element k of a row in byte k//2, low
nibble for even k; `scales` and `mins` [N, K/g]; weight = q * scale + min. The minimum is a float because an integer
zero point could not represent every source exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_OPERATOR_GROUP_SIZES = (32, 64, 128, 256)
_int4_matmul = torch.ops.aten._weight_int4pack_mm_for_cpu.default
_DENSE_ABOVE_ROWS = 16  # from here on the dense matrix multiplication is faster than the int4 operator


@dataclass(frozen=True, slots=True)
class W4Weight:
    """One matrix in our layout, with K = qweight.shape[1] * 2 and N rows."""

    qweight: Tensor
    scales: Tensor
    mins: Tensor

    @property
    def group_size(self) -> int:
        """Elements of a row that share a scale and a minimum."""
        return self.qweight.shape[1] * 2 // self.scales.shape[1]

    def rows(self, order: Tensor | slice) -> W4Weight:
        """The same matrix with its rows in another order, or some of them."""
        return W4Weight(self.qweight[order], self.scales[order], self.mins[order])

    def codes(self) -> Tensor:
        """The four-bit codes, int32 [N, K]."""
        pairs = torch.stack((self.qweight & 15, self.qweight >> 4), dim=-1)
        return pairs.view(self.qweight.shape[0], -1).int()

    def dequantize(self) -> Tensor:
        """The weights, fp32 [N, K]."""
        groups = self.codes().view(*self.scales.shape, -1).float()
        return groups.mul_(self.scales.float()[..., None]).add_(self.mins.float()[..., None]).view(len(groups), -1)


def stack_rows(weights: Sequence[W4Weight]) -> W4Weight:
    """Matrices over the same input, one below the other."""
    return W4Weight(
        torch.cat([w.qweight for w in weights]),
        torch.cat([w.scales.float() for w in weights]),
        torch.cat([w.mins.float() for w in weights]),
    )


def fits_operator(weight: W4Weight) -> bool:
    """Whether torch's int4 operator takes this shape; otherwise the matrix must be dequantized."""
    return weight.qweight.shape[0] % 16 == 0 and weight.group_size in _OPERATOR_GROUP_SIZES


class W4Linear:
    """y = x W^T + b with W in four bits.

    `dense_dtype` is the dtype of the dense copy that serves more than 16 rows, None for no copy: then the int4 operator
    serves every number of rows. The operator works in bf16 and sums each row of x on its own.
    """

    def __init__(self, weight: W4Weight, bias: Tensor | None, dense_dtype: torch.dtype | None) -> None:
        self._group_size = weight.group_size
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes(), 2)
        scales, mins = weight.scales.float(), weight.mins.float()
        centred = torch.stack((scales, mins + 8 * scales), dim=-1)  # the operator computes (q - 8) * scale + zero
        self._scales_and_zeros = centred.transpose(0, 1).contiguous().bfloat16()
        self._dense = None if dense_dtype is None else weight.dequantize().to(dense_dtype)
        self._bias = None if bias is None else bias.float()

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        tensors = (self._packed, self._scales_and_zeros, self._dense, self._bias)
        return sum(t.nbytes for t in tensors if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, K] fp32 or bf16 -> [m, N] in bf16 (int4 operator without bias) or the dense dtype or fp32."""
        if self._dense is not None and x.shape[0] > _DENSE_ABOVE_ROWS:
            out = F.linear(x.to(self._dense.dtype), self._dense)
        else:
            out = _int4_matmul(x.bfloat16(), self._packed, self._group_size, self._scales_and_zeros)
        return out if self._bias is None else out + self._bias
