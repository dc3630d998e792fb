"""Two reports of the same benchmark side by side: what differs between them, and every figure with its ratio.

Owns: which rows of two reports belong together, and what counts as better, worse or alike. Does not know: files, or any
benchmark: a table's headings say what a row is about and which way is better.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ToolError
from .figures import Bars, Figure, Line, Lines
from .report import FIRST_SCHEMA, Better, Cell, Heading, Report, Spread, Table, machine_facts

ALIKE = 0.02  # a ratio nearer to 1 than this says nothing, where no repeats tell more

EXPLAINED = (
    f"alike: less than {ALIKE:.0%} apart. within noise: both were measured several times, and what they ranged over "
    "overlaps. What shows no range was measured once."
)

Verdict = Literal["better", "worse", "alike", "within noise", ""]


@dataclass(frozen=True)
class Figures:
    """One figure of one case on both sides. `ratio` is B over A; None where there is none."""

    case: tuple[str, ...]
    figure: str
    a: Cell
    b: Cell
    ratio: float | None
    verdict: Verdict


@dataclass(frozen=True)
class TableComparison:
    """One table of both reports. `only`: cases, or a whole table, that one side lacks."""

    title: str
    case_headings: tuple[str, ...]
    rows: list[Figures]
    only: list[str]

    def text(self) -> str:
        """For a terminal."""
        headings = [*self.case_headings, "figure", "A", "B", "B/A", ""]
        rows = [(*row.case, row.figure, row.a, row.b, ratio_text(row.ratio), row.verdict) for row in self.rows]
        lines = [Table(self.title, tuple(map(Heading, headings)), tuple(rows)).text()] if rows else [self.title]
        return "\n".join([*lines, *self.only])


@dataclass(frozen=True)
class Comparison:
    """Two reports of the same benchmark. `differences`: what else is not the same, before any figure is believed."""

    name: str
    benchmark: str
    a: Report
    b: Report
    differences: list[tuple[str, str, str]]
    tables: list[TableComparison]

    def count(self, verdict: Verdict) -> int:
        """How many figures came out so."""
        return sum(row.verdict == verdict for table in self.tables for row in table.rows)

    @property
    def summary(self) -> str:
        """All figures in one line."""
        named: tuple[Verdict, ...] = ("better", "worse", "alike", "within noise")
        return "B against A: " + ", ".join(f"{self.count(verdict)} {verdict}" for verdict in named)

    def text(self) -> str:
        """For a terminal."""
        head = f"{self.name} ({self.benchmark})"
        same = "Machine, command, settings and revision are the same."
        columns = (Heading("not the same"), Heading("A"), Heading("B"))
        told = Table("Before the figures:", columns, tuple(self.differences)).text() if self.differences else same
        return "\n\n".join([head, told, *(table.text() for table in self.tables), f"{self.summary}\n{EXPLAINED}"])

    @property
    def figures(self) -> list[Figure]:
        """Plots that both have, in one."""
        others = {figure.title: figure for figure in self.b.figures}
        pairs = ((figure, others[figure.title]) for figure in self.a.figures if figure.title in others)
        return [joined for a, b in pairs if (joined := _joined(a, b)) is not None]


def compare(name: str, a: Report, b: Report) -> Comparison:
    """Raises ToolError when they are not of the same benchmark."""
    if a.benchmark != b.benchmark:
        raise ToolError(f"A is a report of {a.benchmark!r}, B of {b.benchmark!r}: give two of the same benchmark")
    return Comparison(name, a.benchmark, a, b, list(differences(a, b)), compare_tables(tables_of(a), tables_of(b)))


def tables_of(found: Report) -> tuple[Table, ...]:
    """The report's; of the first version, those that its results can still fill."""
    if found.schema != FIRST_SCHEMA:
        return found.tables
    from .main import modules

    if (where := modules().get(found.benchmark)) is None:
        raise ToolError(f"reports of {found.benchmark!r} in the first version are not known here: measure again")
    try:
        return tuple(importlib.import_module(where, __package__).tables(found.results))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ToolError(
            f"the results of {found.benchmark!r} from {found.machine.get('date', 'before')} have another shape than "
            f"those of today ({error!r}): measure again"
        ) from error


