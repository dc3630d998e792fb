"""The plots of a report: what one shows, as data, and how it is drawn as an SVG that fits into a page.

Owns: the three kinds of plots and their look. Does not know: what was measured, or the page around them.

A plot is plain data, so that it can be kept in a report's file, drawn again, and laid over that of another run. Text
and axes are drawn in the page's own text colour, so that they can be read on a light and on a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MOST_POINTS = 400  # of a distribution's curve: more cannot be seen
_WIDTH, _HEIGHT = 6.2, 3.1  # inches
_INK = "#010203"  # stands for the page's text colour
_COLORS = ("#3f86d8", "#e07b39", "#2f9e77", "#b65ba8", "#c9a227", "#7d6bd0")
_SPAN_COLORS = {
    "prompt": "#c9a227",
    "running": "#8fb8e8",
    "queue out": "#9aa3ad",
    "copy out": "#e07b39",
    "stall": "#d65f5f",
    "queue in": "#b7bfc7",
    "copy in": "#2f9e77",
    "resume": "#7d6bd0",
}


class Line(Struct, frozen=True):
    """One curve."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False


class Lines(Struct, frozen=True, tag="lines"):
    """Curves over a common axis: `steps` for a share that grows, points joined by lines otherwise."""

    title: str
    caption: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_log: bool = False
    steps: bool = False


class Bars(Struct, frozen=True, tag="bars"):
    """A group of bars a name, one bar a series. `ceilings`: of a series' bars, what each could reach at most."""

    title: str
    caption: str
    label: str
    names: tuple[str, ...]
    series: Mapping[str, tuple[float, ...]]
    ceilings: Mapping[str, tuple[float, ...]] = {}
    ceiling_name: str = ""
    horizontal: bool = False


class Span(Struct, frozen=True):
    """A phase, from when to when."""

    phase: str
    begin: float
    end: float


class Row(Struct, frozen=True):
    """One request, or one direction of the link: its phases, and the moments of its tokens."""

    name: str
    spans: tuple[Span, ...] = ()
    tokens: tuple[float, ...] = ()


class Timeline(Struct, frozen=True, tag="timeline"):
    """What happened when, a row each; shown from `begin` to `end`. `wide`: over the page's whole width."""

    title: str
    caption: str
    x_label: str
    rows: tuple[Row, ...]
    begin: float
    end: float
    wide: bool = False


Figure = Lines | Bars | Timeline
Value = Callable[[Mapping[str, Any]], float]


def share_below(name: str, values: Sequence[float]) -> Line:
    """The curve of a distribution: over each value the share of values that are no larger."""
    ordered = sorted(values)
    step = max(1, len(ordered) // MOST_POINTS)
    ranks = sorted({*range(0, len(ordered), step), len(ordered) - 1} - {-1})
    places, shares = [ordered[rank] for rank in ranks], [(rank + 1) / len(ordered) for rank in ranks]
    return Line(name, (*places[:1], *places), (*[0.0][: len(places)], *shares))


def bars_by_format(
    title: str,
    caption: str,
    label: str,
    results: Sequence[Mapping[str, Any]],
    series: Mapping[str, Value],
    ceilings: Mapping[str, Value] | None = None,
    ceiling_name: str = "",
) -> Bars:
    """A group of bars for each result, which is of one KV format: what the series' functions make of it."""

    def values(of: Mapping[str, Value]) -> dict[str, tuple[float, ...]]:
        return {name: tuple(value(result) for result in results) for name, value in of.items()}

    names = tuple(result["kv_cache_dtype"] for result in results)
    return Bars(title, caption, label, names, values(series), values(ceilings or {}), ceiling_name)


def svg(figure: Figure) -> str:
    """The plot as an `<svg>` element of a page."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    style = {"svg.fonttype": "none", "svg.hashsalt": "coldblock", "font.size": 9, "axes.spines.top": False}
    look = {"axes.spines.right": False, "axes.axisbelow": True, "grid.color": _INK, "grid.alpha": 0.15}
    buffer = io.StringIO()
    with matplotlib.rc_context({**ink, **style, **look}):
        canvas = Canvas(figsize=_size(figure), layout="constrained")
        axes = canvas.subplots()
        if isinstance(figure, Lines):
            _draw_lines(axes, figure)
        elif isinstance(figure, Bars):
            _draw_bars(axes, figure)
        else:
            _draw_timeline(axes, figure)
        _legend(canvas, axes)
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        canvas.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _for_a_page(buffer.getvalue())


def _size(figure: Figure) -> tuple[float, float]:
    if isinstance(figure, Timeline):
        return (2 if figure.wide else 1) * _WIDTH, 1.2 + 0.28 * len(figure.rows)
    if isinstance(figure, Bars) and figure.horizontal:
        return _WIDTH, 1.0 + 0.2 * len(figure.names) * len(figure.series)
    return _WIDTH, _HEIGHT


def _for_a_page(text: str) -> str:
    """Without what only a file of its own needs, in the page's colour and as wide as the page lets it be."""
    element = text[text.index("<svg") :]
    head, rest = element.split(">", 1)
    head = re.sub(r' (width|height|version|xmlns:xlink)="[^"]*"', "", head).replace("<svg", '<svg role="img"')
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL).replace("xlink:href", "href")
    return f"{head}>{rest}".replace(_INK, "currentColor")


