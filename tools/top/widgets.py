"""The two kinds of widget that the live screen is made of: a panel of lines, and the table of requests.

Owns: colours, and painting no more than what changed. Does not know: where lines and entries come from.

The table is drawn line by line (textual's Line API). textual's own DataTable draws every cell in view again when one
changes, which at 200 rows costs four times what a monitor may take (see docs/top.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from ..terminal import columns_of, shorten
from .columns import GAP, NOTHING, Column, Entry, Order, fitting
from .history import RequestKey
from .panels import Line

_GREEN, _TEAL, _BLUE, _AMBER, _VIOLET, _CYAN, _RED, _PINK = (
    "#56d364", "#2dd4bf", "#58a6ff", "#f0a83a", "#bc8cff", "#39c5cf", "#ff7b72", "#f778ba",
)  # fmt: skip
_GREY, _DIM = "#8b949e", "#57606c"

STYLES = {
    name: Style.parse(definition)
    for name, definition in {
        "": "",
        "title": f"bold {_BLUE}",
        "strong": "bold",
        "label": f"bold {_BLUE}",
        "dim": _GREY,
        "alarm": f"bold {_RED}",
        "live": f"bold {_GREEN}",
        "paused": f"bold {_AMBER}",
        # blocks by state
        "used": _GREEN,
        "shared": _TEAL,
        "cached": _BLUE,
        "in flight": _AMBER,
        "free": _DIM,
        # graphs
        "out": _AMBER,
        "in": _CYAN,
        "rate": _GREEN,
        "step": _PINK,
        # requests by state
        "waiting": _GREY,
        "loading": _CYAN,
        "prefill": _BLUE,
        "decode": _GREEN,
        "swapping_out": _AMBER,
        "swapped": _VIOLET,
        "swapping_in": _CYAN,
        "unseen": _DIM,
        # events
        "resumed": _GREEN,
        "copied_out": "#9a7b45",
        "copied_in": "#3f8a91",
        "rejected": _RED,
        "recomputed": _RED,
        "connected": _GREEN,
        "restarted": f"bold {_AMBER}",
        "gone": f"bold {_RED}",
    }.items()
}
_PLAIN = Style()


def strip(line: Line, width: int, base: Style) -> Strip:
    """A line as textual paints it, in exactly `width` columns."""
    segments = [
        Segment("".join(text for text, _ in spans), base + STYLES.get(style, _PLAIN))
        for style, spans in itertools.groupby(line, key=lambda span: span[1])
    ]
    return Strip(segments).adjust_cell_length(width, base)


class Panel(Widget):
    """Lines that `draw(width, height)` makes; `redraw` paints those that differ from what is there."""

    DEFAULT_CSS = "Panel { height: 1; }"

    def __init__(self, draw: Callable[[int, int], Sequence[Line]], *, id: str) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._lines: list[Line] = []

    def redraw(self) -> None:
        """Ask for the lines again."""
        before = self._lines
        self._lines = list(self._draw(self.size.width, self.size.height)) if self.size else []
        for y in range(max(len(before), len(self._lines))):
            if before[y : y + 1] != self._lines[y : y + 1]:
                self.refresh(Region(0, y, self.size.width, 1))

    def on_resize(self) -> None:
        """Another size is another drawing."""
        self.redraw()

    def render_line(self, y: int) -> Strip:
        """See textual's Line API."""
        line = self._lines[y] if y < len(self._lines) else []
        return strip(line, self.size.width, self.rich_style)


PaintedRow = tuple[RequestKey | None, tuple[str, ...], str]
"""What a line of the table shows: whose it is, the cells' text, the style of the state."""


