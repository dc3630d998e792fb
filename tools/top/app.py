"""The live screen of `coldblock top`: what is where, which key does what.

Owns: layout, keys, and what the user chose: order, filter, selection, pause. Does not know: how anything is worded
(`panels`, `columns`) or painted (`widgets`), nor how the engine is heard (`feed`).
"""

from __future__ import annotations

import os
import time

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Container, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.theme import Theme
from textual.widgets import Footer, Input, Static

from ...protocol.client import AsyncClient
from ..terminal import human_seconds, safe, shorten
from . import panels
from .columns import COLUMNS, STATES, Entry, Order, entries
from .feed import listen
from .history import Frame, History, key_of
from .panels import Line, Span
from .widgets import Panel, RequestTable

THEME = Theme(
    name="coldblock",
    primary="#58a6ff",
    foreground="#d6deeb",
    background="#0b0f16",
    surface="#0b0f16",
    panel="#161c27",
    error="#ff7b72",
    variables={
        "footer-background": "#161c27",
        "footer-item-background": "#161c27",
        "footer-key-background": "#161c27",
        "footer-description-background": "#161c27",
        "scrollbar": "#2a3344",
        "scrollbar-background": "#0b0f16",
    },
)

PUBLISHED_S = 0.5  # between two snapshots, about
TITLES = {"tiers": "KV blocks", "copies": "copies", "load": "load", "detail": "request", "log": "events"}


