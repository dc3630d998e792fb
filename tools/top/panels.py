"""What the monitor shows beside its table, as lines of styled text: tiers, copies, load, one request, the event log.

Owns: wording, bars, graphs, and the names of the styles. Does not know: which colour a style has, nor the terminal.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

from ...protocol.messages import TierUse
from ..terminal import columns_of, count_of, human_bytes, human_seconds, safe, shorten
from .columns import COLUMNS, Entry, seconds_text
from .history import UNSEEN, Change, Frame, Moment, Track

Span = tuple[str, str]
"""Text, and the name of its style: "" is plain."""
Line = list[Span]

TIER_STATES = (("used", "█"), ("shared", "▓"), ("cached", "▒"), ("in flight", "▚"), ("free", "·"))
"""A block's states in a bar, each with its sign, so that they differ without colour too. "shared" are used as well."""

COURSE = {
    "waiting": "·",
    "loading": "△",
    "prefill": "▒",
    "decode": "█",
    "swapping_out": "▼",
    "swapped": "▁",
    "swapping_in": "▲",
    UNSEEN: "?",
}
"""The sign of each state in a request's course over time."""

COURSE_S = 120.0  # so much of it is shown
_LEVELS = " ▁▂▃▄▅▆▇█"
_LEAST_BAR, _MOST_BAR = 10, 60  # of a tier in one line
_SHORT = {"in flight": "moving"}


def width_of(line: Line) -> int:
    """Columns that a line takes."""
    return sum(columns_of(text) for text, _ in line)


def pad(line: Line, width: int) -> Line:
    """The line filled up to `width`."""
    return [*line, (" " * (width - width_of(line)), "")]


# ---------------------------------------------------------------- bars and graphs


def bar(shares: Sequence[tuple[str, str, int]], width: int) -> Line:
    """Counts as (style, sign, count) in `width` cells; the ends of the parts are rounded, so that they add up."""
    total = sum(count for _, _, count in shares)
    if not total:
        return [("·" * width, "dim")]
    line, counted, end = [], 0, 0
    for style, sign, count in shares:
        counted, begin = counted + count, end
        end = round(width * counted / total)
        line.append((sign * (end - begin), style))
    return line


def graph(values: Sequence[float], width: int, height: int, style: str) -> list[Line]:
    """The last `width` values as columns of eighths, scaled to the largest; zero is a dim base line."""
    shown = [0.0] * (width - len(values)) + list(values[len(values) - width :] if width < len(values) else values)
    top = max(shown, default=0.0) or 1.0
    eighths = [min(8 * height, max(1, round(8 * height * value / top))) if value > 0 else 0 for value in shown]
    lines: list[Line] = []
    for row in reversed(range(height)):
        line: Line = []
        for is_zero, group in itertools.groupby(eighths, key=lambda level: level == 0):
            if is_zero:
                line.append((("▁" if row == 0 else " ") * len(list(group)), "dim"))
            else:
                line.append(("".join(_LEVELS[min(8, max(0, level - 8 * row))] for level in group), style))
        lines.append(line)
    return lines


def percent(part: float, whole: float) -> str:
    """ "43%", "<1%" for what is little but not nothing; empty when there is no whole."""
    if not whole:
        return ""
    return "<1%" if 0 < part < whole / 100 else f"{100 * part / whole:.0f}%"


# ---------------------------------------------------------------- the engine


def title(frame: Frame, width: int, badge: Span) -> Line:
    """Model, device, uptime, KV format on the left, as much of it as fits; `badge` on the right."""
    parts: list[Line] = [[("coldblock top", "title")]]
    if frame.stats is not None:
        stats, model = frame.stats, frame.stats.model
        block = f"{model.block_size} tokens, {human_bytes(model.kv_block_bytes)} a block"
        parts += [
            [("  ", ""), (shorten(safe(model.name), 32), "strong"), (f" on {safe(model.device)}", "dim")],
            [("  up ", "dim"), (human_seconds(stats.uptime_s), "")],
            [("  KV ", "dim"), (safe(model.kv_cache_dtype), "")],
            [(f"  {block}", "dim")],
            [(f"  {count_of(stats.peers, 'peer')}", "dim")],
        ]
    line: Line = []
    for part in parts:
        if width_of(line) + width_of(part) + columns_of(badge[0]) >= width:
            break
        line += part
    return [*pad(line, width - columns_of(badge[0])), badge]


def _tier_shares(use: TierUse) -> list[tuple[str, str, int]]:
    counts = {
        "used": use.used - use.shared,
        "shared": use.shared,
        "cached": use.cached,
        "in flight": use.in_flight,
        "free": use.free,
    }
    return [(name, sign, counts[name]) for name, sign in TIER_STATES]


