"""How the tools put things on a terminal: widths, units, colours, and nothing that could steer it."""

from __future__ import annotations

import pytest
from coldblock.tools import terminal


@pytest.mark.parametrize(
    ("text", "columns"), [("abc", 3), ("", 0), ("漢字", 4), ("e\u0301", 1), ("Ωmega", 5), ("한", 2)]
)
def test_columns_of_counts_what_a_terminal_takes(text: str, columns: int) -> None:
    assert terminal.columns_of(text) == columns


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x9b31m", "a\nb", "\r", "\x07", "\u202eabc", "\u2028", "\x00", "\ud800"])
def test_safe_leaves_nothing_that_steers_a_terminal(evil: str) -> None:
    assert terminal.safe(evil).isprintable()
    assert terminal.columns_of(terminal.safe(evil)) == len(evil)


def test_safe_leaves_other_text_alone() -> None:
    for text in ("chatcmpl-1", "ünïcode", "漢字 e\u0301"):
        assert terminal.safe(text) == text


@pytest.mark.parametrize("columns", range(0, 14))
@pytest.mark.parametrize("text", ["chatcmpl-0123456789", "漢字漢字漢字漢字", "short"])
def test_shorten_keeps_both_ends_and_the_width(text: str, columns: int) -> None:
    short = terminal.shorten(text, columns)
    assert terminal.columns_of(short) <= columns
    if columns >= 8 and short != text:
        assert (short[0], short[-1]) == (text[0], text[-1])


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (589824, "576 KiB"), (2**31, "2.0 GiB")]
)
def test_human_bytes(count: int, text: str) -> None:
    assert terminal.human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00021, "0.21 ms"), (0.25, "250 ms"), (3.42, "3.4 s"), (312, "5 min 12 s"), (7500, "2 h 5 min")],
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert terminal.human_seconds(seconds) == text


def test_no_colour_without_a_terminal_or_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.Style(Terminal()).paint("x", "red") == "\x1b[31mx\x1b[0m"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.Style(Terminal()).paint("x", "red") == "x"  # type: ignore[arg-type]
