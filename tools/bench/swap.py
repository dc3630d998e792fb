"""The forced swap: two requests of three blocks each, a pool of three; in every KV format.

Owns: the experiment and what counts as passing. Does not know: how swapping works; it reads events and tokens.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ...protocol.client import AsyncClient
from ...protocol.errors import ColdblockError
from ...protocol.messages import ModelInfo
from ...settings import EXIT_FAILED, EXIT_OK, Settings, UsageError, load
from ..children import run_until_signal
from ..daemons import running_engine
from ..errors import report as show_error
from ..fetch_model import resolve_model
from . import report
from .measure import Timeline, all_of, greedy, random_prompts, timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROG = "coldblock bench swap"
FORMATS = ("fp16", "int8", "fp8", "fp8_e5m2")
BLOCKS = 3
BLOCK_SIZE = 16
PROMPT_TOKENS = 33  # a third block from the start, and all three until the end
NEW_TOKENS = BLOCKS * BLOCK_SIZE - PROMPT_TOKENS
LARGE_POOL = 64


class SwapSettings(Settings):
    """Settings of `coldblock bench swap`."""

    model: str = Field("smollm2-135m", description="a checkpoint folder, or a known name")
    iterations: int = Field(5, ge=1, description="pairs of requests for each KV format")
    deterministic: bool = Field(False, description="also check that the tokens equal those of a large pool")
    out: Path | None = Field(None, description="folder for the results; docs/results or the current one if absent")
    seed: int = Field(0, ge=0, description="of the random prompts")


@dataclass(frozen=True)
class FormatResult:
    """What one KV format's iterations showed. Blocks, bytes and seconds are totals over all iterations."""

    kv_cache_dtype: str
    requests: int
    completed: int
    swaps: int
    resumes: int
    rejected: int
    blocks_out: int
    bytes_out: int
    copy_out_s: float
    copy_in_s: float
    stall_s: float
    tokens_equal: bool | None

    @property
    def passed(self) -> bool:
        """All complete, one swap and one resume a pair, and equal tokens where that was checked."""
        pairs = self.requests // 2
        counts = (self.completed, self.swaps, self.resumes) == (self.requests, pairs, pairs)
        return counts and self.tokens_equal is not False


def main(argv: list[str]) -> int:
    """Run the command; 0 only if every format passed."""
    settings = load(SwapSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        report.require_plotting()
        report.require_folder(settings.out)
        resolve_model(settings.model)
        return run_until_signal(lambda: run(settings))
    except (ColdblockError, UsageError) as error:
        return show_error(PROG, error)


async def run(settings: SwapSettings) -> int:
    """Measure every format, then print and write."""
    results: list[FormatResult] = []
    model: ModelInfo | None = None
    for name in FORMATS:
        print(f"{PROG}: {name}, {settings.iterations} pairs of requests ...", file=sys.stderr)
        result, model = await measure_format(name, settings)
        results.append(result)
    print(render(results))
    folder = settings.out or report.default_folder()
    written = report.write(folder, "swap", settings.model_dump(), model, [asdict(result) for result in results])
    title = f"Forced swap of {BLOCKS} blocks, {settings.model}"
    plotted = report.plot(folder, "swap", title, [lambda axes: _plot_copies(axes, results)])
    print(f"written: {written}, {plotted}")
    return EXIT_OK if all(result.passed for result in results) else EXIT_FAILED


async def measure_format(name: str, settings: SwapSettings) -> tuple[FormatResult, ModelInfo]:
    """All pairs of one KV format on a fresh engine, and on one with a large pool when tokens are compared."""
    small, model = await run_pairs(name, BLOCKS, settings)
    equal = None
    if settings.deterministic:
        large, _ = await run_pairs(name, LARGE_POOL, settings)
        equal = [timeline.token_ids for timeline in small] == [timeline.token_ids for timeline in large]
    return summarize(name, small, equal), model


async def run_pairs(name: str, blocks: int, settings: SwapSettings) -> tuple[list[Timeline], ModelInfo]:
    """The timelines of all pairs in order; a pair's second request is submitted at the first one's first token."""
    flags = ["--kv-cache-dtype", name, "--num-gpu-blocks", str(blocks), "--block-size", str(BLOCK_SIZE)]
    flags += ["--swap-or-recompute", "swap"]
    flags += ["--deterministic"] if settings.deterministic else []
    timelines: list[Timeline] = []
    async with running_engine(settings.model, *flags) as endpoint, AsyncClient(endpoint, name="bench swap") as client:
        model = await client.ready()
        prompts = random_prompts(settings.seed, 2 * settings.iterations, PROMPT_TOKENS, model)
        for first, second in zip(prompts[::2], prompts[1::2], strict=True):
            timelines += await run_pair(client, first, second)
    return timelines, model


async def run_pair(client: AsyncClient, first: list[int], second: list[int]) -> list[Timeline]:
    """Both requests to their ends."""
    started = asyncio.Event()

    async def after_first_token() -> Timeline:
        await started.wait()
        return await timed(client, second, greedy(NEW_TOKENS))

    return await all_of(timed(client, first, greedy(NEW_TOKENS), started), after_first_token())


def summarize(name: str, timelines: list[Timeline], tokens_equal: bool | None) -> FormatResult:
    """The counts and sums over all requests."""
    out = [event for timeline in timelines for event in timeline.swap_events if event.phase == "swapped"]
    return FormatResult(
        kv_cache_dtype=name,
        requests=len(timelines),
        completed=sum(t.finished is not None and len(t.token_ids) == NEW_TOKENS for t in timelines),
        swaps=len(out),
        resumes=sum(timeline.count("resumed") for timeline in timelines),
        rejected=sum(timeline.count("rejected") for timeline in timelines),
        blocks_out=sum(event.blocks for event in out),
        bytes_out=sum(event.bytes for event in out),
        copy_out_s=sum(timeline.copy_seconds("swapped") for timeline in timelines),
        copy_in_s=sum(timeline.copy_seconds("resumed") for timeline in timelines),
        stall_s=sum(timeline.finished.usage.stall_s for timeline in timelines if timeline.finished is not None),
        tokens_equal=tokens_equal,
    )


def render(results: list[FormatResult]) -> str:
    """The table of all formats; copies and stall per swap."""
    columns = ("KV", "completed", "swaps", "resumes", "KiB/swap", "out ms", "in ms", "stall ms", "tokens", "")
    tokens = {None: "-", True: "equal", False: "DIFFER"}
    rows = [
        (
            result.kv_cache_dtype,
            f"{result.completed}/{result.requests}",
            result.swaps,
            result.resumes,
            result.bytes_out / 1024 / max(1, result.swaps),
            1e3 * result.copy_out_s / max(1, result.swaps),
            1e3 * result.copy_in_s / max(1, result.resumes),
            1e3 * result.stall_s / max(1, result.swaps),
            tokens[result.tokens_equal],
            "ok" if result.passed else "FAILED",
        )
        for result in results
    ]
    return report.table(columns, rows)


def _plot_copies(axes: Axes, results: list[FormatResult]) -> None:
    places = range(len(results))
    out = [1e3 * result.copy_out_s / max(1, result.swaps) for result in results]
    back = [1e3 * result.copy_in_s / max(1, result.resumes) for result in results]
    axes.bar([place - 0.2 for place in places], out, width=0.4, label="out")
    axes.bar([place + 0.2 for place in places], back, width=0.4, label="in")
    axes.set_xticks(list(places), [result.kv_cache_dtype for result in results])
    axes.set_ylabel("copy, ms a swap")
    axes.legend()
