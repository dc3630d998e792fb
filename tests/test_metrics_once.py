"""Each engine's metrics once, whatever frontends are scraped; each frontend's own, of all its workers, in each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from frontend_kit import fake_engine, wait_until, write_model
from processes import EngineProcess, running_engine, write_tiny_model
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, tuple[tuple[str, str], ...]]
HTTP = ("coldblock_http_", "coldblock_engine_up")


@contextlib.contextmanager
def frontend(endpoint: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`coldblock frontend` on a free port, once it answers: its URL and process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "coldblock", "frontend", "--engine", endpoint, "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url), timeout_s=60)
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def answers(url: str) -> bool:
    time.sleep(0.05)
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/version").status_code == 200
    return False


def scrape(url: str) -> dict[Series, float]:
    """What Prometheus would store of one scrape. Each on a connection of its own: any worker may answer."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def engine_series(found: dict[Series, float]) -> set[Series]:
    return {series for series in found if not series[0].startswith(HTTP)}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    with running_engine(model, "--load-format", "dummy", "--num-gpu-blocks", "8") as running:
        yield running


def test_two_frontends_show_each_engine_series_once(engine: EngineProcess) -> None:
    with frontend(engine.endpoint) as (first, _), frontend(engine.endpoint, "--workers", "2") as (second, _):
        urls = [second, first, second, second, first]  # the second one is asked first: it exports
        rounds = [scrape(url) for url in urls]
        seen = Counter(series for url in (first, second) for series in engine_series(scrape(url)))
        note = httpx.get(f"{first}/metrics").text.splitlines()[-1]
        with engine.client() as watcher:
            watcher.ready()
            told = {metric.name for metric in watcher.stats().metrics}
    assert set(seen.values()) == {1}
    assert {name.removesuffix("_bucket") for name, _ in seen} >= told > set(), "all that the engine counts is shown"
    assert [bool(engine_series(found)) for found in rounds] == [True, False, True, True, False]
    assert len({frozenset(engine_series(found)) for found in rounds if engine_series(found)}) == 1
    assert all(found["coldblock_engine_up", (("endpoint", engine.endpoint),)] == 1 for found in rounds)
    assert note.startswith(f"# The metrics of the engine at {engine.endpoint} are exported by") and second in note


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_exporter_ends_the_next_scrape_of_another_has_them(engine: EngineProcess, end: int) -> None:
    with frontend(engine.endpoint) as (second, _), frontend(engine.endpoint) as (first, process):
        assert engine_series(scrape(first)) and not engine_series(scrape(second))
        os.kill(process.pid, end)
        process.wait(30)
        wait_until(lambda: bool(engine_series(scrape(second))), timeout_s=30)


def test_a_frontend_alone_shows_all(engine: EngineProcess) -> None:
    with frontend(engine.endpoint) as (url, _):
        found = scrape(url)
    names = {name for name, _ in found}
    assert {"vllm:num_requests_running", "coldblock_swapped_requests", "coldblock_http_requests_total"} <= names


def test_http_numbers_are_those_of_all_workers(tmp_path: Path) -> None:
    with fake_engine(write_model(tmp_path)) as engine, frontend(engine.endpoint, "--workers", "3") as (url, _):
        for _ in range(30):
            httpx.get(f"{url}/v1/nothing")
        answers_404 = [scrape(url)["coldblock_http_requests_total", (("path", "other"), ("status", "404"))]]
        answers_404 += [scrape(url)["coldblock_http_requests_total", (("path", "other"), ("status", "404"))]]
    assert answers_404 == [30, 30]
