"""Hold this GPU's kernels against their references, one by one and in a whole model: is it right here, on this card?

Owns: the limits, the table, the file. Does not know: how anything is computed (`kernel_checks`).
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from ..engine_core.errors import EngineError
from ..engine_core.models.registry import read_model_config
from ..settings import EXIT_FAILED, EXIT_OK, Settings, UsageError, load
from .bench import report
from .errors import ToolError
from .errors import report as show_error
from .fetch_model import resolve_model

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
    out: Path | None = Field(None, description="folder for validate.json; docs/results or the current one if absent")


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

    if not torch.cuda.is_available():
        raise ToolError("there is no CUDA device here, so there is no kernel to validate")
    from ..engine_core.models.weights import Checkpoint
    from .kernel_checks import FORMATS, compare_logits, kernel_comparisons, load_model

    with torch.inference_mode():
        rows = [check() for check in kernel_comparisons(settings.seed)]
        decoder = load_model(config, Checkpoint(config.path, "cuda"), settings.tokens)
        torch.manual_seed(settings.seed)
        ids = torch.randint(0, config.tokenizer_vocab_size, (settings.tokens,)).tolist()
        logits = [compare_logits(decoder, ids, kv_format) for kv_format in FORMATS]
    wrong = [r.name for r in rows if not r.relative_error <= limit(r.name)] + [
        r.name for r in logits if not r.mean_kl <= MOST_KL
    ]
    columns = ("kernel", "cosine", "max abs error", "relative error")
    print(report.table(columns, [(r.name, f"{r.cosine:.8f}", r.max_abs_error, r.relative_error) for r in rows]))
    columns = (settings.model, "cosine", "max abs error", "mean KL", "same top-1")
    print()
    print(
        report.table(
            columns,
            [(r.name, f"{r.cosine:.8f}", r.max_abs_error, f"{r.mean_kl:.2e}", r.top1_agreement) for r in logits],
        )
    )
    results = {"kernels": [asdict(r) for r in rows], "logits": [asdict(r) for r in logits], "wrong": wrong}
    written = report.write(settings.out or report.default_folder(), "validate", settings.model_dump(), None, results)
    print(f"written: {written}")
    if wrong:
        print(f"{PROG}: off by more than rounding: {'; '.join(wrong)}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{len(rows)} kernels and {len(logits)} models are right on {torch.cuda.get_device_name()}")
    return EXIT_OK


def limit(name: str) -> float:
    """The largest relative error of the kernel of that name."""
    return MOST_RELATIVE_ERROR["bf16" if "bf16" in name else "fp16"]
