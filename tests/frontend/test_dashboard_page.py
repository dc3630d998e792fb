"""The dashboard in a real browser, over engines that say what a test wants: what it draws, and what it withstands."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from browser import chromium, opened
from coldblock.protocol.messages import CpuOffload, LinkUse, Metric, RequestRow, Sample, Stats, SwapEvent, TierUse
from fake_engine import PEER, FakeEngine, swap_event
from frontend_kit import Server, fake_engine, serving, wait_until
from playwright.sync_api import Browser, Page, expect

ROW = RequestRow(
    "request-a", PEER, "decode", 40, 12, 4, 3, 1, 0.25, 10.0, 0, queue_s=2.0, ttft_s=5.0, tpot_s=0.05, peer_name="chat"
)
TTFT = "vllm:time_to_first_token_seconds"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


class Publisher:
    """Publishes a snapshot again and again, with the clock going on, and events when told to."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.changes: dict[str, object] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def stats(self) -> Stats:
        return msgspec.structs.replace(self.engine.stats(), **self.changes)

    def events(self, *events: SwapEvent) -> None:
        for event in events:
            self.engine.publish(event)

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.engine.publish(self.stats())


@contextlib.contextmanager
def published(folder: Path) -> Iterator[tuple[Server, Publisher]]:
    with fake_engine(folder) as engine, serving(engine) as server, Publisher(engine) as publisher:
        server.wait_for_health(200)
        yield server, publisher


@pytest.fixture
def stage(model_folder: Path) -> Iterator[tuple[Server, Publisher]]:
    with published(model_folder) as pair:
        yield pair


def phases(page: Page, row: int = 0) -> list[str]:
    """The names of a request's segments, in order."""
    segments = page.locator(".requests tbody tr").nth(row).locator(".segment")
    names: list[str] = segments.evaluate_all("nodes => nodes.map(node => node.className.split(' ')[1])")
    return names


# ---------------------------------------------------------------- what is drawn


def test_tiers_link_and_numbers(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    publisher.changes = {
        "running": 3,
        "waiting": 2,
        "swapped": 1,
        "tokens_per_s": 123.4,
        "gpu": TierUse(64, 40, 10, 6, 8, 5),
        "cpu": TierUse(32, 8, 4, 2, 18),
        "link": LinkUse(5 * 2**20, 0, 2.5e9, 0.0, 10e9, 20e9),
    }
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator(".engine h2")).to_have_text("tiny")
        expect(page.locator(".engine .status")).to_have_text("● live")
        assert page.locator(".tile b").all_inner_texts()[:4] == ["3", "2", "1", "123"]
        gpu, cpu = page.locator(".tier").all()
        assert gpu.locator(".legend li").all_inner_texts() == [
            "35 used",
            "5 shared",
            "10 cached",
            "6 in flight",
            "8 free",
        ]
        assert cpu.locator(".legend li").all_inner_texts() == [
            "8 used",
            "0 shared",
            "4 cached",
            "2 in flight",
            "18 free",
        ]
        widths = gpu.locator(".bar .part").evaluate_all("parts => parts.map(part => part.offsetWidth)")
        assert widths[0] / sum(widths) == pytest.approx(35 / 64, abs=0.02)
        assert "56 of 64 blocks taken" in gpu.inner_text()
        out, into = page.locator(".direction").all()
        assert "2.50 GB/s" in out.inner_text() and "25% of the link's 10.0 GB/s" in out.inner_text()
        assert "0% of the link's 20.0 GB/s" in into.inner_text() and "5.00 MiB since the start" in out.inner_text()


def test_without_a_cpu_tier_the_page_says_so(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    publisher.changes = {"cpu_offload": CpuOffload(False, 0, 0, 0, 0)}
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator("[data-part=tiers]")).to_contain_text("There is no CPU tier")
        expect(page.locator("[data-part=requests-note]")).to_contain_text("No requests in this time")


