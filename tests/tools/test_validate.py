"""Validation says what is off and by how much, and says so plainly where there is no GPU; on one, all kernels pass."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from coldblock.tools import kernel_checks, validate
from coldblock.tools.bench import kernels

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@needs_no_gpu
def test_without_a_gpu_it_says_so(embedded_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([f"--model={embedded_model}"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


@needs_no_gpu
def test_the_benchmark_of_kernels_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_comparison_measures_the_distance() -> None:
    reference = torch.tensor([[3.0, 4.0]])
    same = kernel_checks.compare("same", reference, reference)
    assert (same.cosine, same.max_abs_error, same.relative_error) == (1.0, 0.0, 0.0)
    off = kernel_checks.compare("off", torch.tensor([[3.0, 4.5]]), reference)
    assert off.max_abs_error == 0.5
    assert off.relative_error == pytest.approx(0.1)
    assert 0.99 < off.cosine < 1


def test_what_was_never_written_is_off() -> None:
    unwritten = kernel_checks.compare("x", torch.tensor([1.0, math.nan]), torch.ones(2))
    assert not unwritten.relative_error <= validate.limit("x")


def test_every_format_and_head_dimension_is_compared() -> None:
    assert len(list(kernel_checks.kernel_comparisons(0))) == 2 * (2 + 2 * 3) + 2 * 5 * 4


def test_percent_is_of_the_ceiling_that_binds() -> None:
    row = kernels.Measured("x", 10.0, 2.0, 400.0, 0.5)
    assert "50" in kernels.render([row])


@pytest.mark.gpu
def test_all_kernels_are_right() -> None:
    for check in kernel_checks.kernel_comparisons(1):
        row = check()
        assert row.relative_error <= validate.limit(row.name), row
