"""A report: what a benchmark ran and where, its figures in tables and plots, and the raw results.

Owns: the shape of a report and of its file, how tables look as text. Does not know: what was
measured, how the page looks (`page`), how plots are drawn (`figures`), how two reports are compared (`comparison`).
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..errors import ToolError
from .figures import Figure

FIRST_SCHEMA = 1
"""Of files without a number: they have results and no tables."""
SCHEMA = 2
"""Of the files that are written."""

_TEXT_WIDTH = 100  # of notes on a terminal

Better = Literal["higher", "lower"]


class Spread(Struct, frozen=True):
    """A figure that was measured several times: their median, the least and the largest."""

    value: float
    low: float
    high: float


Cell = str | int | float | Spread | None


class Heading(Struct, frozen=True):
    """Of a column. `better`: which of two values is, where one is; `case`: it is part of what a row is about."""

    text: str
    better: Better | None = None
    case: bool = False


class Table(Struct, frozen=True):
    """Rows of figures. The cells below `case` headings say what a row is about, the rest what was found there."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def text(self) -> str:
        """Right-aligned columns, for a terminal."""
        cells = [[heading.text for heading in self.headings], *([show(value) for value in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([self.title, *lines, *([textwrap.fill(self.note, _TEXT_WIDTH)] if self.note else [])])


class Report(Struct):
    """What a benchmark leaves behind. `title` says what was run; `command` runs it again."""

    benchmark: str
    title: str
    command: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    model: dict[str, Any] | None
    results: dict[str, Any]
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...] = ()
    schema: int = SCHEMA


# ---------------------------------------------------------------- tables of results


class Column(Struct, frozen=True):
    """A column to be filled from results that are plain dicts.

    `find`: a path such as "tpot_s.p50", or a function of the row. Numbers are multiplied by `scale`. `range`: path of
    the least and the largest value, where it was measured several times.
    """

    heading: str
    find: str | Callable[[Mapping[str, Any]], Cell]
    scale: float = 1
    better: Better | None = None
    case: bool = False
    range: str = ""

    def cell(self, row: Mapping[str, Any]) -> Cell:
        """The row's value; None where it has none."""
        value = self.find(row) if callable(self.find) else _at(row, self.find)
        if value is None or isinstance(value, str):
            return value
        extremes = _at(row, self.range) if self.range else None
        if extremes is None:
            return value if self.scale == 1 else value * self.scale
        low, high = extremes
        return Spread(value * self.scale, low * self.scale, high * self.scale)


def table(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], note: str = "") -> Table:
    """A table with a row for each of `rows`."""
    headings = tuple(Heading(column.heading, column.better, column.case) for column in columns)
    return Table(title, headings, tuple(tuple(column.cell(row) for column in columns) for row in rows), note)


def _at(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


VERDICT = Column("", lambda row: {True: "ok", False: "FAILED", None: "-"}[row.get("passed")])
"""Of results that know whether they passed."""


def distribution_columns(path: str = "") -> list[Column]:
    """Columns for a distribution in seconds, shown in ms. The largest value is chance: neither is called better."""
    start = f"{path}." if path else ""
    percentiles = [Column(f"{name}, ms", start + name, 1e3, "lower") for name in ("p50", "p95", "p99")]
    return [*percentiles, Column("max, ms", start + "max", 1e3)]


def show(value: Cell) -> str:
    """A cell as people read it: floats with four significant digits, a spread with its extremes."""
    if isinstance(value, Spread):
        return f"{show(value.value)} ({show(value.low)} to {show(value.high)})"
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---------------------------------------------------------------- files


def read(path: Path) -> Report:
    """The report in a file. Raises ToolError when it is none, or of a version that this program does not know.

    One of the first version has its `results` alone: no tables, no plots, no command.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ToolError(f"{path} is not a report: not JSON ({error})") from error
    if not isinstance(content, dict) or not {"benchmark", "machine", "settings", "results"} <= content.keys():
        raise ToolError(f"{path} is not a report: no JSON object with benchmark, machine, settings and results")
    schema = content.get("schema", FIRST_SCHEMA)
    if schema not in (FIRST_SCHEMA, SCHEMA):
        raise ToolError(f"{path}: schema {schema!r} is not known here; allowed: {FIRST_SCHEMA} to {SCHEMA}")
    if schema == FIRST_SCHEMA:
        content = {"title": content["benchmark"], "command": "", "tables": (), **content, "schema": FIRST_SCHEMA}
    try:
        found = msgspec.convert(content, Report)
    except msgspec.ValidationError as error:
        raise ToolError(f"{path} is not a report: {error}") from error
    for name, kind in {"packages": dict, "gpus": list, "cpu_features": list}.items():
        if not isinstance(found.machine.get(name, kind()), kind):
            raise ToolError(f"{path} is not a report: $.machine.{name} is no {kind.__name__}")
    if odd := next((t for t in found.tables if any(len(row) != len(t.headings) for row in t.rows)), None):
        raise ToolError(f"{path} is not a report: a row of {odd.title!r} has not a cell for each heading")
    return found


def default_folder() -> Path:
    """docs/results of the folder we are in, if there is one, else that folder itself."""
    results = Path("docs/results")
    return results if results.is_dir() else Path()


def machine_facts(machine: Mapping[str, Any]) -> dict[str, str]:
    """The machine in a few lines: what it is called, and what it says."""
    memory = f", {machine['memory_gib']} GiB" if machine.get("memory_gib") else ""
    features = ", ".join(machine.get("cpu_features", ()))
    packages = ", ".join(f"{name} {number}" for name, number in machine.get("packages", {}).items())
    facts = {
        "GPU": "; ".join(machine.get("gpus", ())),
        "CPU": f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores{memory}",
        "instructions": features,
        "system": f"{machine.get('system', '')}, Python {machine.get('python', '')}",
        "packages": packages,
        "date": machine.get("date", ""),
        "revision": machine.get("revision") or "unknown",
    }
    return {name: fact for name, fact in facts.items() if fact}


def require_plotting() -> None:
    """Raise ToolError now, not after minutes of measuring, when no plot could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolError("matplotlib is not installed, so no plot can be drawn: pip install 'coldblock[tools]'")


def require_folder(folder: Path) -> None:
    """Make the folder before anything is measured. Raises ToolError when it, or a file in it, cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ToolError(f"--out {folder}: {error.strerror}") from error
