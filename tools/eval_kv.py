"""What each KV format costs a model's quality, against fp16 KV, through the engine's own paged path.

Owns: the settings, the text, tables and plots of `coldblock eval kv`. Does not know: how a text is run and what is
counted (`kv_quality`). Runs on the CPU, in fp32 unless told otherwise; attention over an fp16 or bf16 pool is in that
dtype, as it is when the engine serves. So what rounds is the KV format, and for those two what it means for attention.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pydantic import Field, field_validator
from pydantic_settings import CliPositionalArg

from ..engine_core.errors import EngineError
from ..engine_core.kv_layout import KV_CACHE_DTYPES, FormatName, resolve_kv_cache_dtype
from ..engine_core.models.registry import ModelConfig, read_model_config
from ..progress import track
from ..protocol.text import encode_text, read_tokenizer
from ..settings import EXIT_OK, EXIT_USAGE, UsageError
from .bench.capacity import GIB, capacity_bars, tokens_in
from .bench.command import ReportSettings, conclude, run_command, shown_name
from .bench.figures import Bars, Figure
from .bench.report import Column, Table, table
from .errors import ToolError
from .fetch_model import resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .kv_quality import Quality

PROG = "coldblock eval kv"
_WINDOW = 1024
_LEAST_WINDOW = 2  # tokens, so that there is one to predict
_TOKEN_CHARS = 8  # more than a token has in most texts
_MOST_CHARS = 1 << 20  # read at first
_LAST_WORD = 64  # tokens at the end of what was read that may be others when more is
TEXT = Path(__file__).parents[1] / "tests" / "data" / "prose_and_code.txt"


class EvalSettings(ReportSettings):
    """Settings of `coldblock eval kv`."""

    model: CliPositionalArg[str] = Field(description="a checkpoint folder, or a known name such as smollm2-135m")
    text: Path | None = Field(None, description="UTF-8 text to run; the tests' prose and code if absent")
    formats: str = Field(
        "bf16,int8,fp8_e4m3,fp8_e5m2", description="KV formats, separated by commas; each is compared with fp16"
    )
    window: int | None = Field(
        None, ge=_LEAST_WINDOW, description="tokens of text in one sequence; 1024, or all that fit, if absent"
    )
    windows: int | None = Field(None, ge=1, description="most sequences to run; the whole text if absent")
    pool_mb: int = Field(
        1024, ge=1, le=1 << 30, description="MiB of the KV pool for which the tokens that fit are told"
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "fp32", description="what activations are computed in; a CPU has fp32 for fp16, and for bf16 if it lacks that"
    )
    threads: int | None = Field(None, ge=1, le=os.cpu_count(), description="CPU threads; all cores if absent")

    @field_validator("formats")
    @classmethod
    def _known_formats(cls, formats: str) -> str:
        named = KV_CACHE_DTYPES[1:]  # "auto" names none
        for name in formats.split(","):
            if name.strip() not in named:
                raise ValueError(f"{name.strip()!r} is not one of {', '.join(named)}")
        return formats

    @property
    def format_names(self) -> list[FormatName]:
        """The formats by their own names, each once."""
        names = (resolve_kv_cache_dtype(name.strip(), "fp16") for name in self.formats.split(","))
        return list(dict.fromkeys(names))

    def window_for(self, config: ModelConfig) -> int:
        """Tokens of a window. Raises UsageError for more than the model was made for, ToolError where that is none."""
        most = config.max_position_embeddings
        if most < _LEAST_WINDOW:
            raise ToolError(f"the model was made for {most} token; at least {_LEAST_WINDOW} are needed")
        if self.window is None:
            return min(_WINDOW, most)
        if self.window > most:
            raise UsageError(f"--window: {self.window} is not allowed: the model was made for at most {most} tokens")
        return self.window


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    if argv[:1] != ["kv"]:
        print("usage: coldblock eval kv MODEL [ARGUMENTS]      coldblock eval kv --help", file=sys.stderr)
        return EXIT_OK if argv and argv[0] in ("-h", "--help") else EXIT_USAGE
    return run_command(EvalSettings, argv[1:], PROG, __doc__, run)


def run(settings: EvalSettings) -> int:
    """Measure, then report."""
    try:
        config = read_model_config(resolve_model(settings.model))
        windows = read_windows(settings, config)
        found = measure(settings, config, windows)
    except EngineError as error:
        raise ToolError(str(error)) from error
    tokens = sum(map(len, windows))
    formats = [
        {**asdict(quality), "tokens_in_pool": tokens_in(settings.pool_mb << 20, quality.bytes_per_token)}
        for quality in found
    ]
    results = {"tokens": tokens, "windows": len(windows), "pool_mb": settings.pool_mb, "formats": formats}
    title = f"KV formats of {shown_name(settings.model)} over {tokens:,} tokens"
    return conclude(settings, PROG, title, None, results, tables(results), figures(results))


def read_windows(settings: EvalSettings, config: ModelConfig) -> list[list[int]]:
    """The text's token ids, cut into windows.

    Raises UsageError when the text cannot be read or predicts nothing, ToolError when the checkpoint's tokenizer is of
    no use.
    """
    size = settings.window_for(config)
    path = settings.text or TEXT
    try:
        tokenizer = read_tokenizer(config.path)
    except (OSError, ValueError) as error:
        raise ToolError(str(error)) from error
    try:
        with path.open(encoding="utf-8-sig") as text:
            ids = read_tokens(text, tokenizer, settings.windows and settings.windows * size)
    except OSError as error:
        raise UsageError(f"--text {path}: {error.strerror}") from error
    except ValueError as error:  # no UTF-8, or nothing that the tokenizer knows
        raise UsageError(f"--text {path}: {error}") from error
    if len(ids) < _LEAST_WINDOW:
        raise UsageError(f"--text {path}: holds {len(ids)} tokens; at least {_LEAST_WINDOW} are needed")
    if max(ids) >= config.vocab_size:
        raise ToolError(f"the tokenizer in {config.path} has token {max(ids)}; the model knows {config.vocab_size}")
    windows = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [window for window in windows if len(window) >= _LEAST_WINDOW]


def read_tokens(text: TextIO, tokenizer: Tokenizer, most: int | None) -> list[int]:
    """The first `most` tokens, or all: of a text that is far longer, little more than those is read.

    Raises ValueError when the tokenizer has nothing for a part of the text.
    """
    start = -1 if most is None else min(_TOKEN_CHARS * most, _MOST_CHARS)
    read, ids = "", []
    while more := text.read(len(read) or start):
        read += more
        ids = encode_text(tokenizer, read)
        if most and len(ids) > most + _LAST_WORD:
            break
    return ids[:most]


def measure(settings: EvalSettings, config: ModelConfig, windows: Sequence[Sequence[int]]) -> list[Quality]:
    """Load the model once and run the windows in every format."""
    from ..engine_core.device.config import ExecutorConfig
    from ..engine_core.device.cpu_executor import CpuExecutor
    from .kv_quality import REFERENCE, compare

    size = settings.window_for(config)
    executor = CpuExecutor(
        ExecutorConfig(
            config.path,
            num_gpu_blocks=1,
            max_model_len=size,
            compute_dtype=settings.dtype,
            num_threads=settings.threads,
        )
    )
    try:
        for problem in filter(None, map(executor.misfit, dict.fromkeys([REFERENCE, *settings.format_names]))):
            print(f"{PROG}: {problem}", file=sys.stderr)
        return compare(executor, track(windows, PROG, "window"), size, settings.format_names)
    finally:
        executor.close()


def tables(results: Mapping[str, Any]) -> list[Table]:
    """One line a format; the pool's size is one of the settings."""
    note = "KL: to fp16 KV, nats a token. same top-1: % of tokens for which the most likely next one is the same."
    return [table("Quality and size of the KV formats", FORMATS, results["formats"], note)]


