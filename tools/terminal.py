"""How the tools put things on a terminal: colours, units, and one line for a swap event.

Owns: the wording and look of these. Does not know: where the values come from.
"""

from __future__ import annotations

import os
import unicodedata
from functools import lru_cache
from typing import TextIO

from ..protocol.messages import SwapEvent

_CODES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "magenta": "35", "cyan": "36"}


class Style:
    """Paints text for one stream; paints nothing when that is no terminal or NO_COLOR is set."""

    def __init__(self, stream: TextIO) -> None:
        self.active = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def paint(self, text: str, *names: str) -> str:
        """`text` in these colours ("dim", "bold", "red", "green", "yellow", "magenta", "cyan")."""
        if not self.active or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"


def columns_of(text: str) -> int:
    """How many columns `text` takes on a terminal: two for a wide character, none for one that joins the one before."""
    return len(text) if text.isascii() else sum(map(_columns, text))


@lru_cache(4096)
def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def safe(text: str) -> str:
    """`text` that others chose, such as a request's id, with every character replaced that could steer a terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shorten(text: str, columns: int) -> str:
    """`text` in so many columns at the most: beginning and end of a longer one, as ids often differ at their end."""
    if columns_of(text) <= columns:
        return text
    tail = max(0, (columns - 1) // 3)
    head = columns - 1 - tail
    return f"{_fitting(text, head)}…{_fitting(text[::-1], tail)[::-1]}" if columns > 0 else ""


def _fitting(text: str, columns: int) -> str:
    """The beginning of `text` that fits."""
    fitting, taken = "", 0
    for character in text:
        taken += _columns(character)
        if taken > columns:
            break
        fitting += character
    return fitting


def human_bytes(count: float) -> str:
    """`count` bytes with a binary unit: "960 B", "1.5 KiB", "270 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """A duration in the unit that suits it: "0.21 ms", "3.4 s", "5 min 12 s", "2 h 5 min"."""
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count_of(number: int, noun: str) -> str:
    """ "1 block", "3 blocks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_swap(event: SwapEvent, who: str) -> str:
    """One line for a swap event of the request that people know as `who`."""
    nothing = not event.blocks  # what has a copy gives its place up at once, and what is still there need not come back
    move = "nothing to copy" if nothing else f"{count_of(event.blocks, 'block')}, {human_bytes(event.bytes)}"
    seconds = human_seconds(event.seconds)
    took = move if nothing else f"{move} in {seconds}"
    reason = event.reason.replace("_", "-")
    tiers = f"GPU {event.gpu_used_blocks}/{event.gpu_total_blocks} blocks, CPU {human_bytes(event.cpu_used_bytes)}"
    return {
        "swapping_out": f"▼ {who} swapping out: {move}{'' if nothing else ' to CPU'} ({reason})",
        "swapped": f"▼ {who} swapped out: {took} · {tiers}",
        "swapping_in": f"▲ {who} swapping in: {move}{'' if nothing else ' back to GPU'}",
        "resumed": f"▲ {who} resumed: {took} · {tiers}",
        "copied_out": f"▽ {move} copied to CPU ({reason}) in {seconds}",
        "copied_in": f"△ {move} copied to GPU ({reason}) in {seconds}",
        "rejected": f"✗ {who} not swapped: {event.detail or 'no room in the CPU tier'}",
    }[event.phase]
