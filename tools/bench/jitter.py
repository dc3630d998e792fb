"""Inter-token times with and without swap pressure, of the requests that were swapped and of those that were not.

Owns: the comparison: the same requests on a pool with room for all and on one too small. Does not know: how victims
are chosen; a victim is whoever had a swap event.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...protocol.client import AsyncClient
from ...protocol.errors import ColdblockError
from ...protocol.messages import ModelInfo
from ...settings import EXIT_OK, Settings, UsageError, load
from ..children import run_until_signal
from ..daemons import running_engine
from ..errors import ToolError
from ..errors import report as show_error
from ..fetch_model import resolve_model
from . import report
from .measure import Timeline, distribution, greedy, random_prompts, timed_load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROG = "coldblock bench jitter"
BLOCK_SIZE = 16


class JitterSettings(Settings):
    """Settings of `coldblock bench jitter`."""

    model: str = Field("smollm2-135m", description="a checkpoint folder, or a known name")
    requests: int = Field(8, ge=2, description="requests that run at once")
    prompt_tokens: int = Field(32, ge=1, description="length of each prompt")
    new_tokens: int = Field(96, ge=2, description="tokens of each answer")
    pool_share: float = Field(0.6, gt=0, lt=1, description="the small pool, as a share of what all requests need")
    kv_cache_dtype: str = Field("auto", description="as the engine's flag")
    out: Path | None = Field(None, description="folder for the results; docs/results or the current one if absent")
    seed: int = Field(0, ge=0, description="of the random prompts")


def main(argv: list[str]) -> int:
    """Run the command."""
    settings = load(JitterSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        report.require_plotting()
        report.require_folder(settings.out)
        resolve_model(settings.model)
        return run_until_signal(lambda: run(settings))
    except (ColdblockError, UsageError) as error:
        return show_error(PROG, error)


async def run(settings: JitterSettings) -> int:
    """Measure with both pools, then print and write."""
    small_pool, large_pool = pool_sizes(settings)
    print(f"{PROG}: {settings.requests} requests, {large_pool} blocks: no pressure ...", file=sys.stderr)
    calm, _ = await measure(settings, large_pool)
    print(f"{PROG}: {settings.requests} requests, {small_pool} blocks: pressure ...", file=sys.stderr)
    pressed, model = await measure(settings, small_pool)
    groups = group_gaps(calm, pressed)
    results = summarize(groups, pressed)
    print(render(results))
    folder = settings.out or report.default_folder()
    written = report.write(folder, "jitter", settings.model_dump(), model, results)
    title = f"Inter-token time, {settings.requests} requests, {settings.model}"
    plotted = report.plot(folder, "jitter", title, [lambda axes: _plot_gaps(axes, groups)])
    print(f"written: {written}, {plotted}")
    return EXIT_OK


def pool_sizes(settings: JitterSettings) -> tuple[int, int]:
    """Blocks of the small and of the large pool. Raises ToolError when the small one could not hold one request."""
    each = -(-(settings.prompt_tokens + settings.new_tokens) // BLOCK_SIZE)
    large = each * settings.requests
    small = int(large * settings.pool_share)
    if small < each:
        raise ToolError(
            f"--pool-share {settings.pool_share}: {small} blocks cannot hold one request of {each}; raise it"
        )
    return small, large


async def measure(settings: JitterSettings, blocks: int) -> tuple[list[Timeline], ModelInfo]:
    """All requests at once on a fresh engine with a pool of so many blocks, after one request to warm up."""
    flags = ["--num-gpu-blocks", str(blocks), "--block-size", str(BLOCK_SIZE)]
    flags += ["--kv-cache-dtype", settings.kv_cache_dtype]
    sampling = greedy(settings.new_tokens)
    async with running_engine(settings.model, *flags) as endpoint, AsyncClient(endpoint, name="bench jitter") as client:
        model = await client.ready()
        warm_up, *prompts = random_prompts(settings.seed, settings.requests + 1, settings.prompt_tokens, model)
        await timed_load(client, [warm_up], sampling, 1)
        timelines, _ = await timed_load(client, prompts, sampling, settings.requests)
    return timelines, model


def group_gaps(calm: Sequence[Timeline], pressed: Sequence[Timeline]) -> dict[str, list[float]]:
    """Inter-token seconds by what happened to the request."""
    victims = [timeline for timeline in pressed if timeline.count("swapped")]
    bystanders = [timeline for timeline in pressed if not timeline.count("swapped")]
    groups = {"no pressure": calm, "bystanders": bystanders, "victims": victims}
    return {name: [gap for timeline in group for gap in timeline.gaps] for name, group in groups.items()}


def summarize(groups: dict[str, list[float]], pressed: Sequence[Timeline]) -> dict[str, Any]:
    """Distributions in seconds, and what the pressure led to."""
    return {
        "gaps": {name: distribution(gaps) for name, gaps in groups.items()},
        "swaps": sum(timeline.count("swapped") for timeline in pressed),
        "victims": sum(timeline.count("swapped") > 0 for timeline in pressed),
        "stall_s": distribution([t.finished.usage.stall_s for t in pressed if t.finished and t.count("swapped")]),
    }


def render(results: dict[str, Any]) -> str:
    """The table in milliseconds, and the swaps in one line."""
    rows = [
        (name, gaps["count"], *(1e3 * gaps[key] for key in ("p50", "p95", "p99", "max")))
        for name, gaps in results["gaps"].items()
    ]
    stall = results["stall_s"]
    line = f"{results['swaps']} swaps of {results['victims']} requests; stalled {stall['p50']:.2f} s (p50)"
    return report.table(("inter-token", "tokens", "p50 ms", "p95 ms", "p99 ms", "max ms"), rows) + "\n" + line


def _plot_gaps(axes: Axes, groups: dict[str, list[float]]) -> None:
    for name, gaps in groups.items():
        ordered = sorted(1e3 * gap for gap in gaps)
        axes.step(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("ms between two tokens")
    axes.set_ylabel("share of tokens")
    axes.legend()