class RequestTable(ScrollView, can_focus=True):
    """A row a request, a title line on top. The selection stays with its request, wherever that is sorted to."""

    COMPONENT_CLASSES = {"requests--title", "requests--sorted", "requests--selected"}  # noqa: RUF012  (textual's name)
    DEFAULT_CSS = """
    RequestTable {
        overflow-x: hidden;
        & > .requests--title { color: $text-muted; background: $panel; text-style: bold; }
        & > .requests--sorted { color: $primary; background: $panel; text-style: bold; }
        & > .requests--selected { background: $primary 30%; text-style: bold; }
        &:nocolor > .requests--title { text-style: bold underline; }
        &:nocolor > .requests--sorted { text-style: bold underline reverse; }
        &:nocolor > .requests--selected { text-style: reverse; }
    }
    """
    BINDINGS = [  # noqa: RUF012  (textual's name)
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    selected: reactive[RequestKey | None] = reactive(None)

    class Opened(Message):
        """The selected row was clicked again."""

    class SortAsked(Message):
        """The title of this column was clicked."""

        def __init__(self, title: str) -> None:
            super().__init__()
            self.title = title

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._entries: list[Entry] = []
        self._order = Order()
        self._columns: list[tuple[Column, int]] = []
        self._place = 0  # of the selected request when it was last there
        self._painted: dict[int, PaintedRow] = {}
        self._empty: Line = []

    # ------------------------------------------------------------ what is shown

    def show(self, entries: list[Entry], order: Order, empty: Line, follow: bool) -> None:
        """Show these; `empty` is what stands there when there are none. `follow`: keep the selected one in view."""
        same_titles = order == self._order and bool(entries) == bool(self._entries)
        self._entries, self._order, self._empty = entries, order, empty
        self.virtual_size = Size(self.scrollable_content_region.width, len(entries) + 1)
        self._place = self._found(self._place)
        if follow:
            self._reveal()
        self._fit(repaint=not same_titles)

    def on_resize(self) -> None:
        """Other columns may fit."""
        self._fit(repaint=True)

    def _fit(self, *, repaint: bool = False) -> None:
        columns = fitting(self.scrollable_content_region.width, self._order.title)
        if repaint or columns != self._columns:
            self._columns = columns
            self._painted.clear()
            self.refresh()
        else:
            self._repaint_changed()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Every line shows another row."""
        super().watch_scroll_y(old_value, new_value)
        self._painted.clear()
        self.refresh()

    def watch_selected(self) -> None:
        """Two lines look different."""
        self._place = self._found(self._place)
        self._painted.clear()
        self.refresh()

    def _repaint_changed(self) -> None:
        """Mark the cells that differ from what was painted, from the first to the last of each line."""
        for y, before in list(self._painted.items()):
            now = self._row_at(y)
            if now == before:
                continue
            left, right = self._changed_columns(before, now)
            self.refresh(Region(left, y, right - left, 1))

    def _changed_columns(self, before: PaintedRow, now: PaintedRow) -> tuple[int, int]:
        if (before[0] == self.selected) != (now[0] == self.selected) or len(before[1]) != len(now[1]):
            return 0, self.size.width
        left, right, x = self.size.width, 0, 0
        for (_, width), old, new in zip(self._columns, before[1], now[1], strict=True):
            if old != new:
                left, right = min(left, x), x + width
            x += width + GAP
        return (left, right) if right else (0, self.size.width)

    # ------------------------------------------------------------ painting

    def _row_at(self, y: int) -> PaintedRow:
        index = y - 1 + int(self.scroll_offset.y)
        if index >= len(self._entries):
            return None, (), ""
        entry = self._entries[index]
        return entry.key, tuple(column.text(entry) for column, _ in self._columns), entry.row.state

    def render_line(self, y: int) -> Strip:
        """See textual's Line API."""
        width, base = self.size.width, self.rich_style
        if y == 0:
            return self._title_strip(width)
        if not self._entries:
            return strip(self._empty if y == 2 else [], width, base)
        self._painted[y] = row = self._row_at(y)
        key, cells, state = row
        if key is not None and key == self.selected:
            base = self.get_component_rich_style("requests--selected")
        line: Line = []
        for (column, room), text in zip(self._columns, cells, strict=False):  # below the last row there are no cells
            style = state if column.title == "STATE" else "dim" if text in ("0", NOTHING) else ""
            line += [*_cell(column, text, room, style), (" " * GAP, "")]
        return strip(line, width, base)

    def _title_strip(self, width: int) -> Strip:
        plain = self.get_component_rich_style("requests--title")
        sorting = self.get_component_rich_style("requests--sorted")
        segments = []
        for column, room in self._columns:
            by_it = column.title == self._order.title
            text = shorten(column.title + ("▼▲"[not self._order.reverse] if by_it else ""), room)
            for part, _ in _cell(column, text, room, ""):
                segments.append(Segment(part, sorting if by_it else plain))
            segments.append(Segment(" " * GAP, plain))
        return Strip(segments).adjust_cell_length(width, plain)

    # ------------------------------------------------------------ selecting

    def _found(self, otherwise: int) -> int:
        keys = (index for index, entry in enumerate(self._entries) if entry.key == self.selected)
        return next(keys, max(0, min(otherwise, len(self._entries) - 1)))

    def select(self, place: int) -> None:
        """Select the request in this place, or in the nearest there is."""
        if self._entries:
            self._place = max(0, min(place, len(self._entries) - 1))
            self.selected = self._entries[self._place].key
            self._reveal()

    def action_move(self, rows: int) -> None:
        """Select another row; the first move selects the first row in view."""
        self.select(int(self.scroll_offset.y) if self.selected is None and abs(rows) == 1 else self._place + rows)

    def action_page(self, pages: int) -> None:
        """Move by what is in view."""
        self.select(self._place + pages * max(1, self.size.height - 2))

    def _reveal(self) -> None:
        in_view = max(1, self.size.height - 1)
        top = int(self.scroll_offset.y)
        if not top <= self._place < top + in_view:
            self.scroll_to(y=self._place if self._place < top else self._place - in_view + 1, animate=False)

    def on_click(self, event: events.Click) -> None:
        """A title sorts, a row is selected, the selected row opens."""
        at = event.get_content_offset(self)
        if at is None:
            return
        if at.y == 0:
            if column := self._column_at(at.x):
                self.post_message(self.SortAsked(column.title))
            return
        place = at.y - 1 + int(self.scroll_offset.y)
        if place < len(self._entries):
            again = self._entries[place].key == self.selected
            self.select(place)
            if again:
                self.post_message(self.Opened())

    def _column_at(self, x: int) -> Column | None:
        for column, width in self._columns:
            if x < width + GAP:
                return column
            x -= width + GAP
        return None


def _cell(column: Column, text: str, width: int, style: str) -> Iterable[tuple[str, str]]:
    """Text and the blanks that align it."""
    text = shorten(text, width)
    blanks = (" " * (width - columns_of(text)), "")
    return ((text, style), blanks) if column.left else (blanks, (text, style))