def tier(name: str, use: TierUse, block_bytes: int, width: int, roomy: bool) -> list[Line]:
    """One tier: its bar, how full it is, its blocks by state. In one line unless `roomy`."""
    shares = _tier_shares(use)
    full = (f" {percent(use.total - use.free, use.total):>4} ", "strong")
    states: Line = []
    for state, sign, count in shares:
        before = f"{sign}{count}" if roomy else str(count)
        states += [(before, state if roomy else ""), (f" {_SHORT.get(state, state)} ", "dim" if roomy else state)]
    if roomy:
        size = f"of {human_bytes(use.total * block_bytes)}"
        room = width - 4 - columns_of(full[0]) - columns_of(size)
        return [[(f"{name} ", "label"), *bar(shares, max(1, room)), full, (size, "dim")], states]
    room = width - 4 - columns_of(full[0]) - width_of(states)
    return [[(f"{name} ", "label"), *bar(shares, max(_LEAST_BAR, min(_MOST_BAR, room))), full, *states]]


def tiers(frame: Frame, width: int, roomy: bool) -> list[Line]:
    """Both tiers."""
    stats = frame.stats
    if stats is None:
        return [[("waiting for the first snapshot", "dim")]]
    block_bytes = stats.model.kv_block_bytes
    lines = tier("GPU", stats.gpu, block_bytes, width, roomy)
    if stats.cpu_offload.enabled:
        return lines + tier("CPU", stats.cpu, block_bytes, width, roomy)
    return [*lines, [("CPU  " if roomy else "CPU ", "label"), ("tier is off: nothing can be swapped", "dim")]]


