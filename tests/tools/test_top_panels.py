"""What the monitor shows, as text: tiers, copies, load, one request, the table's columns; without a terminal."""

from __future__ import annotations

import itertools

import pytest
from coldblock.protocol.messages import CpuOffload, LinkUse, RequestRow, TierUse
from coldblock.tools.top import panels
from coldblock.tools.top.columns import COLUMNS, GAP, Entry, Order, entries, fitting, seconds_text
from coldblock.tools.top.history import Frame, History
from fake_engine import MODEL, PEER, swap_event
from showing_engine import row, snapshot


def frame(*rows: RequestRow, **changes: object) -> Frame:
    history = History()
    history.snapshot(snapshot(*rows, **changes))
    return history.frame()


def text(line: panels.Line) -> str:
    return "".join(part for part, _ in line)


# ---------------------------------------------------------------- bars and graphs


@pytest.mark.parametrize(("used", "width"), list(itertools.product(range(0, 65, 7), (1, 7, 20, 60))))
def test_a_bar_always_has_its_width(used: int, width: int) -> None:
    rest = 64 - used
    use = TierUse(64, used, rest // 3, rest // 5, rest - rest // 3 - rest // 5, used // 2)
    shares = [("used", "█", use.used), ("cached", "▒", use.cached), ("in", "▚", use.in_flight), ("free", "·", use.free)]
    assert panels.width_of(panels.bar(shares, width)) == width


def test_a_bar_of_nothing_is_empty() -> None:
    assert text(panels.bar([("used", "█", 0)], 5)) == "·····"


def test_a_graph_scales_to_its_largest_and_shows_small_values() -> None:
    (line,) = panels.graph([0.0, 1.0, 50.0, 100.0], 6, 1, "rate")
    assert text(line) == "▁▁▁▁▄█"
    assert [style for _, style in line] == ["dim", "rate"]  # a zero is dim, a small value is not
    top, bottom = panels.graph([25.0, 100.0], 2, 2, "rate")
    assert (text(top), text(bottom)) == (" █", "▄█")


@pytest.mark.parametrize("count", [0, 3, 5, 300])
def test_a_graph_has_its_size_however_long_the_past(count: int) -> None:
    lines = panels.graph([float(i) for i in range(count)], 5, 3, "rate")
    assert [panels.width_of(line) for line in lines] == [5, 5, 5]


# ---------------------------------------------------------------- the engine


def test_tiers_say_each_state() -> None:
    gpu, cpu = panels.tiers(frame(), 80, roomy=False)
    assert text(gpu).startswith("GPU ██") and "88% 28 used 4 shared 16 cached 8 moving 8 free" in " ".join(
        text(gpu).split()
    )
    assert "6% 3 used 0 shared 1 cached 0 moving 60 free" in " ".join(text(cpu).split())
    signs = {sign for line in panels.tiers(frame(), 80, roomy=True) for part, _ in line for sign in part}
    assert signs >= set("█▓▒▚·")  # they differ without colour


def test_a_cpu_tier_that_is_off_is_said() -> None:
    off = frame(cpu_offload=CpuOffload(False, 0, 0, 0, 0), cpu=TierUse(), link=LinkUse())
    assert "tier is off" in text(panels.tiers(off, 80, roomy=False)[1])
    assert "%" not in text(panels.copies(off, 80, 1)[0])  # of no peak


def test_copies_are_held_against_the_measured_peak() -> None:
    (line,) = panels.copies(frame(), 80, 1)
    assert "out 1.9 GiB/s 25%" in text(line) and "in 954 MiB/s 10%" in text(line)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_header_lines_fit(width: int) -> None:
    large = TierUse(9999, 4000, 2000, 999, 3000, 900)
    many = frame(gpu=large, cpu=large, running=256, waiting=1000, swapped=256, step_ms=1234.5, tokens_per_s=12345.6)
    badge = ("● live", "live")
    for line in (*panels.header(many, width), panels.title(many, width, badge)):
        assert panels.width_of(line) <= width, text(line)


@pytest.mark.parametrize("width", range(0, 60, 5))
def test_nothing_fails_where_there_is_no_room(width: int) -> None:
    shown = frame(row("漢字" * 40))
    panels.header(shown, width)
    panels.title(shown, width, ("● live", "live"))
    for height in range(5):
        panels.copies(shown, width, max(1, height))
        panels.load(shown, width, max(1, height))


# ---------------------------------------------------------------- one request


def watched() -> History:
    history = History()
    history.snapshot(snapshot(row(age_s=10.0, queue_s=2.0, ttft_s=5.0, swaps=0)))
    history.swap(swap_event("req-a", "swapped", time=1002.0))
    history.swap(swap_event("req-a", "resumed", time=1006.0))
    history.snapshot(snapshot(row(age_s=20.0, swaps=1), time=1010.0))
    return history


def test_the_course_shows_each_state_for_as_long_as_it_lasted() -> None:
    track = watched().track((PEER, "req-a"))
    assert track is not None
    cells, ruler, legend = panels.course(track, 1010.0, 20)
    assert text(cells) == "··▒▒▒███████▁▁▁▁████"
    assert "arrived" in text(ruler) and text(ruler).endswith("20.0 s")
    assert text(legend).split() == ["·", "waiting", "▒", "prefill", "█", "decode", "▁", "swapped"]


def test_a_paused_screen_shows_no_more_than_was_known_then() -> None:
    track = watched().track((PEER, "req-a"))
    assert track is not None
    assert "▁" not in text(panels.course(track, 1001.0, 20)[0])
    lines = panels.detail(Entry(track.row, MODEL, None), track, 1003.0, 120, 14)
    assert "swapped out" in text(lines[-1])
    assert "resumed" not in "".join(map(text, lines))


def test_details_name_everything_and_say_when_a_request_is_gone() -> None:
    history = watched()
    history.snapshot(snapshot(time=1011.0))
    track = history.track((PEER, "req-a"))
    assert track is not None
    lines = [text(line) for line in panels.detail(Entry(track.row, MODEL, 12.5), track, 1020.0, 100, 16)]
    everything = "\n".join(lines)
    for column in COLUMNS[1:]:
        assert f"{column.title.lower()} " in everything
    assert "gone since" in everything and "tok/s 12.5" in everything
    assert max(map(len, lines)) <= 100


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("width", range(1, 220))
def test_columns_fit_and_the_sorted_one_stays(width: int) -> None:
    for title in ("AGE", "PRIO"):
        sized = fitting(width, title)
        taken = sum(room + GAP for _, room in sized) - GAP
        assert sized[0][0] is COLUMNS[0]
        assert taken <= max(width, COLUMNS[0].width)
        if width >= 24:
            assert title in [column.title for column, _ in sized]


def test_what_80_columns_show_and_what_a_wide_terminal_does() -> None:
    assert [c.title for c, _ in fitting(80, "STALL")] == [
        "REQUEST", "STATE", "PROMPT", "NEW", "GPU", "CPU", "SWAPS", "OUT NOW", "STALL",
    ]  # fmt: skip
    assert [c for c, _ in fitting(148, "STALL")] == list(COLUMNS)


def test_every_title_has_room_for_the_sign_of_the_order() -> None:
    assert [column.title for column in COLUMNS if len(column.title) >= column.width] == []


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 0, ""), (0, 10, "0%"), (0.04, 10, "<1%"), (4.3, 10, "43%"), (10, 10, "100%")]
)
def test_percent(part: float, whole: float, text: str) -> None:
    assert panels.percent(part, whole) == text