FORMATS = (
    Column("KV", "kv_format", case=True),
    Column("perplexity", "perplexity", better="lower"),
    Column("KL", "mean_kl", better="lower"),
    Column("p99 KL", "p99_kl", better="lower"),
    Column("same top-1, %", "top1_agreement", 100, better="higher"),
    Column("bytes a token", "bytes_per_token", better="lower"),
    Column("tokens in 1 GiB", lambda row: tokens_in(GIB, row["bytes_per_token"]), better="higher"),
    Column("tokens in the pool", "tokens_in_pool", better="higher"),
)


def figures(results: Mapping[str, Any]) -> list[Figure]:
    """What fits, and what that costs."""
    formats = results["formats"]
    pools = {"in 1 GiB": GIB}
    if results["pool_mb"] << 20 != GIB:
        pools[f"in a pool of {results['pool_mb']} MiB"] = results["pool_mb"] << 20
    lossy = [row for row in formats if row["mean_kl"] > 0]
    return [
        capacity_bars({row["kv_format"]: row["bytes_per_token"] for row in formats}, pools),
        Bars(
            "What a format costs",
            "Mean KL of the predictions to those with fp16 KV, in thousandths of a nat a token: 0 is no difference.",
            "KL, nats/1000",
            tuple(row["kv_format"] for row in lossy),
            {"mean KL": tuple(1e3 * row["mean_kl"] for row in lossy)},
        ),
    ]
