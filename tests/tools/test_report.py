"""Reports: what is told of a run, what its page shows and does not load, and how a file is read again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coldblock.settings import load
from coldblock.tools.bench import command, figures, report, swap_timeline
from coldblock.tools.bench.measure import Timeline as Request
from coldblock.tools.bench.pressure import PressureSettings
from coldblock.tools.errors import ToolError
from fake_engine import MODEL, swap_event
from msgspec.structs import replace
from report_pages import Page, check_alone, check_page

TIMELINE = figures.Timeline(
    "A swap", "", "ms", (figures.Row("v", (figures.Span("stall", 0.0, 5.0),), (-1.0, 6.0, 99.0)),), -2.0, 7.0
)
BARS = figures.Bars("Bars", "", "GB/s", ("fp16", "int8"), {"out": (1.0, 12_345.0)}, {"out": (2.0, 3.0)}, "the link")
LINES = figures.Lines(
    "Lines",
    "",
    "x",
    "y",
    (figures.share_below("a <b>", [3.0, 1.0, 2.0]), figures.Line("b", (1.0,), (2.0,))),
    x_log=True,
    steps=True,
)


def settings_of(*flags: str) -> PressureSettings:
    return load(PressureSettings, list(flags), prog="coldblock bench jitter", summary="")


def written(tmp_path: Path, *flags: str, tables: tuple[report.Table, ...] = (), **changes: Any) -> dict[str, Any]:
    settings = settings_of(f"--out={tmp_path}", *flags)
    values = {"results": {"gaps": {}}, "tables": tables, "figures": [TIMELINE, BARS, LINES], **changes}
    command.conclude(settings, "coldblock bench jitter", "What was run", MODEL, **values)
    content: dict[str, Any] = json.loads((tmp_path / "bench-jitter.json").read_text())
    return content


TABLE = report.table(
    "Figures <of> all",
    (
        report.Column("KV", "kv", case=True),
        report.Column("tok/s", "speed", better="higher"),
        report.Column("ms", "deep.seconds", 1e3, better="lower", range="deep.range"),
        report.Column("not measured", "nowhere"),
    ),
    [{"kv": "fp16 & more", "speed": 1234.5, "deep": {"seconds": 0.5, "range": [0.25, 0.75]}}, {"kv": "int8"}],
    note="A note.",
)


def test_columns_are_filled_from_plain_results() -> None:
    assert TABLE.rows == (
        ("fp16 & more", 1234.5, report.Spread(500.0, 250.0, 750.0), None),
        ("int8", None, None, None),
    )
    assert [heading.better for heading in TABLE.headings] == [None, "higher", "lower", None]
    assert "500 (250 to 750)" in TABLE.text() and TABLE.text().endswith("A note.")


def test_a_page_shows_its_report_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = written(tmp_path, "--requests=4", "--engine-flags=--threads 1 --x='<b>'", tables=(TABLE,))
    check_page(tmp_path / "bench-jitter.html", content)
    text = Page(tmp_path / "bench-jitter.html").text
    assert "fp16 & more 1,234 500 250 to 750 - int8 - - -" in text
    assert "a <b>" in text, "a curve's name is not markup"
    assert "Figures <of> all" in capsys.readouterr().out


def test_what_is_read_of_a_file_is_what_was_written(tmp_path: Path) -> None:
    content = written(tmp_path, tables=(TABLE,))
    found = report.read(tmp_path / "bench-jitter.json")
    assert (found.tables, found.figures, found.schema) == ((TABLE,), (TIMELINE, BARS, LINES), report.SCHEMA)
    assert found.command == content["command"] and "path" not in (found.model or {})


def test_an_engine_named_by_its_folder_is_told_by_the_folders_name(tmp_path: Path) -> None:
    model = replace(MODEL, name="/home/somebody/models/mine")
    command.conclude(settings_of(f"--out={tmp_path}"), "coldblock bench jitter", "", model, {}, ())
    found = report.read(tmp_path / "bench-jitter.json")
    assert (found.model or {})["name"] == "mine"
    assert "somebody" not in (tmp_path / "bench-jitter.json").read_text()


def test_not_a_number_stays_valid_json(tmp_path: Path) -> None:
    assert written(tmp_path, results={"x": math.nan})["results"] == {"x": None}


def test_the_command_repeats_the_run_without_telling_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDBLOCK_NEW_TOKENS", "9")
    flags = (f"--model={tmp_path}/smollm2", f"--out={tmp_path}", "--engine-flags=--threads 1", "--requests=4")
    line = command.command_line(settings_of(*flags), "coldblock bench jitter")
    assert line.split()[:3] == ["coldblock", "bench", "jitter"]
    assert str(tmp_path) not in line and "--model=smollm2" in line
    assert "--new-tokens=9" in line and "'--engine-flags=--threads 1'" in line and "--requests=4" in line
    assert "--seed" not in line, "what was not set stays at its default"
    monkeypatch.chdir(tmp_path)
    for path in ("../" + tmp_path.name, ".", f"{tmp_path}/"):
        assert f"--model={tmp_path.name}" in command.command_line(settings_of(f"--model={path}"), "coldblock bench x")


def test_unwritable_folder_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match="--out"):
        written(tmp_path / "file")
    with pytest.raises(ToolError, match="--out /proc: "):
        report.require_folder(Path("/proc"))  # is there, and takes no files


def test_what_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench-jitter.json").mkdir()
    with pytest.raises(ToolError, match="is a folder there"):
        written(tmp_path, tables=(TABLE,))
    assert "1,234" in capsys.readouterr().out


def test_what_cannot_be_printed_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `| head` leaves early."""

    def gone(*text: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    with pytest.raises(BrokenPipeError):
        written(tmp_path, tables=(TABLE,))
    assert report.read(tmp_path / "bench-jitter.json").tables == (TABLE,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "not JSON"),
        ("[]", "no JSON object with benchmark"),
        ('{"benchmark": "serve"}', "no JSON object with benchmark"),
        ('{"benchmark": "x", "machine": {}, "settings": {}, "results": {}, "schema": 3}', "schema 3 .* 1 to 2"),
        ('{"benchmark": "x", "machine": {}, "settings": {}, "results": [], "schema": 2}', r"results|title"),
        ('{"benchmark": 7, "machine": {}, "settings": {}, "results": {}}', r"is not a report: .*\$.title|benchmark"),
        ('{"benchmark": "x", "machine": {"packages": [1]}, "settings": {}, "results": {}, "model": null}', "packages"),
        ('{"benchmark": "x", "machine": {"gpus": 7}, "settings": {}, "results": {}, "model": null}', "gpus"),
    ],
)
def test_files_that_are_no_reports_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bench-x.json"
    file.write_text(text)
    with pytest.raises(ToolError, match=words) as error:
        report.read(file)
    assert str(file) in str(error.value)


