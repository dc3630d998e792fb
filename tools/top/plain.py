"""The monitor as plain text or JSON lines, for scripts and pipes: one snapshot after another, no terminal needed.

Owns: what is printed, and when a run ends. Does not know: textual, and is never to.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sys

import msgspec

from ...protocol.client import AsyncClient
from ...protocol.errors import EngineDied, EngineUnreachable
from ...protocol.messages import Stats
from ...settings import EXIT_OK
from ..terminal import Style, columns_of, shorten
from .columns import COLUMNS, GAP, Column, Entry, Order, entries, fitting
from .history import Frame, History
from .panels import Line, header, pad, title

HEADER_COLUMNS = 100  # where there is no terminal to fit
_PAINTS = {
    "title": "bold", "strong": "bold", "label": "bold", "dim": "dim", "used": "green", "shared": "green",
    "cached": "cyan", "in flight": "yellow", "free": "dim", "out": "yellow", "in": "cyan", "rate": "green",
    "step": "magenta", "decode": "green", "prefill": "cyan", "loading": "cyan", "waiting": "dim",
    "swapping_out": "yellow", "swapped": "magenta", "swapping_in": "yellow",
}  # fmt: skip


async def watch(client: AsyncClient, *, snapshots: int | None, interval_s: float, json_lines: bool) -> int:
    """Print so many snapshots, or without end if None: then an engine that goes away is waited for, else it is raised.

    What is no snapshot goes to stderr, so that JSON lines stay JSON. Raises EngineUnreachable, EngineDied.
    """
    style, history, gone = Style(sys.stdout), History(), False
    for count in itertools.count(1):
        try:
            stats = await client.stats()
            if gone:
                print(f"engine {stats.engine_id} answers", file=sys.stderr, flush=True)
            gone = False
            history.snapshot(stats)
            text = msgspec.json.encode(stats).decode() if json_lines else render(history.frame(), style)
            print(text, flush=True)
        except (EngineUnreachable, EngineDied) as error:
            if snapshots is not None:
                raise
            if not gone:
                print(f"engine gone: {error}; waiting for it", file=sys.stderr, flush=True)
            gone = True
        if count == snapshots:
            break
        await asyncio.sleep(interval_s)
    return EXIT_OK


def render(frame: Frame, style: Style) -> str:
    """The whole state as text: title and header, then one line a request."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    head = [title(frame, width or HEADER_COLUMNS, ("", "")), *header(frame, width or HEADER_COLUMNS)]
    lines = [*head, [], *table(entries(frame, Order(), ""), width), []]
    return "\n".join(paint(line, style) for line in lines)


def render_header(stats: Stats, style: Style) -> list[str]:
    """The engine's state without its requests, in a few lines."""
    history = History()
    history.snapshot(stats)
    frame = history.frame()
    lines = [title(frame, HEADER_COLUMNS, ("", "")), *header(frame, HEADER_COLUMNS)]
    return [paint(line, style) for line in lines]


def table(requests: list[Entry], width: int | None) -> list[Line]:
    """The live requests: on a terminal the columns that fit, else all of them and every id in full."""
    if not requests:
        return [[("no requests", "dim")]]
    if width is None:
        sized = [(c, max(columns_of(c.title), *(columns_of(c.text(e)) for e in requests))) for c in COLUMNS]
    else:
        sized = fitting(width, Order().title)
    gap = (" " * GAP, "")
    heads: Line = [span for column, room in sized for span in (*_cell(column, column.title, room, "strong"), gap)]
    rows: list[Line] = [
        [
            span
            for column, room in sized
            for span in (*_cell(column, column.text(entry), room, _style(column, entry)), gap)
        ]
        for entry in requests
    ]
    return [heads, *rows]


def _style(column: Column, entry: Entry) -> str:
    return entry.row.state if column.title == "STATE" else ""


def _cell(column: Column, text: str, width: int, style: str) -> Line:
    span = (shorten(text, width), style)
    filled = pad([span], width)
    return filled if column.left else filled[::-1]


def paint(line: Line, style: Style) -> str:
    """The line for a stream; nothing is left at its end that cannot be seen."""
    return "".join(style.paint(text, _PAINTS[name]) if name in _PAINTS else text for text, name in line).rstrip()
