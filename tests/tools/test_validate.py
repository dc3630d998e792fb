"""Validation says what is off and by how much, and says so plainly where there is no GPU; on one, all kernels pass."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_on_cpu
import pytest
import torch
from coldblock.kernels import fused, loader, prefill_attention, prefill_attention_hopper, w4_wide
from coldblock.kernels.errors import KernelUnavailable
from coldblock.tools import kernel_checks, validate
from coldblock.tools.bench import kernel_cases, kernels
from coldblock.tools.bench.report import Spread
from tiny_models import save_tiny

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@needs_no_gpu
def test_without_a_gpu_it_says_so(embedded_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main([f"--model={embedded_model}"]) == 1
    assert "need a CUDA device" in capsys.readouterr().err


@needs_no_gpu
def test_the_benchmark_of_kernels_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 1
    assert "need a CUDA device" in capsys.readouterr().err


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
    everywhere = 2 * (3 + 4 + 2 * (1 + 3)) + 1 + 4 * 5 * (4 + 2) + 2
    assert len(list(kernel_checks.kernel_comparisons(0, "sm_86"))) == everywhere
    assert len(list(kernel_checks.kernel_comparisons(0, "sm_90a"))) == everywhere + 2 * 2 * 2 + 5 * 2


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are plain torch, and the CPU an SM90."""
    cuda_on_cpu.emulate(monkeypatch)
    monkeypatch.setattr(kernel_checks, "DEVICE", "cpu")
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(loader, "device_architecture", lambda: "sm_90a")
    monkeypatch.setattr(loader, "header_folders", lambda: ())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=1, L2_cache_size=4 << 20)
    )
    monkeypatch.setattr(prefill_attention, "paged_prefill_mma", cuda_on_cpu.paged_prefill)
    monkeypatch.setattr(prefill_attention_hopper, "paged_prefill_hopper", cuda_on_cpu.paged_prefill)
    monkeypatch.setattr(w4_wide, "w4_wide_linear", cuda_on_cpu.w4_linear)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", head_dim=64, hidden_size=64)
    return tmp_path / "model"


def validated(model: Path, out: Path) -> tuple[int, dict[str, Any]]:
    code = validate.main([f"--model={model}", "--tokens=40", f"--out={out}"])
    return code, json.loads((out / "bench-validate.json").read_text())["results"]


def test_references_are_right_by_their_own_measure(emulated: None, model: Path, tmp_path: Path) -> None:
    code, results = validated(model, tmp_path)
    assert (code, results["wrong"]) == (0, [])
    assert len(results["logits"]) == 5


def test_what_is_off_is_named(
    emulated: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused, "silu_multiply", lambda gate_up, out: out.fill_(0.1))
    code, results = validated(model, tmp_path)
    assert code == 1
    assert results["wrong"] == ["silu_multiply fp16", "silu_multiply bf16"]
    assert "off by more than rounding: silu_multiply fp16; silu_multiply bf16" in capsys.readouterr().err


@pytest.mark.parametrize("command", [validate.main, kernels.main])
def test_what_is_missing_is_named(
    command: Callable[[list[str]], int], emulated: None, model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def missing() -> tuple[Path, ...]:
        raise KernelUnavailable("CuPy is missing: install it")

    monkeypatch.setattr(loader, "header_folders", missing)
    assert command([f"--model={model}"] if command is validate.main else []) == 1
    assert capsys.readouterr().err.endswith(": CuPy is missing: install it\n")


def test_too_little_memory_is_said(
    emulated: None, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused, "embed", full)
    monkeypatch.setattr(kernels, "measure_ceilings", full)
    assert (validate.main([f"--model={model}"]), kernels.main([])) == (1, 1)
    assert capsys.readouterr().err.count("too little free memory") == 2


def test_a_model_that_no_kernel_serves_is_named(
    emulated: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path, head_dim=80)
    assert validate.main([f"--model={tmp_path}"]) == 1
    assert "head_dim 80 is not supported" in capsys.readouterr().err


def test_a_benchmark_of_nothing_is_refused_before_anything_is_measured(
    emulated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "measure_ceilings", lambda: pytest.fail("measured"))
    assert kernels.main(["--only=nothing"]) == 2
    assert "--only: 'nothing' is not allowed" in capsys.readouterr().err


def test_percent_is_of_the_ceiling_that_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernel_cases.Case([lambda: None], bytes_moved=2e9, flops=4e12)
    monkeypatch.setattr(kernels, "milliseconds", lambda calls: [1.0, 2.0, 4.0])
    row = kernels.measure("x", case, kernels.Ceilings(read=4.0, copy=4.0, matmul=4000.0))
    assert (row.us, row.us_range, row.tb_per_s, row.of_ceiling) == (2000.0, (1000.0, 4000.0), 1.0, 0.5)
    results = {"ceilings": {"read": 4.0, "copy": 4.0, "matmul": 4000.0}, "cases": [asdict(row)]}
    assert kernels.tables(results)[1].rows == (("x", Spread(2000.0, 1000.0, 4000.0), 1.0, 2000.0, 50.0),)
    assert kernels.figures(results)[0].series == {"share": (50.0,)}


@pytest.mark.gpu
def test_all_kernels_are_right() -> None:
    for check in kernel_checks.kernel_comparisons(1, loader.device_architecture()):
        row = check()
        assert row.relative_error <= validate.limit(row.name), row
