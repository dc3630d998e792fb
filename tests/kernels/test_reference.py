"""The plain operators against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from coldblock.kernels import reference


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight, eps = torch.randn(5, 48) * 1e-3, torch.randn(48), 1e-5
    wanted = torch.nn.functional.rms_norm(x, (48,), weight, eps)
    got = reference.rms_norm(x, weight * math.sqrt(48), torch.tensor(math.sqrt(48 * eps)))
    torch.testing.assert_close(got, wanted)


def test_rotate_turns_neighbouring_pairs() -> None:
    heads = torch.randn(3, 2, 4)
    angles = torch.randn(3, 2, 2)
    got = reference.rotate(heads, torch.polar(torch.ones_like(angles), angles))
    even, odd = heads[..., ::2], heads[..., 1::2]
    torch.testing.assert_close(got[..., ::2], even * angles.cos() - odd * angles.sin())
    torch.testing.assert_close(got[..., 1::2], even * angles.sin() + odd * angles.cos())


def test_silu_and_multiply() -> None:
    gate, up = torch.randn(2, 3, 10)
    got = reference.silu_and_multiply(torch.cat([gate, up], 1))
    torch.testing.assert_close(got, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (7, 1)])
def test_attention_equals_its_definition(heads: int, groups: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, heads, 10), torch.randn(groups, 9, 10), torch.randn(groups, 9, 10)
    each_k, each_v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
    scores = torch.einsum("thd,hsd->hts", q, each_k) / math.sqrt(10)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    wanted = torch.einsum("hts,hsd->thd", scores.masked_fill(hidden, -math.inf).softmax(-1), each_v).flatten(1)
    bias = torch.zeros(9, 9).masked_fill(hidden, -math.inf)
    torch.testing.assert_close(reference.attend_many(q, k, v, None), wanted)
    torch.testing.assert_close(reference.attend_many(q[5:], k, v, bias[5:]), wanted[5:])
    torch.testing.assert_close(reference.attend_one(q[8:], k[None], v[None], torch.zeros(1, 1, 1, 9)), wanted[8:])


def test_attention_past_the_end_is_masked() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    bias = torch.zeros(2, 1, 1, 6)
    bias[0, ..., 3:] = -math.inf
    got = reference.attend_one(q, k, v, bias)
    short = reference.attend_one(q[:1], k[:1, :, :3], v[:1, :, :3], torch.zeros(1, 1, 1, 3))
    torch.testing.assert_close(got[:1], short)
    torch.testing.assert_close(got[1:], reference.attend_one(q[1:], k[1:], v[1:], torch.zeros(1, 1, 1, 6)))
