"""The model's operators in plain torch: what every other kernel must agree with, and what the CPU runs.

Owns: the arithmetic. Does not know: models, pages, requests; it sees tensors and numbers.

All of it computes in fp32. T is tokens, H query heads, G KV heads (H a multiple of G), D the head dimension.
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
    """Attention of one query token per sequence: q [B, H, D], k and v [B, G, S, D], bias [B*G, 1, S] -> [B, H*D].

    `bias` is 0 where a key exists and -inf past a sequence's end; k and v must be finite there.
    """
    batch, groups, length, dim = k.shape
    queries = q.reshape(batch * groups, -1, dim)
    scores = torch.baddbmm(bias, queries, k.reshape(-1, length, dim).transpose(1, 2), alpha=dim**-0.5)
    return torch.bmm(torch.softmax(scores, -1), v.reshape(-1, length, dim)).view(batch, -1)


def attend_many(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of one chunk: q [T, H, D] at positions start.., k and v [G, start+T, D] -> [T, H*D]."""
    tokens, heads, dim = q.shape
    mask = None
    if start:
        mask = torch.ones(tokens, start + tokens, dtype=torch.bool).tril_(start)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=heads != k.shape[0],
    )
    return out[0].transpose(0, 1).reshape(tokens, heads * dim)
