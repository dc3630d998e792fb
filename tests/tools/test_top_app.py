"""The live screen, without a terminal (textual's pilot) and on a real pseudo-terminal, against engines that answer."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from busy_engine import BusyEngine
from coldblock.protocol.client import AsyncClient
from coldblock.protocol.messages import CpuOffload, Goodbye, Hello, LinkUse, Ping, SamplingParams, StatsRequest, TierUse
from coldblock.tools.top import feed
from coldblock.tools.top.app import TopApp
from coldblock.tools.top.widgets import Panel, RequestTable
from fake_engine import PEER, swap_event
from processes import running_engine, write_tiny_model
from showing_engine import ShowingEngine, row
from terminals import Terminal
from textual.geometry import Region
from textual.pilot import Pilot

EVIL = "\x1b]0;owned\x07\x1b[2J\nroot\u202e"
WAIT_S = 15.0


@asynccontextmanager
async def watching(endpoint: str, size: tuple[int, int] = (160, 46)) -> AsyncIterator[Pilot[None]]:
    """The app on this endpoint."""
    async with AsyncClient(endpoint, name="top") as client:
        await client.ready()
        async with TopApp(client, 0.05).run_test(size=size) as pilot:
            yield pilot


def app_of(pilot: Pilot[None]) -> TopApp:
    assert isinstance(pilot.app, TopApp)
    return pilot.app


def lines(pilot: Pilot[None]) -> list[str]:
    """What the screen shows."""
    return [strip.text for strip in pilot.app.screen._compositor.render_strips()]


def screen(pilot: Pilot[None]) -> str:
    return "\n".join(lines(pilot))


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, screen(pilot)
        await asyncio.sleep(0.02)
        await pilot.pause()


async def until_shown(pilot: Pilot[None], *texts: str) -> None:
    await until(pilot, lambda: all(text in screen(pilot) for text in texts))


async def until_hidden(pilot: Pilot[None], text: str) -> None:
    await until(pilot, lambda: text not in screen(pilot))


def shown_ids(pilot: Pilot[None]) -> list[str]:
    return [line for text in lines(pilot) for line in re.findall(r"│? ?(req-\w+) ", text)]


# ---------------------------------------------------------------- what is shown


async def test_header_table_and_events_are_shown() -> None:
    with ShowingEngine(row(), row("req-b", peer_name="web", state="swapped", stalled_s=1.5)) as engine:
        async with watching(engine.endpoint) as pilot:
            await until_shown(pilot, "req-a", "● decode", "req-b", "■ swapped", "1.50 s", "● live")
            engine.publish(swap_event("req-b", "swapped"))
            await until_shown(pilot, "▼ req-b swapped out: 3 blocks, 1.7 MiB in 1.50 ms")
            expected = (
                "fake-model on cpu|28 used|4 shared|8 moving|out 1.9 GiB/s 25%|in 954 MiB/s 10%|1 running|1 swapped"
            )
            expected += "|83.2 tok/s|12.3 ms|? Help|requests 2 · by AGE"
            for text in expected.split("|"):
                assert text in screen(pilot)
    assert {type(message) for message in engine.received} <= {Hello, Ping, StatsRequest, Goodbye}


async def test_no_requests_and_no_cpu_tier() -> None:
    with ShowingEngine() as engine:
        engine.changes = {"cpu_offload": CpuOffload(False, 0, 0, 0, 0), "cpu": TierUse(), "link": LinkUse()}
        async with watching(engine.endpoint) as pilot:
            await until_shown(pilot, "no requests", "tier is off")


@pytest.mark.parametrize("size", [(160, 46), (80, 24), (40, 12), (20, 5), (5, 2), (1, 1)])
async def test_evil_names_and_many_rows_fit_any_terminal(size: tuple[int, int]) -> None:
    names = [EVIL, "漢字" * 60, "x" * 256, "[bold red]markup[/]", "", "e\u0301" * 30]
    rows = [row(name + str(i), peer_name=name[:256], age_s=float(i)) for i in range(170) for name in names]
    with ShowingEngine(*rows[:1000], stats_every_s=0.5) as engine:  # as often as a real one
        engine.publish(swap_event(EVIL, "rejected", detail=EVIL))
        async with watching(engine.endpoint, size) as pilot:
            await until(pilot, lambda: len(app_of(pilot).table._entries) == 1000)
            await pilot.press("down", "enter", "f", "l", "end", "pagedown", "home")
            await pilot.pause()
            for line in lines(pilot):
                assert line.isprintable()
            for strip in pilot.app.screen._compositor.render_strips():
                assert strip.cell_length == size[0]


async def test_it_can_be_resized_at_any_time() -> None:
    with BusyEngine(50) as engine:
        async with watching(engine.endpoint) as pilot:
            await until_shown(pilot, "GPU KV", "events")
            await pilot.press("down", "enter")
            for size in ((80, 24), (10, 3), (200, 60), (80, 24)):
                await pilot.resize_terminal(*size)
                await pilot.pause()
            await until_shown(pilot, "REQUEST", "? Help")
            assert "GPU KV" not in "".join(line for line in lines(pilot) if "REQUEST" in line)


async def test_only_changed_cells_are_painted(monkeypatch: pytest.MonkeyPatch) -> None:
    with ShowingEngine(*(row(f"req-{i}", stall_s=9.0 - i) for i in range(8))) as engine:
        async with watching(engine.endpoint, (80, 24)) as pilot:
            await until_shown(pilot, "req-7")
            await pilot.press(*["left"] * 4)  # by STALL, so that AGE, which always changes, gives way
            await until_shown(pilot, "STALL▼")
            painted: list[Region] = []
            monkeypatch.setattr(
                RequestTable, "refresh", lambda self, *regions, **_: painted.extend(regions or [self.size.region])
            )
            engine.requests = (*engine.requests[:3], row("req-3", stall_s=6.0, cpu_blocks=33), *engine.requests[4:])
            await until(pilot, lambda: bool(painted))
            widths = {column.title: width for column, width in app_of(pilot).table._columns}
            left = sum(widths[title] + 1 for title in ("REQUEST", "STATE", "PROMPT", "NEW", "GPU"))
            assert set(painted) == {Region(left, 4, widths["CPU"], 1)}


# ---------------------------------------------------------------- keys and mouse


@asynccontextmanager
async def three_requests(size: tuple[int, int] = (160, 46)) -> AsyncIterator[tuple[ShowingEngine, Pilot[None]]]:
    rows = (row("req-1", age_s=1.0, swaps=5), row("req-2", age_s=3.0, swaps=1), row("req-3", age_s=2.0, swaps=9))
    with ShowingEngine(*rows) as engine:
        async with watching(engine.endpoint, size) as pilot:
            await until_shown(pilot, "req-3")
            yield engine, pilot


async def test_sort_by_keys_and_by_clicks() -> None:
    async with three_requests() as (_, pilot):
        assert shown_ids(pilot) == ["req-2", "req-3", "req-1"]
        await pilot.press("r")
        await until(pilot, lambda: shown_ids(pilot) == ["req-1", "req-3", "req-2"])
        await pilot.press("greater_than_sign", "greater_than_sign")  # past the last column: the first one
        await until(pilot, lambda: shown_ids(pilot) == ["req-1", "req-2", "req-3"])
        title = next(line for line in lines(pilot) if "SWAPS" in line)
        at = (title.index("SWAPS") + 1, lines(pilot).index(title))
        await pilot.click(offset=at)
        await until(pilot, lambda: shown_ids(pilot) == ["req-3", "req-1", "req-2"])
        await pilot.click(offset=at)
        await until(pilot, lambda: shown_ids(pilot) == ["req-2", "req-1", "req-3"])


async def test_filter_is_live_kept_by_enter_and_cleared_by_escape() -> None:
    async with three_requests((80, 24)) as (_, pilot):
        await pilot.press("slash", *"q-2")
        await until(pilot, lambda: shown_ids(pilot) == ["req-2"])
        await pilot.press("enter")
        await until_shown(pilot, "requests 1 of 3", "filter 'q-2'")
        await pilot.press("slash", *"[/]")
        await until_shown(pilot, "no request has this")
        await pilot.press("escape")
        await until(pilot, lambda: len(shown_ids(pilot)) == 3)


async def test_selection_stays_with_its_request_and_details_show_its_course() -> None:
    async with three_requests() as (engine, pilot):
        await pilot.press("down", "down", "enter")
        engine.publish(swap_event("req-3", "swapped", time=time.time()))
        await until_shown(pilot, "queue 0 ms", "s  ▼ swapped out")
        engine.requests = (row("req-3", age_s=99.0, state="swapped"), *engine.requests[:2])
        await until(pilot, lambda: shown_ids(pilot)[0] == "req-3")
        assert app_of(pilot).table.selected == (PEER, "req-3")
        engine.requests = engine.requests[1:]
        await until_shown(pilot, "gone since")
        await pilot.press("escape")
        await until_hidden(pilot, "gone since")


async def test_a_click_selects_and_a_second_one_opens() -> None:
    async with three_requests() as (_, pilot):
        at = (4, next(i for i, line in enumerate(lines(pilot)) if "req-3" in line))
        await pilot.click(offset=at)
        assert app_of(pilot).table.selected == (PEER, "req-3")
        assert not app_of(pilot).query_one("#detail", Panel).display
        await pilot.click(offset=at)
        await until_shown(pilot, "queue", "recomputed")


async def test_follow_keeps_a_request_in_view_and_its_events_alone() -> None:
    rows = [row(f"req-{i}", age_s=1000.0 - i) for i in range(100)]
    with ShowingEngine(*rows) as engine:
        async with watching(engine.endpoint, (80, 24)) as pilot:
            await until_shown(pilot, "req-5")
            await pilot.press("down", "f")
            await until_shown(pilot, "following req-0")
            engine.publish(swap_event("req-7", "swapped"))
            engine.publish(swap_event("req-0", "swapped"))
            engine.requests = (row("req-0", age_s=1.0), *rows[1:])  # sorted to the very end
            await until_shown(pilot, "req-0 ", "req-0 swapped out")
            assert "req-7 swapped out" not in screen(pilot)
            await pilot.press("escape")
            await until_shown(pilot, "req-7 swapped out")


async def test_pause_keeps_the_screen_and_goes_on_listening() -> None:
    async with three_requests() as (engine, pilot):
        await pilot.press("space")
        await until_shown(pilot, "paused")
        seen = app_of(pilot).history.frame().stats
        engine.requests = (row("req-9"),)
        engine.publish(swap_event("req-9", "swapped"))
        await until(pilot, lambda: "req-9" in str(app_of(pilot).history.frame().log))
        assert app_of(pilot).history.frame().stats != seen
        await pilot.press("r")
        assert "req-9" not in screen(pilot) and "req-3" in screen(pilot)
        await pilot.press("p")
        await until_shown(pilot, "req-9 ", "req-9 swapped out", "● live")


async def test_help_log_and_quit() -> None:
    async with three_requests((100, 40)) as (_, pilot):
        await pilot.press("question_mark")
        await until_shown(pilot, "follow it", "Esc closes", "times it was swapped out")
        await pilot.press("escape")
        await until_hidden(pilot, "Esc closes")
        small = app_of(pilot).query_one("#log").size.height
        await pilot.press("l")
        await until(pilot, lambda: app_of(pilot).query_one("#log").size.height > small)
        await pilot.press("q")
        await until(pilot, lambda: not pilot.app.is_running)


# ---------------------------------------------------------------- an engine that goes away


async def test_an_engine_that_goes_away_and_another_that_comes(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/e.sock"
    with ShowingEngine(row(), endpoint=endpoint) as engine:
        async with watching(endpoint) as pilot:
            await until_shown(pilot, "req-a", "● live")
            engine.stop()
            await until_shown(pilot, "✗ no engine", "waiting for one", "req-a")
            with ShowingEngine(row("req-z"), endpoint=endpoint):
                await until_shown(pilot, "● live", "the engine was restarted", "req-z")
                assert "req-a " not in screen(pilot)


async def test_a_silent_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "SILENT_S", 0.3)
    with ShowingEngine(row()) as engine:
        async with watching(engine.endpoint) as pilot:
            await until_shown(pilot, "● live")
            engine._stats_every_s = None
            await until_shown(pilot, "no snapshot for")
            engine._stats_every_s = 0.05
            await until_shown(pilot, "● live", "connected to")


async def test_a_live_engine_under_swap_pressure(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    flags = ("--load-format", "dummy", "--num-gpu-blocks", "12", "--max-cpu-offload-mb", "16")
    with running_engine(model, *flags) as engine:
        async with AsyncClient(engine.endpoint, name="load") as load, watching(engine.endpoint) as pilot:
            await load.ready()
            sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
            asked = [await load.submit([5 + i] * 20, sampling, request_id=f"req-{i}") for i in range(6)]
            await until_shown(pilot, "swapped out", "model on cpu")
            await asyncio.gather(*(generation.result() for generation in asked))
            await until_shown(pilot, "no requests")
            assert any(app_of(pilot).history.frame().past.out_bytes_per_s)


# ---------------------------------------------------------------- on a terminal


COLOURS = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")
LEAVES_THE_SCREEN = b"\x1b[?1049l"


def test_a_terminal_is_given_back_by_q() -> None:
    with ShowingEngine(row(EVIL)) as engine:
        terminal = Terminal(engine.endpoint)
        terminal.read_until("live")
        assert terminal.end(b"q") == 0
    assert LEAVES_THE_SCREEN in terminal.written
    assert COLOURS.search(terminal.written)
    assert b"\x1b]0;owned" not in terminal.written


@pytest.mark.parametrize(("by", "code"), [(b"\x03", 0), (signal.SIGTERM, 0)], ids=["ctrl-c", "sigterm"])
def test_a_terminal_is_given_back_however_it_ends(by: bytes | int, code: int) -> None:
    with ShowingEngine(row()) as engine:
        terminal = Terminal(engine.endpoint)
        terminal.read_until("live")
        assert terminal.end(by) == code
    assert LEAVES_THE_SCREEN in terminal.written


def test_no_color_is_respected() -> None:
    with ShowingEngine(row()) as engine:
        terminal = Terminal(engine.endpoint, NO_COLOR="1")
        terminal.read_until("live")
        assert terminal.end(b"q") == 0
    assert not COLOURS.search(terminal.written)
