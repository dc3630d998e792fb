"""The fixed-point head: precise where it matters, and the same whatever shares its batch."""

from __future__ import annotations

import pytest
import torch
from coldblock.engine_core.models.head import LIKELY, FixedPointHead


def head_and_input(size: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(size)
    input_size = torch.rand(96) + 0.1
    return torch.randn(size, 96) * torch.rand(96), torch.randn(rows, 96) * input_size, input_size


@pytest.mark.parametrize("size", [40, 320, 5000, 5013])
def test_precision(size: int) -> None:
    weight, x, input_size = head_and_input(size, 9)
    x *= torch.logspace(-6, 6, 9)[:, None]
    wanted = (x.double() @ weight.double().t()).float()
    error = (FixedPointHead(weight, input_size)(x) - wanted).abs() / wanted.std(dim=1, keepdim=True)
    assert error.max() < 0.05
    likely = wanted.topk(min(LIKELY, size) // 2).indices
    assert error.gather(1, likely).max() < 1e-3


def test_rows_do_not_depend_on_each_other() -> None:
    weight, x, input_size = head_and_input(5000, 33)
    head = FixedPointHead(weight, input_size)
    whole = head(x)
    for first, last in ((0, 1), (4, 9), (7, 33)):
        torch.testing.assert_close(head(x[first:last]), whole[first:last], rtol=1e-6, atol=1e-6)


def test_zero_and_not_finite_rows() -> None:
    weight, x, input_size = head_and_input(5000, 3)
    x[0], x[1, 4], x[2, 5] = 0.0, float("nan"), float("inf")
    out = FixedPointHead(weight, input_size)(x)
    assert (out[0] == 0).all()
    assert out[1:].isnan().all()


def test_zero_columns() -> None:
    weight, x, input_size = head_and_input(320, 2)
    weight[:, 3], input_size[5] = 0.0, 0.0
    assert FixedPointHead(weight, input_size)(x).isfinite().all()


def test_bytes() -> None:
    weight, _, input_size = head_and_input(320, 1)
    assert FixedPointHead(weight, input_size).nbytes == 2 * 320 * 96 + 4 * 320 + 4 * 96
