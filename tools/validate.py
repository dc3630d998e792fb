"""Hold this GPU's kernels against their references, one by one and in a whole model: is it right here, on this card?

Owns: the limits, the table, the file. Does not know: how anything is computed (`kernel_checks`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ..engine_core.errors import EngineError
from ..engine_core.models.registry import ModelConfig, read_model_config
from ..progress import track
from .bench.command import ReportSettings, conclude, run_command
from .bench.figures import Bars, Figure
from .bench.report import Column, Table, table
from .errors import ToolError
from .fetch_model import resolve_model

if TYPE_CHECKING:
    from .kernel_checks import Comparison, LogitsComparison

PROG = "coldblock validate"
MOST_RELATIVE_ERROR = {"fp16": 2e-3, "bf16": 1.2e-2}
"""‖kernel - reference‖ / ‖reference‖ that rounding alone explains, by activation type."""
MOST_BIASED_ERROR = 5e-3
"""Beside that, where K's bias is added: what it costs to round K with such a bias to half, and as much again."""
MOST_KL = 1e-3
"""Nats per token between a model with native and with reference attention."""


class ValidateSettings(ReportSettings):
    """Settings of `coldblock validate`."""

    model: str = Field("smollm2-135m", description="whose logits are compared: a checkpoint folder or a known name")
    tokens: int = Field(512, ge=1, le=4096, description="length of the random prompt for the logits")
    seed: int = Field(0, ge=0, description="of the random inputs")


def main(argv: list[str]) -> int:
    """Run the command. Exit code 1 when a kernel is off."""
    return run_command(ValidateSettings, argv, PROG, __doc__, run)


def run(settings: ValidateSettings) -> int:
    """Compare, then report."""
    try:
        gpu, results = checked(settings)
    except EngineError as error:
        raise ToolError(str(error)) from error
    if wrong := results["wrong"]:
        print(f"{PROG}: off by more than rounding: {'; '.join(wrong)}", file=sys.stderr)
        verdict = f"{len(wrong)} comparisons are off by more than rounding"
    else:
        count = len(results["kernels"]) + len(results["logits"])
        verdict = f"all {count} comparisons of kernels and of {Path(settings.model).name} are right"
    return conclude(
        settings, PROG, f"{gpu}: {verdict}", None, results, tables(results), figures(results), passed=not wrong
    )


def checked(settings: ValidateSettings) -> tuple[str, dict[str, Any]]:
    """The GPU's name, and all comparisons."""
    import torch

    from ..engine_core.device import cuda_support
    from ..engine_core.device.config import ExecutorConfig
    from .gpu import explained, require_gpu

    config = read_model_config(resolve_model(settings.model))
    gpu = require_gpu()
    cuda_support.refuse_unsupported(ExecutorConfig(config.path), config)
    with torch.inference_mode(), explained():
        rows, logits = compare_all(settings, config)
    wrong = [r.name for r in rows if not r.relative_error <= limit(r.name)] + [
        r.name for r in logits if not r.mean_kl <= MOST_KL
    ]
    return gpu, {"kernels": [asdict(r) for r in rows], "logits": [asdict(r) for r in logits], "wrong": wrong}


def compare_all(settings: ValidateSettings, config: ModelConfig) -> tuple[list[Comparison], list[LogitsComparison]]:
    """Every kernel, then the model's logits in every KV format."""
    import torch

    from ..engine_core.models.weights import Checkpoint
    from ..kernels.loader import device_architecture
    from .kernel_checks import DEVICE, FORMATS, compare_logits, kernel_comparisons, load_model

    checks = list(kernel_comparisons(settings.seed, device_architecture()))
    rows = [check() for check in track(checks, PROG, "kernel")]
    decoder = load_model(config, Checkpoint(config.path, DEVICE), settings.tokens)
    torch.manual_seed(settings.seed)
    ids = torch.randint(0, config.tokenizer_vocab_size, (settings.tokens,)).tolist()
    return rows, [compare_logits(decoder, ids, kv_format) for kv_format in FORMATS]


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Kernels, and a whole model."""
    return [
        table("Kernels against their references", KERNELS, results["kernels"]),
        table("A model's logits, with native against reference attention", LOGITS, results["logits"]),
    ]


KERNELS = (
    Column("kernel", "name", case=True),
    Column("cosine", lambda row: f"{row['cosine']:.8f}"),
    Column("max abs error", "max_abs_error"),
    Column("relative error", "relative_error", better="lower"),
)
LOGITS = (
    Column("KV", "name", case=True),
    Column("cosine", lambda row: f"{row['cosine']:.8f}"),
    Column("max abs error", "max_abs_error"),
    Column("mean KL", "mean_kl", better="lower"),
    Column("same top-1", "top1_agreement", better="higher"),
)


def figures(results: Mapping[str, Any]) -> list[Figure]:
    """Each kernel's error against what rounding alone explains."""
    rows = results["kernels"]
    return [
        Bars(
            "Error against what rounding explains",
            "100 % is the limit from which on a kernel counts as wrong.",
            "% of the limit",
            tuple(row["name"] for row in rows),
            {"relative error": tuple(100 * row["relative_error"] / limit(row["name"]) for row in rows)},
            horizontal=True,
        )
    ]


def limit(name: str) -> float:
    """The largest relative error of the kernel of that name."""
    return MOST_RELATIVE_ERROR["bf16" if "bf16" in name else "fp16"] + ("K bias" in name) * MOST_BIASED_ERROR