def differences(a: Report, b: Report) -> Iterator[tuple[str, str, str]]:
    """Machine, command, settings and model, as far as they are not the same on both sides."""
    sides = []
    for side in (a, b):
        settings = {f"setting {name}": value for name, value in side.settings.items() if name not in ("config", "out")}
        model = {f"model {name}": value for name, value in (side.model or {}).items()}
        packages = {f"package {name}": number for name, number in side.machine.get("packages", {}).items()}
        machine = machine_facts({**side.machine, "packages": {}})
        sides.append({**machine, **packages, "command": side.command, **settings, **model})
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        left, right = (_plain(side.get(name)) for side in sides)
        if left != right and (name != "command" or "-" not in (left, right)):
            yield name, left, right


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "-" if value is None or value == "" else str(value)


# ---------------------------------------------------------------- rows and figures


def compare_tables(a: tuple[Table, ...], b: tuple[Table, ...]) -> list[TableComparison]:
    """Tables of the same title and cases; what one side lacks is told."""
    in_a, in_b = ({table.title: table for table in tables} for tables in (a, b))
    found = []
    for title in dict.fromkeys([*in_a, *in_b]):
        if title in in_a and title in in_b:
            found.append(compare_table(in_a[title], in_b[title]))
        else:
            found.append(TableComparison(title, (), [], [f"only in {'A' if title in in_a else 'B'}"]))
    return found


def compare_table(a: Table, b: Table) -> TableComparison:
    """Every figure that both have, case by case."""
    rows_a, rows_b = _by_case(a), _by_case(b)
    better = {heading.text: heading.better for heading in (*a.headings, *b.headings)}
    rows, only = [], []
    for case in dict.fromkeys([*rows_a, *rows_b]):
        if case not in rows_a or case not in rows_b:
            only.append(f"only in {'A' if case in rows_a else 'B'}: {', '.join(case)}")
            continue
        for figure in dict.fromkeys([*rows_a[case], *rows_b[case]]):
            left, right = rows_a[case].get(figure), rows_b[case].get(figure)
            if left is not None or right is not None:
                rows.append(Figures(case, figure, left, right, ratio(left, right), judge(left, right, better[figure])))
    return TableComparison(a.title, tuple(heading.text for heading in a.headings if heading.case), rows, only)


def _by_case(table: Table) -> dict[tuple[str, ...], dict[str, Cell]]:
    """Each row's figures by heading, under what the row is about."""
    found = {}
    for row in table.rows:
        cells = list(zip(table.headings, row, strict=True))
        case = tuple(str(value) for heading, value in cells if heading.case)
        found[case] = {heading.text: value for heading, value in cells if not heading.case}
    return found


def ratio(a: Cell, b: Cell) -> float | None:
    """B over A; None when these are no numbers, or A is 0."""
    left, right = number(a), number(b)
    return None if left is None or right is None or left == 0 else right / left


def number(cell: Cell) -> float | None:
    """The cell's value, the median of a spread."""
    value = cell.value if isinstance(cell, Spread) else cell
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def judge(a: Cell, b: Cell, better: Better | None) -> Verdict:
    """Whether B is better. Ranges that overlap are noise; without ranges, less than ALIKE is as good as nothing."""
    left, right = number(a), number(b)
    if better is None or left is None or right is None:
        return ""
    if isinstance(a, Spread) and isinstance(b, Spread):
        if a.low <= b.high and b.low <= a.high:
            return "within noise"
    elif abs(right - left) <= ALIKE * abs(left):
        return "alike"
    return "better" if (right > left) == (better == "higher") else "worse"


def ratio_text(value: float | None) -> str:
    """ "1.25 x"."""
    return "" if value is None else f"{value:.3g} x"


# ---------------------------------------------------------------- plots


def _joined(a: Figure, b: Figure) -> Figure | None:
    """Both in one plot, where they are of a kind that allows it."""
    if isinstance(a, Lines) and isinstance(b, Lines):
        lines = [
            Line(f"{side}: {line.name}", line.x, line.y, side == "B")
            for side, of in (("A", a), ("B", b))
            for line in of.lines
        ]
        return Lines(a.title, a.caption, a.x_label, a.y_label, tuple(lines), a.x_log, a.steps)
    if isinstance(a, Bars) and isinstance(b, Bars) and a.names == b.names:
        series, ceilings = (
            {**_named("A", left), **_named("B", right)}
            for left, right in ((a.series, b.series), (a.ceilings, b.ceilings))
        )
        return Bars(a.title, a.caption, a.label, a.names, series, ceilings, a.ceiling_name, a.horizontal)
    return None


def _named(side: str, series: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    return {f"{side}: {name}": values for name, values in series.items()}