def test_a_swap_is_drawn_where_its_events_say(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    """A request that arrived 10 s ago, waited 2 s, had its first token after 5: its swap begins with its events."""
    server, publisher = stage
    publisher.changes = {"requests": (msgspec.structs.replace(ROW, swaps=0),), "running": 1}
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator(".segment.decode").nth(1)).to_be_visible()  # the first is the legend's
        assert phases(page) == ["queue", "prefill", "decode"]
        widths = page.locator(".lane .segment").evaluate_all("nodes => nodes.map(node => parseFloat(node.style.width))")
        assert widths[0] == pytest.approx(100 * 2 / 60, abs=0.2) and widths[1] == pytest.approx(100 * 3 / 60, abs=0.2)
        began = time.time()
        publisher.changes["requests"] = (msgspec.structs.replace(ROW, state="swapped", stalled_s=0.1),)
        publisher.events(
            swap_event("request-a", "swapping_out", time=began, seconds=0.0),
            swap_event("request-a", "swapped", time=began + 0.01, seconds=0.01, queued_s=0.002),
            swap_event("somebody-else", "resumed", time=began + 0.02),
        )
        expect(page.locator(".lane .mark.out")).to_have_count(1)
        expect(page.locator(".lane .mark.in")).to_have_count(0)
        wait_until(lambda: phases(page)[-2:] == ["copying", "swapped"])
        expect(page.locator(".requests .state")).to_have_text("▽ swapped")
        publisher.changes["requests"] = (ROW,)
        publisher.events(
            swap_event("request-a", "swapping_in", reason="resume", seconds=0.0),
            swap_event("request-a", "resumed", reason="resume"),
        )
        expect(page.locator(".lane .mark.in")).to_have_count(1)
        wait_until(lambda: phases(page)[-1] == "decode")
        log = page.locator("[data-part=moves] tr")
        assert "▲ swapped in\tits turn again\t3\t1.69 MiB\t1.50 ms" in log.nth(0).inner_text()
        publisher.changes["requests"] = ()
        expect(page.locator(".requests .state")).to_have_text("■ ended")
        expect(page.locator(".lane .mark.out")).to_have_count(1)


def test_events_stamped_after_the_snapshot_that_knows_of_them(
    browser: Browser, stage: tuple[Server, Publisher]
) -> None:
    """An event's time is when it is sent, a snapshot's when it is made: on a busy machine the later one says less."""
    server, publisher = stage
    publisher.changes = {"requests": (msgspec.structs.replace(ROW, swaps=0),), "running": 1}
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator(".lane .segment.decode")).to_be_visible()
        now = time.time()
        publisher.events(
            swap_event("request-a", "swapped", time=now - 2),
            swap_event("request-a", "swapping_in", time=now + 0.4),
            swap_event("request-a", "resumed", time=now + 0.41),
        )
        wait_until(lambda: len(phases(page)) >= 6)
        assert phases(page) == ["queue", "prefill", "decode", "swapped", "copying", "decode"]


def test_what_was_before_the_page_looked_is_not_made_up(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    row = msgspec.structs.replace(ROW, state="swapped", swaps=2, stall_s=4.0, stalled_s=1.0)
    publisher.changes = {"requests": (row,), "swapped": 1}
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator(".lane .segment.swapped")).to_be_visible()
        assert phases(page) == ["queue", "unseen", "swapped"]


def test_an_id_that_two_peers_use_gets_no_swap_of_the_other(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    rows = tuple(msgspec.structs.replace(ROW, peer=peer, peer_name=peer, swaps=0) for peer in ("one", "two"))
    publisher.changes = {"requests": rows, "running": 2}
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator(".lane")).to_have_count(2)
        publisher.events(
            swap_event("request-a", "swapped", peer="three"), swap_event("request-a", "swapped", peer="two")
        )
        expect(page.locator(".mark")).to_have_count(1)
        expect(page.locator(".requests tbody tr", has_text="two").locator(".mark")).to_have_count(1)
        expect(page.locator("[data-part=moves] tr")).to_have_count(2)


