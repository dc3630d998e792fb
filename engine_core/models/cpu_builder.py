"""The parts of a decoder as the CPU computes with them.

Owns: which kind of linear, embedding and head a matrix becomes. Does not know: files, names of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .head import FixedPointHead, has_int8_products
from .layers import DenseLinear, Int8Embedding, Int8Weight, Linear, PlainEmbedding
from .w4a16 import W4Linear, W4Weight, fits_operator


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held in memory.

    `linear_dtype`: what dense linears compute in. `four_bit` False dequantizes four-bit linears at load; else they stay
    packed, with dense copies for many rows when `dense_copies`. `positions`: length of the rotary table.
    """

    linear_dtype: torch.dtype
    four_bit: bool
    dense_copies: bool
    positions: int


class CpuBuilder:
    """See `weights.Builder`."""

    turns: int | None = None

    def __init__(self, options: LoadOptions) -> None:
        self._options, self._dtype = options, options.linear_dtype

    def norm(self, weight: Tensor) -> Tensor:
        """Norm weight times sqrt(N), fp32."""
        return weight * math.sqrt(len(weight))

    def linear(self, weight: Tensor | W4Weight, bias: Tensor | None) -> Linear:
        """In four bits when torch's operator takes the shape, else dense."""
        if isinstance(weight, Tensor):
            return DenseLinear(weight, bias, self._dtype)
        if self._options.four_bit and fits_operator(weight):
            return W4Linear(weight, bias, self._dtype if self._options.dense_copies else None)
        return DenseLinear(weight.dequantize(), bias, self._dtype)

    def embedding(self, table: Tensor | Int8Weight) -> PlainEmbedding | Int8Embedding:
        """The rows as they are stored."""
        return Int8Embedding(table) if isinstance(table, Int8Weight) else PlainEmbedding(table)

    def head(
        self, matrix: Tensor | Int8Weight | W4Weight, norm: Tensor, tied: PlainEmbedding | Int8Embedding | None
    ) -> Linear:
        """An int8 matrix is multiplied in fixed point where the CPU can."""
        if not isinstance(matrix, Int8Weight):
            return self.linear(matrix, None)
        weight = matrix.dequantize()
        if self._options.four_bit and has_int8_products():
            return FixedPointHead(weight, self.norm(norm))
        return DenseLinear(weight, None, self._dtype)
