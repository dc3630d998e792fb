"""The process: port first, one ready line, a clean end that drains streams, workers that end together, no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from coldblock.frontend.main import bind, main
from coldblock.protocol.messages import Submit
from frontend_kit import byte_ids, fake_engine, wait_until

STREAM = {"prompt": "x", "stream": True}
READY = "coldblock frontend: http://127.0.0.1:"


@contextmanager
def frontend(endpoint: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`coldblock frontend` on a free port, and its URL, once it said that it is ready."""
    command = [sys.executable, "-c", "import sys; from coldblock.__main__ import main; sys.exit(main())"]
    arguments = ["frontend", "--port", "0", "--engine", endpoint, *flags]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith(READY), line + (process.stderr.read() if process.stderr else "")
        assert f"(model tiny, engine {endpoint})" in line
        yield process, line.split()[2].removesuffix("/v1")
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_taken_port_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and f"port {port}" in message and "--port" in message


def test_a_bound_port_is_exclusive() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match="choose another"):
        bind("127.0.0.1", first.getsockname()[1])


def test_an_unknown_host_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "no-such-host.invalid"]) == 1
    assert "--host no-such-host.invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--engine", ","],
        ["--workers", "0"],
        ["--engine", "udp://x"],
        ["--tokenizer", "/nowhere"],
        ["--served-model-name", ""],
    ],
)
def test_a_wrong_setting_is_told_in_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and flags[0] in message and message.count("\n") == 1


def test_sigterm_lets_a_stream_end(model_folder: Path) -> None:
    with (
        fake_engine(model_folder, lambda prompt: iter(byte_ids("ab" * 30)), delay_s=0.02) as engine,
        frontend(engine.endpoint) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json={**STREAM, "max_tokens": 60}) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(timeout=20) == 0
        assert len(engine.wait_for(Submit)) == 1 and not engine.aborted


def test_sigterm_ends_a_stream_that_takes_too_long(model_folder: Path) -> None:
    with (
        fake_engine(model_folder, lambda prompt: iter(byte_ids("a" * 500)), delay_s=0.1) as engine,
        frontend(engine.endpoint, "--shutdown-timeout", "1") as (process, url),
        httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 500, "stream": True}
        ) as stream,
    ):
        next(lines := stream.iter_lines())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        (submit,) = engine.wait_for(Submit)
        wait_until(lambda: submit.request_id in engine.aborted)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)


def test_sigterm_answers_what_takes_too_long_with_a_503(model_folder: Path) -> None:
    with (
        fake_engine(model_folder, lambda prompt: iter(byte_ids("a" * 500)), delay_s=0.1) as engine,
        frontend(engine.endpoint, "--shutdown-timeout", "1") as (process, url),
        ThreadPoolExecutor() as pool,
    ):
        reply = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 500}, timeout=20)
        engine.wait_for(Submit)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert reply.result().status_code == 503
        assert reply.result().json()["error"]["code"] == "shutting_down"


def test_workers_share_the_port_and_end_together(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, frontend(engine.endpoint, "--workers", "2") as (process, url):
        wait_until(lambda: engine.stats().peers == 2)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        wait_until(lambda: engine.stats().peers == 0)


def test_when_a_worker_dies_all_end(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, frontend(engine.endpoint, "--workers", "2") as (process, _):
        wait_until(lambda: engine.stats().peers == 2)
        victim = next(int(name.partition(":")[2]) for name in engine._peers.values())
        os.kill(victim, signal.SIGKILL)
        assert process.wait(timeout=20) == 1


def test_workers_end_with_a_supervisor_that_was_killed(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, frontend(engine.endpoint, "--workers", "2") as (process, _):
        wait_until(lambda: engine.stats().peers == 2)
        process.kill()
        wait_until(lambda: engine.stats().peers == 0)


def test_the_frontend_never_imports_torch() -> None:
    code = "import sys, coldblock.frontend.main; sys.exit(' '.join(m for m in ('torch', 'numpy') if m in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stderr.strip() == ""


def test_a_signal_while_the_server_loads_is_not_lost(model_folder: Path) -> None:
    early = "\n".join(
        (
            "import signal, sys, uvicorn",
            "from coldblock.__main__ import main",
            "run = uvicorn.Server.run",
            "def interrupted(server, sockets=None):",
            "    signal.raise_signal(signal.SIGTERM)",
            "    run(server, sockets=sockets)",
            "uvicorn.Server.run = interrupted",
            "sys.exit(main())",
        )
    )
    with fake_engine(model_folder) as engine:
        arguments = ["frontend", "--port", "0", "--engine", engine.endpoint]
        ended = subprocess.run([sys.executable, "-c", early, *arguments], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
