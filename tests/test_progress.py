"""Progress: bars on a terminal and lines on a pipe, on stderr alone, and silence about what ends at once."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from coldblock import progress
from coldblock.tools import daemons
from coldblock.tools.errors import ToolError
from tiny_models import load, save_tiny

WORK = """
import time
from coldblock import progress
progress.BAR_AFTER_S, progress.LINE_EVERY_S = {after}, {every}
for item in progress.track(range(4), "counting", "sheep"):
    time.sleep(0.02)
with progress.waiting("starting") as tell:
    for _ in range(4):
        tell("nearly there")
        time.sleep(0.02)
print("the result")
"""


def on_a_pipe(after: float, every: float) -> subprocess.CompletedProcess[str]:
    code = WORK.format(after=after, every=every)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)


def on_a_terminal(
    after: float, columns: int = 100, *, every: float = 1000, code: str = WORK, **env: str
) -> tuple[str, str]:
    """stdout, which is a pipe, and what stderr, a terminal, shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    code = code.format(after=after, every=every)
    environment = {**os.environ, "TERM": "xterm", "TQDM_MININTERVAL": "0.01", **env}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, shown
    return out, shown.decode()


def test_a_pipe_gets_lines_and_stdout_only_the_result() -> None:
    done = on_a_pipe(after=0, every=0.001)
    assert done.stdout == "the result\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith("counting: 1 of 4 sheeps (25%), about 00:0") and lines[0].endswith(" left")
    assert lines[3].startswith("counting: done in 00:0")
    assert "starting: 00:00, nearly there" in lines
    assert "\r" not in done.stderr and "\x1b" not in done.stderr


def test_a_pipe_gets_nothing_about_what_ends_at_once() -> None:
    assert on_a_pipe(after=0, every=1000).stderr == ""


def test_a_terminal_gets_a_bar_with_its_eta_that_vanishes() -> None:
    out, shown = on_a_terminal(after=0)
    assert out == "the result\n"
    assert "counting:" in shown and "| 2/4 [" in shown and "<" in shown, "an ETA is after <"
    assert "starting: 00:00, nearly there" in shown
    assert shown.endswith("\r") and "\x1b[3" not in shown, "no colours"


@pytest.mark.parametrize(("after", "columns", "env"), [(1000, 100, {}), (0, 100, {"TERM": "dumb"}), (0, 0, {})])
def test_a_terminal_gets_no_bar_of_short_work_or_that_it_cannot_draw(
    after: float, columns: int, env: dict[str, str]
) -> None:
    _, shown = on_a_terminal(after, columns, **env)
    assert "|" not in shown


def test_a_terminal_for_json_gets_no_bar_and_lines_that_are_events() -> None:
    setup = 'from coldblock.logs import setup, tell\nsetup("info", "json", "engine")\ntell("engine", "ready")\n'
    shown = on_a_terminal(after=0, every=0.001, code=setup + WORK)[1]
    messages = [json.loads(line)["message"] for line in shown.splitlines()]
    assert messages[0] == "ready" and messages[1].startswith("counting: 1 of 4 sheeps (25%)")
    assert "starting: 00:00, nearly there" in messages


def test_a_process_that_keeps_a_log_says_it_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        list(progress.track([1, 2], "loading weights", "layer"))
        with progress.progress("checking", 3 << 20, "B") as advance:
            advance(1 << 20)
    assert caplog.messages[0].startswith("loading weights: 1 of 2 layers (50%), about 00:00 left")
    assert caplog.messages[1].startswith("loading weights: done in 00:00")
    assert caplog.messages[2].startswith("checking: 33% of 3.00MB")


def test_loading_a_model_and_waiting_for_it_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    save_tiny(tmp_path)
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert caplog.messages[0].startswith("loading weights: 1 of 2 layers (50%)")


async def test_who_waits_for_an_engine_sees_its_last_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(daemons, "_SHOW_S", 0.01)
    (tmp_path / "log").write_text("free memory\nloading weights: 3 of 9 layers\n\n")
    with caplog.at_level(logging.INFO):
        await daemons._shown("engine", tmp_path / "log", asyncio.sleep(0.1))
        with pytest.raises(ToolError):
            await daemons._shown("engine", tmp_path / "nowhere", fail())
    assert "starting the engine: 00:00, loading weights: 3 of 9 layers" in caplog.messages


async def fail() -> None:
    raise ToolError("no")


def test_work_that_fails_leaves_its_error_alone() -> None:
    with pytest.raises(ToolError, match="no"), progress.progress("x", 3, "token"):
        raise ToolError("no")
