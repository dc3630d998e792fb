"""A load on a pool that is too small for it, against the same load with room for all.

Owns: the comparison: throughput, what swapping did, how victims and bystanders fared, copies against the link. Does not
know: how the engine chooses; it reads events, counters and arrivals of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ...protocol.messages import ModelInfo
from .engines import inward, outward
from .figures import Figure, bars_by_format
from .link import Link, copies_table, measure_link, summarize_copies
from .pressure import Observed, PressureSettings, group_tables, grouped, observe, summarize_group
from .report import Column, Table, table
from .swap_timeline import one_swap, swap_figures, swap_table

POOL_SHARE = 1 / 3


@dataclass(frozen=True)
class LoadResult:
    """One KV format's load. `groups` and `copies` hold distributions in seconds and figures of either direction.

    `one_swap`: see `swap_timeline`; None when nothing was swapped.
    """

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
    one_swap: Mapping[str, Any] | None

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
        one_swap=one_swap(pressed.timelines, pressed.copies, pressed.clock_offset),
    )


def tables(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Throughput and counts (blocks copied ahead of need, and prefetched), how requests fared, copies, one swap."""
    swaps = [(swap, result["kv_cache_dtype"]) for result in results if (swap := result.get("one_swap"))]
    return [
        table("A load on a pool too small for it, against room for all", LOAD, results),
        *group_tables([(result["kv_cache_dtype"], result["groups"]) for result in results]),
        copies_table(results),
        *(swap_table(swap, f"{name} KV") for swap, name in swaps[:1]),
    ]


LOAD = (
    Column("KV", "kv_cache_dtype", case=True),
    Column("blocks", lambda result: f"{result['blocks']}/{result['blocks_for_all']}", case=True),
    Column("tok/s", "tokens_per_s", better="higher"),
    Column("with room", "tokens_per_s_with_room", better="higher"),
    Column("ratio", "ratio", better="higher"),
    Column("done", lambda result: f"{result['completed']}/{result['requests']}"),
    Column("swaps", "counters.swaps"),
    Column("recomputes", "counters.recomputes"),
    Column("rejected", "counters.rejected"),
    Column("ahead", "counters.write_behind_blocks"),
    Column("prefetched", "counters.prefetch_blocks"),
)


def figures(results: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Both throughputs, times per token, the copies' bandwidth, and one swap of the first format that has any."""
    first = results[0]
    swaps = [(swap, result["kv_cache_dtype"]) for result in results if (swap := result["one_swap"])]
    return [
        bars_by_format(
            "Throughput under pressure",
            f"{first['requests']} requests on {first['blocks']} of the {first['blocks_for_all']} blocks that all need.",
            "tokens/s",
            results,
            {"under pressure": itemgetter("tokens_per_s"), "room for all": itemgetter("tokens_per_s_with_room")},
        ),
        bars_by_format(
            "Time per output token, median",
            "Victims were swapped out or recomputed meanwhile, which their time includes; bystanders were not.",
            "ms",
            results,
            {who: lambda r, who=who: 1e3 * r["groups"][who]["tpot_s"]["p50"] for who in first["groups"]},
        ),
        bars_by_format(
            "Copy bandwidth meanwhile",
            "Payload over the time that copies ran, without their waits; the strokes are the link's peak.",
            "GB/s",
            results,
            {way: lambda r, way=way: r["copies"][way]["gb_per_s"] for way in first["copies"]},
            {way: lambda r, way=way: r["copies"][way]["link_gb_per_s"] for way in first["copies"]},
            "the link alone",
        ),
        *(figure for swap, name in swaps[:1] for figure in swap_figures(swap, f"{name} KV")),
    ]
