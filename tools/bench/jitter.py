"""Times between tokens with and without swap pressure: of victims, of bystanders, and of these while blocks are copied.

Owns: the comparison: the same requests on a pool with room for all and on one too small. Does not know: how victims
are chosen, or when and why the engine copies; its events tell.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from ...logs import tell
from ...protocol.messages import SwapEvent
from ..children import run_until_signal
from .command import conclude, run_command, shown_name
from .engines import inward, outward, require_model
from .figures import Figure, Lines, Row, Span, share_below
from .figures import Timeline as Chart
from .measure import Timeline, distribution
from .pressure import (
    Observed,
    PressureSettings,
    group_tables,
    grouped,
    observe,
    summarize_group,
)
from .report import Column, Table, distribution_columns, table
from .swap_timeline import one_swap, swap_figures, swap_table

PROG = "coldblock bench jitter"
POOL_SHARE = 0.6  # so that some stay

Times = tuple[float, float]


class JitterSettings(PressureSettings):
    """Settings of `coldblock bench jitter`."""

    kv_cache_dtype: str = Field("auto", description="as the engine's flag")


def main(argv: list[str]) -> int:
    """Run the command."""
    return run_command(JitterSettings, argv, PROG, __doc__, run)


def run(settings: JitterSettings) -> int:
    """Refuse what cannot be measured, then measure."""
    settings.pools(POOL_SHARE)
    require_model(settings)
    return run_until_signal(lambda: measure(settings))


async def measure(settings: JitterSettings) -> int:
    """Measure with both pools, then report."""
    small_pool, large_pool = settings.pools(POOL_SHARE)
    tell(PROG, f"{settings.requests} requests, {large_pool} blocks: no pressure ...")
    calm = await observe(settings, settings.kv_cache_dtype, large_pool)
    tell(PROG, f"{settings.requests} requests, {small_pool} blocks: pressure ...")
    pressed = await observe(settings, settings.kv_cache_dtype, small_pool)
    results, model = summarize(calm, pressed), pressed.model
    title = (
        f"{settings.requests} requests on {small_pool} of the {large_pool} blocks that all need: "
        f"{shown_name(model.name)} on {model.device}, {model.kv_cache_dtype} KV"
    )
    return conclude(settings, PROG, title, model, results, tables(results), figures(results, calm, pressed))


def summarize(calm: Observed, pressed: Observed) -> dict[str, Any]:
    """Distributions in seconds, and what the pressure led to."""
    groups = grouped(calm.timelines, pressed.timelines)
    return {
        "kv_cache_dtype": pressed.model.kv_cache_dtype,
        "blocks": pressed.model.num_gpu_blocks,
        "blocks_for_all": calm.model.num_gpu_blocks,
        "gaps": {name: distribution([gap for line in group for gap in line.gaps]) for name, group in groups.items()},
        "requests": {name: summarize_group(group) for name, group in groups.items()},
        "beside_copies": beside_copies(pressed.timelines, copy_spans(pressed.copies, pressed.clock_offset)),
        "counters": pressed.counters,
        "one_swap": one_swap(pressed.timelines, pressed.copies, pressed.clock_offset),
    }


# ---------------------------------------------------------------- bystanders beside copies


def beside_copies(timelines: Sequence[Timeline], copies: Sequence[Times]) -> dict[str, Any]:
    """The bystanders' gaps during which anything was copied, against those without, of the same engine.

    A step with more requests takes longer, whatever is copied, and a prompt in it longer still. So gaps in which a
    prompt was computed are left out, and `ratio` compares each gap beside a copy with the mean of those without whose
    step had as many requests; `compared` counts the gaps beside copies for which there are any.
    """
    prompts = sorted(prompt_spans(timelines))
    arrivals = sorted(arrival for timeline in timelines for arrival in timeline.arrivals)
    beside: defaultdict[int, list[float]] = defaultdict(list)
    without: defaultdict[int, list[float]] = defaultdict(list)
    for begun, ended in _bystanders_gaps(timelines):
        near = (ended - begun) / 4  # the tokens of a step arrive together, those of the next one later
        in_step = bisect_right(arrivals, ended + near) - bisect_right(arrivals, ended - near)
        if near > 0 and not _overlaps(begun, ended, prompts):
            (beside if _overlaps(begun, ended, copies) else without)[in_step].append(ended - begun)
    comparable = beside.keys() & without.keys()
    expected = sum(len(beside[number]) * fmean(without[number]) for number in comparable)
    return {
        "beside": distribution([gap for gaps in beside.values() for gap in gaps]),
        "without": distribution([gap for gaps in without.values() for gap in gaps]),
        "compared": sum(len(beside[number]) for number in comparable),
        "ratio": sum(sum(beside[number]) for number in comparable) / expected if expected else None,
    }


def _bystanders_gaps(timelines: Sequence[Timeline]) -> Iterator[Times]:
    for timeline in timelines:
        if not timeline.is_victim:
            yield from zip(timeline.arrivals, timeline.arrivals[1:], strict=False)


def prompt_spans(timelines: Sequence[Timeline]) -> list[Times]:
    """When prompts were computed."""
    return merged(
        (line.arrivals[0] - line.finished.usage.prefill_s, line.arrivals[0])
        for line in timelines
        if line.arrivals and line.finished is not None
    )


def copy_spans(copies: Sequence[SwapEvent], clock_offset: float) -> list[Times]:
    """When copies ran, at most: from when they were asked for until their end was told, on the timelines' clock."""
    return merged((c.time - clock_offset - c.seconds - c.queued_s, c.time - clock_offset) for c in copies)