def test_latencies_are_those_of_the_last_minutes_or_else_all(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    metric = Metric(TTFT, "histogram", "", (Sample(counts=(10, 0, 0), sum=1.0),), (0.1, 1.0))
    publisher.changes = {"metrics": (metric,)}
    with opened(browser, f"{server.url}/dashboard") as page:
        figure = page.locator(".latency")
        expect(figure).to_contain_text("10 requests since the engine's start")
        assert "median 50.0 ms" in figure.inner_text()
        publisher.changes["metrics"] = (msgspec.structs.replace(metric, samples=(Sample(counts=(10, 4, 1), sum=9.0),)),)
        expect(figure).to_contain_text("5 requests in the last 5 minutes")
        assert "median 663 ms" in figure.inner_text() and "99% > 1.00 s" in figure.inner_text()


def test_copies_ahead_of_need_are_shown_when_wanted(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator(".status")).to_have_text("● live")
        publisher.events(
            swap_event("", "copied_out", reason="write_behind"), swap_event("x", "rejected", detail="full")
        )
        log = page.locator("[data-part=moves] tr")
        expect(log).to_have_count(1)
        expect(log).to_contain_text("✕ not swapped")
        page.get_by_label("also copies ahead of need").check()
        expect(log).to_have_count(2)
        expect(log.nth(1)).to_contain_text("ahead of need")


def test_more_requests_than_fit_are_counted(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    rows = tuple(msgspec.structs.replace(ROW, request_id=f"r{index}") for index in range(250))
    publisher.changes = {"requests": rows, "running": 300, "waiting": 700}
    with opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator("[data-part=requests-note]")).to_have_text("and 960 more live requests")
        expect(page.locator(".requests tbody tr")).to_have_count(40)


# ---------------------------------------------------------------- what it withstands

HOSTILE = (
    "<img src=x onerror=window.pwned=1>",
    "<script>window.pwned=1</script>",
    "\"' onmouseover=window.pwned=1 x='",
    "</td></tr></table><svg onload=window.pwned=1>",
    "\u202e\n\ndata: {}\n\nevent: state",
    "javascript:window.pwned=1",
    "__proto__",
    "constructor",
)


def test_names_that_others_made_up_stay_text(browser: Browser, model_folder: Path) -> None:
    with fake_engine(model_folder) as engine:
        engine.model = msgspec.structs.replace(engine.model, name=HOSTILE[0], device=HOSTILE[1])
        with serving(engine) as server, Publisher(engine) as publisher:
            publisher.changes = {
                "requests": tuple(
                    msgspec.structs.replace(ROW, request_id=name, peer=name, peer_name=name, state=name)
                    for name in HOSTILE
                )
            }
            with opened(browser, f"{server.url}/dashboard") as page:
                expect(page.locator(".lane")).to_have_count(len(HOSTILE))
                publisher.events(*(swap_event(name, "rejected", detail=name) for name in HOSTILE))
                expect(page.locator("[data-part=moves] tr")).to_have_count(len(HOSTILE))
                shown = page.locator(".requests .name > .made-up").evaluate_all(
                    "nodes => nodes.map(n => n.textContent)"
                )
                assert shown == list(HOSTILE)
                states = page.locator(".requests .state").evaluate_all("nodes => nodes.map(node => node.textContent)")
                assert states == list(HOSTILE)
                expect(page.locator(".engine h2")).to_have_text(HOSTILE[0])
                page.evaluate(  # at once, as rows are replaced whenever there is news
                    "document.querySelectorAll('*').forEach(node => node.dispatchEvent(new MouseEvent('mouseover')))"
                )
                assert page.evaluate("window.pwned") is None
                assert page.locator("img, script:not([src]), svg:not(.sparkline)").count() == 0


def test_markup_could_not_run_even_if_a_line_of_the_page_put_it_in(
    browser: Browser, stage: tuple[Server, Publisher]
) -> None:
    server, _ = stage
    with opened(browser, f"{server.url}/dashboard", problems_expected=True) as page:
        with pytest.raises(Exception, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<img src=x onerror=window.pwned=1>'")
        page.evaluate("document.body.append(Object.assign(document.createElement('img'), {src: 'http://192.0.2.1/x'}))")
        with pytest.raises(Exception, match="TrustedScript"):
            page.evaluate("document.body.setAttribute('onclick', 'window.pwned = 1')")
        assert page.evaluate("window.pwned") is None


def test_an_engine_that_goes_and_comes_back(browser: Browser, model_folder: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/e.sock"
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(fake_engine(model_folder, endpoint=endpoint))
        server = stack.enter_context(serving(engine))
        with opened(browser, f"{server.url}/dashboard") as page:
            status = page.locator(".status")
            with Publisher(engine) as publisher:
                publisher.changes = {"requests": (ROW,), "running": 1}
                expect(status).to_have_text("● live")
                expect(page.locator(".requests .state")).to_have_text("▸ decode")
            engine.stop()
            expect(status).to_contain_text("■ not live: No engine answers here")
            expect(page.locator(".engine")).to_have_class("engine stale")
            with fake_engine(model_folder, endpoint=endpoint) as second, Publisher(second):
                expect(status).to_have_text("● live")
                log = page.locator("[data-part=moves] tr")
                expect(log.first).to_contain_text("engine restarted")
                expect(log.nth(1)).to_contain_text("engine gone")
                expect(page.locator(".requests .state")).to_have_text("■ ended")


def test_a_page_opened_before_any_engine_waits_and_says_so(
    browser: Browser, model_folder: Path, tmp_path: Path
) -> None:
    engine = fake_engine(model_folder, endpoint=f"ipc://{tmp_path}/e.sock")
    with serving(engine) as server, opened(browser, f"{server.url}/dashboard") as page:
        expect(page.locator(".status")).to_contain_text("No engine answers here")
        with engine, Publisher(engine):
            expect(page.locator(".status")).to_have_text("● live")


def test_a_frontend_that_goes_and_comes_back(browser: Browser, model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, Publisher(engine), contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(engine))
        with opened(browser, f"{server.url}/dashboard", problems_expected=True) as page:
            connection = page.locator("#connection")
            expect(connection).to_have_text("live")
            stack.close()
            expect(connection).to_contain_text("trying again")
            with serving(engine, port=int(server.url.rpartition(":")[2])):
                expect(connection).to_have_text("live")
                expect(page.locator(".engine")).to_have_count(1)


def test_two_engines_have_a_panel_each(browser: Browser, model_folder: Path) -> None:
    with (
        fake_engine(model_folder) as one,
        fake_engine(model_folder) as two,
        serving(one, two) as server,
        Publisher(one) as first,
        Publisher(two) as second,
        opened(browser, f"{server.url}/dashboard") as page,
    ):
        first.changes, second.changes = {"running": 1}, {"running": 2}
        expect(page.locator(".status")).to_have_text(["● live", "● live"])
        for index, (engine, running) in enumerate(((one, "1"), (two, "2"))):
            panel = page.locator(".engine").nth(index)
            expect(panel.locator(".tile b").first).to_have_text(running)
            expect(panel.locator(".about")).to_contain_text(engine.endpoint)


def test_a_frontend_with_keys_asks_for_one(browser: Browser, model_folder: Path) -> None:
    with (
        fake_engine(model_folder) as engine,
        serving(engine, api_key="schlüssel €") as server,
        Publisher(engine),
        opened(browser, f"{server.url}/dashboard", problems_expected=True) as page,
    ):
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        assert page.locator(".engine").count() == 0
        field.fill("wrong")
        field.press("Enter")
        expect(page.locator("#key-problem")).to_contain_text("does not know this key")
        field.fill("schlüssel €")
        field.press("Enter")
        expect(page.locator(".status")).to_have_text("● live")
        expect(field).to_be_hidden()
        page.reload()
        expect(page.locator(".status")).to_have_text("● live")
        assert "key" not in page.url


# ---------------------------------------------------------------- for everybody


@pytest.mark.parametrize("width", [340, 600, 800])
def test_a_narrow_window_is_not_wider_than_itself(
    browser: Browser, stage: tuple[Server, Publisher], width: int
) -> None:
    server, publisher = stage
    publisher.changes = {"requests": (msgspec.structs.replace(ROW, request_id="x" * 256, peer_name="y" * 256),)}
    viewport = {"width": width, "height": 700}
    with opened(browser, f"{server.url}/dashboard", viewport=viewport) as page:
        expect(page.locator(".lane")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lane = page.locator(".lane").bounding_box()
        assert lane is not None and lane["width"] > width / 3 and lane["x"] + lane["width"] <= width


def test_the_keyboard_is_enough(browser: Browser, stage: tuple[Server, Publisher]) -> None:
    server, publisher = stage
    publisher.changes = {"running": 1}
    with opened(browser, f"{server.url}/dashboard") as page:
        running = page.locator(".tile b").first
        expect(running).to_have_text("1")
        page.keyboard.press("Tab")
        expect(page.get_by_label("Show the last")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        pause = page.get_by_role("button", name="Resume")
        expect(pause).to_be_focused()
        publisher.changes = {"running": 7}
        page.wait_for_timeout(1000)
        assert running.inner_text() == "1"
        page.keyboard.press("Enter")
        expect(running).to_have_text("7")
        for _ in range(2):
            page.keyboard.press("Tab")
        expect(page.get_by_role("region", name="Event log")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_phases_differ_without_colour(
    browser: Browser, stage: tuple[Server, Publisher], scheme: str
) -> None:
    server, _ = stage
    with opened(browser, f"{server.url}/dashboard", color_scheme=scheme) as page:
        expect(page.locator(".status")).to_have_text("● live")
        page_colour = luminance(page, "getComputedStyle(document.body).backgroundColor")
        assert (page_colour > 0.5) == (scheme == "light")
        card = luminance(page, "getComputedStyle(document.querySelector('.tile')).backgroundColor")
        for selector in (".tile b", ".note", ".about", ".status", ".legend li"):
            text = luminance(page, f"getComputedStyle(document.querySelector('.engine {selector}')).color")
            light, dark = max(text, card), min(text, card)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, selector
        shapes = page.locator("[data-part=phases] .segment").evaluate_all(
            "nodes => nodes.map(node => [node.offsetHeight, getComputedStyle(node).backgroundImage].join())"
        )
        assert len(shapes) == len(set(shapes)) == 5


def luminance(page: Page, colour: str) -> float:
    """The relative luminance (WCAG) of a computed colour."""
    channels = page.evaluate(f"{colour}.match(/[\\d.]+/g).slice(0, 3).map(Number)")
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in channels)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
