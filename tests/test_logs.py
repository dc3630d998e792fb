"""Log lines: one event is one line in both formats, whatever text is in it; exceptions are part of their event."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import pytest
from coldblock.logs import HumanLines, JsonLines

HOSTILE = 'a "quote", \\, \r\n12:00:00 E engine: forged\x1b[2J\x00\u2028\ud800 {"level": "error"}'


def record(message: str, *args: object, error: BaseException | None = None, **extra: object) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("coldblock.test", logging.WARNING, "file", 1, message, args, exc_info)
    made.__dict__.update(extra)
    return made


def raised(text: str) -> BaseException:
    """An exception with a traceback, raised from another that has the text too."""
    try:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"bad {text}") from error
    except ValueError as error:
        return error


def test_a_json_event_is_one_valid_line() -> None:
    line = JsonLines("engine").format(record("peer %s left", HOSTILE, fields={"peer": HOSTILE, "level": "none"}))
    assert "\n" not in line and line.isascii()
    event = json.loads(line)
    assert event["message"] == f"peer {HOSTILE} left" and event["peer"] == HOSTILE
    assert (event["level"], event["process"], event["logger"]) == ("warning", "engine", "coldblock.test")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", event["time"])


def test_a_json_exception_is_inside_its_event() -> None:
    line = JsonLines("engine").format(record("failed", error=raised(HOSTILE)))
    assert "\n" not in line
    text = json.loads(line)["exception"]
    assert "Traceback" in text and "in raised" in text and HOSTILE in text and "KeyError" in text


def test_a_human_event_is_one_line_that_nobody_can_forge() -> None:
    line = HumanLines("engine").format(record("peer %s left", HOSTILE))
    assert re.match(r"\d\d:\d\d:\d\d W engine: peer a ", line)
    assert line.isprintable() and "\\r\\n12:00:00 E engine: forged\\x1b[2J" in line
    line.encode()


def test_a_human_traceback_is_indented() -> None:
    first, *rest = HumanLines("engine").format(record("failed", error=raised(HOSTILE))).split("\n")
    assert first.endswith("W engine: failed") and len(rest) > 6
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


@pytest.mark.parametrize("lines", [HumanLines("f", exception_texts=False), JsonLines("f", exception_texts=False)])
def test_withheld_texts_leave_types_and_places(lines: logging.Formatter) -> None:
    line = lines.format(record("failed", error=raised("SECRET")))
    assert "SECRET" not in line and "--log-prompts" in line
    assert "builtins.ValueError" in line and "builtins.KeyError" in line and "in raised" in line


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_uncaught_exceptions_and_warnings_are_events(log_format: str) -> None:
    code = (
        "import sys, threading, warnings, logging; from coldblock.logs import setup, tell\n"
        f"setup('info', {log_format!r}, 'engine')\n"
        "warnings.warn('careful')\n"
        "tell('coldblock engine', 'ready')\n"
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()\n"
        "logging.getLogger('x').debug('not wanted')\n"
        "raise RuntimeError('the end')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stdout == ""
    if log_format == "human":
        assert "\ncoldblock engine: ready\n" in ended.stderr
        assert all(" engine: " in line or line.startswith(("    ", "coldblock")) for line in ended.stderr.splitlines())
        return
    events = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [event["level"] for event in events] == ["warning", "info", "critical", "critical"]
    assert "careful" in events[0]["message"] and events[1]["message"] == "ready"
    assert "ZeroDivisionError" in events[2]["exception"] and "RuntimeError: the end" in events[3]["exception"]
