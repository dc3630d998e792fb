"""The layers of a decoder and their forward pass.

Owns: dense linears, embeddings, the output head, the rotary table, `Decoder`.
Does not know: pages and requests: attention over past tokens is a function that the caller passes in.

The residual stream is fp32. The rows of q and k are stored so that rotary pairs are neighbours (`pair_order`), which
turns the rotation into one complex multiplication; scores do not change, as q and k are permuted alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import reference
from .k_bias import KeyBias, KeyOffsets, Rotation, rotated
from .registry import ModelConfig, RopeConfig

Attend = Callable[[int, Tensor, Tensor, KeyOffsets | None], Tensor]
"""(layer, q [T, H, D] fp32, k and v [T, 2G, D] fp32, offsets) -> [T, H*D]; stores k and v before it attends.

The offsets are added to K when it is read; None: nothing.
"""


class Linear(Protocol):
    """x [m, K] -> [m, N]; the output's dtype is the layer's own."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class DenseLinear:
    """y = x W^T + b with a plain matrix in `dtype`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, K] of any float dtype -> [m, N] in the layer's dtype."""
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias)


class PlainEmbedding:
    """Rows of a float matrix [V, N]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        return self._weight.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] -> fp32 [T, N]."""
        return self._weight[ids].float()


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """An int8 matrix `qweight` [R, N] with one factor per group along N, `scales` [R, N/g]."""

    qweight: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """The weights, fp32 [R, N]."""
        return dequantize_groups(self.qweight, self.scales)


class Int8Embedding:
    """Rows of an int8 matrix [V, N]."""

    def __init__(self, table: Int8Weight) -> None:
        self._qweight, self._scales = table.qweight, table.scales

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        return self._qweight.nbytes + self._scales.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] -> fp32 [T, N]."""
        return dequantize_groups(self._qweight[ids], self._scales[ids])


def dequantize_groups(qweight: Tensor, scales: Tensor) -> Tensor:
    """int8 [R, N] times scales [R, N/g] per group -> fp32 [R, N]."""
    return (qweight.view(*scales.shape, -1) * scales.float()[..., None]).view(qweight.shape)


def pair_order(head_dim: int) -> Tensor:
    """Row order within a head that brings the rotary pair (i, i + head_dim/2) together."""
    return torch.arange(head_dim).view(2, -1).t().reshape(-1)


def rotary_table(config: ModelConfig, positions: int) -> Tensor:
    """exp(i * position * frequency), times the attention factor of yarn: complex64 [positions, head_dim/2]."""
    frequencies = _frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.polar(torch.full_like(angles, _rotary_factor(config.rope)), angles).to(torch.complex64)


def whole_rotation(config: ModelConfig) -> Rotation:
    """What the positions that the model was made for do to q and k."""
    last = config.max_position_embeddings - 1
    return Rotation(last * _frequencies(config.rope, config.head_dim), _rotary_factor(config.rope))


def _rotary_factor(rope: RopeConfig) -> float:
    """What rotation multiplies q and k by: 1, or the attention factor of yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope, rope.mscale) / _yarn_scale(rope, rope.mscale_all_dim)
    return _yarn_scale(rope, 1.0)


def _frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Angular frequency of each pair (fp64 [dim/2])."""
    plain = rope.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    smooth = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeConfig, plain: Tensor, dim: int) -> Tensor:
    """Pairs that turn more than beta_fast times in the original context are kept, less than beta_slow slowed."""

    def pair_turning(rotations: float) -> float:
        return dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_turning(rope.beta_fast)), 0)
    high = min(math.ceil(pair_turning(rope.beta_slow)), dim - 1)
    width = high - low or 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _yarn_scale(rope: RopeConfig, weight: float) -> float:
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0


LinearT = TypeVar("LinearT")


@dataclass(frozen=True, slots=True)
class DecoderLayer(Generic[LinearT]):
    """One layer, its linears of one device's kind. `qkv` adds no bias to K where `key_bias` keeps it apart."""

    input_norm: Tensor
    qkv: LinearT
    key_bias: KeyBias
    attention_out: LinearT
    mlp_norm: Tensor
    gate_up: LinearT
    down: LinearT


@dataclass(frozen=True, slots=True)
class Decoder:
    """A loaded model. `floor` is sqrt(N * eps) as a scalar tensor, `rotary` complex64 [positions, D/2].

    The norm weights are multiplied by sqrt(N), as `reference.rms_norm` wants them.
    """

    config: ModelConfig
    embedding: PlainEmbedding | Int8Embedding
    layers: Sequence[DecoderLayer[Linear]]
    final_norm: Tensor
    head: Linear
    floor: Tensor
    rotary: Tensor

    def nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(part.nbytes for part in (self.embedding, self.head, self.rotary, *self.linears()))

    def linears(self) -> list[Linear]:
        """All linears of the layers, the head not among them."""
        return [linear for x in self.layers for linear in (x.qkv, x.attention_out, x.gate_up, x.down)]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the final norm, fp32 [T, N], of token_ids [T] at positions [T]."""
        config = self.config
        shape = (len(token_ids), config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        turns = self._turns(positions)
        x = self.embedding(token_ids)
        for index, layer in enumerate(self.layers):
            normed = reference.rms_norm(x, layer.input_norm, self.floor)
            heads = reference.rotate(layer.qkv(normed).float().view(shape), turns)
            apart = layer.key_bias.apart
            offsets = None if apart is None else rotated(apart, self.rotary)
            attended = attend(index, heads[:, : config.num_heads], heads[:, config.num_heads :], offsets)
            x.add_(layer.attention_out(attended))
            normed = reference.rms_norm(x, layer.mlp_norm, self.floor)
            x.add_(layer.down(reference.silu_and_multiply(layer.gate_up(normed))))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, vocab_size] of hidden states [R, N]."""
        return self.head(reference.rms_norm(hidden, self.final_norm, self.floor)).float()

    def _turns(self, positions: Tensor) -> Tensor:
        """Rotation of every q, k and v head, complex64 [T, H + 2G, D/2]; v is turned by 1: one product does all."""
        turns = self.rotary[positions]
        values = torch.ones_like(turns)
        turned = self.config.num_heads + self.config.num_kv_heads
        return torch.stack([turns] * turned + [values] * self.config.num_kv_heads, dim=1)