def test_every_cell_fits_its_column() -> None:
    entry = Entry(
        row("r", peer_name="p", state="swapping_out", prompt_tokens=131072, generated_tokens=99999, gpu_blocks=99999,
            cpu_blocks=99999, swaps=99999, stall_s=99999.0, stalled_s=999.4, age_s=59999.0, ttft_s=99.96, tpot_s=9.996,
            priority=-999),
        MODEL, 9999.9,
    )  # fmt: skip
    for column in COLUMNS:
        assert len(column.text(entry)) <= column.width, column.title


@pytest.mark.parametrize("seconds", [0, 0.0004, 0.9994, 0.9996, 9.994, 9.996, 99.94, 99.96, 999.4, 999.6, 59999, None])
def test_durations_are_short(seconds: float | None) -> None:
    assert len(seconds_text(seconds)) <= 7


def test_rows_are_sorted_and_filtered() -> None:
    shown = frame(
        row("a", stall_s=1.0, peer_name="chat", ttft_s=None),
        row("b", stall_s=3.0, peer_name="web", state="swapped", ttft_s=2.0),
        row("c", stall_s=2.0, peer_name="Web", ttft_s=1.0),
    )

    def ids(order: Order, pattern: str = "") -> str:
        return "".join(entry.row.request_id for entry in entries(shown, order, pattern))

    assert ids(Order("STALL", reverse=True)) == "bca"
    assert ids(Order("TTFT", reverse=True)) == "bca"  # none yet comes last
    assert ids(Order("REQUEST", reverse=False), "WEB") == "bc"
    assert ids(Order("REQUEST", reverse=False), "swapp") == "b"
    assert ids(Order("REQUEST", reverse=False), "[") == ""
    for column in COLUMNS:
        assert len(ids(Order(column.title, reverse=False))) == 3
