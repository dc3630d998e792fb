"""A load on a pool that is too small for it, against the same load with room for all.

Owns: the comparison: throughput, what swapping did, how victims and bystanders fared, copies against the link. Does not
know: how the engine chooses; it reads events, counters and arrivals of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...protocol.messages import ModelInfo
from . import report
from .engines import inward, outward
from .link import COPY_COLUMNS, Link, copy_row, measure_link, summarize_copies
from .pressure import GROUP_COLUMNS, Observed, PressureSettings, group_rows, grouped, observe, summarize_group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POOL_SHARE = 1 / 3
COUNTED = ("swaps", "recomputes", "rejected", "write_behind_blocks", "prefetch_blocks")


@dataclass(frozen=True)
class LoadResult:
    """One KV format's load. `groups` and `copies` hold distributions in seconds and figures of either direction."""

    kv_cache_dtype: str
    requests: int
    completed: int
    blocks: int
    blocks_for_all: int
    tokens_per_s: float
    tokens_per_s_with_room: float
    ratio: float
    counters: Mapping[str, int]
    groups: Mapping[str, Mapping[str, Any]]
    copies: Mapping[str, Mapping[str, Any]]

    @property
    def passed(self) -> bool:
        """Everybody got all tokens."""
        return self.completed == self.requests


async def measure(kv_cache_dtype: str, settings: PressureSettings) -> tuple[LoadResult, ModelInfo]:
    """The load with room for all, the link alone, then the load under pressure."""
    small, large = settings.pools(POOL_SHARE)
    calm = await observe(settings, kv_cache_dtype, large)
    link = await measure_link(calm.model)
    pressed = await observe(settings, kv_cache_dtype, small)
    return summarize(kv_cache_dtype, settings.new_tokens, calm, pressed, link), pressed.model


def summarize(kv_cache_dtype: str, new_tokens: int, calm: Observed, pressed: Observed, link: Link) -> LoadResult:
    """The figures of both loads."""
    return LoadResult(
        kv_cache_dtype=kv_cache_dtype,
        requests=len(pressed.timelines),
        completed=sum(timeline.completed(new_tokens) for timeline in pressed.timelines),
        blocks=pressed.model.num_gpu_blocks,
        blocks_for_all=calm.model.num_gpu_blocks,
        tokens_per_s=pressed.tokens_per_s,
        tokens_per_s_with_room=calm.tokens_per_s,
        ratio=pressed.tokens_per_s / calm.tokens_per_s,
        counters=pressed.counters,
        groups={name: summarize_group(group) for name, group in grouped(calm.timelines, pressed.timelines).items()},
        copies={
            "out": summarize_copies(outward(pressed.copies), link.out_gb_per_s),
            "in": summarize_copies(inward(pressed.copies), link.in_gb_per_s),
        },
    )


def render(results: Sequence[LoadResult]) -> str:
    """Three tables: throughput and counts (blocks copied ahead of need, and prefetched), how requests fared, copies."""
    columns = ("load", "blocks", "tok/s", "with room", "ratio", "done", *COUNTED[:3], "ahead", "prefetched")
    counts = [
        (
            result.kv_cache_dtype,
            f"{result.blocks}/{result.blocks_for_all}",
            result.tokens_per_s,
            result.tokens_per_s_with_room,
            f"{result.ratio:.2f}",
            f"{result.completed}/{result.requests}",
            *(result.counters[name] for name in COUNTED),
        )
        for result in results
    ]
    groups = [row for result in results for row in group_rows(result.kv_cache_dtype, result.groups)]
    copies = [copy_row(result.kv_cache_dtype, way, found) for result in results for way, found in result.copies.items()]
    return "\n\n".join(
        [report.table(columns, counts), report.table(GROUP_COLUMNS, groups), report.table(COPY_COLUMNS, copies)]
    )


def _plot_throughput(results: Sequence[LoadResult], axes: Axes) -> None:
    """Draw both throughputs."""
    places = range(len(results))
    axes.bar([place - 0.2 for place in places], [r.tokens_per_s for r in results], width=0.4, label="under pressure")
    axes.bar([p + 0.2 for p in places], [r.tokens_per_s_with_room for r in results], width=0.4, label="room for all")
    axes.set_xticks(list(places), [f"{result.kv_cache_dtype}\n{result.ratio:.2f}" for result in results])
    axes.set_title(f"{results[0].requests} requests on {results[0].blocks} of {results[0].blocks_for_all} blocks")
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.2)
    axes.legend(ncols=2, loc="upper center")


def _plot_bandwidth(results: Sequence[LoadResult], axes: Axes) -> None:
    """Draw the copies' bandwidth, and the link's as a line over it."""
    for offset, way in ((-0.2, "out"), (0.2, "in")):
        places = [place + offset for place in range(len(results))]
        axes.bar(places, [result.copies[way]["gb_per_s"] for result in results], width=0.38, label=way)
        for place, result in zip(places, results, strict=True):
            axes.hlines(result.copies[way]["link_gb_per_s"], place - 0.19, place + 0.19, color="black")
    axes.set_xticks(range(len(results)), [result.kv_cache_dtype for result in results])
    axes.set_title("copies meanwhile; black: the link alone")
    axes.set_ylabel("GB/s")
    axes.margins(y=0.2)
    axes.legend(ncols=2, loc="upper center")


PANELS = (_plot_throughput, _plot_bandwidth)