def test_a_row_with_a_cell_too_few_is_no_report(tmp_path: Path) -> None:
    headings = (report.Heading("concurrency", case=True), report.Heading("tok/s"))
    short = report.Table("Load", headings, ((1,),))
    file = tmp_path / "bench-x.json"
    file.write_bytes(msgspec.json.encode(report.Report("x", "x", "x", {}, {}, None, {}, (short,))))
    with pytest.raises(ToolError, match="a row of 'Load'"):
        report.read(file)


# ---------------------------------------------------------------- plots


@pytest.mark.parametrize("figure", [TIMELINE, BARS, replace(BARS, horizontal=True), LINES, replace(LINES, lines=())])
def test_a_plot_is_one_element_in_the_pages_colour(figure: figures.Figure, tmp_path: Path) -> None:
    svg = figures.svg(figure)
    assert svg.startswith("<svg") and svg.count("<svg") == 1 and "currentColor" in svg
    assert "#010203" not in svg and "<metadata" not in svg and "width=" not in svg.partition(">")[0]
    (tmp_path / "plot.html").write_text(svg)
    check_alone(Page(tmp_path / "plot.html"))
    assert svg == figures.svg(figure), "the same data are the same bytes"


def test_a_timeline_shows_what_lies_in_its_window() -> None:
    marks = [line for line in figures.svg(TIMELINE).splitlines() if line.strip().startswith("L ")]
    assert "a token" in figures.svg(TIMELINE) and "stall" in figures.svg(TIMELINE)
    assert "copy out" not in figures.svg(TIMELINE), "no such phase is there"
    assert marks


