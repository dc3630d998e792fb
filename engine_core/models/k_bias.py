"""The bias of K, kept out of the pool where it would drown what K says.

Owns: which layers' K is stored without its bias, what has to be added when K is read, how large K and V become, and
which formats do not hold that. Does not know: where rotations come from, pages, how formats round, devices' kernels.

Rotation is linear: RoPE_p(W x + b) = RoPE_p(W x) + RoPE_p(b). The first term alone is stored, the second, which is the
same for every sequence, is added in fp32 when K is read for attention. So nothing changes but rounding, and that for
the better: Qwen2's bias makes some layers' K a large constant plus a small signal, and every format spends its bits on
what is large. No model is known to need the like for V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import reference
from ..kv_layout import FormatName, largest_number
from .w4a16 import W4Weight

SPLIT_ABOVE = 16.0
"""Ratio of the largest bias of a head to that head's signal above which a layer's bias is kept apart.

In Qwen2.5-Coder-0.5B the six layers that one-byte formats spoil have 22.6 and more, over all heads, the others at most
10.5. Splitting these too would gain nothing there that can be measured, and reading K without a bias is faster.
"""
_PEAK = 4.0  # in standard deviations: what some channel reaches every few tokens
_FORMATS: tuple[FormatName, ...] = ("int8", "fp16", "bf16")  # to recommend

KeyOffsets = Callable[[int], Tensor]
"""n -> fp32 [G, n, D]: what is to be added to the stored K of positions 0 to n - 1."""
Projection = tuple[Tensor | W4Weight, Tensor | None]
"""W [G*D, N] and b [G*D] of K or V."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """What positions do to a head's rotary pairs.

    `angles`: fp64 [D/2], by how much the last position turns each. `factor`: what all of them multiply a pair by.
    """

    angles: Tensor
    factor: float

    def peaks(self, heads: Tensor) -> Tensor:
        """The largest number fp64 [G, D/2] that some position makes of each pair of heads [G, D]."""
        pairs = heads.double().view(len(heads), -1, 2)
        first = torch.atan2(pairs[..., 1], pairs[..., 0]).remainder(math.pi / 2)
        last = (first + self.angles).clamp_max(math.pi / 2)  # where all of a pair is in one number
        share = torch.stack((first.cos(), first.sin(), last.cos(), last.sin())).amax(0)
        return self.factor * share * torch.linalg.vector_norm(pairs, dim=-1)


@dataclass(frozen=True, slots=True)
class KeyBias:
    """One layer's K and V, as its weights tell.

    `ratio`: of the head whose bias of K is largest against the rest of its K, the largest |bias| against the rms of
    that rest. `peaks`: what some channel of K, as it is stored, and of V reaches every few tokens. `apart`: the bias
    fp32 [G, D] that is not stored, in the rows' order.
    """

    ratio: float
    peaks: tuple[float, float]
    apart: Tensor | None


def measure(keys: Projection, values: Projection, norm: Tensor, rotation: Rotation) -> KeyBias:
    """Decide for one layer, from what makes its K and V and the weight [N] of the norm in front of them.

    The rows of K's projection are in the order of rotary pairs.
    """
    head_dim = 2 * len(rotation.angles)
    heads, bias = (part.view(-1, head_dim) for part in _channels(keys, norm))
    ratio = float((bias.abs().amax(1) / heads.square().mean(1).sqrt().clamp_min(1e-30)).amax())
    apart = None
    if keys[1] is not None and ratio > SPLIT_ABOVE:
        apart, bias = keys[1].float().view(-1, head_dim).clone(), torch.zeros_like(bias)
    noise = rotation.factor * heads.view(len(heads), -1, 2).amax(2)
    value_channels, value_bias = _channels(values, norm)
    key_peak = (_PEAK * noise + rotation.peaks(bias)).amax()
    value_peak = (_PEAK * value_channels + value_bias.abs()).amax()
    return KeyBias(ratio, (float(key_peak), float(value_peak)), apart)


def _channels(projection: Projection, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The rms of each channel without its bias, and the bias: fp32 [G*D] on the CPU.

    Normed activations are about 1 in size, so the rms is |W[d] * norm|.
    """
    weight, bias = projection
    matrix = weight.dequantize() if isinstance(weight, W4Weight) else weight.float()
    channels = torch.linalg.vector_norm(matrix * norm.float(), dim=1).cpu()
    return channels, torch.zeros_like(channels) if bias is None else bias.float().cpu()


def rotated(bias: Tensor, rotary: Tensor) -> KeyOffsets:
    """RoPE_p(bias) for bias [G, D] and the rotary table [positions, D/2]; n is cut to the table's length."""

    def offsets(length: int) -> Tensor:
        turns = rotary[:length, None]
        return reference.rotate(bias.expand(len(turns), -1, -1), turns).transpose(0, 1)

    return offsets


def misfit(layers: Sequence[KeyBias], kv_format: FormatName) -> str | None:
    """Why this model's K or V does not suit a format, with numbers; None: it does."""
    limit = largest_number(kv_format)
    highest = max((peak for layer in layers for peak in layer.peaks), default=0.0)
    for which, name in enumerate("KV"):
        peak, number = max(((layer.peaks[which], number) for number, layer in enumerate(layers)), default=(0.0, 0))
        if peak > limit:
            others = " or ".join(other for other in _FORMATS if largest_number(other) >= highest)
            return (
                f"{name} in {kv_format} is clamped at {limit:.0f}, and by its weights {name} of layer {number} reaches "
                f"{peak:.0f}: this loses quality; use {others}"
            )
    return None
