"""Reports as pages that need nothing else: one HTML file each, which opens from a disk and without a network.

Owns: what stands on a page. Does not know: what was measured, or how plots are drawn. The look is `templates`'.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from . import figures
from .report import Report, Spread, machine_facts, show

if TYPE_CHECKING:
    from .comparison import Comparison


def report_page(report: Report) -> str:
    """The page of one report."""
    return _template("report.html").render(report=report, machine=machine_facts(report.machine))


def comparison_page(a: str, b: str, comparisons: Sequence[Comparison], alone: Sequence[str], explained: str) -> str:
    """The page of two runs side by side. `alone`: what only one has; `explained`: what the verdicts mean."""
    return _template("compare.html").render(a=a, b=b, comparisons=comparisons, alone=alone, explained=explained)


@functools.cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = show
    environment.filters["ratio"] = lambda value: "" if value is None else f"{value:.3g} x"
    environment.filters["first_fact"] = lambda facts: next(iter(facts.values()))
    environment.filters["svg"] = lambda figure: Markup(figures.svg(figure))
    environment.tests["spread"] = lambda value: isinstance(value, Spread)
    environment.tests["number"] = lambda value: isinstance(value, int | float | Spread)
    return environment.get_template(name)
