"""`coldblock top` as scripts run it: text, JSON lines, a number of snapshots, exit codes, and no textual at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from coldblock import Client
from coldblock.protocol.messages import CpuOffload, Goodbye, Hello, Ping, SamplingParams, StatsRequest
from coldblock.tools import terminal
from coldblock.tools.top import main as top
from coldblock.tools.top import plain
from coldblock.tools.top.history import History
from fake_engine import PEER, FakeEngine
from showing_engine import ShowingEngine, row, snapshot

TOP = [sys.executable, "-m", "coldblock", "top"]


def unpainted() -> terminal.Style:
    style = terminal.Style(sys.stdout)
    style.active = False
    return style


def rendered(*rows: object, **changes: object) -> list[str]:
    history = History()
    history.snapshot(snapshot(*rows, **changes))  # type: ignore[arg-type]
    return plain.render(history.frame(), unpainted()).splitlines()


def test_text_shows_tiers_and_requests_with_ids_in_full() -> None:
    long_id = "chatcmpl-" + "0123456789abcdef" * 4
    lines = rendered(row(), row(long_id, peer_name="web", state="swapped", stalled_s=1.5))
    assert lines[0].startswith("coldblock top  fake-model on cpu  up 1 min 15 s  KV fp16")
    assert "28 used 4 shared 16 cached 8 moving 8 free" in lines[1]
    assert lines[6].split()[:3] == ["REQUEST", "FRONTEND", "STATE"]
    assert lines[7].split() == [
        "req-a", "chat", "●", "decode", "40", "12", "4", "2.2", "MiB", "0", "-", "1", "-", "250", "ms", "-",
        "500", "ms", "20", "ms", "2.50", "s", "0",
    ]  # fmt: skip
    assert long_id in lines[8] and "1.50 s" in lines[8]


def test_text_of_nothing_and_of_no_cpu_tier() -> None:
    text = "\n".join(rendered(cpu_offload=CpuOffload(False, 0, 0, 0, 0)))
    assert "tier is off" in text and "no requests" in text


def test_names_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\nroot"
    lines = rendered(row(evil, peer_name=evil), row("left", peer_name=""), row("漢字"))
    assert len(lines) == 10  # no line of its own for what follows its newline
    assert all(line.isprintable() for line in lines)
    assert [terminal.columns_of(line) for line in lines[6:10]] == [terminal.columns_of(lines[6])] * 4
    assert lines[8].split()[:2] == ["left", PEER]


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
    assert [row["peer_name"] for row in stats["requests"]] == ["me"]


def test_batch_prints_so_many_and_rates_from_the_second_on(capsys: pytest.CaptureFixture[str]) -> None:
    with ShowingEngine(row()) as engine:
        assert top.main(["--endpoint", engine.endpoint, "--batch", "3", "--interval", "0.05"]) == 0
    blocks = capsys.readouterr().out.split("coldblock top")[1:]
    rates = [block.splitlines()[7].split()[15] for block in blocks]
    assert rates == ["-", "0.0", "0.0"]


def test_batch_json_is_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ShowingEngine(row()) as engine:
        assert top.main(["--endpoint", engine.endpoint, "--batch", "4", "--json", "--interval", "0.01"]) == 0
    assert [json.loads(line)["type"] for line in capsys.readouterr().out.splitlines()] == ["stats"] * 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch", "0"], "--batch: '0' is not allowed"),
        (["--interval", "0"], "--interval: '0' is not allowed"),
        (["--batch", "2", "--once"], "--once and --batch 2: give one of them"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        top.main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_it_only_ever_asks() -> None:
    with ShowingEngine(row()) as engine:
        top.main(["--endpoint", engine.endpoint, "--batch", "3", "--interval", "0.05"])
        engine.wait_for(Goodbye)
    assert {type(message) for message in engine.received} <= {Hello, Ping, StatsRequest, Goodbye}


WITHOUT_TEXTUAL = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("textual", "rich"):
            raise ImportError(f"no {name} here")
sys.meta_path.insert(0, Nowhere())
from coldblock.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [["--once"], ["--batch", "2"], ["--json", "--batch", "2"], ["--help"]])
def test_scripts_need_no_textual(flags: list[str]) -> None:
    with ShowingEngine(row()) as engine:
        command = [sys.executable, "-c", WITHOUT_TEXTUAL, "top", "--endpoint", engine.endpoint, *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_a_missing_textual_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setenv("TERM", "xterm")
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with FakeEngine() as engine:
        assert top.main(["--endpoint", engine.endpoint]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'coldblock[tools]'" in line and "--once" in line


@pytest.mark.parametrize(("term", "prints"), [("xterm", False), ("dumb", True)])
def test_on_a_terminal_that_cannot_draw_it_prints(term: str, prints: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert top.TopSettings().prints is prints


def test_an_encoding_without_the_signs_gets_others() -> None:
    with ShowingEngine(row()) as engine:
        command = [*TOP, "--endpoint", engine.endpoint, "--once"]
        environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "GPU ?" in ended.stdout


def test_a_full_disk_is_one_line() -> None:
    with ShowingEngine(row()) as engine, open("/dev/full", "w") as full:
        command = [*TOP, "--endpoint", engine.endpoint, "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "coldblock top: No space left on device\n")


def test_no_engine_is_an_error_with_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "CONNECT_TIMEOUT_S", 0.2)
    assert top.main(["--endpoint", f"ipc://{tmp_path}/nobody.sock", "--once"]) == 3


@pytest.fixture
def watcher(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`coldblock top` in a pipe, looking often at an endpoint."""
    endpoint = f"ipc://{tmp_path}/engine.sock"
    command = [*TOP, "--endpoint", endpoint, "--json", "--interval", "0.05", *getattr(request, "param", ())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(60, process.kill)
    timer.start()
    yield endpoint, process
    timer.cancel()
    process.kill()
    process.communicate(timeout=10)


def stats_of(process: subprocess.Popen[str], engine_id: str) -> None:
    """Read until a snapshot of this engine; every line must be JSON."""
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["engine_id"] == engine_id:
            return
    pytest.fail(f"top ended before it printed a snapshot of {engine_id}")


def test_lost_engine_is_said_beside_the_snapshots_and_found_again(
    watcher: tuple[str, subprocess.Popen[str]],
) -> None:
    endpoint, process = watcher
    with FakeEngine(endpoint=endpoint, engine_id="first"):
        stats_of(process, "first")
    assert process.stderr is not None
    assert "engine gone" in process.stderr.readline()
    with FakeEngine(endpoint=endpoint, engine_id="second"):
        stats_of(process, "second")
        assert "second answers" in process.stderr.readline()
        process.terminate()
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize("watcher", [("--batch", "100000")], indirect=True)
def test_a_run_that_has_an_end_ends_with_its_engine(watcher: tuple[str, subprocess.Popen[str]]) -> None:
    endpoint, process = watcher
    with FakeEngine(endpoint=endpoint, engine_id="first"):
        stats_of(process, "first")
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (1, 3)
    assert len(errors.splitlines()) == 1 and endpoint in errors
