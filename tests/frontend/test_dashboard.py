"""The dashboard without a browser: what it tells, to whom, how often it asks the engine, and what it costs."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coldblock.frontend.dashboard import feed as feed_module
from coldblock.frontend.dashboard import pages, view
from coldblock.frontend.dashboard.feed import MAX_MOVES, Feed, Viewer
from coldblock.frontend.engines import Engine
from coldblock.protocol.client import AsyncClient
from coldblock.protocol.messages import CpuOffload, LinkUse, Metric, RequestRow, Sample, Stats, TierUse
from fake_engine import FakeEngine, swap_event
from frontend_kit import Server, byte_ids, fake_engine, serving, wait_until

EVENTS = "/dashboard/events"
PAGE = Path(view.__file__).parent / "page"
ROW = RequestRow("r", "p", "decode", 4, 2, 1, 0, 0, 0.0, 1.0, 0)


def parsed(chunk: bytes | str) -> list[tuple[str, Any]]:
    """Names and data of whole server-sent events."""
    text = chunk.decode() if isinstance(chunk, bytes) else chunk
    pairs = [event.split("\n") for event in text.split("\n\n") if event]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def snapshot_of(stats: Stats) -> dict[str, Any]:
    ((name, state),) = parsed(view.live_state(0, "ipc:///e", "tiny", stats))
    assert (name, state["engine"], state["endpoint"], state["problem"]) == ("state", 0, "ipc:///e", None)
    return dict(state["snapshot"])


# ---------------------------------------------------------------- what is told


def test_a_snapshot_has_tiers_link_requests_and_the_latencies_alone() -> None:
    ttft = Metric("vllm:time_to_first_token_seconds", "histogram", "", (Sample(counts=(1, 2), sum=3.0),), (0.5,))
    other = Metric("vllm:num_requests_running", "gauge", "", (Sample(1.0),))
    stats = msgspec.structs.replace(
        FakeEngine().stats(),
        requests=(ROW,),
        running=1,
        metrics=(ttft, other),
        cpu=TierUse(8, 3, 2, 1, 2, 1),
        link=LinkUse(out_bytes=7, peak_out_bytes_per_s=5e9),
    )
    told = snapshot_of(stats)
    assert told["model"] == "tiny" and told["gpu"]["total"] == 64
    assert told["cpu"] == {"total": 8, "used": 3, "cached": 2, "in_flight": 1, "free": 2, "shared": 1}
    assert told["link"]["out_bytes"] == 7 and told["link"]["peak_out_bytes_per_s"] == 5e9
    assert told["requests"][0]["request_id"] == "r" and told["unlisted"] == 0
    assert told["latencies"] == {"ttft": {"bounds": [0.5], "counts": [1, 2]}}
    assert "metrics" not in told and "path" not in json.dumps(told)


def test_without_a_cpu_tier_there_is_none() -> None:
    stats = msgspec.structs.replace(FakeEngine().stats(), cpu_offload=CpuOffload(False, 0, 0, 0, 0))
    assert snapshot_of(stats)["cpu"] is None


def test_a_long_queue_is_cut_and_counted() -> None:
    rows = tuple(msgspec.structs.replace(ROW, request_id=str(index)) for index in range(view.MAX_ROWS + 50))
    told = snapshot_of(msgspec.structs.replace(FakeEngine().stats(), requests=rows, running=10, waiting=1500))
    assert len(told["requests"]) == view.MAX_ROWS and told["requests"][0]["request_id"] == "0"
    assert told["unlisted"] == 1510 - view.MAX_ROWS


def test_a_name_with_line_breaks_stays_one_event() -> None:
    hostile = "\n\nevent: state\ndata: {}\r\n\u2028</script>"
    stats = msgspec.structs.replace(FakeEngine().stats(), requests=(msgspec.structs.replace(ROW, request_id=hostile),))
    assert snapshot_of(stats)["requests"][0]["request_id"] == hostile
    ((_, told),) = parsed(view.moves(0, [view.move(swap_event(hostile, detail=hostile))], 0))
    assert told["moves"][0]["request_id"] == told["moves"][0]["detail"] == hostile


# ---------------------------------------------------------------- a viewer


async def test_a_slow_viewer_gets_the_newest_state_and_hears_how_many_moves_it_missed() -> None:
    viewer = Viewer()
    for index in range(MAX_MOVES + 3):
        viewer.put_move(0, b'{"n":%d}' % index)
    for engine, word in ((0, "old"), (1, "other"), (0, "new")):
        viewer.put_state(engine, view.lost_state(engine, "e", word))
    chunk = await viewer.take()
    assert chunk is not None
    (moves_name, moves), *states = parsed(chunk)
    assert (moves_name, moves["missed"], len(moves["moves"])) == ("moves", 3, MAX_MOVES)
    assert [move["n"] for move in moves["moves"]] == list(range(3, MAX_MOVES + 3))
    assert sorted((state["engine"], state["problem"]) for _, state in states) == [(0, "new"), (1, "other")]
    viewer.put_state(0, view.lost_state(0, "e", "next"))
    assert [name for name, _ in parsed(await viewer.take() or b"")] == ["state"], "nothing is told twice"


async def test_a_closed_viewer_ends() -> None:
    viewer = Viewer()
    waiting = asyncio.create_task(viewer.take())
    await asyncio.sleep(0)
    viewer.close()
    assert await waiting is None and await viewer.take() is None


# ---------------------------------------------------------------- one subscription an engine


@asynccontextmanager
async def feeding(*endpoints: str) -> AsyncIterator[tuple[Feed, list[AsyncClient]]]:
    clients = [AsyncClient(endpoint) for endpoint in endpoints]
    for client in clients:
        await client.connect()
    feed = Feed([Engine(*pair) for pair in zip(endpoints, clients, strict=True)], lambda model: model.name)
    try:
        yield feed, clients
    finally:
        for client in clients:
            await client.close()


async def told(viewer: Viewer, wanted: Callable[[str, Any], bool]) -> Any:
    """The data of the first event that is wanted."""
    async with asyncio.timeout(20):
        while (chunk := await viewer.take()) is not None:
            for name, data in parsed(chunk):
                if wanted(name, data):
                    return data
    raise AssertionError("the viewer was closed")


def live(name: str, data: Any) -> bool:
    return name == "state" and data["snapshot"] is not None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_nobody_looks_nobody_subscribes_and_two_share_one() -> None:
    with FakeEngine(stats_every_s=0.05) as engine:
        async with feeding(engine.endpoint) as (feed, (client,)):
            await client.ready()
            assert not client._subscriptions
            with feed.watch() as first:
                await told(first, live)
                with feed.watch() as second:
                    await told(second, live)
                    assert len(client._subscriptions) == 1
                assert len(client._subscriptions) == 1
            await until(lambda: not client._subscriptions)
            with feed.watch() as again:
                await told(again, live)
                assert len(client._subscriptions) == 1


async def test_moves_come_in_order_before_the_state() -> None:
    with FakeEngine() as engine:
        async with feeding(engine.endpoint) as (feed, (client,)):
            await client.ready()
            with feed.watch() as viewer:
                async with asyncio.timeout(20):
                    while not client._subscriptions:
                        await asyncio.sleep(0.01)
                    seen: list[tuple[str, Any]] = []
                    while not seen:  # the subscription takes a moment to reach the publisher
                        for phase in ("swapping_out", "swapped"):
                            engine.publish(swap_event("a", phase, blocks=3))
                        engine.publish(engine.stats())
                        await asyncio.sleep(0.05)
                        if viewer._ready.is_set():
                            seen = parsed(await viewer.take() or b"")
                assert [name for name, _ in seen] == ["moves", "state"]
                phases = [move["phase"] for move in seen[0][1]["moves"]]
                assert phases[-2:] == ["swapping_out", "swapped"] and seen[0][1]["moves"][-1]["blocks"] == 3


async def test_an_engine_that_comes_back_elsewhere_is_followed(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/e.sock"
    async with feeding(endpoint) as (feed, _):
        with feed.watch() as viewer:
            gone = await told(viewer, lambda name, data: name == "state")
            assert gone["snapshot"] is None and "No engine answers here" in gone["problem"]
            with FakeEngine(endpoint=endpoint, engine_id="first", stats_every_s=0.05):
                assert (await told(viewer, live))["snapshot"]["engine_id"] == "first"
            await told(viewer, lambda name, data: name == "state" and data["problem"] is not None)
            second = FakeEngine(endpoint=endpoint, engine_id="second", stats_every_s=0.05)
            second.events_endpoint = f"ipc://{tmp_path}/elsewhere.sock"
            with second:
                assert (await told(viewer, live))["snapshot"]["engine_id"] == "second"


async def test_an_engine_that_publishes_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "QUIET_S", 0.2)
    with FakeEngine() as engine:
        async with feeding(engine.endpoint) as (feed, (client,)):
            await client.ready()
            with feed.watch() as viewer:
                quiet = await told(viewer, lambda name, data: name == "state")
                assert "publishes nothing" in quiet["problem"]


async def test_a_stuck_engine_is_told() -> None:
    with FakeEngine(stats_every_s=0.05) as engine:
        engine.step_age_s = 99.0
        async with feeding(engine.endpoint) as (feed, (client,)):
            await client.ready()
            with feed.watch() as viewer:
                await told(viewer, lambda name, data: "stands still" in (data.get("problem") or ""))


async def test_an_events_endpoint_that_cannot_be_used_is_told_with_the_reason() -> None:
    engine = FakeEngine()
    with engine:
        engine.events_endpoint = "tcp://192.0.2.1:5555"
        async with feeding(engine.endpoint) as (feed, (client,)):
            await client.ready()
            with feed.watch() as viewer:
                data = await told(viewer, lambda name, data: "192.0.2.1" in (data.get("problem") or ""))
                assert "encrypt" in data["problem"]


# ---------------------------------------------------------------- over HTTP


@pytest.fixture
def watched(model_folder: Path) -> Iterator[Server]:
    engine = fake_engine(model_folder, lambda prompt: byte_ids("a" * 500), delay_s=0.05, stats_every_s=0.05)
    with engine, serving(engine) as server:
        server.wait_for_health(200)
        yield server


def first_live(lines: Iterator[str]) -> Any:
    """The first state with a snapshot in a stream's lines."""
    for line in lines:
        if line.startswith("data: ") and (data := json.loads(line.removeprefix("data: "))).get("snapshot"):
            return data
    raise AssertionError("the stream ended")


