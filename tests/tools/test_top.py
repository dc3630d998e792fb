"""`coldblock top` against a scripted engine: text, JSON, and what it says when the engine is not there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from coldblock import Client
from coldblock.protocol.messages import CpuOffload, RequestRow, SamplingParams, Stats, TierUse
from coldblock.tools import terminal, top
from fake_engine import MODEL, FakeEngine

STATS = Stats(
    engine_id="engine-1",
    time=0.0,
    uptime_s=75.0,
    model=MODEL,
    peers=2,
    running=1,
    waiting=0,
    swapped=1,
    gpu=TierUse(total=64, used=32, cached=16, in_flight=8, free=8),
    cpu_offload=CpuOffload(True, 3 * 589824, 2**31, 4, 3),
    step_ms=12.34,
    tokens_per_s=83.25,
    requests=(
        RequestRow("req-a", "chat", "decode", 40, 12, 4, 0, 1, 0.25, 2.5, 0),
        RequestRow("req-b", "frontend", "swapped", 40, 3, 0, 3, 1, 1.5, 9.0, 5),
    ),
    metrics=(),
)


def plain() -> terminal.Style:
    style = terminal.Style(sys.stdout)
    style.active = False
    return style


def test_render_shows_tiers_and_requests() -> None:
    lines = top.render(STATS, plain()).splitlines()
    assert "fake-model on cpu" in lines[0]
    assert "up 1 min 15 s" in lines[0]
    assert all(len(line) <= 80 for line in lines[:4])
    assert lines[1].startswith(
        "GPU " + "█" * 10 + "▒" * 5 + "▚" * 3 + "·" * 2 + " 32 used, 16 cached, 8 in flight, 8 free"
    )
    assert "3 blocks, 1.7 MiB of 2.0 GiB, most at once 4 requests" in lines[2]
    assert "1 running · 0 waiting · 1 swapped · 83.2 tok/s · step 12.3 ms" in lines[3]
    assert lines[6].split() == ["req-a", "chat", "decode", "40", "12", "4", "0", "1", "0.25", "s", "2.5", "s", "0"]
    assert len({len(line) for line in lines[5:8]}) == 1


@pytest.mark.parametrize("used", range(0, 65, 7))
def test_bar_always_has_its_width(used: int) -> None:
    rest = 64 - used
    use = TierUse(total=64, used=used, cached=rest // 3, in_flight=rest // 5, free=rest - rest // 3 - rest // 5)
    assert len(top.gpu_bar(use, plain())) == top.BAR_WIDTH


def test_offload_off_is_said() -> None:
    stats = msgspec.structs.replace(STATS, cpu_offload=CpuOffload(False, 0, 0, 0, 0), requests=())
    text = top.render(stats, plain())
    assert "CPU offload is off" in text
    assert "no requests" in text


def test_once_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeEngine() as engine:
        assert top.main(["--endpoint", engine.endpoint, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "fake-model" in shown
    assert "\x1b" not in shown


def test_once_json_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeEngine(lambda prompt: range(10**6), delay_s=0.02) as engine, Client(engine.endpoint, name="me") as client:
        client.ready()
        generation = client.submit([1, 2, 3], SamplingParams(max_tokens=1000))
        next(generation)
        assert top.main(["--endpoint", engine.endpoint, "--once", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["engine_id"] == engine.engine_id
    assert [row["peer"] for row in stats["requests"]] == ["me"]


def test_no_engine_is_an_error_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "CONNECT_TIMEOUT_S", 0.2)
    assert top.main(["--endpoint", f"ipc://{tmp_path}/nobody.sock", "--once"]) == 3


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`coldblock top` in a pipe, looking often at an endpoint."""
    endpoint = f"ipc://{tmp_path}/engine.sock"
    command = [sys.executable, "-m", "coldblock", "top", "--endpoint", endpoint, "--json", "--interval", "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(60, process.kill)
    timer.start()
    yield endpoint, process
    timer.cancel()
    process.kill()
    process.communicate(timeout=10)


def lines_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"top ended before it printed {text!r}")


def test_lost_engine_is_said_and_found_again(watcher: tuple[str, subprocess.Popen[str]]) -> None:
    endpoint, process = watcher
    with FakeEngine(endpoint=endpoint, engine_id="first"):
        lines_until(process, "first")
    lines_until(process, "engine gone")
    with FakeEngine(endpoint=endpoint, engine_id="second"):
        lines_until(process, "second")
        process.terminate()
        assert process.wait(timeout=20) == 0


def test_clip_counts_visible_columns_only() -> None:
    assert terminal.clip("\x1b[1mabc\x1b[0mdef", 4) == "\x1b[1mabc\x1b[0md"
    assert terminal.clip("abc", 10) == "abc"


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
