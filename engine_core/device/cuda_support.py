"""What the GPU path can serve: the device, the model's shape, the settings. Refused by name before anything is loaded.

Owns: the limits, and the words. Does not know: how anything is computed.
"""

from __future__ import annotations

import torch

from ...kernels import loader
from ...kernels.errors import KernelUnavailable
from ...kernels.fused import MOST_NORM_COLUMNS
from ...kernels.pages import HEAD_DIMS
from ...kernels.sampling import LARGEST_VOCABULARY
from ..errors import CheckpointError, SettingError
from ..kv_layout import ComputeDtype
from ..models.registry import ModelConfig
from .config import ExecutorConfig

BLOCK_SIZE_STEP = 16
_WIDTH_STEP = 8  # elements that a kernel reads at once
_INSTEAD = "use --device cpu"


def why_no_cuda() -> str | None:
    """Why nothing can run on a GPU here; None when it can."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    try:
        loader.device_architecture()
        loader.header_folders()
    except KernelUnavailable as error:
        return str(error)
    return None


def compute_dtype(options: ExecutorConfig, model: ModelConfig) -> ComputeDtype:
    """fp16 or bf16: what was asked for, else the checkpoint's own, bf16 for fp32. Raises SettingError for fp32."""
    if options.compute_dtype == "fp32":
        raise SettingError("--dtype", f"'fp32' is not allowed on a GPU; allowed: auto, bf16, fp16, or {_INSTEAD}")
    if options.compute_dtype != "auto":
        return options.compute_dtype
    return "bf16" if model.dtype == "fp32" else model.dtype


def refuse_unsupported(options: ExecutorConfig, model: ModelConfig) -> None:
    """Raises SettingError or CheckpointError for what no kernel can do."""
    if options.block_size % BLOCK_SIZE_STEP:
        problem = f"{options.block_size} is not allowed on a GPU: a multiple of {BLOCK_SIZE_STEP} is needed"
        raise SettingError("--block-size", f"{problem}, or {_INSTEAD}")
    file = model.path / "config.json"
    if model.head_dim not in HEAD_DIMS:
        supported = ", ".join(map(str, HEAD_DIMS))
        problem = f"head_dim {model.head_dim} is not supported on a GPU; supported: {supported}; {_INSTEAD}"
        raise CheckpointError(file, problem)
    if model.tokenizer_vocab_size > LARGEST_VOCABULARY:
        problem = f"a vocabulary of {model.tokenizer_vocab_size} tokens is not supported on a GPU"
        raise CheckpointError(file, f"{problem}; supported: up to {LARGEST_VOCABULARY}; {_INSTEAD}")
    for name, width, most in (
        ("hidden_size", model.hidden_size, MOST_NORM_COLUMNS),
        ("intermediate_size", model.intermediate_size, model.intermediate_size),
    ):
        if width % _WIDTH_STEP or width > most:
            allowed = f"multiples of {_WIDTH_STEP}" + (f" up to {most}" if width > most else "")
            raise CheckpointError(file, f"{name} {width} is not supported on a GPU; supported: {allowed}; {_INSTEAD}")
