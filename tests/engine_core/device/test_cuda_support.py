"""What the GPU path refuses, by name, before it loads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from coldblock.engine_core.device import cuda_support
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.errors import EngineError, SettingError
from coldblock.engine_core.models.registry import read_model_config
from tiny_models import edit_config, save_tiny

FITTING = {"head_dim": 64, "hidden_size": 64}


def refuse(path: Path, model: dict[str, Any], **settings: Any) -> None:
    save_tiny(path, **{**FITTING, **model})
    options = ExecutorConfig(path, **settings)
    config = read_model_config(path)
    cuda_support.compute_dtype(options, config)
    cuda_support.refuse_unsupported(options, config)


def test_what_fits_is_not_refused(tmp_path: Path) -> None:
    refuse(tmp_path, {}, block_size=48, compute_dtype="fp16")


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ({"head_dim": 80}, {}, "head_dim 80 .* 64, 96, 128, 256; .*--device cpu"),
        ({"hidden_size": 68}, {}, "hidden_size 68 .*multiples of 8"),
        ({"hidden_size": 8200}, {}, "hidden_size 8200 .*multiples of 8 up to 8192"),
        ({"intermediate_size": 100}, {}, "intermediate_size 100 .*multiples of 8"),
        ({"vocab_size": 300_000, "hidden_size": 8}, {}, "vocabulary of 300000 .*up to 262144; use --device cpu"),
        ({}, {"block_size": 8}, "--block-size: 8 .*multiple of 16"),
        ({}, {"compute_dtype": "fp32"}, "--dtype: 'fp32' .*bf16, fp16, or use --device cpu"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        refuse(tmp_path, model, **settings)


@pytest.mark.parametrize(
    ("checkpoint", "asked", "dtype"),
    [
        ("float32", "auto", "bf16"),
        ("float16", "auto", "fp16"),
        ("bfloat16", "auto", "bf16"),
        ("float16", "bf16", "bf16"),
    ],
)
def test_compute_dtype(tmp_path: Path, checkpoint: str, asked: Any, dtype: str) -> None:
    save_tiny(tmp_path, **FITTING)
    edit_config(tmp_path, dtype=checkpoint)
    options = ExecutorConfig(tmp_path, compute_dtype=asked)
    assert cuda_support.compute_dtype(options, read_model_config(tmp_path)) == dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said() -> None:
    reason = cuda_support.why_no_cuda()
    assert reason is not None and "CUDA" in reason


def test_a_setting_error_names_its_flag() -> None:
    error = SettingError("--dtype", "wrong")
    assert (error.flag, str(error)) == ("--dtype", "--dtype: wrong")
