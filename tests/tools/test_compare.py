"""Two reports side by side: the arithmetic, what belongs together, what is refused, what is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from coldblock.tools.bench import comparison, main, report
from coldblock.tools.bench.figures import Bars, Line, Lines
from coldblock.tools.bench.report import Cell, Column, Report, Spread, table
from report_pages import Page, check_alone

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COLUMNS = (
    Column("c", "c", case=True),
    Column("KV", "kv", case=True),
    Column("tok/s", "speed", better="higher"),
    Column("TPOT, ms", "tpot", better="lower"),
    Column("swaps", "swaps"),
)


def run(*rows: dict[str, Any], benchmark: str = "serve", **changes: Any) -> Report:
    values: dict[str, Any] = {
        "title": "t",
        "command": "coldblock bench serve",
        "machine": {"cpu": "a CPU", "cores": 2, "packages": {"torch": "1"}, "date": "today", "revision": "abc"},
        "settings": {"requests": 4, "out": "x"},
        "model": {"kv_cache_dtype": "fp16"},
        "results": {},
        "tables": (table("Speed", COLUMNS, rows),),
        **changes,
    }
    return Report(benchmark=benchmark, **values)


def row(c: int, speed: Cell, tpot: Cell, kv: str = "fp16", swaps: int = 0) -> dict[str, Any]:
    return {"c": c, "kv": kv, "speed": speed, "tpot": tpot, "swaps": swaps}


def save(path: Path, found: Report) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(found))
    return path


@pytest.mark.parametrize(
    ("a", "b", "better", "ratio", "verdict"),
    [
        (100.0, 125.0, "higher", 1.25, "better"),
        (100.0, 80.0, "higher", 0.8, "worse"),
        (100.0, 80.0, "lower", 0.8, "better"),
        (100.0, 125.0, "lower", 1.25, "worse"),
        (100.0, 101.9, "higher", 1.019, "alike"),
        (100, 98, "lower", 0.98, "alike"),
        (0, 0, "lower", None, "alike"),
        (0.0, 3.0, "lower", None, "worse"),
        (3.0, 0.0, "lower", 0.0, "better"),
        (100.0, 125.0, None, 1.25, ""),
        (None, 125.0, "higher", None, ""),
        (100.0, float("nan"), "higher", None, ""),
        ("4/4", "3/4", "higher", None, ""),
        (Spread(100.0, 90.0, 110.0), Spread(120.0, 109.0, 130.0), "higher", 1.2, "within noise"),
        (Spread(100.0, 90.0, 110.0), Spread(120.0, 111.0, 130.0), "higher", 1.2, "better"),
        (Spread(100.0, 99.0, 100.5), Spread(101.0, 100.6, 102.0), "lower", 1.01, "worse"),
        (Spread(100.0, 90.0, 110.0), 101.0, "higher", 1.01, "alike"),
    ],
)
def test_a_figure_is_judged(a: Cell, b: Cell, better: Any, ratio: float | None, verdict: str) -> None:
    assert comparison.ratio(a, b) == (pytest.approx(ratio) if ratio is not None else None)
    assert comparison.judge(a, b, better) == verdict


def test_cases_are_matched_by_what_they_are_about_and_none_is_dropped() -> None:
    a = run(row(1, 10.0, 5.0), row(4, 30.0, 6.0), row(4, 31.0, 6.0, kv="int8"), row(16, 50.0, 9.0))
    b = run(row(4, 60.0, 3.0, kv="int8"), row(1, 11.0, 5.0), row(64, 1.0, 1.0), row(4, 15.0, 12.0))
    (found,) = comparison.compare("x", a, b).tables
    speeds = {line.case: (line.a, line.b, line.ratio, line.verdict) for line in found.rows if line.figure == "tok/s"}
    assert speeds == {
        ("1", "fp16"): (10.0, 11.0, pytest.approx(1.1), "better"),
        ("4", "fp16"): (30.0, 15.0, 0.5, "worse"),
        ("4", "int8"): (31.0, 60.0, pytest.approx(60 / 31), "better"),
    }
    assert found.only == ["only in A: 16, fp16", "only in B: 64, fp16"]


def test_tables_and_figures_that_one_side_lacks_are_told() -> None:
    more = table("More", (Column("x", "x"),), [{"x": 1}])
    narrower = table("Speed", COLUMNS[:3], [row(1, 10.0, 5.0)])
    a, b = run(row(1, 10.0, 5.0)), run(tables=(narrower, more))
    speed, other = comparison.compare("x", a, b).tables
    assert [(line.figure, line.a, line.b) for line in speed.rows] == [
        ("tok/s", 10.0, 10.0),
        ("TPOT, ms", 5.0, None),
        ("swaps", 0, None),
    ]
    assert (other.title, other.only) == ("More", ["only in B"])


def test_what_is_not_the_same_comes_first() -> None:
    a = run(row(1, 10.0, 5.0))
    machine = {**a.machine, "gpus": ["H200"], "packages": {"torch": "2"}, "revision": "def+"}
    b = run(row(1, 10.0, 5.0), machine=machine, settings={"requests": 8, "out": "y"}, model={"kv_cache_dtype": "int8"})
    b.command = "coldblock bench serve --requests=8"
    assert list(comparison.differences(a, b)) == [
        ("revision", "abc", "def+"),
        ("package torch", "1", "2"),
        ("command", "coldblock bench serve", "coldblock bench serve --requests=8"),
        ("setting requests", "4", "8"),
        ("model kv_cache_dtype", "fp16", "int8"),
        ("GPU", "-", "H200"),
    ]
    text = comparison.compare("x", a, b).text()
    assert text.index("package torch") < text.index("Speed")
    assert "Machine, command, settings and revision are the same." in comparison.compare("x", a, a).text()


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main.main(["compare", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_two_files_as_text_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines("Throughput", "", "c", "tok/s", (Line("all", (1.0, 4.0), (2.0, 3.0)),))
    bars = Bars("Capacity <b>", "", "tokens", ("fp16",), {"in 1 GiB": (3.0,)})
    a = save(tmp_path / "a.json", run(row(1, 10.0, Spread(5.0, 4.0, 6.0)), row(4, 1.0, 1.0), figures=(lines, bars)))
    b = save(tmp_path / "b.json", run(row(1, 12.5, Spread(5.5, 5.0, 6.0)), figures=(lines, bars)))
    code, out, _ = compared(capsys, a, b, f"--html={tmp_path / 'page.html'}")
    assert code == 0
    words = " ".join(out.split())
    assert "1 fp16 tok/s 10 12.5 1.25 x better" in words
    assert "1 fp16 TPOT, ms 5 (4 to 6) 5.5 (5 to 6) 1.1 x within noise" in words
    assert "only in A: 4, fp16" in out and "B against A: 1 better, 0 worse, 0 alike, 1 within noise" in out
    page = Page(tmp_path / "page.html")
    check_alone(page)
    assert "1 fp16 tok/s 10 12.5 1.25 x better" in page.text and "only in A: 4, fp16" in page.text
    assert page.tags.count("svg") == 2 and "A: all" in page.text and "B: in 1 GiB" in page.text
    assert "Capacity <b>" in page.text


def test_two_folders_are_matched_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/bench-serve.json", "a/fp16/bench-serve.json", "a/bench-swap.json"):
        save(tmp_path / name, run(row(1, 10.0, 5.0)))
    for name in ("b/fp16/bench-serve.json", "b/bench-serve.json", "b/bench-kernels.json"):
        save(tmp_path / name, run(row(1, 20.0, 5.0)))
    (tmp_path / "a" / "other.json").write_text("{}")
    code, out, _ = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert code == 0 and out.count("2 x  better") == 2
    assert "\nbench-serve.json (serve)" in out and "\nfp16/bench-serve.json (serve)" in out
    assert "only in A: bench-swap.json" in out and "only in B: bench-kernels.json" in out


@pytest.mark.parametrize(
    ("a", "b", "code", "words"),
    [
        ("serve.json", "nowhere.json", 2, ["B: ", "nowhere.json does not exist"]),
        ("serve.json", "folder", 2, ["two files or two folders"]),
        ("folder", "empty", 1, ["same name", "holds bench-serve.json", "holds none"]),
        ("serve.json", "swap.json", 1, ["A is a report of 'serve', B of 'swap'"]),
        ("serve.json", "no.json", 1, ["no.json is not a report"]),
        ("serve.json", "later.json", 1, ["later.json: schema 3 is not known here; allowed: 1 to 2"]),
        ("old.json", "old.json", 1, ["'nix' in the first version"]),
        ("odd.json", "odd.json", 1, ["another shape", "measure again"]),
        ("text.json", "text.json", 1, ["another shape", "measure again"]),
    ],
)
def test_what_cannot_be_compared_is_refused(
    a: str, b: str, code: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("serve", "folder/bench-serve"):
        save(tmp_path / f"{name}.json", run(row(1, 10.0, 5.0)))
    save(tmp_path / "swap.json", run(row(1, 10.0, 5.0), benchmark="swap"))
    save(tmp_path / "later.json", run(schema=3))
    save(tmp_path / "old.json", run(benchmark="nix", schema=report.FIRST_SCHEMA))
    save(tmp_path / "odd.json", run(schema=report.FIRST_SCHEMA))
    save(tmp_path / "text.json", run(schema=report.FIRST_SCHEMA, benchmark="monitor", results={"medians": "text"}))
    (tmp_path / "no.json").write_text("[1]")
    (tmp_path / "empty").mkdir()
    ended, out, error = compared(capsys, tmp_path / a, tmp_path / b)
    assert (ended, out) == (code, "")
    assert error.startswith("coldblock bench compare: ") and len(error.splitlines()) == 1
    assert all(word in error for word in words)


def test_nothing_in_a_file_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save(tmp_path / name, run(row(1, 10.0, 5.0), machine={"cpu": f"\x1b[2J{name}"})) for name in ("a", "b"))
    code, out, _ = compared(capsys, a, b)
    assert code == 0 and "[2Ja" in out and "\x1b" not in out


def test_a_page_that_cannot_be_written_names_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save(tmp_path / "a.json", run(row(1, 10.0, 5.0)))
    code, _, error = compared(capsys, file, file, f"--html={tmp_path / 'nowhere' / 'page.html'}")
    assert code == 1 and "--html" in error


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("bench-*.json")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_every_result_in_the_docs_can_still_be_compared(file: Path) -> None:
    found = report.read(file)
    same = comparison.compare(file.name, found, found)
    assert same.differences == []
    assert same.count("alike") + same.count("within noise") > 0
    assert same.count("better") == same.count("worse") == 0
