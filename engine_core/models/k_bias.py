"""The bias of K, kept out of the pool where it would drown what K says.

Owns: which layers' K is stored without its bias, what has to be added when K is read, and which formats do not suit
what is stored. Does not know: pages, how formats round, devices' kernels.

Rotation is linear: RoPE_p(W x + b) = RoPE_p(W x) + RoPE_p(b). The first term alone is stored, the second, which is the
same for every sequence, is added in fp32 when K is read for attention. So nothing changes but rounding, and that for
the better: Qwen2's bias makes some layers' K a large constant plus a small signal, and every format spends its bits on
what is large. No model is known to need the like for V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels import reference
from ..kv_layout import FormatName, has_one_byte_elements, largest_number
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
class KeyBias:
    """One layer's K and V, as its weights tell.

    `largest` and `signal`: of the head whose bias of K is largest against the rest of its K, the largest |bias|, and
    the rms of K without it. `peaks`: what some channel of K, as it is stored, and of V reaches every few tokens.
    `apart`: the bias fp32 [G, D] that is not stored, in the rows' order.
    """

    largest: float
    signal: float
    peaks: tuple[float, float]
    apart: Tensor | None

    @property
    def ratio(self) -> float:
        """How large the bias is against the signal."""
        return self.largest / max(self.signal, 1e-30)


def measure(
    keys: Projection, values: Projection, norm: Tensor, head_dim: int, may_split: bool, turn: float = 1.0
) -> KeyBias:
    """Decide for one layer, from what makes its K and V and the weight [N] of the norm in front of them.

    The rows of K's projection are in the order of rotary pairs; `turn` is the size of a rotation.
    """
    channels, bias = _channels(keys[0], norm), keys[1]
    bare_peak, value_peak = turn * _rotated_peak(channels, None), _peak(_channels(values[0], norm), values[1])
    signals = channels.view(-1, head_dim).square().mean(1).sqrt()
    if bias is None:
        return KeyBias(0.0, float(signals.amin()), (bare_peak, value_peak), None)
    largest = bias.float().abs().view(-1, head_dim).amax(1)
    head = int((largest / signals.clamp_min(1e-30)).argmax())
    apart = bias.float().view(-1, head_dim).clone()
    whole = KeyBias(float(largest[head]), float(signals[head]), (bare_peak, value_peak), apart)
    if may_split and whole.ratio > SPLIT_ABOVE:
        return whole
    return replace(whole, peaks=(turn * _rotated_peak(channels, bias), value_peak), apart=None)


def _channels(weight: Tensor | W4Weight, norm: Tensor) -> Tensor:
    """The rms of each channel without its bias [G*D]: normed activations are about 1 in size, so |W[d] * norm|."""
    matrix = weight.dequantize() if isinstance(weight, W4Weight) else weight.float()
    channels: Tensor = torch.linalg.vector_norm(matrix * norm.float(), dim=1)
    return channels


def _rotated_peak(channels: Tensor, bias: Tensor | None) -> float:
    """For rows in the order of rotary pairs: somewhere rotation turns all of a pair's bias into one of its channels."""
    pairs = None if bias is None else torch.linalg.vector_norm(bias.float().view(-1, 2), dim=1)
    return _peak(channels.view(-1, 2).amax(1), pairs)


def _peak(channels: Tensor, bias: Tensor | None) -> float:
    return float((_PEAK * channels + (0.0 if bias is None else bias.float().abs())).amax())


def rotated(bias: Tensor, rotary: Tensor) -> KeyOffsets:
    """RoPE_p(bias) for bias [G, D] and the rotary table [positions, D/2]; n is cut to the table's length."""

    def offsets(length: int) -> Tensor:
        turns = rotary[:length, None]
        return reference.rotate(bias.expand(len(turns), -1, -1), turns).transpose(0, 1)

    return offsets


def misfit(layers: Sequence[KeyBias], kv_format: FormatName) -> str | None:
    """Why this model's K or V does not suit a format, with numbers; None: it does."""
    drowned = [(number, layer) for number, layer in enumerate(layers) if _drowns(layer)]
    if drowned and has_one_byte_elements(kv_format):
        number, worst = max(drowned, key=lambda entry: entry[1].ratio)
        return (
            f"K in {kv_format} loses quality on this model: in {len(drowned)} of {len(layers)} layers the bias of K is "
            f"stored with it and drowns it, in layer {number} up to {worst.largest:.0f} against a signal of "
            f"{worst.signal:.1f}; use fp16 or bf16"
        )
    limit = largest_number(kv_format)
    for which, name in enumerate("KV"):
        peak, number = max(((layer.peaks[which], number) for number, layer in enumerate(layers)), default=(0.0, 0))
        if peak > limit:
            others = " or ".join(other for other in _FORMATS if largest_number(other) >= peak)
            return (
                f"{name} in {kv_format} is clamped at {limit:.0f}, and by its weights {name} of layer {number} reaches "
                f"{peak:.0f}: this loses quality; use {others}"
            )
    return None


def _drowns(layer: KeyBias) -> bool:
    return layer.apart is None and layer.ratio > SPLIT_ABOVE
