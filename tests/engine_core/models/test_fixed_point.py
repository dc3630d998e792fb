"""The fixed-point linear: precise, and the same whatever shares its batch."""

from __future__ import annotations

import torch
from coldblock.engine_core.models.fixed_point import FixedPointLinear


def test_precision() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(320, 96), torch.randn(9, 96) * torch.logspace(-6, 6, 9)[:, None]
    wanted = (x.double() @ weight.double().t()).float()
    error = (FixedPointLinear(weight)(x) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert error.max() < 2e-4


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    linear, x = FixedPointLinear(torch.randn(320, 96)), torch.randn(33, 96)
    whole = linear(x)
    for first, last in ((0, 1), (4, 9), (7, 33)):
        assert torch.equal(linear(x[first:last]), whole[first:last])


def test_zero_and_not_finite_rows() -> None:
    x = torch.zeros(3, 32)
    x[1, 4], x[2, 5] = float("nan"), float("inf")
    out = FixedPointLinear(torch.randn(64, 32))(x)
    assert (out[0] == 0).all()
    assert out[1:].isnan().all()


def test_bytes() -> None:
    assert FixedPointLinear(torch.randn(320, 96)).nbytes == 2 * 320 * 96 + 4 * 320
