"""Times between tokens with and without swap pressure: of victims, of bystanders, and of these while blocks are copied.

Owns: the comparison: the same requests on a pool with room for all and on one too small. Does not know: how victims
are chosen, or when and why the engine copies; its events tell.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...protocol.errors import ColdblockError
from ...protocol.messages import SwapEvent
from ...settings import EXIT_OK, UsageError, load
from ..children import run_until_signal
from ..errors import report as show_error
from . import report
from .engines import inward, outward, require_model
from .measure import Timeline, distribution
from .pressure import (
    BYSTANDERS,
    GROUP_COLUMNS,
    VICTIMS,
    Observed,
    PressureSettings,
    group_rows,
    grouped,
    observe,
    summarize_group,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROG = "coldblock bench jitter"
POOL_SHARE = 0.6  # so that some stay

Span = tuple[float, float]
_COLORS = {False: "tab:orange", True: "tab:green"}  # of bystanders and victims, as in the other panel


class JitterSettings(PressureSettings):
    """Settings of `coldblock bench jitter`."""

    kv_cache_dtype: str = Field("auto", description="as the engine's flag")


def main(argv: list[str]) -> int:
    """Run the command."""
    settings = load(JitterSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        report.require_plotting()
        report.require_folder(settings.out)
        settings.pools(POOL_SHARE)
        require_model(settings)
        return run_until_signal(lambda: run(settings))
    except (ColdblockError, UsageError) as error:
        return show_error(PROG, error)


async def run(settings: JitterSettings) -> int:
    """Measure with both pools, then print and write."""
    small_pool, large_pool = settings.pools(POOL_SHARE)
    print(f"{PROG}: {settings.requests} requests, {large_pool} blocks: no pressure ...", file=sys.stderr)
    calm = await observe(settings, settings.kv_cache_dtype, large_pool)
    print(f"{PROG}: {settings.requests} requests, {small_pool} blocks: pressure ...", file=sys.stderr)
    pressed = await observe(settings, settings.kv_cache_dtype, small_pool)
    results = summarize(calm, pressed)
    print(render(results, pressed.model.kv_cache_dtype))
    folder = settings.out or report.default_folder()
    written = report.write(folder, "jitter", settings.model_dump(), pressed.model, results)
    title = f"{settings.requests} requests on {small_pool} of {large_pool} blocks, {settings.model}"
    groups = grouped(calm.timelines, pressed.timelines)
    plotted = report.plot(folder, "jitter", title, [partial(_plot_gaps, groups), partial(_plot_timeline, pressed)])
    print(f"written: {written}, {plotted}")
    return EXIT_OK


def summarize(calm: Observed, pressed: Observed) -> dict[str, Any]:
    """Distributions in seconds, and what the pressure led to."""
    groups = grouped(calm.timelines, pressed.timelines)
    return {
        "blocks": pressed.model.num_gpu_blocks,
        "blocks_for_all": calm.model.num_gpu_blocks,
        "gaps": {name: distribution([gap for line in group for gap in line.gaps]) for name, group in groups.items()},
        "requests": {name: summarize_group(group) for name, group in groups.items()},
        "beside_copies": beside_copies(pressed.timelines, copy_spans(pressed.copies, pressed.clock_offset)),
        "counters": pressed.counters,
    }


# ---------------------------------------------------------------- bystanders beside copies


def beside_copies(timelines: Sequence[Timeline], copies: Sequence[Span]) -> dict[str, Any]:
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


def _bystanders_gaps(timelines: Sequence[Timeline]) -> Iterator[Span]:
    for timeline in timelines:
        if not timeline.is_victim:
            yield from zip(timeline.arrivals, timeline.arrivals[1:], strict=False)


def prompt_spans(timelines: Sequence[Timeline]) -> list[Span]:
    """When prompts were computed."""
    return merged(
        (line.arrivals[0] - line.finished.usage.prefill_s, line.arrivals[0])
        for line in timelines
        if line.arrivals and line.finished is not None
    )


def copy_spans(copies: Sequence[SwapEvent], clock_offset: float) -> list[Span]:
    """When copies ran, at most: from when they were asked for until their end was told, on the timelines' clock."""
    return merged((c.time - clock_offset - c.seconds - c.queued_s, c.time - clock_offset) for c in copies)