def test_the_stream_is_server_sent_events_with_the_request_but_not_its_words(watched: Server) -> None:
    with (
        watched.http() as http,
        http.stream("POST", "/v1/completions", json={"prompt": "secret words", "stream": True}),
    ):
        wait_until(lambda: bool(watched.engine.stats().requests))
        with http.stream("GET", EVENTS) as stream:
            assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert stream.headers["cache-control"] == "no-cache" and stream.headers["x-request-id"]
            state = first_live(stream.iter_lines())
    (row,) = state["snapshot"]["requests"]
    assert row["prompt_tokens"] == len("secret words") and "secret" not in json.dumps(state)
    assert "prompt" not in {key for key in row if key != "prompt_tokens"}


def test_every_engine_of_the_frontend_is_told(model_folder: Path) -> None:
    engines = [fake_engine(model_folder, stats_every_s=0.05) for _ in range(2)]
    with engines[0], engines[1], serving(*engines) as server, server.http() as http:
        found: dict[int, str] = {}
        with http.stream("GET", EVENTS) as stream:
            lines = stream.iter_lines()
            while len(found) < 2:
                data = first_live(lines)
                found[data["engine"]] = data["snapshot"]["engine_id"]
        assert found == {0: engines[0].engine_id, 1: engines[1].engine_id}


