"""What all commands that leave a report behind have in common, from their settings to their exit code.

Owns: the order: check what a report needs, measure, print, write; the command line that a report names. Does not know:
what is measured.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import Field

from ...protocol.errors import ColdblockError
from ...protocol.messages import ModelInfo
from ...settings import EXIT_FAILED, EXIT_OK, Settings, UsageError, flag_name, load
from ..errors import ToolError
from ..errors import report as show_error
from . import report
from .figures import Figure
from .machine import describe_machine
from .page import report_page

NOT_TOLD = {"config", "out"}  # where files lie is nobody else's business


class ReportSettings(Settings):
    """Settings of every command that writes a report."""

    out: Path | None = Field(None, description="folder for the report; docs/results or the current one if absent")

    @property
    def folder(self) -> Path:
        """Where the report goes."""
        return self.out or report.default_folder()


S = TypeVar("S", bound=ReportSettings)


def run_command(kind: type[S], argv: list[str], prog: str, doc: str | None, run: Callable[[S], int]) -> int:
    """Read the settings, refuse what would fail after measuring, run. Errors become a line and an exit code."""
    settings = load(kind, argv, prog=prog, summary=(doc or "").partition("\n")[0])
    try:
        report.require_plotting()
        report.require_folder(settings.folder)
        return run(settings)
    except (ColdblockError, UsageError) as error:
        return show_error(prog, error)


def conclude(
    settings: ReportSettings,
    prog: str,
    title: str,
    model: ModelInfo | None,
    results: Mapping[str, Any],
    tables: Sequence[report.Table],
    figures: Sequence[Figure] = (),
    passed: bool = True,
) -> int:
    """Write the report and print its tables, each also when the other fails. Returns 0 only if everything `passed`."""
    found = report.Report(
        benchmark=prog.removeprefix("coldblock bench ").removeprefix("coldblock ").replace(" ", "-"),
        title=title,
        command=command_line(settings, prog),
        machine=describe_machine(),
        settings=_told(settings),
        model=_without_folders(model) if model else None,
        results=dict(results),
        tables=tuple(tables),
        figures=tuple(figures),
    )
    try:
        written = write(settings.folder, found)
    finally:
        print("\n\n".join([title, *(table.text() for table in tables)]) + "\n")
    print(f"written: {', '.join(map(str, written))}")
    return EXIT_OK if passed else EXIT_FAILED


def write(folder: Path, found: report.Report) -> tuple[Path, Path]:
    """Write bench-NAME.json and bench-NAME.html, both or neither; returns their paths.

    Raises ToolError when that cannot be.
    """
    data = msgspec.json.format(msgspec.json.encode(found, enc_hook=str), indent=2)
    stem = folder / f"bench-{found.benchmark}"
    json, html = stem.with_suffix(".json"), stem.with_suffix(".html")
    parts = [(path, path.with_name(f".{path.name}.part")) for path in (json, html)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for (path, part), content in zip(parts, (data + b"\n", report_page(found).encode()), strict=True):
            if path.is_dir():
                raise ToolError(f"--out {folder}: {path.name} is a folder there")
            part.write_bytes(content)
        for path, part in parts:  # both or none, but for a moment
            part.replace(path)
    except OSError as error:
        raise ToolError(f"--out {folder}: {error.strerror}") from error
    finally:
        for _, part in parts:
            with suppress(OSError):
                part.unlink()
    return json, html


def command_line(settings: ReportSettings, prog: str) -> str:
    """The command that measures the same again, whether its settings came from flags, environment or a file."""
    words = prog.split()
    for name, value in _told(settings).items():
        if name not in settings.model_fields_set or value is None:
            continue
        if isinstance(value, bool):
            words.append(flag_name(name if value else f"no_{name}"))
        elif type(settings).model_fields[name].is_required():  # given by its place
            words.append(str(value))
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f"{flag_name(name)}={text}")
    return shlex.join(words)


def _told(settings: ReportSettings) -> dict[str, Any]:
    """The settings that others may know: of a checkpoint or a text its name, and no folder."""
    told = settings.model_dump(exclude=NOT_TOLD)
    if told.get("model"):
        told["model"] = shown_name(told["model"])
    return {name: value.name if isinstance(value, Path) else value for name, value in told.items()}


def shown_name(model: str) -> str:
    """A known model as it is named, a checkpoint by its folder's own name."""
    return os.path.basename(os.path.abspath(model))


def _without_folders(model: ModelInfo) -> dict[str, Any]:
    told = {name: value for name, value in msgspec.to_builtins(model).items() if name != "path"}
    return {**told, "name": shown_name(model.name)}