class TopApp(App[None]):
    """Listens to the engine of `client`, and shows what it hears, at most once an `interval_s`."""

    TITLE = "coldblock top"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (150, "-wide")]  # noqa: RUF012  (textual's name)
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (12, "-short"), (20, "-low"), (32, "-tall")]  # noqa: RUF012
    CSS_PATH = "app.tcss"
    BINDINGS = [  # noqa: RUF012  (textual's name)
        Binding("question_mark,f1", "help", "Help", key_display="?"),
        Binding("slash,f3", "filter", "Filter", key_display="/"),
        Binding("less_than_sign,left", "sort(-1)", show=False),
        Binding("greater_than_sign,right", "sort(1)", "Sort", key_display="<>"),
        Binding("r", "reverse", "Reverse"),
        Binding("f", "follow", "Follow"),
        Binding("space,p", "pause", "Pause", key_display="space"),
        Binding("enter", "details", "Details", key_display="⏎"),
        Binding("l", "log", "Log"),
        Binding("q,ctrl+c", "quit", "Quit", key_display="q"),
        Binding("escape", "close", show=False),
    ]

    def __init__(self, client: AsyncClient, interval_s: float = 0.5) -> None:
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.register_theme(THEME)
        self.theme = THEME.name
        self._client = client
        self._interval_s = interval_s
        self.history = History()
        self._frame: Frame = self.history.frame()
        self._shown_at = 0.0
        self._paused_at: float | None = None
        self._order = Order()
        self._pattern = ""
        self._follows = False

    def compose(self) -> ComposeResult:
        """Title, the engine's panels, the table, one request, the log, the keys."""
        yield Panel(lambda width, _: [panels.title(self._frame, width, self._badge())], id="title")
        with Container(id="engine"):
            yield Panel(lambda width, height: panels.tiers(self._frame, width, roomy=height >= 4), id="tiers")
            yield Panel(lambda width, height: panels.copies(self._frame, width, height), id="copies")
            yield Panel(lambda width, height: panels.load(self._frame, width, height), id="load")
        yield RequestTable(id="requests")
        yield Panel(self._detail_lines, id="detail")
        yield Panel(self._log_lines, id="log")
        yield Input(placeholder="part of an id, frontend or state; Enter keeps it, Esc clears it", id="filter")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        """Begin to listen."""
        for name, title in TITLES.items():
            self._panel(name).border_title = title
        self.table.focus()
        self.watch(self.table, "selected", self._redraw, init=False)
        self.run_worker(listen(self._client, self.history, self._changed), exit_on_error=True)
        self.set_interval(1.0, self._panel("title").redraw)

    # ------------------------------------------------------------ showing

    @property
    def table(self) -> RequestTable:
        """The table of requests."""
        return self.query_one(RequestTable)

    def _panel(self, name: str) -> Panel:
        return self.query_one(f"#{name}", Panel)

    def _changed(self) -> None:
        """There is something new: show it, unless paused or shown something just now."""
        now = time.monotonic()
        if not self.query(RequestTable):  # the screen is being taken down
            return
        if self._paused_at is None and now - self._shown_at >= self._interval_s - PUBLISHED_S / 2:
            self._shown_at = now
            self._frame = self.history.frame()
            self._redraw()

    def _redraw(self) -> None:
        """Show the frame as the user wants to see it."""
        shown = entries(self._frame, self._order, self._pattern)
        self.table.show(shown, self._order, self._empty(), self._follows)
        _title(self.table, self._table_title(len(shown)))
        for panel in self.query(Panel):
            if panel.display:
                panel.redraw()

    def _badge(self) -> Span:
        if self._paused_at is not None:
            return f"‖ paused {human_seconds(int(time.monotonic() - self._paused_at))}", "paused"
        if self._frame.away:
            return "✗ no engine", "alarm"
        return ("● live", "live") if self._frame.stats is not None else ("○ waiting", "dim")

    def _table_title(self, shown: int) -> str:
        stats = self._frame.stats
        total = len(stats.requests) if stats is not None else 0
        beyond = stats.running + stats.waiting + stats.swapped - total if stats is not None else 0
        words = [f"requests {shown} of {total}" if self._pattern else f"requests {total}"]
        if beyond > 0:
            words.append(f"{beyond} more not listed")
        words.append(f"by {self._order.title} {'▼' if self._order.reverse else '▲'}")
        if self._pattern:
            words.append(f"filter {self._pattern!r}")
        if self._follows and self.table.selected is not None:
            words.append(f"following {shorten(safe(self.table.selected[1]), 24)}")
        return " · ".join(words)

    def _empty(self) -> Line:
        if self._frame.away:
            return [(f"  {self._frame.away}", "gone")]
        return [("  no request has this in its id, frontend or state" if self._pattern else "  no requests", "dim")]

    def _log_lines(self, _: int, height: int) -> list[Line]:
        moments = self._frame.log
        if self._follows and self.table.selected is not None:
            moments = tuple(m for m in moments if m.key in (None, self.table.selected))
        return panels.log(moments, height)

    def _detail_lines(self, width: int, height: int) -> list[Line]:
        key, stats = self.table.selected, self._frame.stats
        track = self.history.track(key) if key is not None else None
        if stats is None or track is None or key is None:
            return panels.detail(None, None, 0.0, width, height)
        row = next((row for row in stats.requests if key_of(row) == key), track.row)
        return panels.detail(Entry(row, stats.model, self._frame.rates.get(key)), track, stats.time, width, height)

    # ------------------------------------------------------------ keys and mouse

    def action_sort(self, step: int) -> None:
        """Sort by the next column, or the one before."""
        titles = [column.title for column in COLUMNS]
        self._sort_by(titles[(titles.index(self._order.title) + step) % len(titles)])

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._order = self._order._replace(reverse=not self._order.reverse)
        self._redraw()

    def on_request_table_sort_asked(self, message: RequestTable.SortAsked) -> None:
        """A click on the column that sorts already turns the order round."""
        if message.title == self._order.title:
            self.action_reverse()
        else:
            self._sort_by(message.title)

    def _sort_by(self, title: str) -> None:
        column = next(column for column in COLUMNS if column.title == title)
        self._order = Order(title, reverse=not column.left)  # names from A, numbers from the largest
        self._redraw()

    def action_filter(self) -> None:
        """Ask for what rows must hold."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._pattern = event.value.strip()
        self._redraw()

    def on_input_submitted(self) -> None:
        """Keep the filter, give the keyboard back to the table."""
        self.query_one("#filter").display = False
        self.table.focus()

    def action_close(self) -> None:
        """Undo the last thing that is open: the filter, the details, following."""
        field, detail = self.query_one("#filter", Input), self._panel("detail")
        if field.display or self._pattern:
            field.value = ""
            self.on_input_submitted()
        elif detail.display:
            self.action_details()
        elif self._follows:
            self.action_follow()

    def action_follow(self) -> None:
        """Keep the selected request in view, and show its events alone."""
        self._select_one()
        self._follows = not self._follows and self.table.selected is not None
        self._redraw()

    def action_details(self) -> None:
        """Open or close the pane of the selected request."""
        self._select_one()
        detail = self._panel("detail")
        detail.display = not detail.display
        self.screen.set_class(detail.display, "-detail")
        self.call_after_refresh(self._redraw)

    def on_request_table_opened(self) -> None:
        """A click on the selected row."""
        self.action_details()

    def _select_one(self) -> None:
        if self.table.selected is None:
            self.table.action_move(1)

    def action_pause(self) -> None:
        """Keep what is shown as it is; the monitor goes on listening."""
        self._paused_at = time.monotonic() if self._paused_at is None else None
        self._shown_at = 0.0
        self._changed()
        self._redraw()

    def action_log(self) -> None:
        """More room for the log, or less."""
        self.screen.toggle_class("-log")
        self.call_after_refresh(self._redraw)

    def action_help(self) -> None:
        """What everything means."""
        self.push_screen(Help())


class Help(ModalScreen[None]):
    """Keys, columns and signs."""

    BINDINGS = [Binding("escape,q,question_mark,f1,enter", "dismiss", "Close")]  # noqa: RUF012  (textual's name)

    def compose(self) -> ComposeResult:
        """One page that scrolls."""
        with VerticalScroll(id="help"):
            yield Static(help_page())

    def on_mount(self) -> None:
        """Say how to leave."""
        page = self.query_one("#help")
        page.border_title, page.border_subtitle = "help", "Esc closes"


KEYS = (
    ("↑ ↓ PgUp PgDn Home End", "select a request (also j k g G, or a click)"),
    ("Enter", "its details and its course over time (or click it again)"),
    ("f", "follow it: keep it in view, show its events alone"),
    ("< >  ← →", "sort by another column (or click on its title)"),
    ("r", "turn the order round (or click on the title again)"),
    ("/", "only requests with this in id, frontend or state"),
    ("space  p", "pause: keep the screen as it is"),
    ("l", "more or less room for the events"),
    ("Esc", "clear the filter, close the details, stop following"),
    ("q", "quit"),
)


def help_page() -> Content:
    """The page behind `?`."""
    chapters = (
        ("Keys", KEYS),
        ("Columns: those that do not fit are left out, Enter shows all", [(c.title, c.meaning) for c in COLUMNS]),
        ("Blocks of a tier", [(sign, name) for name, sign in panels.TIER_STATES]),
        ("States of a request", [(sign, name.replace("_", " ")) for name, sign in STATES.items()]),
        ("Its course over time", [(sign, name.replace("_", " ")) for name, sign in panels.COURSE.items()]),
    )
    parts: list[str | tuple[str, str]] = []
    for title, rows in chapters:
        parts.append((f"{title}\n", "bold $primary"))
        for name, text in rows:
            parts += [(f"  {name:<24}", "bold"), f"{text}\n"]
        parts.append("\n")
    return Content.assemble(*parts)


def _title(widget: RequestTable, text: str) -> None:
    if widget.border_title != text:
        widget.border_title = Content(text)  # not markup: a filter may hold brackets