def copies(frame: Frame, width: int, height: int) -> list[Line]:
    """Copies out and in, side by side: bytes a second, their share of the link's peak, and their past."""
    stats, past = frame.stats, frame.past
    if stats is None:
        return []
    link, half = stats.link, max(1, (width - 2) // 2)
    out = _rate("▼ out", "out", link.out_bytes_per_s, link.peak_out_bytes_per_s, half)
    back = _rate("▲ in", "in", link.in_bytes_per_s, link.peak_in_bytes_per_s, half)
    return _side_by_side(
        _with_graph(out, past.out_bytes_per_s, half, height, "out"),
        _with_graph(back, past.in_bytes_per_s, half, height, "in"),
        half,
    )


def _rate(name: str, style: str, rate: float, peak: float, width: int) -> Line:
    """One direction's speed, and its share of the peak where that is known; the peak itself where it fits."""
    words: Line = [(f"{name} ", style), (f"{human_bytes(rate)}/s ", "strong")]
    if peak:
        words.append((f"{percent(rate, peak)} ", style))
        of_peak = f"of {human_bytes(peak)}/s"
        if width_of(words) + columns_of(of_peak) + _LEAST_BAR <= width:
            words.append((f"{of_peak} ", "dim"))
    return words


def load(frame: Frame, width: int, height: int) -> list[Line]:
    """Requests by what they do, tokens/s and step time with their past."""
    stats, past = frame.stats, frame.past
    if stats is None:
        return []
    counts: Line = [
        (f"{stats.running}", "strong"), (" running  ", "decode"),
        (f"{stats.waiting}", "strong"), (" waiting  ", "waiting"),
        (f"{stats.swapped}", "strong"), (" swapped  ", "swapped"),
    ]  # fmt: skip
    tokens: Line = [(f"{stats.tokens_per_s:.1f}", "strong"), (" tok/s ", "dim")]
    step: Line = [("step ", "dim"), (f"{stats.step_ms:.1f} ms ", "strong")]
    if height == 1:
        room = max(1, (width - width_of(counts) - 1) // 2)
        (tokens,) = _with_graph(tokens, past.tokens_per_s, room, 1, "rate")
        (step,) = _with_graph(step, past.step_ms, room, 1, "step")
        return [[*counts, *tokens, (" ", ""), *step]]
    half = max(1, (width - 2) // 2)
    tokens_lines = _with_graph(tokens, past.tokens_per_s, half, height - 1, "rate")
    step_lines = _with_graph(step, past.step_ms, half, height - 1, "step")
    return [counts, *_side_by_side(tokens_lines, step_lines, half)]


def _side_by_side(left: list[Line], right: list[Line], width: int) -> list[Line]:
    """Two columns of lines; the left one takes `width`."""
    return [[*pad(a, width), ("  ", ""), *b] for a, b in zip(left, right, strict=True)]


def _with_graph(words: Line, values: Sequence[float], width: int, height: int, style: str) -> list[Line]:
    """Words, and the graph below them, or behind them where there is one line only."""
    if height == 1:
        room = width - width_of(words)
        return [[*words, *graph(values, room, 1, style)[0]] if room > 3 and len(values) > 1 else words]
    return [words, *graph(values, width, height - 1, style)]


# ---------------------------------------------------------------- events


def clock(moment: float) -> str:
    """Time of day here, to a tenth of a second."""
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(10 * (moment % 1))}"


def event(moment: Moment) -> Line:
    """One line of the log."""
    return [(f"{clock(moment.time)} ", "dim"), (moment.text, moment.kind)]


def log(moments: Iterable[Moment], height: int) -> list[Line]:
    """The newest of these that fit, the newest last."""
    newest = list(moments)[-height:] if height > 0 else []
    return [event(moment) for moment in newest]


# ---------------------------------------------------------------- one request


def detail(entry: Entry | None, track: Track | None, until: float, width: int, height: int) -> list[Line]:
    """Everything known of one request: its figures, its course over time, and what happened to it, up to `until`."""
    if entry is None or track is None:
        return [[("no request is selected", "dim")]]
    head = _figures(entry, width)
    if track.ended_at is not None and track.ended_at <= until:
        head.append([(f"gone since {clock(track.ended_at)}; the last that was seen of it is shown", "gone")])
        until = track.ended_at
    head += course(track, until, width)
    moments = [moment for moment in track.moments if moment.time <= until]
    room = height - len(head)
    return head + [
        [*event(moment)[:1], (f"{max(0.0, moment.time - track.arrived_at):+8.2f} s  ", "dim"), *event(moment)[1:]]
        for moment in (moments[-room:] if room > 0 else [])
    ]


def _figures(entry: Entry, width: int) -> list[Line]:
    row = entry.row
    more = (
        ("QUEUE", seconds_text(row.queue_s)),
        ("CACHED", str(row.cached_tokens)),
        ("MOVED", human_bytes(row.moved_bytes)),
        ("RECOMPUTED", str(row.recomputes)),
    )
    lines: list[Line] = [[(shorten(safe(row.request_id), width), "strong")]]
    line: Line = []
    for name, text in (*((column.title, column.text(entry)) for column in COLUMNS[1:]), *more):
        style = row.state if name == "STATE" else ""
        figure: Line = [(f"{name.lower()} ", "dim"), (f"{shorten(text, 24)}   ", style)]
        if line and width_of(line) + width_of(figure) > width:
            lines.append(line)
            line = []
        line += figure
    return [*lines, line]


def course(track: Track, until: float, width: int) -> list[Line]:
    """Its last two minutes as a bar, as far as they were seen, and what the signs in it mean."""
    seen_from = track.seen_at if any(change.state == UNSEEN for change in track.changes) else track.arrived_at
    began = max(seen_from, until - COURSE_S)
    spans = _spans(track.changes, began, until)
    step = max(until - began, 1e-3) / width
    states = [_longest(spans, began + step * i, began + step * (i + 1)) for i in range(width)]
    cells: Line = [(COURSE.get(state, "?") * len(list(run)), state) for state, run in itertools.groupby(states)]
    left = f"{'arrived' if began == track.arrived_at else 'from'} {clock(began)}"
    right = human_seconds(until - began)
    ruler: Line = [(left, "dim"), (" " * max(1, width - len(left) - len(right)), ""), (right, "dim")]
    legend: Line = []
    for state, sign in COURSE.items():
        if state in states:
            legend += [(f"{sign} ", state), (f"{state.replace('_', ' ')}  ", "dim")]
    return [cells, ruler, legend]


def _spans(changes: Iterable[Change], began: float, until: float) -> list[tuple[str, float, float]]:
    """State, begin and end of each stay between these times."""
    ends = [*itertools.islice((change.time for change in changes), 1, None), until]
    stays = [(c.state, max(began, c.time), min(until, end)) for c, end in zip(changes, ends, strict=True)]
    return [stay for stay in stays if stay[2] > stay[1]]


def _longest(spans: Sequence[tuple[str, float, float]], begin: float, end: float) -> str:
    """The state that lasted longest between these times."""
    lasted: dict[str, float] = {}
    for state, left, right in spans:
        if left < end and right > begin:
            lasted[state] = lasted.get(state, 0.0) + min(right, end) - max(left, begin)
    return max(lasted, key=lambda state: lasted[state], default=UNSEEN)


# ---------------------------------------------------------------- all of it as text


def header(frame: Frame, width: int) -> list[Line]:
    """The engine in six lines, for where there is no room for panels."""
    stats = frame.stats
    if stats is None:
        return []
    return [*tiers(frame, width, roomy=False), *copies(frame, width, 1), *load(frame, width, 1)]
