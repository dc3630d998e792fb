"""Settings: command line over environment over file; a wrong value is one line that names it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from coldblock.__main__ import main as program
from coldblock.engine_core.config import EngineSettings, StatusSettings
from coldblock.settings import UsageError, load, models_dir


def engine(*argv: str) -> EngineSettings:
    return load(EngineSettings, ["model", *argv], prog="coldblock engine", summary="Run.")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "coldblock.yaml"
    path.write_text("engine:\n  block-size: 32\n  seed: 5\n  kv_cache_dtype: int8\nfrontend:\n  port: 1\n")
    return path


def test_command_line_over_environment_over_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDBLOCK_SEED", "6")
    monkeypatch.setenv("COLDBLOCK_KV_CACHE_DTYPE", "fp8")
    settings = engine("--config", str(file), "--kv-cache-dtype", "fp16")
    assert (settings.block_size, settings.seed, settings.kv_cache_dtype) == (32, 6, "fp16")
    monkeypatch.setenv("COLDBLOCK_CONFIG", str(file))
    assert engine().block_size == 32


def test_toml_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "coldblock.toml"
    path.write_text("[engine]\nblock-size = 8\ncpu-offload = false\n")
    settings = engine("--config", str(path))
    assert (settings.block_size, settings.cpu_offload) == (8, False)


def test_max_cache_is_another_name_of_max_model_len() -> None:
    assert engine("--max-cache", "77").max_model_len == 77


def test_unprefixed_variables_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCK_SIZE", "4")
    monkeypatch.setenv("SEED", "4")
    assert (engine().block_size, engine().seed) == (16, 0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--block-size", "x"], ["--block-size", "'x'", "integer"]),
        (["--block-size", "0"], ["--block-size", "'0'", "1"]),
        (["--device", "tpu"], ["--device", "'tpu'", "'cpu'"]),
        (["--kv-cache-dtype", "int3"], ["--kv-cache-dtype", "'int3'", "fp8_e5m2"]),
        (["--max-num-batched-tokens", "3"], ["--max-num-batched-tokens", "3", "64"]),
        (["--nonsense", "3"], ["--nonsense"]),
        (["--threads", "100000"], ["--threads", "'100000'", "less than or equal to"]),
        (["--config", "/nowhere.yaml"], ["--config", "/nowhere.yaml"]),
        (["--kv-events", "--no-prefix-cache"], ["--kv-events", "not allowed", "--no-prefix-cache"]),
        (["--kv-replay-endpoint", "ipc:///r"], ["--kv-replay-endpoint", "ipc:///r", "--kv-events"]),
    ],
)
def test_a_wrong_value_is_one_line(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        engine(*argv)
    assert end.value.code == 2
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine:\n  blok-size: 3\n", ["blok"]),
        ("engine: 3\n", ["engine", "table"]),
        ("engin:\n  block-size: 8\n", ["--config", "'engin'", "engine or frontend"]),
        ("block-size: 8\n", ["--config", "'block-size'", "engine or frontend"]),
        ("engine: [\n", ["coldblock.yaml"]),
        ("- 1\n", ["sections"]),
        ("engine:\n  block-size: many\n", ["--block-size", "many"]),
    ],
)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, text: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "coldblock.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        engine("--config", str(path))
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1
    assert all(word in line for word in words), line


def test_only_commands_with_a_section_take_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(StatusSettings, ["--config", "coldblock.yaml"], prog="coldblock status", summary="")
    assert "unrecognized arguments: --config" in capsys.readouterr().err


def test_models_dir_honours_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COLDBLOCK_MODELS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "coldblock" / "models"
    monkeypatch.setenv("COLDBLOCK_MODELS_DIR", str(tmp_path / "m"))
    assert models_dir() == tmp_path / "m"


def test_without_a_home_folder_models_dir_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    for name in ("COLDBLOCK_MODELS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UsageError, match="set COLDBLOCK_MODELS_DIR"):
        models_dir()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ([], 2, ["usage", "serve", "fetch-model"]),
        (["--help"], 0, ["usage", "Exit codes"]),
        (["--version"], 0, ["coldblock"]),
        (["frobnicate"], 2, ["frobnicate", "serve"]),
        (["engine", "--help"], 0, ["--kv-cache-dtype", "--max-cpu-offload-mb", "MODEL"]),
    ],
)
def test_the_program(argv: list[str], code: int, words: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", "coldblock", *argv], capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert all(word in result.stdout + result.stderr for word in words)


def test_with_stderr_closed_its_words_go_nowhere() -> None:
    command = f"{shlex.quote(sys.executable)} -m coldblock frobnicate 2>&-"
    result = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-", "<&- >&-"])
def test_no_file_takes_the_number_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; from coldblock.__main__ import main; main(['--version']);"
        "names = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)];"
        "other = open(sys.argv[1], 'w'); other.write(f'{names} {other.fileno()}')"
    )
    command = shlex.join([sys.executable, "-c", code, str(tmp_path / "found")])
    subprocess.run(["sh", "-c", f"{command} {closed}"], stdout=subprocess.DEVNULL, timeout=60, check=True)
    found = (tmp_path / "found").read_text()
    assert found.count("/dev/null") >= closed.count("&-")
    assert int(found.split()[-1]) > 2


@pytest.mark.parametrize("command", [["engine", "--status"], ["top", "--once"], ["chat"], ["bench", "serve"]])
def test_a_wrong_endpoint_is_one_line(command: list[str]) -> None:
    arguments = [sys.executable, "-m", "coldblock", *command, "--endpoint", "foo"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and "--endpoint" in result.stderr and "'foo'" in result.stderr


@pytest.mark.parametrize(
    "command", ["serve", "engine", "frontend", "chat", "top", "demo", "fetch-model", "bench serve", "eval kv"]
)
def test_help_speaks_no_python(command: str) -> None:
    arguments = [sys.executable, "-m", "coldblock", *command.split(), "--help"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for word in ("tuple", "None", "lambda", "factory", " Path", " str]", " int]", "()"):
        assert word not in result.stdout, word


def test_help_shows_defaults_that_say_something() -> None:
    arguments = [sys.executable, "-m", "coldblock", "bench", "serve", "--help"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert "(default: 1, 4, 16)" in result.stdout and "--rounds N" in result.stdout


def test_serve_does_not_offer_a_flag_that_it_refuses() -> None:
    arguments = [sys.executable, "-m", "coldblock", "serve", "--help"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert "--engine" not in result.stdout and "--endpoint" in result.stdout


def test_interrupt_while_a_command_is_imported_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coldblock.__main__.importlib.import_module", interrupted)
    assert program(["top"]) == 130