def _draw_lines(axes: Axes, figure: Lines) -> None:
    drawn = {False: 0, True: 0}  # each kind has the colours to itself: a dashed curve is paired with a solid one
    for line in figure.lines:
        color, dashes = _COLORS[drawn[line.dashed] % len(_COLORS)], "--" if line.dashed else "-"
        drawn[line.dashed] += 1
        if figure.steps:
            axes.step(line.x, line.y, where="post", label=line.name, color=color, linestyle=dashes)
        else:
            axes.plot(line.x, line.y, "o", linestyle=dashes, label=line.name, color=color, markersize=4)
    if figure.x_log:
        axes.set_xscale("log")
        _plain_ticks(axes, None if figure.steps else sorted({x for line in figure.lines for x in line.x}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.grid(True)


def _plain_ticks(axes: Axes, places: Sequence[float] | None) -> None:
    """Numbers, not powers of ten, on a logarithmic axis: at these places, or at round ones."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if places is not None:
        axes.set_xticks(places)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _draw_bars(axes: Axes, figure: Bars) -> None:
    """Values stand at the bars' ends, ceilings as dark strokes across them."""
    count = len(figure.series)
    thickness = 0.8 / count
    draw = axes.barh if figure.horizontal else axes.bar
    mark = axes.vlines if figure.horizontal else axes.hlines
    for index, (name, values) in enumerate(figure.series.items()):
        places = [place - 0.4 + (index + 0.5) * thickness for place in range(len(figure.names))]
        bars = draw(places, values, 0.92 * thickness, label=name, color=_COLORS[index % len(_COLORS)])
        axes.bar_label(bars, [_short(value) for value in values], padding=2, fontsize=7)
        for place, ceiling in zip(places, figure.ceilings.get(name, ()), strict=False):
            mark(ceiling, place - 0.5 * thickness, place + 0.5 * thickness, color=_INK, linewidth=1.6)
    if figure.ceilings:
        axes.plot([], [], color=_INK, linewidth=1.6, label=figure.ceiling_name)
    if figure.horizontal:
        axes.set_yticks(range(len(figure.names)), figure.names, fontsize=8)
        axes.set_ylim(len(figure.names) - 0.4, -0.6)
        axes.set_xlabel(figure.label)
        axes.grid(True, axis="x")
    else:
        axes.set_xticks(range(len(figure.names)), figure.names)
        axes.set_ylabel(figure.label)
        axes.grid(True, axis="y")
    axes.margins(0.08 if figure.horizontal else 0.02, 0.02 if figure.horizontal else 0.08)


def _draw_timeline(axes: Axes, figure: Timeline) -> None:
    for place, row in enumerate(figure.rows):
        for span in row.spans:
            begin, end = max(span.begin, figure.begin), min(span.end, figure.end)
            if begin <= end:  # the edge lets the shortest be seen
                color = _SPAN_COLORS[span.phase]
                axes.barh(place, end - begin, 0.62, left=begin, color=color, edgecolor=color, linewidth=0.8)
        shown = [moment for moment in row.tokens if figure.begin <= moment <= figure.end]
        strokes = [x for moment in shown for x in (moment, moment, float("nan"))]  # one path, however many there are
        axes.plot(strokes, [place - 0.26, place + 0.26, place] * len(shown), color=_INK, linewidth=0.9)
    present = {span.phase for row in figure.rows for span in row.spans}
    for phase, color in _SPAN_COLORS.items():
        if phase in present:
            axes.barh(0, 0, color=color, label=phase)
    if any(row.tokens for row in figure.rows):
        axes.plot([], [], "|", color=_INK, markersize=8, label="a token")
    axes.set_yticks(range(len(figure.rows)), [row.name for row in figure.rows], fontsize=8)
    axes.set_ylim(len(figure.rows) - 0.4, -0.6)
    axes.set_xlim(figure.begin, figure.end)
    axes.set_xlabel(figure.x_label)
    axes.grid(True, axis="x")


def _legend(canvas: Canvas, axes: Axes) -> None:
    handles: Any
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, min(len(labels), int(14 * canvas.get_figwidth() / (5 + max(map(len, labels))))))
        canvas.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)


def _short(value: float) -> str:
    """Three digits, thousands and millions as k and M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and unit == "M"):
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
