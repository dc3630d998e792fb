"""A bias of K that drowns what K says, for checks and benchmarks of kernels.

Owns: its numbers. Does not know: who adds it to what.
"""

from __future__ import annotations

import torch

from ..kernels.rotated_bias import RotatedBias, Turns


def large_bias(
    kv_heads: int, head_dim: int, positions: int, device: str = "cuda", theta: float = 1e6, factor: float = 1.0
) -> RotatedBias:
    """Of norm 400 in each KV head, as Qwen2's first layer has it: a few channels are far larger than the others.

    The rotary table has `positions` rows, and all of it is times `factor`.
    """
    values = torch.randn(kv_heads, head_dim, generator=torch.Generator().manual_seed(head_dim))
    values[:, 5::40] *= 8
    values *= 400 / values.norm(dim=1, keepdim=True)
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    rotary = torch.view_as_real(torch.polar(torch.full_like(angles, factor), angles)).float()
    rotary = rotary.contiguous().to(device)
    return RotatedBias(values.to(device), rotary, Turns.of(rotary))
