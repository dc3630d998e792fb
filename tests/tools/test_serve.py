"""`coldblock serve`: what it refuses before it starts anything, and which child gets which setting."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from coldblock.engine_core.config import EngineSettings
from coldblock.frontend.config import FrontendSettings
from coldblock.protocol.sockets import default_endpoint, default_events_endpoint, default_replay_endpoint, runtime_dir
from coldblock.settings import UsageError, load
from coldblock.tools import daemons, serve
from coldblock.tools.errors import ToolError
from processes import write_tiny_model


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("COLDBLOCK_")]:  # the developer's own settings
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def settings_of(*argv: str) -> serve.ServeSettings:
    return load(serve.ServeSettings, list(argv), prog="coldblock serve", summary="")


def test_each_child_gets_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDBLOCK_BLOCK_SIZE", "32")
    settings = settings_of(
        "m", "--num-gpu-blocks", "12", "--no-prefix-cache", "--deterministic", "--port", "9", "--api-key", "a,b"
    )
    flags, env = serve.hand_down(settings, EngineSettings, {"endpoint": "ipc:///e"})
    text = " ".join(flags)
    assert all(part in text for part in ("--num-gpu-blocks 12", "--block-size 32", "--endpoint ipc:///e"))
    assert "--no-prefix-cache" in flags and "--deterministic" in flags
    assert "--port" not in flags and env == {}
    flags, env = serve.hand_down(settings, FrontendSettings, {"engine": ("ipc:///e",), "port": 9})
    assert flags == ["--port", "9", "--engine", "ipc:///e"]
    assert env == {"COLDBLOCK_API_KEY": "a,b"}


def test_children_read_back_what_they_are_handed() -> None:
    settings = settings_of(
        "m", "--no-cpu-offload", "--kv-cache-dtype", "fp8", "--max-cache", "256", "--log-level", "debug"
    )
    handed, _ = serve.hand_down(settings, EngineSettings, {})
    engine = load(EngineSettings, ["m", *handed], prog="coldblock engine", summary="")
    assert (engine.cpu_offload, engine.kv_cache_dtype, engine.max_model_len) == (False, "fp8", 256)
    handed, _ = serve.hand_down(settings, FrontendSettings, {"engine": ("ipc:///e",)})
    frontend = load(FrontendSettings, handed, prog="coldblock frontend", summary="")
    assert (frontend.engine, frontend.log_level) == (("ipc:///e",), "debug")


def test_specs_name_model_and_the_same_endpoint(tmp_path: Path) -> None:
    engine, frontend = serve.child_specs(settings_of("some-model", "--shutdown-timeout", "3"), 8123)
    assert engine.command[-5:] == [
        "some-model",
        "--endpoint",
        default_endpoint(),
        "--events-endpoint",
        default_events_endpoint(),
    ]
    text = " ".join(frontend.command)
    assert "--port 8123" in text and f"--engine {default_endpoint()}" in text
    assert frontend.grace_s > 3


def test_second_serve_takes_endpoints_of_its_own() -> None:
    assert serve.free_endpoints() == (default_endpoint(), default_events_endpoint(), default_replay_endpoint())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(default_endpoint().removeprefix("ipc://"))
        other.listen()
        assert serve.free_endpoints() == daemons.own_endpoints("serve")
        engine, _ = serve.child_specs(settings_of("m", "--kv-events"), 8123)
        assert daemons.own_endpoints("serve")[2] in engine.command
    assert serve.free_endpoints()[0] == default_endpoint()  # what is left of a dead engine does not count


def test_busy_port_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve.main(["smollm2-135m", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err


def test_port_zero_takes_a_free_one() -> None:
    assert daemons.free_port("127.0.0.1", 0) > 0
    with pytest.raises(UsageError, match="--host"):
        daemons.free_port("no.such.host.invalid", 0)


def test_what_the_engine_refuses_is_one_line_too(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "coldblock", "serve", str(model), "--port", "0", "--max-model-len", "999999"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1 and "--max-model-len: 999999 is not allowed" in ended.stderr


def test_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["gpt-9", "--port", "0"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_engine_flag_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        settings_of("m", "--engine", "ipc:///e")
    assert end.value.code == 2
    assert "coldblock frontend --engine" in capsys.readouterr().err


async def test_engine_that_fails_to_start_is_shown_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"(?s)exit code 2.*MODEL"):
        async with daemons.running_engine(str(tmp_path / "nothing")):
            pass


@pytest.mark.parametrize("flag", ["--endpoint", "--events-endpoint", "--kv-replay-endpoint"])
@pytest.mark.parametrize("value", ["foo", "ipc:///" + "a" * 120, "tcp://127.0.0.1:99999"])
def test_wrong_endpoint_is_one_line(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        settings_of("m", flag, value)
    assert end.value.code == 2
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1 and flag in line and value in line


async def test_engine_of_a_tool_leaves_no_sockets_behind(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        model = write_tiny_model(tmp_path_factory.mktemp("model"))
        flags = ("--load-format", "dummy", "--num-gpu-blocks", "4", "--threads", "1")
        async with daemons.running_engine(str(model), *flags):
            assert list(runtime_dir().iterdir())
        assert not list(runtime_dir().iterdir())
