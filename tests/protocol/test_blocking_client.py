"""Client: the same without an event loop, from one thread or many, and with an interrupt in between."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from coldblock import Client
from coldblock.protocol.client import TokenChunk
from coldblock.protocol.errors import ColdblockError, EngineDied, EngineUnreachable, RequestRefused
from coldblock.protocol.messages import Refused, SamplingParams, Stats, SwapEvent
from fake_engine import FakeEngine


def endless(prompt: list[int]) -> Iterator[int]:
    while True:
        yield 7


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def interrupted() -> Iterator[None]:
    """As if the user pressed Ctrl-C once the body waits."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: sys._current_frames()[main].f_code is threading.Condition.wait.__code__)
        time.sleep(0.1)  # from Python's wait into the system's
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        sender.join()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cb-") as folder:
        yield f"ipc://{folder}/engine.sock"


def test_a_normal_life() -> None:
    with FakeEngine(lambda prompt: [1, "swapped", 2]) as engine, Client(engine.endpoint, name="plain") as client:
        assert client.ready().name == "fake-model"
        assert client.alive
        assert client.model == engine.model
        assert client.engine_id == engine.engine_id
        assert client.endpoint == engine.endpoint
        generation = client.submit([5], SamplingParams(seed=1), request_id="r", priority=3)
        assert (generation.request_id, generation.prompt_token_ids) == ("r", [5])
        items = list(generation)
        assert [i.phase if isinstance(i, SwapEvent) else i.token_ids for i in items] == [(1,), "swapped", (2,), ()]
        assert client.submit([5]).result().token_ids == [1, 2]
        assert client.stats().peers == 1


def test_errors_are_the_same() -> None:
    with FakeEngine(lambda prompt: [Refused("", "prompt", "x", "y")]) as engine, Client(engine.endpoint) as client:
        client.ready()
        with pytest.raises(RequestRefused):
            next(client.submit([1]))
        with pytest.raises(ValueError, match="token id -1"):
            client.submit([-1])


def test_abort() -> None:
    with FakeEngine(endless, delay_s=0.002) as engine, Client(engine.endpoint) as client:
        client.ready()
        one, two = client.submit([1]), client.submit([1])
        one.abort()
        client.abort(two.request_id)
        assert [g.result().finished.reason for g in (one, two)] == ["abort", "abort"]


def test_several_threads_share_it() -> None:
    with FakeEngine(lambda prompt: prompt * 20) as engine, Client(engine.endpoint) as client:
        client.ready()
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(lambda i: client.submit([i]).result().token_ids, range(40), timeout=60))
    assert results == [[i] * 20 for i in range(40)]


def test_forgetting_a_generation_aborts_it() -> None:
    with FakeEngine(endless, delay_s=0.002) as engine, Client(engine.endpoint) as client:
        client.ready()
        for _ in islice(client.submit([1], request_id="forgotten"), 2):
            pass
        gc.collect()
        until(lambda: engine.aborted == {"forgotten"})


def test_an_interrupt_leaves_nothing_hanging() -> None:
    with FakeEngine(lambda prompt: endless(prompt) if prompt == [1] else [3], delay_s=60.0) as engine:
        with Client(engine.endpoint) as client:
            client.ready()
            generation = client.submit([1], request_id="r")
            next(generation)
            with interrupted():
                next(generation)
            until(lambda: engine.aborted == {"r"})
            assert list(generation) == []
            with interrupted():
                next(client.events())
            assert next(client.submit([2])) == TokenChunk((3,))
        assert not [t for t in threading.enumerate() if t.name == "coldblock-client"]


def test_an_interrupt_before_the_wait_aborts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = asyncio.run_coroutine_threadsafe

    def interrupted_behind(*arguments: Any) -> Any:
        schedule(*arguments)
        raise KeyboardInterrupt

    with FakeEngine(endless, delay_s=60.0) as engine, Client(engine.endpoint) as client:
        client.ready()
        generation = client.submit([1], request_id="r")
        next(generation)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted_behind)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
        monkeypatch.undo()
        until(lambda: engine.aborted == {"r"})
        assert list(generation) == []


def test_the_engines_death_reaches_every_thread(endpoint: str) -> None:
    with FakeEngine(endless, endpoint=endpoint, delay_s=0.01) as engine, Client(endpoint) as client:
        client.ready()
        generations = [client.submit([1]) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(g.result) for g in generations]
            engine.stop()
            assert all(isinstance(w.exception(timeout=10), EngineDied) for w in waiting)
        with pytest.raises(EngineUnreachable):
            client.submit([1])
        with FakeEngine(endpoint=endpoint):
            client.ready()
            assert client.submit([1]).result().token_ids == [10, 11, 12]


def test_closing_ends_the_calls_of_other_threads() -> None:
    with FakeEngine(endless, delay_s=60.0) as engine, ThreadPoolExecutor(2) as threads:
        client = Client(engine.endpoint)
        client.connect()
        client.connect()
        client.ready()
        generation = client.submit([1])
        reading = threads.submit(generation.result)
        watching = threads.submit(list, (e for e in client.events() if isinstance(e, SwapEvent)))
        client.close()
        assert isinstance(reading.exception(timeout=10), ColdblockError)
        watching.exception(timeout=10)
        client.close()
        for call in (client.ready, client.stats, generation.result, lambda: next(generation)):
            with pytest.raises(ColdblockError):
                call()


def test_events() -> None:
    with FakeEngine() as engine, Client(engine.endpoint) as client, ThreadPoolExecutor(1) as threads:
        client.ready()
        events = client.events()
        first = threads.submit(next, events)
        while not first.done():
            engine.publish(engine.stats())
            time.sleep(0.01)
        assert isinstance(first.result(), Stats)
        events.close()


def test_without_an_engine(endpoint: str) -> None:
    with pytest.raises(ColdblockError, match=r"call connect\(\) first"):
        Client(endpoint).ready()
    with Client(endpoint) as client, pytest.raises(EngineUnreachable, match=endpoint):
        client.ready(timeout_s=0.02)
    with pytest.raises(ColdblockError, match="other machines"):
        Client("tcp://10.0.0.1:1").connect()
    assert not [t for t in threading.enumerate() if t.name == "coldblock-client"]