def test_a_distributions_curve_reaches_all_and_is_not_endless() -> None:
    line = figures.share_below("x", [float(value) for value in range(100_000, 0, -1)])
    assert line.x[0] == 1.0 and line.x[-1] == 100_000.0 and (line.y[0], line.y[-1]) == (0.0, 1.0)
    assert len(line.x) <= figures.MOST_POINTS + 3 and list(line.x) == sorted(line.x)
    assert figures.share_below("none", []) == figures.Line("none", (), ())


# ---------------------------------------------------------------- one swap


def request(*arrivals: float, request_id: str = "r", **moments: float) -> Request:
    """Swap events at these moments on the engine's clock, 100 s ahead of ours; copies take 2 s after 1 s of waiting."""
    copying = {"swapped": 2.0, "resumed": 2.0}
    events = [
        swap_event(request_id, phase, time=100.0 + at, seconds=copying.get(phase, 0.0), queued_s=1.0, bytes=500)
        for phase, at in moments.items()
    ]
    return Request(0.0, request_id, list(range(len(arrivals))), list(arrivals), events)


VICTIM = request(1.0, 2.0, 30.0, 31.0, swapping_out=3.0, swapped=6.0, swapping_in=20.0, resumed=25.0)


def test_the_phases_of_a_swap_follow_each_other_to_the_next_token() -> None:
    (swap,) = swap_timeline.swaps_of(VICTIM)
    assert [(span.phase, span.begin, span.end) for span in swap.phases(100.0)] == [
        ("queue out", 3.0, 4.0),
        ("copy out", 4.0, 6.0),
        ("stall", 6.0, 20.0),
        ("queue in", 20.0, 23.0),
        ("copy in", 23.0, 25.0),
        ("resume", 25.0, 30.0),
    ]


@pytest.mark.parametrize(
    ("phases", "count"),
    [
        (("swapping_out", "swapped", "swapping_in", "resumed") * 2, 2),
        (("swapping_out", "swapped"), 0),
        (("swapping_out", "rejected", "swapped", "copied_in", "swapping_in", "resumed"), 1),
        (("swapping_out", "swapped", "swapping_out", "swapped", "swapping_in", "resumed"), 1),
        (("swapped", "swapping_in", "resumed"), 0),
    ],
)
def test_only_whole_swaps_are_shown(phases: tuple[str, ...], count: int) -> None:
    line = replace_events(VICTIM, [swap_event(phase=phase) for phase in phases])
    assert len(swap_timeline.swaps_of(line)) == count


def replace_events(line: Request, events: list[Any]) -> Request:
    return Request(line.submitted, line.request_id, line.token_ids, line.arrivals, events)


def test_one_swap_is_drawn_with_those_that_stay() -> None:
    bystander = request(*(float(at) for at in range(40)), request_id="b")
    gone = request(-50.0, -49.0, request_id="g")
    copies = [swap_event("r", "swapped", time=106.0, seconds=2.0), swap_event("", "copied_in", time=500.0, seconds=1.0)]
    found = swap_timeline.one_swap([VICTIM, bystander, gone], copies, 100.0)
    assert found is not None and json.dumps(found)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["the victim", "a bystander", "link, out", "link, in"]
    assert rows["the victim"]["tokens"] == (-2000.0, -1000.0, 27_000.0, 28_000.0)
    assert [span["phase"] for span in rows["link, out"]["spans"]] == ["copy out"] and not rows["link, in"]["spans"]
    assert {row["phase"]: row["ms"] for row in found["phases"]}["stall"] == 14_000.0
    whole, leaves, returns = swap_timeline.swap_figures(found, "fp16 KV")
    assert (leaves.begin, leaves.end) == (-3000.0, 6000.0) and returns.begin == 14_000.0
    assert whole.wide and "stall" in figures.svg(whole)


def test_without_a_swap_there_is_nothing_to_draw() -> None:
    assert swap_timeline.one_swap([request(1.0, 2.0)], [], 100.0) is None
