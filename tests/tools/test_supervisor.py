"""Supervision with stub children: a death is said, one restart, bounded stops, and nothing outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from coldblock.tools.children import describe_exit

PROGRAM = Path(__file__).parent.parent / "fakes" / "supervised.py"
DEADLINE_S = 30.0

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
name = {name!r}
with open(folder / "pids", "a") as pids: print(name, os.getpid(), file=pids, flush=True)
def log(word):
    with open(folder / "log", "a") as file: print(name, word, file=file, flush=True)
def leave(*_):
    log("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
(folder / (name + ".ready")).touch()
"""
WAIT = "time.sleep(600)\n"


class Supervised:
    """A running supervisor of two stubs, and what the stubs wrote."""

    def __init__(self, folder: Path, engine: str, frontend: str) -> None:
        self.folder = folder
        codes = [PRELUDE.format(name="engine") + engine, PRELUDE.format(name="frontend") + frontend]
        self.said = folder / "stderr"
        with self.said.open("w") as stderr:
            self.process = subprocess.Popen([sys.executable, str(PROGRAM), str(folder), *codes], stderr=stderr)

    def started(self, name: str) -> list[int]:
        """Process ids of the children of that name so far."""
        file = self.folder / "pids"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == name and len(line.split()) == 2]

    def log(self) -> list[str]:
        file = self.folder / "log"
        return file.read_text().splitlines() if file.exists() else []

    def wait_until_ready(self, name: str, times: int = 1) -> None:
        """Until the supervisor has said so that many times."""
        wait_for(lambda: self.said.read_text().count(f"{name} is ready") == times)

    def wait_until_both_run(self) -> None:
        self.wait_until_ready("engine")
        self.wait_until_ready("frontend")

    def finish(self) -> tuple[int, str]:
        """Exit code and stderr; then no child may be left."""
        self.process.wait(timeout=DEADLINE_S)
        self.assert_no_orphans()
        return self.process.returncode, self.said.read_text()

    def assert_no_orphans(self) -> None:
        everyone = [*self.started("engine"), *self.started("frontend"), *self.started("grandchild")]
        assert everyone
        wait_for(lambda: not any(is_alive(pid) for pid in everyone))


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_signal_stops_frontend_then_engine(tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = Supervised(tmp_path, WAIT, WAIT)
    run.wait_until_both_run()
    run.process.send_signal(number)
    assert run.finish()[0] == code
    assert run.log() == ["frontend stopped", "engine stopped"]


def test_dead_engine_is_said_and_restarted_once(tmp_path: Path) -> None:
    run = Supervised(tmp_path, WAIT, WAIT)
    run.wait_until_both_run()
    first = run.started("engine")[0]
    os.kill(first, signal.SIGKILL)
    run.wait_until_ready("engine", times=2)
    wait_for(lambda: len(run.started("engine")) == 2)
    os.kill(run.started("engine")[1], signal.SIGKILL)
    code, text = run.finish()
    assert code == 1
    assert "engine died (killed by SIGKILL); restarting" in text
    assert "engine died again (killed by SIGKILL)" in text
    assert len(run.started("engine")) == 2
    assert run.started("frontend") != []
    assert "frontend stopped" in run.log()


def test_child_that_fails_before_it_is_ready_is_not_restarted(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "(folder / 'engine.ready').unlink(); sys.exit(7)", WAIT)
    code, text = run.finish()
    assert (code, len(run.started("engine"))) == (7, 1)
    assert "ended before it was ready (exit code 7)" in text


def test_deaf_child_is_killed(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); log('deaf')\n" + WAIT, WAIT)
    run.wait_until_both_run()
    wait_for(lambda: "engine deaf" in run.log())
    run.process.terminate()
    assert run.finish()[0] == 0


def test_grandchildren_go_too(tmp_path: Path) -> None:
    code = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "with open(folder / 'pids', 'a') as pids: print('grandchild', child.pid, file=pids)\n" + WAIT
    )
    run = Supervised(tmp_path, WAIT, code)
    run.wait_until_both_run()
    wait_for(lambda: bool(run.started("grandchild")))
    run.process.terminate()
    assert run.finish()[0] == 0


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    run = Supervised(tmp_path, WAIT, WAIT)
    run.wait_until_both_run()
    run.process.kill()
    run.finish()
    assert sorted(run.log()) == ["engine stopped", "frontend stopped"]


def test_exit_descriptions() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-250) == "killed by signal 250"