def merged(spans: Iterator[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    result: list[Span] = []
    for begun, ended in sorted(spans):
        if result and begun <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], ended))
        else:
            result.append((begun, ended))
    return result


def _overlaps(begun: float, ended: float, spans: Sequence[Span]) -> bool:
    """Whether any of these spans, which are in order and apart, touches the time between."""
    place = bisect_left(spans, ended, key=lambda span: span[0])
    return place > 0 and spans[place - 1][1] > begun


# ---------------------------------------------------------------- what is shown


def render(results: Mapping[str, Any], kv_cache_dtype: str) -> str:
    """Gaps between tokens, then the requests, then the swaps in two lines."""
    beside, counters = results["beside_copies"], results["counters"]
    gaps = {
        **results["gaps"],
        "bystanders beside copies": beside["beside"],
        "bystanders without": beside["without"],
    }
    rows = [
        (name, found["count"], *(1e3 * found[key] for key in ("p50", "p95", "p99", "max")))
        for name, found in gaps.items()
    ]
    ratio = "not measured" if beside["ratio"] is None else f"{beside['ratio']:.3f} x that without"
    return "\n".join(
        [
            report.table(("between two tokens", "tokens", "p50 ms", "p95 ms", "p99 ms", "max ms"), rows) + "\n",
            report.table(GROUP_COLUMNS, group_rows(kv_cache_dtype, results["requests"])) + "\n",
            f"bystanders' time per token beside copies: {ratio},",
            f"  prompts left out, by equal numbers of requests in a step ({beside['compared']} tokens)",
            f"{counters['swaps']} swaps, {counters['resumes']} resumes, {counters['recomputes']} recomputes",
        ]
    )


def _plot_gaps(groups: Mapping[str, Sequence[Timeline]], axes: Axes) -> None:
    for name, group in groups.items():
        ordered = sorted(1e3 * gap for timeline in group for gap in timeline.gaps)
        axes.step(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("ms between two tokens")
    axes.set_ylabel("share of tokens")
    axes.legend()


def _plot_timeline(pressed: Observed, axes: Axes) -> None:
    """Tokens of each request over time, thick while it was swapped out; below, when blocks were copied."""
    zero = min(timeline.submitted for timeline in pressed.timelines)
    for timeline in pressed.timelines:
        times = [arrival - zero for arrival in timeline.arrivals]
        axes.plot(times, range(1, len(times) + 1), color=_COLORS[timeline.is_victim], linewidth=0.8)
        for begun, ended in swapped_out_spans(timeline, pressed.clock_offset):
            height = bisect_right(timeline.arrivals, begun)
            axes.plot([begun - zero, ended - zero], [height, height], color="tab:red", linewidth=2.5)
    strip = max(len(timeline.arrivals) for timeline in pressed.timelines) / 25
    ways = ((outward(pressed.copies), "copies out", "tab:gray"), (inward(pressed.copies), "copies in", "black"))
    for row, (copies, label, color) in enumerate(ways):
        spans = [(begun - zero, ended - begun) for begun, ended in copy_spans(copies, pressed.clock_offset)]
        axes.broken_barh(spans, (-strip * (row + 1), 0.8 * strip), color=color, label=label)
    for label, color in ((BYSTANDERS, _COLORS[False]), (VICTIMS, _COLORS[True]), ("swapped out", "tab:red")):
        axes.plot([], [], color=color, label=label)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens of each request")
    axes.legend(fontsize=7)


def swapped_out_spans(timeline: Timeline, clock_offset: float) -> list[Span]:
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
