"""Hold this GPU's kernels against their references, one by one and in a whole model: is it right here, on this card?

Owns: the limits, the table, the file. Does not know: how anything is computed (`kernel_checks`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ..engine_core.errors import EngineError
from ..engine_core.models.registry import ModelConfig, read_model_config
from ..settings import EXIT_FAILED, EXIT_OK, Settings, UsageError, load
from .bench import report
from .errors import ToolError
from .errors import report as show_error
from .fetch_model import resolve_model

if TYPE_CHECKING:
    from .kernel_checks import Comparison, LogitsComparison

PROG = "coldblock validate"
MOST_RELATIVE_ERROR = {"fp16": 2e-3, "bf16": 1.2e-2}
"""‖kernel - reference‖ / ‖reference‖ that rounding alone explains, by activation type."""
MOST_KL = 1e-3
"""Nats per token between a model with native and with reference attention."""


class ValidateSettings(Settings):
    """Settings of `coldblock validate`."""

    model: str = Field("smollm2-135m", description="whose logits are compared: a checkpoint folder or a known name")
    tokens: int = Field(512, ge=1, le=4096, description="length of the random prompt for the logits")
    seed: int = Field(0, ge=0, description="of the random inputs")
    out: Path | None = Field(
        None, description="folder for bench-validate.json; docs/results or the current one if absent"
    )


def main(argv: list[str]) -> int:
    """Run the command. Exit code 1 when a kernel is off."""
    settings = load(ValidateSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        return run(settings)
    except (ToolError, UsageError) as error:
        return show_error(PROG, error)
    except EngineError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_FAILED


def run(settings: ValidateSettings) -> int:
    """Compare, print, write."""
    config = read_model_config(resolve_model(settings.model))

    import torch

    from ..engine_core.device import cuda_support
    from ..engine_core.device.config import ExecutorConfig
    from .gpu import explained, require_gpu

    gpu = require_gpu()
    report.require_folder(settings.out)
    cuda_support.refuse_unsupported(ExecutorConfig(config.path), config)
    with torch.inference_mode(), explained():
        rows, logits = compare_all(settings, config)
    wrong = [r.name for r in rows if not r.relative_error <= limit(r.name)] + [
        r.name for r in logits if not r.mean_kl <= MOST_KL
    ]
    print(render(settings.model, rows, logits))
    results = {"kernels": [asdict(r) for r in rows], "logits": [asdict(r) for r in logits], "wrong": wrong}
    written = report.write(settings.out or report.default_folder(), "validate", settings.model_dump(), None, results)
    print(f"written: {written}")
    if wrong:
        print(f"{PROG}: off by more than rounding: {'; '.join(wrong)}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{len(rows)} comparisons of kernels and {len(logits)} of models are right on {gpu}")
    return EXIT_OK


def compare_all(settings: ValidateSettings, config: ModelConfig) -> tuple[list[Comparison], list[LogitsComparison]]:
    """Every kernel, then the model's logits in every KV format."""
    import torch

    from ..engine_core.models.weights import Checkpoint
    from ..kernels.loader import device_architecture
    from .kernel_checks import DEVICE, FORMATS, compare_logits, kernel_comparisons, load_model

    rows = [check() for check in kernel_comparisons(settings.seed, device_architecture())]
    decoder = load_model(config, Checkpoint(config.path, DEVICE), settings.tokens)
    torch.manual_seed(settings.seed)
    ids = torch.randint(0, config.tokenizer_vocab_size, (settings.tokens,)).tolist()
    return rows, [compare_logits(decoder, ids, kv_format) for kv_format in FORMATS]


def render(model: str, rows: Sequence[Comparison], logits: Sequence[LogitsComparison]) -> str:
    """The two tables."""
    kernels = report.table(
        ("kernel", "cosine", "max abs error", "relative error"),
        [(r.name, f"{r.cosine:.8f}", r.max_abs_error, r.relative_error) for r in rows],
    )
    models = report.table(
        (model, "cosine", "max abs error", "mean KL", "same top-1"),
        [(r.name, f"{r.cosine:.8f}", r.max_abs_error, f"{r.mean_kl:.2e}", r.top1_agreement) for r in logits],
    )
    return f"{kernels}\n\n{models}"


def limit(name: str) -> float:
    """The largest relative error of the kernel of that name."""
    return MOST_RELATIVE_ERROR["bf16" if "bf16" in name else "fp16"]
