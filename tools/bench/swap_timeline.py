"""One swap of a load, phase by phase, with the tokens of the request that left and of those that stayed.

Owns: which swap is shown, where its phases begin and end, and the timelines of it. Does not know: the load, or why the
engine chose that request. A copy's beginning is its end less the time it took, as the engine's events tell both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from ...protocol.messages import SwapEvent
from .engines import inward, outward
from .figures import Figure, Row, Span, Timeline
from .measure import Timeline as Request
from .report import Column, Table, table

OTHERS = 4  # requests shown beside the one that is swapped


@dataclass(frozen=True)
class Swap:
    """A whole one: when the request stopped to run, was out, began to come back, was back. Seconds, as events tell."""

    request: Request
    leaving: SwapEvent
    out: SwapEvent
    returning: SwapEvent
    back: SwapEvent

    @property
    def moved(self) -> int:
        """Bytes copied while the request did not run."""
        return self.out.bytes + self.back.bytes

    @property
    def seconds(self) -> float:
        """From when it stopped to run until it was back."""
        return self.back.time - self.leaving.time

    def phases(self, clock_offset: float) -> list[Span]:
        """On the clock of the tokens; phases that took no time are left out."""
        out_begun, back_begun = self.out.time - self.out.seconds, self.back.time - self.back.seconds
        after = bisect_left(self.request.arrivals, self.back.time - clock_offset)
        back = self.back.time - clock_offset
        resumed = self.request.arrivals[after] if after < len(self.request.arrivals) else back
        spans = [
            ("queue out", self.leaving.time, max(self.leaving.time, out_begun)),
            ("copy out", out_begun, self.out.time),
            ("stall", self.out.time, self.returning.time),
            ("queue in", self.returning.time, max(self.returning.time, back_begun)),
            ("copy in", back_begun, self.back.time),
            ("resume", self.back.time, resumed + clock_offset),
        ]
        return [Span(name, begin - clock_offset, end - clock_offset) for name, begin, end in spans if end > begin]


def swaps_of(request: Request) -> list[Swap]:
    """The request's swaps that began and ended."""
    found, phases = [], ("swapping_out", "swapped", "swapping_in", "resumed")
    events: list[SwapEvent] = []
    for event in request.swap_events:
        if event.phase == phases[len(events)]:
            events.append(event)
        elif event.phase in phases:  # recomputed meanwhile, or never out
            events = [event] if event.phase == phases[0] else []
        if len(events) == len(phases):
            found.append(Swap(request, *events))
            events = []
    return found


def one_swap(requests: Sequence[Request], copies: Sequence[SwapEvent], clock_offset: float) -> dict[str, Any] | None:
    """The swap of median length, of those that moved bytes if any did, in ms from its beginning; None without one."""
    swaps = [swap for request in requests for swap in swaps_of(request)]
    chosen = sorted([swap for swap in swaps if swap.moved] or swaps, key=lambda swap: swap.seconds)
    if not chosen:
        return None
    swap = chosen[len(chosen) // 2]
    zero = swap.leaving.time - clock_offset
    phases = [_moved(span, zero) for span in swap.phases(clock_offset)]
    end = phases[-1].end if phases else 0.0
    rows = [Row("the victim", tuple(phases), _moments(swap.request, zero, end))]
    others = [other for other in requests if other is not swap.request and _runs(other, zero, zero + end / 1e3)]
    for other in sorted(others, key=lambda other: other.is_victim)[:OTHERS]:
        name = "another victim" if other.is_victim else "a bystander"
        rows.append(Row(name, (), _moments(other, zero, end)))
    for name, phase, some in (("link, out", "copy out", outward(copies)), ("link, in", "copy in", inward(copies))):
        spans = (_moved(Span(phase, c.time - c.seconds - clock_offset, c.time - clock_offset), zero) for c in some)
        rows.append(Row(name, tuple(span for span in spans if span.end > -end and span.begin < 2 * end)))
    gaps = [gap for request in requests for gap in request.gaps if gap > 0]
    return {
        "bytes": swap.moved,
        "phases": [{"phase": span.phase, "ms": span.end - span.begin} for span in phases],
        "left_ms": (swap.out.time - swap.leaving.time) * 1e3,
        "returning_ms": (swap.returning.time - swap.leaving.time) * 1e3,
        "end_ms": end,
        "step_ms": 1e3 * median(gaps) if gaps else 1.0,
        "rows": msgspec.to_builtins(rows),
    }


def _runs(request: Request, begin: float, end: float) -> bool:
    """Whether it has a token in that time."""
    return bisect_left(request.arrivals, begin) < bisect_right(request.arrivals, end)


def _moved(span: Span, zero: float) -> Span:
    return Span(span.phase, 1e3 * (span.begin - zero), 1e3 * (span.end - zero))


def _moments(request: Request, zero: float, end_ms: float) -> tuple[float, ...]:
    """Its tokens about the swap, in ms from its beginning."""
    first = bisect_left(request.arrivals, zero - end_ms / 1e3)
    last = bisect_right(request.arrivals, zero + 2 * end_ms / 1e3)
    return tuple(1e3 * (arrival - zero) for arrival in request.arrivals[first:last])


PHASES = (Column("phase", "phase", case=True), Column("ms", "ms"))
NOTE = "out: it leaves. stall: it is in CPU memory. in: it returns. resume: from there to its next token."


def swap_table(swap: Mapping[str, Any], name: str) -> Table:
    """The phases in numbers."""
    return table("One swap, phase by phase", PHASES, swap["phases"], f"{name}, {swap['bytes'] / 1e6:.3g} MB. {NOTE}")


def swap_figures(swap: Mapping[str, Any], name: str) -> list[Figure]:
    """The whole swap, and its two ends enlarged."""
    rows = msgspec.convert(swap["rows"], tuple[Row, ...])
    end, near = swap["end_ms"], 3 * swap["step_ms"]
    views = [
        ("One swap", -0.08 * end, 1.08 * end, "From its last token to its next one. Those that stay go on meanwhile."),
        (
            "The same, as it leaves",
            -near,
            swap["left_ms"] + near,
            "Blocks that were copied ahead of need leave at once.",
        ),
        (
            "The same, as it comes back",
            swap["returning_ms"] - near,
            end + near,
            "It runs as soon as its blocks are there.",
        ),
    ]
    label = "ms since it stopped to run"
    return [
        Timeline(f"{title}, {name}", caption, label, rows, begin, until, wide=title == "One swap")
        for title, begin, until, caption in views
        if until > begin
    ]
