"""The bias of K, kept out of the pool where it would drown what K says.

Owns: which layers' K is stored without its bias, and what has to be added when K is read.
Does not know: pages, formats' arithmetic, devices' kernels.

Rotation is linear: RoPE_p(W x + b) = RoPE_p(W x) + RoPE_p(b). The first term alone is stored, the second, which is the
same for every sequence, is added in fp32 when K is read for attention. So nothing changes but rounding, and that for
the better: Qwen2's bias makes some layers' K a large constant plus a small signal, and every format spends its bits on
what is large. V has no such layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import reference
from ..kv_layout import FormatName, has_one_byte_elements
from .w4a16 import W4Weight

SPLIT_ABOVE = 16.0
"""Ratio of the largest bias to the signal above which a layer's bias is kept apart.

In Qwen2.5-Coder-0.5B the six layers that one-byte formats spoil have 22.6 and more, the others at most 10.5. Splitting
these too would gain nothing that can be measured, and reading K without a bias is faster.
"""
_PEAK = 4.0  # in standard deviations: what some channel reaches every few tokens
_LARGEST_E4M3 = 448.0

KeyOffsets = Callable[[int], Tensor]
"""n -> fp32 [G, n, D]: what is to be added to the stored K of positions 0 to n - 1."""


@dataclass(frozen=True, slots=True)
class KeyBias:
    """One layer's K, as its weights tell: `largest` |bias|, `signal`: K without it, the rms of all channels together,
    `loudest`: that of the loudest channel. `apart`: the bias fp32 [G, D] that is not stored, in the rows' order."""

    largest: float
    signal: float
    loudest: float
    apart: Tensor | None

    @property
    def ratio(self) -> float:
        """How large the bias is against the signal."""
        return self.largest / max(self.signal, 1e-30)


def measure(weight: Tensor | W4Weight, bias: Tensor | None, norm: Tensor, head_dim: int, may_split: bool) -> KeyBias:
    """Decide for one layer: W_k [G*D, N], b_k [G*D], and the weight [N] of the norm in front of them.

    Normed activations are about 1 in size, so a channel's K without bias is about as large as |W_k[d] * norm|.
    """
    matrix = weight.dequantize() if isinstance(weight, W4Weight) else weight.float()
    channels = torch.linalg.vector_norm(matrix * norm.float(), dim=1)
    signal, loudest = float(channels.square().mean().sqrt()), float(channels.amax())
    if bias is None:
        return KeyBias(0.0, signal, loudest, None)
    whole = KeyBias(float(bias.abs().amax()), signal, loudest, bias.float().view(-1, head_dim).clone())
    if may_split and whole.ratio > SPLIT_ABOVE:
        return whole
    return KeyBias(whole.largest, signal, loudest, None)


def rotated(bias: Tensor, rotary: Tensor) -> KeyOffsets:
    """RoPE_p(bias) for bias [G, D] and the rotary table [positions, D/2]; n is cut to the table's length."""

    def offsets(length: int) -> Tensor:
        turns = rotary[:length, None]
        return reference.rotate(bias.expand(len(turns), -1, -1), turns).transpose(0, 1)

    return offsets


def misfit(keys: Sequence[KeyBias], kv_format: FormatName) -> str | None:
    """Why this model's K does not suit a format, with numbers; None: it does."""
    if not has_one_byte_elements(kv_format):
        return None
    stored = [(number, key) for number, key in enumerate(keys) if key.apart is None]
    drowned = [(number, key) for number, key in stored if key.ratio > SPLIT_ABOVE]
    if drowned:
        number, worst = max(drowned, key=lambda entry: entry[1].ratio)
        return (
            f"K in {kv_format} loses quality on this model: in {len(drowned)} of {len(keys)} layers the bias of K is "
            f"stored with it and drowns it, in layer {number} up to {worst.largest:.0f} against a signal of "
            f"{worst.signal:.1f}; use fp16 or bf16"
        )
    peaks = [(_stored_largest(key) + _PEAK * key.loudest, number) for number, key in enumerate(keys)]
    peak, number = max(peaks, default=(0.0, 0))
    if kv_format == "fp8_e4m3" and peak > _LARGEST_E4M3:
        return (
            f"K in {kv_format} is clamped at {_LARGEST_E4M3:.0f}, and by its weights K of layer {number} reaches "
            f"{peak:.0f}: this loses quality; use int8, fp16 or bf16"
        )
    return None


def _stored_largest(key: KeyBias) -> float:
    return key.largest if key.apart is None else 0.0
