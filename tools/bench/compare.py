"""Compare two runs of the same benchmarks: files or folders of reports, figure by figure.

Owns: the command, and which reports of two folders belong together. Does not know: what is better (`comparison`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from ...protocol.errors import ColdblockError
from ...settings import EXIT_OK, Settings, UsageError, load
from ..errors import ToolError
from ..errors import report as show_error
from ..terminal import safe
from . import report
from .comparison import EXPLAINED, compare
from .page import comparison_page

PROG = "coldblock bench compare"
FILES = "bench-*.json"


class CompareSettings(Settings):
    """Settings of `coldblock bench compare`."""

    a: CliPositionalArg[Path] = Field(description="a report's JSON file, or a folder of reports")
    b: CliPositionalArg[Path] = Field(description="the other one: is it better than A?")
    html: Path | None = Field(None, description="also write the comparison as a page into this file")


def main(argv: list[str]) -> int:
    """Run the command."""
    settings = load(CompareSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        pairs, alone = paired(settings.a, settings.b)
        found = [compare(name, report.read(a), report.read(b)) for name, a, b in pairs]
        print(f"A: {settings.a}\nB: {settings.b}\n")
        text = "\n\n\n".join([*(comparison.text() for comparison in found), *alone])
        print("\n".join(map(safe, text.split("\n"))))
        if settings.html is not None:
            _write(settings.html, comparison_page(str(settings.a), str(settings.b), found, alone, EXPLAINED))
            print(f"\nwritten: {settings.html}")
    except (ColdblockError, UsageError) as error:
        return show_error(PROG, error)
    return EXIT_OK


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ToolError(f"--html {path}: {error.strerror}") from error


def paired(a: Path, b: Path) -> tuple[list[tuple[str, Path, Path]], list[str]]:
    """Names and files of reports to be compared, and words about those that one folder lacks.

    Files as they are; in folders, those of equal name, folders in them included. Raises ToolError when nothing is left.
    """
    for name, path in (("A", a), ("B", b)):
        if not path.exists():
            raise UsageError(f"{name}: {path} does not exist")
    if a.is_dir() != b.is_dir():
        raise UsageError(f"A {a} and B {b}: give two files or two folders")
    if not a.is_dir():
        return [(b.name, a, b)], []
    in_a, in_b = ({path.relative_to(folder).as_posix(): path for path in folder.rglob(FILES)} for folder in (a, b))
    both = sorted(in_a.keys() & in_b.keys())
    if not both:
        held = [f"{folder} holds {', '.join(sorted(files)) or 'none'}" for folder, files in ((a, in_a), (b, in_b))]
        raise ToolError(f"no report ({FILES}) has the same name in both folders: {'; '.join(held)}")
    alone = [f"only in A: {name}" for name in sorted(in_a.keys() - in_b.keys())]
    alone += [f"only in B: {name}" for name in sorted(in_b.keys() - in_a.keys())]
    return [(name, in_a[name], in_b[name]) for name in both], alone