def test_the_page_is_confined_and_everything_it_names_is_there(watched: Server) -> None:
    with watched.http() as http:
        page = http.get("/dashboard")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"):
            assert rule in policy
        assert "unsafe" not in policy and "http" not in policy
        for file in PAGE.iterdir():
            reply = http.get(f"/dashboard/{file.name}")
            assert (reply.status_code, reply.content) == (200, file.read_bytes())
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert {file.suffix for file in PAGE.iterdir()} == {".html", ".css", ".js", ".svg"}
        missing = http.get("/dashboard/nothing.js")
        assert missing.status_code == 404 and "nothing.js" in missing.json()["error"]["message"]
        assert http.get("/dashboard/..%2Ffeed.py").status_code == 404


class Attributes(HTMLParser):
    """Every attribute of a page, as (tag, name, value)."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(tag, "", None), *((tag, name, value) for name, value in attrs)]


def test_no_file_of_the_page_names_another_host_or_runs_inline() -> None:
    found = Attributes((PAGE / "index.html").read_text()).found
    assert not [name for _, name, _ in found if name.startswith("on") or name == "style"]
    scripts = [value for tag, name, value in found if tag == "script" and name == "src"]
    assert len([tag for tag, name, _ in found if tag in ("script", "style") and not name]) == len(scripts) == 1
    for file in PAGE.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text and "innerHTML" not in text


def test_a_probe_with_head_does_not_wait_for_ever(watched: Server) -> None:
    with watched.http() as http:
        for path in ("/dashboard", EVENTS, "/dashboard/main.js"):
            assert http.head(path).status_code == 200


def test_with_keys_the_page_is_open_and_what_it_shows_is_not(model_folder: Path) -> None:
    engine = fake_engine(model_folder, stats_every_s=0.05)
    with engine, serving(engine, api_key="k") as server, server.http() as http:
        assert http.get("/dashboard").status_code == http.get("/dashboard/main.js").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = http.get(EVENTS, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        with http.stream("GET", EVENTS, headers={"authorization": "Bearer k"}) as stream:
            first_live(stream.iter_lines())


def test_requests_are_counted_by_route_not_by_what_was_asked(watched: Server) -> None:
    with watched.http() as http:
        for name in ("a", "b/c", "main.js"):
            http.get(f"/dashboard/{name}")
        text = http.get("/metrics").text
    assert 'path="/dashboard/{name}"' in text and "/dashboard/a" not in text


def test_leaving_ends_the_subscription(watched: Server) -> None:
    with watched.http() as http, http.stream("GET", EVENTS) as stream:
        lines = stream.iter_lines()  # held: forgetting it closes the connection
        first_live(lines)
        assert 'coldblock_http_open_requests{path="/dashboard/events"} 1.0' in http.get("/metrics").text
    with watched.http() as http:
        closed = 'coldblock_http_open_requests{path="/dashboard/events"} 0.0'
        wait_until(lambda: closed in http.get("/metrics").text)


@contextmanager
def deaf_browser(server: Server) -> Iterator[socket.socket]:
    """A connection that asks for the stream and never reads."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        browser.settimeout(20)
        browser.connect((host, int(port)))
        browser.sendall(f"GET {EVENTS} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        yield browser


def publish_much(engine: FakeEngine, stop: threading.Event) -> None:
    """Snapshots of 70 kB each, until told to stop."""
    rows = tuple(msgspec.structs.replace(ROW, request_id=str(index) * 60) for index in range(view.MAX_ROWS))
    while not stop.wait(0.02):
        engine.publish(msgspec.structs.replace(engine.stats(), requests=rows))


def test_a_browser_that_does_not_read_is_cut_off_and_the_others_go_on(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STUCK_S", 0.5)
    stop = threading.Event()
    with fake_engine(model_folder) as engine, serving(engine) as server:
        threading.Thread(target=publish_much, args=(engine, stop), daemon=True).start()
        try:
            with deaf_browser(server) as deaf, server.http() as http, http.stream("GET", EVENTS) as stream:
                lines = stream.iter_lines()
                first_live(lines)
                two = 'coldblock_http_open_requests{path="/dashboard/events"} 2.0'
                with server.http() as other:
                    wait_until(lambda: two in other.get("/metrics").text)
                    wait_until(lambda: first_live(lines) and two not in other.get("/metrics").text)
                first_live(lines)
                last = b""
                with suppress(ConnectionResetError):
                    while part := deaf.recv(2**20):
                        last = part
                assert not last.endswith(b"0\r\n\r\n"), "it was not cut, it read all"
        finally:
            stop.set()


def test_a_graceful_stop_ends_the_stream(model_folder: Path) -> None:
    """Leaving `serving` waits for open replies, there without a limit."""
    with fake_engine(model_folder, stats_every_s=0.05) as engine:
        lines: list[str] = []
        running = serving(engine)
        server = running.__enter__()
        opened = threading.Event()

        def read() -> None:
            with server.http() as http, http.stream("GET", EVENTS) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    opened.set()
            lines.append("ended whole")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert opened.wait(20)
        running.__exit__(None, None, None)
        reader.join(20)
        assert lines[-1] == "ended whole", "the body was cut off"
