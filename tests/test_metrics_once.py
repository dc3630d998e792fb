"""Each engine's metrics once, whatever frontends are scraped; each frontend's own, of all its workers, in each."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from frontend_kit import fake_engine, wait_until, write_model
from processes import EngineProcess, FrontendProcess, running_engine, running_frontend, write_tiny_model
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, tuple[tuple[str, str], ...]]
FLAGS = ("--load-format", "dummy", "--num-gpu-blocks", "8")
HTTP = ("coldblock_http_", "coldblock_engine_up")


def scrape(frontend: FrontendProcess) -> dict[Series, float]:
    """What Prometheus would store of one scrape, once the frontend has found its engine. Each scrape comes on a
    connection of its own, so that any worker may answer."""
    found: dict[Series, float] = {}

    def reaches_its_engine() -> bool:
        families = text_string_to_metric_families(httpx.get(f"{frontend.url}/metrics", timeout=30).text)
        found.update(
            {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
        )
        return any(name == "coldblock_engine_up" and value == 1 for (name, _), value in found.items())

    wait_until(reaches_its_engine)
    return found


def engine_series(found: dict[Series, float]) -> set[Series]:
    return {series for series in found if not series[0].startswith(HTTP)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineProcess]:
    with running_engine(model, *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def impatient_engine(model: Path) -> Iterator[EngineProcess]:
    """One that soon notices when a frontend was killed."""
    with running_engine(model, *FLAGS, "--peer-timeout-s", "3") as running:
        yield running


def test_a_frontend_alone_shows_all(engine: EngineProcess) -> None:
    with running_frontend(engine.endpoint) as alone:
        names = {name for name, _ in scrape(alone)}
    assert {"vllm:num_requests_running", "coldblock_swapped_requests", "coldblock_http_requests_total"} <= names


def test_two_frontends_show_each_engine_series_once(engine: EngineProcess) -> None:
    with running_frontend(engine.endpoint) as first, running_frontend(engine.endpoint, "--workers", "2") as second:
        asked = [second, first, second, second, first]  # the second one is asked first: it exports
        rounds = [scrape(frontend) for frontend in asked]
        seen = Counter(series for frontend in (first, second) for series in engine_series(scrape(frontend)))
        note = httpx.get(f"{first.url}/metrics").text.splitlines()[-1]
        with engine.client() as watcher:
            watcher.ready()
            told = {metric.name for metric in watcher.stats().metrics}
    assert set(seen.values()) == {1}
    assert {name.removesuffix("_bucket") for name, _ in seen} >= told > set(), "all that the engine counts is shown"
    assert [bool(engine_series(found)) for found in rounds] == [True, False, True, True, False]
    assert len({frozenset(engine_series(found)) for found in rounds if engine_series(found)}) == 1
    assert all(found["coldblock_engine_up", (("endpoint", engine.endpoint),)] == 1 for found in rounds)
    assert note.startswith(f"# The metrics of the engine at {engine.endpoint} are exported by") and second.url in note


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_exporter_ends_the_next_scrape_of_another_has_them(impatient_engine: EngineProcess, end: int) -> None:
    endpoint = impatient_engine.endpoint
    with running_frontend(endpoint) as second, running_frontend(endpoint) as first:
        assert engine_series(scrape(first)) and not engine_series(scrape(second))
        first.stop(end)
        wait_until(lambda: bool(engine_series(scrape(second))), timeout_s=30)


def test_a_frontend_that_was_killed_goes_on_when_it_is_back(engine: EngineProcess) -> None:
    """Its engine has not noticed yet: it knows the frontend by where it listens."""
    with running_frontend(engine.endpoint) as first:
        assert engine_series(scrape(first))
        first.stop(signal.SIGKILL)
        with running_frontend(engine.endpoint, port=int(first.url.rpartition(":")[2])) as again:
            assert engine_series(scrape(again))


def test_http_numbers_are_those_of_all_workers(tmp_path: Path) -> None:
    with fake_engine(write_model(tmp_path)) as engine, running_frontend(engine.endpoint, "--workers", "2") as frontend:
        for _ in range(10):
            httpx.get(f"{frontend.url}/v1/nothing")
        series = ("coldblock_http_requests_total", (("path", "other"), ("status", "404")))
        assert [scrape(frontend)[series] for _ in range(4)] == [10] * 4