def merged(spans: Iterator[Times]) -> list[Times]:
    """The same times without overlaps, in order."""
    result: list[Times] = []
    for begun, ended in sorted(spans):
        if result and begun <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], ended))
        else:
            result.append((begun, ended))
    return result


def _overlaps(begun: float, ended: float, spans: Sequence[Times]) -> bool:
    """Whether any of these spans, which are in order and apart, touches the time between."""
    place = bisect_left(spans, ended, key=lambda span: span[0])
    return place > 0 and spans[place - 1][1] > begun


# ---------------------------------------------------------------- what is shown


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Gaps between tokens, then the requests, then copies and swaps."""
    beside = results.get("beside_copies", {})
    gaps = {
        **results["gaps"],
        "bystanders beside copies": beside.get("beside"),
        "bystanders without": beside.get("without"),
    }
    rows = [{"who": name, **found} for name, found in gaps.items() if found]
    found = [table("Time between two tokens", GAPS, rows)]
    found += group_tables([("", results.get("requests", {}))])
    if beside:
        found.append(table("Bystanders beside copies, and what was swapped", COUNTS, [results], BESIDE_NOTE))
    if swap := results.get("one_swap"):
        found.append(swap_table(swap, f"{results['kv_cache_dtype']} KV"))
    return found


GAPS = (Column("requests", "who", case=True), Column("tokens", "count"), *distribution_columns())
COUNTS = (
    Column("time per token, x that without", "beside_copies.ratio", better="lower"),
    Column("tokens compared", "beside_copies.compared"),
    Column("swaps", "counters.swaps"),
    Column("resumes", "counters.resumes"),
    Column("recomputes", "counters.recomputes"),
)
BESIDE_NOTE = "Compared are steps with as many requests; those in which a prompt was computed are left out."


def figures(results: Mapping[str, Any], calm: Observed, pressed: Observed) -> list[Figure]:
    """Distributions of both kinds of times, all requests over time, and one swap."""
    groups = {name: group for name, group in grouped(calm.timelines, pressed.timelines).items() if group}
    gaps = {name: [1e3 * gap for line in group for gap in line.gaps] for name, group in groups.items()}
    tpots = {name: [1e3 * line.tpot for line in group] for name, group in groups.items()}
    found: list[Figure] = [
        Lines(
            "Time per output token (TPOT)",
            "One value a request, from its first token to its last: a victim's includes the time it was swapped out.",
            "ms",
            "share of requests",
            tuple(share_below(name, values) for name, values in tpots.items()),
            steps=True,
        ),
        Lines(
            "Time between two tokens",
            "One value a token. A curve that goes on far to the right at the top: few tokens waited long.",
            "ms",
            "share of tokens",
            tuple(share_below(name, values) for name, values in gaps.items()),
            x_log=True,
            steps=True,
        ),
        all_requests(pressed),
    ]
    swap = results["one_swap"]
    return found + (swap_figures(swap, f"{results['kv_cache_dtype']} KV") if swap else [])


def all_requests(pressed: Observed) -> Chart:
    """When each request waited for its first token, ran, and was swapped out; below, when blocks were copied."""
    zero = min(timeline.submitted for timeline in pressed.timelines)
    end = max(arrival for timeline in pressed.timelines for arrival in timeline.arrivals) - zero
    rows = []
    for number, timeline in enumerate(pressed.timelines, 1):
        first, last = timeline.arrivals[0] - zero, timeline.arrivals[-1] - zero
        out = swapped_out_spans(timeline, pressed.clock_offset)
        spans = [Span("prompt", timeline.submitted - zero, first), Span("running", first, last)]
        spans += [Span("stall", begun - zero, ended - zero) for begun, ended in out]
        rows.append(Row(f"request {number}{', victim' if timeline.is_victim else ''}", tuple(spans)))
    for name, copies in (("copy out", outward(pressed.copies)), ("copy in", inward(pressed.copies))):
        spans = [Span(name, b - zero, e - zero) for b, e in copy_spans(copies, pressed.clock_offset)]
        rows.append(Row(f"link, {name.removeprefix('copy ')}", tuple(spans)))
    caption = "stall: swapped out or waiting to be computed again. Copies ahead of need are on the link's rows too."
    return Chart("All requests under pressure", caption, "seconds", tuple(rows), 0.0, end, wide=True)


def swapped_out_spans(timeline: Timeline, clock_offset: float) -> list[Times]:
    """When the request did not run as it was swapped out: until it came back, or was recomputed, or ended."""
    spans, since = [], None
    for event in timeline.swap_events:
        moment = event.time - clock_offset
        if event.phase == "swapping_out":
            since = moment
        elif event.phase == "resumed" and since is not None:
            spans.append((since, moment))
            since = None
    if since is not None:
        after = bisect_right(timeline.arrivals, since)
        spans.append((since, timeline.arrivals[min(after, len(timeline.arrivals) - 1)] if timeline.arrivals else since))
    return spans
