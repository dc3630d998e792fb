"""The model's operators in plain torch: what every other kernel must agree with, and what the CPU runs.

Owns: the arithmetic. Does not know: models, pages, requests; it sees tensors and numbers.

T is tokens, H query heads, G KV heads (H a multiple of G), D the head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, scaled_weight: Tensor, floor: Tensor) -> Tensor:
    """RMS norm of x [T, N] fp32, from `scaled_weight` = weight * sqrt(N) and `floor` = sqrt(N * eps), a scalar tensor.

    x / sqrt(mean(x^2) + eps) * w is x / hypot(|x|, sqrt(N * eps)) * (w * sqrt(N)): half the passes over x.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.div(x, torch.hypot(length, floor)).mul_(scaled_weight)


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of `heads` [T, H, D] fp32 by `turns` [T, H, D/2] complex64; pairs are neighbours (2i, 2i+1)."""
    pairs = torch.view_as_complex(heads.view(heads.shape[0], heads.shape[1], -1, 2))
    return torch.view_as_real(pairs * turns).view_as(heads)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2N] -> [T, N], in its dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def attend_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention of one query token per sequence: q [B, H, D], k and v [B, G, S, D], bias [B, 1, 1, S] -> [B, H*D].

    `bias` is 0 where a key exists and -inf past a sequence's end; k and v must be finite there. One dtype for all.
    """
    queries = q.view(len(q), k.shape[1], -1, q.shape[2])
    return F.scaled_dot_product_attention(queries, k, v, bias).reshape(len(q), -1)


def attend_many(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Causal attention of one sequence's chunk: q [T, H, D], k and v [G, S, D], bias [T, S] -> [T, H*D].

    `bias` is 0 where a query sees a key, else -inf; None when the chunk is the sequence's start (S = T).
    """
    groups = k.shape[0]
    queries = q.view(len(q), groups, -1, q.shape[2]).permute(2, 1, 0, 3)
    keys, values = k.expand(len(queries), -1, -1, -1), v.expand(len(queries), -1, -1, -1)
    out = F.scaled_dot_product_attention(queries, keys, values, bias, is_causal=bias is None)
    return out.permute(2, 1, 0, 3).reshape(len(q), -1)
