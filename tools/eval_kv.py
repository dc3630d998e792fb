"""What each KV format costs a model's quality, against fp16 KV, through the engine's own paged path.

Owns: the settings, the text, table, file and plot of `coldblock eval kv`. Does not know: how a text is run and what is
counted (`kv_quality`). Runs on the CPU, in fp32 unless told otherwise, so that the KV formats are all that rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator
from pydantic_settings import CliPositionalArg

from ..engine_core.errors import EngineError
from ..engine_core.kv_layout import FormatName, resolve_kv_cache_dtype
from ..engine_core.models.registry import ModelConfig, read_model_config
from ..settings import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Settings, UsageError, load
from .bench import report
from .errors import ToolError
from .errors import report as show_error
from .fetch_model import resolve_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .kv_quality import Quality

PROG = "coldblock eval kv"
TEXT = Path(__file__).parents[1] / "tests" / "data" / "prose_and_code.txt"


class EvalSettings(Settings):
    """Settings of `coldblock eval kv`."""

    model: CliPositionalArg[str] = Field(description="a checkpoint folder, or a known name such as smollm2-135m")
    text: Path | None = Field(None, description="UTF-8 text to run; the tests' prose and code if absent")
    formats: str = Field("fp16,bf16,int8,fp8_e4m3,fp8_e5m2", description="KV formats, separated by commas")
    window: int = Field(1024, ge=2, description="tokens of text in one sequence")
    windows: int | None = Field(None, ge=1, description="most sequences to run; the whole text if absent")
    pool_mb: int = Field(1024, ge=1, description="MiB of the KV pool for which the tokens that fit are told")
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("fp32", description="what activations are computed in")
    threads: int | None = Field(None, ge=1, description="CPU threads; all cores if absent")
    out: Path | None = Field(None, description="folder for bench-eval-kv.json and .png; docs/results if absent")

    @field_validator("formats")
    @classmethod
    def _known_formats(cls, formats: str) -> str:
        for name in formats.split(","):
            if name == "auto":
                raise ValueError("'auto' stands for one of the others; name it")
            resolve_kv_cache_dtype(name, "fp16")
        return formats

    @property
    def format_names(self) -> list[FormatName]:
        """The formats by their own names, each once."""
        return list(dict.fromkeys(resolve_kv_cache_dtype(name, "fp16") for name in self.formats.split(",")))


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    if argv[:1] != ["kv"]:
        print("usage: coldblock eval kv MODEL [ARGUMENTS]      coldblock eval kv --help", file=sys.stderr)
        return EXIT_OK if argv and argv[0] in ("-h", "--help") else EXIT_USAGE
    settings = load(EvalSettings, argv[1:], prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        report.require_plotting()
        report.require_folder(settings.out)
        return run(settings)
    except (ToolError, UsageError) as error:
        return show_error(PROG, error)
    except EngineError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return EXIT_FAILED


def run(settings: EvalSettings) -> int:
    """Measure, print, write."""
    config = read_model_config(resolve_model(settings.model))
    windows = read_windows(settings, config)
    results = measure(settings, config, windows)
    tokens = sum(map(len, windows))
    print(render(settings, results, tokens))
    folder = settings.out or report.default_folder()
    found = {
        "tokens": tokens,
        "windows": len(windows),
        "formats": [{**asdict(r), "tokens_in_pool": tokens_in_pool(settings, r)} for r in results],
    }
    written = report.write(folder, "eval-kv", settings.model_dump(exclude={"text", "out"}), None, found)
    plotted = report.plot(folder, "eval-kv", f"KV formats, {settings.model}", [partial(_plot, results)])
    print(f"written: {written}, {plotted}")
    return EXIT_OK


def read_windows(settings: EvalSettings, config: ModelConfig) -> list[list[int]]:
    """The text's token ids, cut into windows. Raises UsageError when there is nothing to predict."""
    from tokenizers import Tokenizer

    if settings.window > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise UsageError(f"--window: {settings.window} is not allowed: the model was made for at most {most} tokens")
    path = settings.text or TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {path}: {error}") from error
    tokenizer_file = config.path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ToolError(f"no tokenizer at {tokenizer_file}")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing more precise
        raise ToolError(f"{tokenizer_file} is not a tokenizer: {error}") from error
    ids = tokenizer.encode(text).ids
    windows = [ids[start : start + settings.window] for start in range(0, len(ids), settings.window)]
    windows = [window for window in windows if len(window) > 1][: settings.windows]
    if not windows:
        raise UsageError(f"--text {path}: holds {len(ids)} tokens; at least 2 are needed")
    return windows


def measure(settings: EvalSettings, config: ModelConfig, windows: Sequence[Sequence[int]]) -> list[Quality]:
    """Load the model once and run the windows in every format."""
    from tqdm import tqdm

    from ..engine_core.device.config import ExecutorConfig
    from ..engine_core.device.cpu_executor import CpuExecutor
    from .kv_quality import compare

    executor = CpuExecutor(
        ExecutorConfig(
            config.path,
            num_gpu_blocks=1,
            max_model_len=settings.window,
            compute_dtype=settings.dtype,
            num_threads=settings.threads,
        )
    )
    try:
        return compare(executor, tqdm(windows, unit="window", disable=None), settings.window, settings.format_names)
    finally:
        executor.close()


def tokens_in_pool(settings: EvalSettings, result: Quality) -> int:
    """How many tokens' KV a pool of `pool_mb` holds."""
    return int((settings.pool_mb << 20) / result.bytes_per_token)


def render(settings: EvalSettings, results: Sequence[Quality], tokens: int) -> str:
    """One line a format."""
    columns = ("KV", "perplexity", "KL", "p99 KL", "same top-1", "bytes/token", f"tokens in {settings.pool_mb} MiB")
    rows = [
        (
            r.kv_format,
            f"{r.perplexity:.3f}",
            f"{r.mean_kl:.2g}",
            f"{r.p99_kl:.2g}",
            f"{100 * r.top1_agreement:.1f}%",
            f"{r.bytes_per_token:,.0f}",
            f"{tokens_in_pool(settings, r):,}",
        )
        for r in results
    ]
    return f"{settings.model}, {tokens:,} tokens; KL to fp16 KV in nats a token\n{report.table(columns, rows)}"


def _plot(results: Sequence[Quality], axes: Axes) -> None:
    """Draw the loss over the bytes: what a byte saved costs."""
    measured = [r for r in results if r.mean_kl > 0]
    axes.scatter([r.bytes_per_token / 1024 for r in measured], [r.mean_kl for r in measured])
    for r in measured:
        axes.annotate(r.kv_format, (r.bytes_per_token / 1024, r.mean_kl), xytext=(5, 3), textcoords="offset points")
    axes.set_yscale("log")
    axes.set_xlabel("KiB a token")
    axes.set_ylabel("mean KL to fp16 KV, nats a token")
    axes.margins(x=0.25, y=0.2)
