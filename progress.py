"""How long work shows how far it is: a bar with an ETA on a terminal, a plain line now and then anywhere else.

Owns: that choice, and the look of both. Bars have no colours and vanish when the work ends; nothing is shown of work
that ends at once, and nothing ever goes to stdout. Where logs are JSON, lines are log events. Does not know: what the
work is.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

from .logs import writes_json

T = TypeVar("T")
Advance = Callable[[int], object]

BAR_AFTER_S = 0.5  # what ends sooner would only flicker
LINE_EVERY_S = 10.0

_logger = logging.getLogger(__name__)


def draws_bars() -> bool:
    """Whether stderr is a terminal that can redraw a line and knows how long one is, and is not for JSON alone."""
    if writes_json() or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return False
    return os.get_terminal_size(sys.stderr.fileno()).columns > 0


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Advance]:
    """Shows the work of the block; call what it yields with the number of units done since the last call.

    `unit` is one of them: "token", or "B" for bytes.
    """
    if not draws_bars():
        yield _Lines(what, total, unit).advance
        return
    size = unit == "B"
    with tqdm(
        total=total,
        desc=what,
        unit=unit if size else f" {unit}s",
        unit_scale=size,
        unit_divisor=1024,
        delay=BAR_AFTER_S,
        leave=False,
        dynamic_ncols=True,
        file=sys.stderr,
    ) as bar:
        yield bar.update


def track(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """The items, one unit of work each."""
    with progress(what, len(items), unit) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows a wait of unknown length; call what it yields twice a second or so, with the latest news or ""."""
    if not draws_bars():
        yield _Lines(what, 0, "").wait
        return
    look = "{desc}: {elapsed}{postfix}"
    with tqdm(desc=what, bar_format=look, delay=BAR_AFTER_S, leave=False, dynamic_ncols=True, file=sys.stderr) as bar:
        yield lambda news: bar.set_postfix_str(news)


class _Lines:
    """The same without a bar: a line every LINE_EVERY_S, and one at the end of work if there was any before.

    It goes into the log of a process that keeps one, else to stderr.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._began = self._told = time.monotonic()

    def advance(self, count: int) -> None:
        """So many units more are done."""
        self._done += count
        taken, told_before = time.monotonic() - self._began, self._told > self._began
        if self._done >= self._total:
            if told_before:
                self._tell(f"done in {_clock(taken)}")
        elif self._is_due():
            left = taken * (self._total - self._done) / max(1, self._done)
            self._tell(f"{self._amount()}, about {_clock(left)} left")

    def wait(self, news: str) -> None:
        """It still lasts."""
        if self._is_due():
            self._tell(", ".join(filter(None, (_clock(time.monotonic() - self._began), news))))

    def _is_due(self) -> bool:
        return time.monotonic() - self._told >= LINE_EVERY_S

    def _tell(self, words: str) -> None:
        self._told = time.monotonic()
        line = f"{self._what}: {words}"
        if logging.getLogger().hasHandlers():
            _logger.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _amount(self) -> str:
        share = f"{self._done / self._total:.0%}"
        if self._unit == "B":
            return f"{share} of {tqdm.format_sizeof(self._total, 'B', 1024)}"
        return f"{self._done} of {self._total} {self._unit}s ({share})"


_clock = tqdm.format_interval  # as bars show it: 00:42
