"""The table of requests: its columns, which of them fit, and which rows are shown in what order.

Owns: what each column says and sorts by, and which are given up first on a narrow terminal.
Does not know: how a cell is painted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...protocol.messages import ModelInfo, RequestRow
from ..terminal import human_bytes, safe
from .history import Frame, RequestKey, key_of

GAP = 1  # columns of the terminal between two of the table
ID_COLUMNS = 40  # an id gets no more of a wide terminal
NOTHING = "-"

STATES = {
    "waiting": "○",
    "loading": "△",
    "prefill": "◔",
    "decode": "●",
    "swapping_out": "▼",
    "swapped": "■",
    "swapping_in": "▲",
}
"""Every state of a live request, in the order in which a request meets them, and the sign before its name."""


class Entry(NamedTuple):
    """One request, with what its own row does not hold."""

    row: RequestRow
    model: ModelInfo
    tokens_per_s: float | None

    @property
    def key(self) -> RequestKey:
        """See `key_of`."""
        return key_of(self.row)

    @property
    def frontend(self) -> str:
        """What sent it calls itself, or is known by once it has left."""
        return self.row.peer_name or self.row.peer

    @property
    def gpu_bytes(self) -> int:
        """Its KV in the GPU pool; blocks that it shares count in full."""
        return self.row.gpu_blocks * self.model.kv_block_bytes

    @property
    def cpu_bytes(self) -> int:
        """Its KV in the CPU tier."""
        return self.row.cpu_blocks * self.model.kv_block_bytes


SortValue = float | str


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `rank`: of two that do not both fit, the lower one stays. `key`: what rows are sorted by."""

    title: str
    width: int
    rank: int
    meaning: str
    text: Callable[[Entry], str]
    key: Callable[[Entry], SortValue]
    left: bool = False  # aligned


def seconds_text(seconds: float | None) -> str:
    """A duration in seven columns: "12 ms", "1.24 s", "340 s", "25 min", "4.2 h"."""
    if seconds is None:
        return NOTHING
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    if seconds < 999.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def _stall(seconds: float) -> str:
    return seconds_text(seconds) if seconds else NOTHING


def _rate(per_second: float | None) -> str:
    return NOTHING if per_second is None else f"{per_second:.1f}"


def _kv(count: int) -> str:
    return human_bytes(count) if count else NOTHING


def _number(name: str) -> tuple[Callable[[Entry], str], Callable[[Entry], float]]:
    """Text and key of a column that is one whole number of the row."""
    return lambda e: str(getattr(e.row, name)), lambda e: getattr(e.row, name)


def _unless_none(value: float | None) -> float:
    return -1.0 if value is None else value


_ORDER = {state: place for place, state in enumerate(STATES)}

# fmt: off
COLUMNS = (
    Column("REQUEST", 12, 0, "the request's id",
           lambda e: safe(e.row.request_id), lambda e: e.row.request_id, left=True),
    Column("FRONTEND", 14, 10, "who sent it", lambda e: safe(e.frontend), lambda e: e.frontend, left=True),
    Column("STATE", 14, 1, "what it does",
           lambda e: f"{STATES.get(e.row.state, '?')} {safe(e.row.state).replace('_', ' ')}",
           lambda e: _ORDER.get(e.row.state, len(_ORDER)), left=True),
    Column("PROMPT", 7, 4, "prompt tokens", *_number("prompt_tokens")),
    Column("NEW", 5, 3, "generated tokens", *_number("generated_tokens")),
    Column("GPU", 5, 5, "KV blocks on the GPU", *_number("gpu_blocks")),
    Column("GPU KV", 8, 12, "the same in bytes", lambda e: _kv(e.gpu_bytes), lambda e: e.gpu_bytes),
    Column("CPU", 5, 6, "KV blocks in the CPU tier", *_number("cpu_blocks")),
    Column("CPU KV", 8, 13, "the same in bytes", lambda e: _kv(e.cpu_bytes), lambda e: e.cpu_bytes),
    Column("SWAPS", 6, 7, "times it was swapped out", *_number("swaps")),
    Column("OUT NOW", 8, 8, "how long it has been swapped out now",
           lambda e: _stall(e.row.stalled_s), lambda e: e.row.stalled_s),
    Column("STALL", 7, 2, "all its time swapped out", lambda e: _stall(e.row.stall_s), lambda e: e.row.stall_s),
    Column("TOK/S", 6, 9, "tokens a second, over three seconds",
           lambda e: _rate(e.tokens_per_s), lambda e: _unless_none(e.tokens_per_s)),
    Column("TTFT", 7, 11, "arrival to first token",
           lambda e: seconds_text(e.row.ttft_s), lambda e: _unless_none(e.row.ttft_s)),
    Column("TPOT", 7, 14, "mean time between two of its tokens",
           lambda e: seconds_text(e.row.tpot_s), lambda e: _unless_none(e.row.tpot_s)),
    Column("AGE", 7, 16, "time since it arrived", lambda e: seconds_text(e.row.age_s), lambda e: e.row.age_s),
    Column("PRIO", 5, 15, "its priority", *_number("priority")),
)
# fmt: on

BY_TITLE = {column.title: column for column in COLUMNS}


class Order(NamedTuple):
    """Sorted by the column of this title; `reverse`: largest first. Rows of one value stay as the engine sent them."""

    title: str = "AGE"
    reverse: bool = True


def entries(frame: Frame, order: Order, pattern: str) -> list[Entry]:
    """The requests to show: those that have `pattern` in id, frontend or state, sorted."""
    if frame.stats is None:
        return []
    wanted = pattern.casefold()
    every = (Entry(row, frame.stats.model, frame.rates.get(key_of(row))) for row in frame.stats.requests)
    found = [e for e in every if any(wanted in text.casefold() for text in (e.row.request_id, e.frontend, e.row.state))]
    return sorted(found, key=BY_TITLE[order.title].key, reverse=order.reverse)


def fitting(width: int, sorted_by: str) -> list[tuple[Column, int]]:
    """The columns that fit into `width`, with the width of each.

    The first one always stays, and takes what is left over up to a point; what sorts stays if it fits beside it.
    """
    first = COLUMNS[0]
    chosen, room = {first.title}, width - first.width
    for column in sorted(COLUMNS[1:], key=lambda c: (c.title != sorted_by, c.rank)):
        if column.width + GAP > room:
            break
        chosen.add(column.title)
        room -= column.width + GAP
    widest = min(first.width + max(0, room), ID_COLUMNS)
    return [(c, widest if c is first else c.width) for c in COLUMNS if c.title in chosen]
