"""AsyncClient against a scripted engine: tokens, errors, and every way an engine can go away."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fake_engine
import msgpack
import pytest
import uvloop
import zmq
from coldblock import AsyncClient
from coldblock.protocol.client import Completion, Generation, TokenChunk
from coldblock.protocol.codec import MAX_MESSAGE_BYTES, encode, pack_tokens
from coldblock.protocol.errors import (
    ColdblockError,
    EngineDied,
    EngineUnreachable,
    ProtocolError,
    RequestFailed,
    RequestRefused,
)
from coldblock.protocol.messages import (
    Abort,
    Fault,
    Finished,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Refused,
    SamplingParams,
    Stats,
    StatsRequest,
    Submit,
    SwapEvent,
    TokenLogprob,
    Tokens,
    TokensOut,
)
from coldblock.protocol.sockets import peer_dealer
from fake_engine import FakeEngine, swap_event, usage

FAST = {"heartbeat_s": 0.02, "death_s": 0.2}


def endless(prompt: list[int]) -> Iterator[int]:
    while True:
        yield 7


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cb-") as folder:
        yield f"ipc://{folder}/engine.sock"


@asynccontextmanager
async def connected(engine: FakeEngine, **options: Any) -> AsyncIterator[AsyncClient]:
    """A client that is ready; the whole test must end within 30 s."""
    async with asyncio.timeout(30), AsyncClient(engine.endpoint, **options) as client:
        await client.ready()
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(generation: Generation) -> list[TokenChunk | SwapEvent]:
    return [item async for item in generation]


# ---------------------------------------------------------------- a normal life


async def test_tokens_and_swap_events_come_in_order() -> None:
    with FakeEngine(lambda prompt: [prompt[0], (8, 9), "swapping_out", "swapped", "resumed", 10]) as engine:
        async with connected(engine, name="tester") as client:
            assert client.alive
            assert client.engine_id == engine.engine_id
            assert client.model == engine.model
            generation = await client.submit([5, 6], SamplingParams(seed=3), priority=2)
            items = await collect(generation)
    assert generation.prompt_token_ids == [5, 6]
    assert [i.phase if isinstance(i, SwapEvent) else i.token_ids for i in items] == [
        *((5,), (8, 9), "swapping_out", "swapped", "resumed", (10,), ())
    ]
    last = items[-1]
    assert isinstance(last, TokenChunk)
    assert last.finished is not None
    assert last.finished.reason == "stop"
    assert engine.messages(Hello)[0].name == "tester"
    assert engine.messages(Submit) == [Submit(generation.request_id, pack_tokens([5, 6]), SamplingParams(seed=3), 2)]
    engine.stop()


async def test_result_gathers_everything() -> None:
    logprob = TokenLogprob(-0.25, ((1, -0.25),))
    with FakeEngine(lambda prompt: [1, "swapped", 2, 3], logprobs=logprob) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1], SamplingParams(max_tokens=2))
            done = await generation.result()
            with pytest.raises(ColdblockError, match="once"):
                await generation.result()
    assert isinstance(done, Completion)
    assert done.token_ids == [1, 2]
    assert done.logprobs == [logprob, logprob]
    assert done.finished.reason == "length"
    assert [e.phase for e in done.swap_events] == ["swapped"]
    assert done.text is None


async def test_many_requests_at_once_do_not_mix() -> None:
    with FakeEngine(lambda prompt: prompt * 5) as engine:
        async with connected(engine) as client:
            generations = [await client.submit([i]) for i in range(100)]
            results = await asyncio.gather(*(g.result() for g in generations))
    assert [r.token_ids for r in results] == [[i] * 5 for i in range(100)]


async def test_stats_answers_in_order_and_times_out() -> None:
    with FakeEngine() as engine:
        async with connected(engine) as client:
            first, second = await asyncio.gather(client.stats(), client.stats())
            assert first.engine_id == second.engine_id == engine.engine_id
            engine.frozen = True
            with pytest.raises(EngineUnreachable, match=r"no stats within 0\.05 s"):
                await client.stats(timeout_s=0.05)
            engine.frozen = False
            assert (await client.stats()).peers == 1


async def test_events_are_what_the_engine_publishes() -> None:
    with FakeEngine() as engine:
        async with connected(engine) as client:
            events = client.events()
            waiting = asyncio.ensure_future(anext(events))
            while not waiting.done():
                engine.publish(engine.stats())
                await asyncio.sleep(0.01)
            assert isinstance(waiting.result(), Stats)
            engine.publish(swap_event("someone's", "rejected"))
            async for event in events:
                if isinstance(event, SwapEvent):
                    break
            assert event.request_id == "someone's"
            rest = asyncio.ensure_future(collect_events(events))
            await asyncio.sleep(0.01)
            await client.close()
            await asyncio.wait_for(rest, 5)


async def collect_events(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def test_events_go_on_after_a_publication_that_nobody_understands() -> None:
    with FakeEngine() as engine:
        async with connected(engine, events_endpoint=engine.events_endpoint) as client:
            waiting = asyncio.ensure_future(anext(client.events()))
            while not waiting.done():
                engine._commands.put(lambda: engine._pub.send_multipart([b"swap", b"rubbish"]))
                engine.publish(swap_event("r"))
                await asyncio.sleep(0.01)
            assert isinstance(waiting.result(), SwapEvent)


async def test_events_go_on_with_the_next_engine(endpoint: str) -> None:
    async with asyncio.timeout(30), AsyncClient(endpoint) as client:
        with FakeEngine(endpoint=endpoint) as first:
            await client.ready()
            events = client.events()
            assert await published_by(first, events) == first.engine_id
        with FakeEngine(endpoint=endpoint) as second:
            assert await published_by(second, events) == second.engine_id


async def published_by(engine: FakeEngine, events: AsyncIterator[Any]) -> str:
    """The engine id of the first stats that arrive while this engine publishes, older ones aside."""
    while True:
        waiting = asyncio.ensure_future(anext(events))
        while not waiting.done():
            engine.publish(engine.stats())
            await asyncio.sleep(0.01)
        if waiting.result().engine_id == engine.engine_id:
            return engine.engine_id


def test_it_works_under_uvloop() -> None:
    async def scenario() -> list[int]:
        with FakeEngine(lambda prompt: [1, 2, 3]) as engine:
            async with connected(engine) as client:
                return (await (await client.submit([1])).result()).token_ids

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == [1, 2, 3]


async def test_close_says_goodbye_and_fails_what_is_open() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1])
            await anext(generation)
            reading = asyncio.ensure_future(generation.result())
            await client.close()
            with pytest.raises(ColdblockError, match="closed"):
                await reading
            await client.close()
            with pytest.raises(ColdblockError, match="make a new one"):
                await client.submit([1])
            with pytest.raises(ColdblockError, match="make a new one"):
                await client.connect()
            with pytest.raises(ColdblockError, match="make a new one"):
                await client.ready()
        await asyncio.to_thread(engine.wait_for, Goodbye)
        await until(lambda: engine.aborted == {generation.request_id})


# ---------------------------------------------------------------- what is refused


async def test_a_client_must_be_connected_first(endpoint: str) -> None:
    client = AsyncClient(endpoint)
    with pytest.raises(ColdblockError, match=r"call connect\(\) first"):
        await client.submit([1])
    await client.close()


async def test_without_an_engine(endpoint: str) -> None:
    async with AsyncClient(endpoint) as client:
        assert not client.alive
        assert client.model is None
        assert client.engine_id is None
        with pytest.raises(EngineUnreachable, match=endpoint):
            await client.ready(timeout_s=0.02)
        with pytest.raises(EngineUnreachable, match=endpoint):
            await client.submit([1])
        with pytest.raises(EngineUnreachable, match=endpoint):
            await client.stats(timeout_s=0.02)


async def test_an_engine_that_starts_later_is_found(endpoint: str) -> None:
    async with AsyncClient(endpoint) as client:
        waiting = asyncio.ensure_future(client.ready())
        await asyncio.sleep(0.05)
        with FakeEngine(endpoint=endpoint):
            assert (await waiting).name == "fake-model"


async def test_an_endpoint_that_cannot_be() -> None:
    with pytest.raises(ColdblockError, match="other machines"):
        await AsyncClient("tcp://10.1.2.3:4").connect()


async def test_the_engines_refusal_names_field_value_and_what_is_allowed() -> None:
    with FakeEngine(lambda prompt: [Refused("", "prompt", "70000", "ids below 49152")]) as engine:
        async with connected(engine) as client:
            with pytest.raises(RequestRefused) as caught:
                await (await client.submit([70000])).result()
    error = caught.value
    assert (error.field, error.value, error.allowed) == ("prompt", "70000", "ids below 49152")
    assert str(error) == "prompt 70000 is not accepted; allowed: ids below 49152"


async def test_a_failed_request_gives_its_tokens_then_the_reason() -> None:
    failed = Finished("error", usage(), error="logits are not finite")
    with FakeEngine(lambda prompt: [4, TokensOut("", pack_tokens([5]), None, failed)]) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1])
            assert [(await anext(generation)).token_ids for _ in range(2)] == [(4,), (5,)]  # type: ignore[union-attr]
            with pytest.raises(RequestFailed, match="logits are not finite"):
                await anext(generation)
            assert (await client.stats()).running == 0


async def test_wrong_values_are_caught_before_they_are_sent() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine) as client:
            open_request = await client.submit([1], request_id="mine")
            with pytest.raises(ValueError, match="'mine' is still open"):
                await client.submit([1], request_id="mine")
            with pytest.raises(ValueError, match="token id -5"):
                await client.submit([-5])
            with pytest.raises(ProtocolError, match="Expected `int"):
                await client.submit([1], SamplingParams(max_tokens="many"))  # type: ignore[arg-type]
            with pytest.raises(ProtocolError, match=f"at most {MAX_MESSAGE_BYTES}"):
                await client.submit([1] * (MAX_MESSAGE_BYTES // 4))
            assert open_request.request_id == "mine"
            assert len(engine.messages(Submit)) == 1


async def test_an_engine_of_another_version() -> None:
    with FakeEngine(version=2) as engine:
        async with AsyncClient(engine.endpoint) as client:
            for _ in range(2):
                with pytest.raises(ProtocolError, match=r"version 2.*install the same") as caught:
                    await client.ready()
                assert caught.value.code == "version"
            with pytest.raises(ProtocolError):
                await client.submit([1])


async def test_an_engine_that_refuses_our_version() -> None:
    with FakeEngine() as engine:
        async with connected(engine) as client:
            engine.send(Fault("version", "this engine speaks version 9"))
            await until(lambda: not client.alive)
            with pytest.raises(ProtocolError, match=r"version 9; install"):
                await client.ready()


async def test_a_fault_fails_only_requests_that_were_not_heard_of() -> None:
    with FakeEngine(lambda prompt: endless(prompt) if prompt == [1] else iter(()), delay_s=0.01) as engine:
        async with connected(engine) as client:
            healthy = await client.submit([1])
            await anext(healthy)
            engine.frozen = True
            silent = await client.submit([2])
            client._receive(encode(Fault("too_large", "at most 10 bytes")))
            with pytest.raises(RequestFailed, match="at most 10 bytes"):
                await silent.result()
            engine.frozen = False
            await anext(healthy)


async def test_rubbish_from_the_engine_ends_requests_with_a_clear_error() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1])
            engine.send(b"\xc1rubbish")
            with pytest.raises(ProtocolError, match="malformed"):
                await generation.result()
            await client.ready()
            assert generation.request_id in engine.aborted
            engine.send(msgpack.packb(["a message of a later release", 1]))
            assert (await client.stats()).running == 0
            assert client.alive


async def test_a_welcome_that_cannot_be_read_is_reported_once() -> None:
    async with AsyncClient("ipc:///tmp/cb-nobody.sock") as client:
        client._receive(msgpack.packb(["welcome", 1, "e", "a model of another shape", "", 1.0]))
        with pytest.raises(ProtocolError, match="malformed"):
            await client.ready()


# ---------------------------------------------------------------- the engine's side of rubbish


def talk(endpoint: str, frames: list[bytes], answers: int) -> list[Any]:
    """Send raw frames, return the decoded answers."""
    with zmq.Context() as ctx, peer_dealer(ctx, endpoint) as dealer:
        assert dealer.poll(5000, zmq.POLLOUT)
        for frame in frames:
            dealer.send(frame)
        got = []
        for _ in range(answers):
            assert dealer.poll(5000)
            got.append(msgpack.unpackb(dealer.recv()))
        return got


def test_a_raw_peer_gets_a_fault_for_each_mistake() -> None:
    hello = msgpack.packb(["hello", 1, "raw"])
    with FakeEngine() as engine:
        answers = talk(engine.endpoint, [msgpack.packb(["ping", 1]), b"\xc1", msgpack.packb(["x"]), hello], 4)
        assert [a[1] if a[0] == "fault" else a[0] for a in answers] == ["no_hello", "malformed", "unknown", "welcome"]
        assert talk(engine.endpoint, [msgpack.packb(["hello", 99, "new"])], 1)[0][:2] == ["fault", "version"]
        assert talk(engine.endpoint, [bytes(MAX_MESSAGE_BYTES + 1)], 1)[0][:2] == ["fault", "too_large"]


# ---------------------------------------------------------------- aborting


async def test_abort_ends_the_iterator_with_reason_abort() -> None:
    with FakeEngine(endless, delay_s=0.002) as engine:
        async with connected(engine) as client:
            first, second = await client.submit([1]), await client.submit([1])
            await anext(first)
            await first.abort()
            await client.abort(second.request_id)
            await client.abort("unknown")
            for generation in (first, second):
                assert (await generation.result()).finished.reason == "abort"
            await first.abort()
            assert [m.request_ids for m in engine.messages(Abort)] == [(first.request_id,), (second.request_id,)]


async def test_a_forgotten_generation_is_aborted() -> None:
    with FakeEngine(endless, delay_s=0.002) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1], request_id="forgotten")
            async for _ in generation:
                break
            del generation
            gc.collect()
            await until(lambda: engine.aborted == {"forgotten"})
            await until(lambda: not client._streams)


async def test_a_finished_generation_is_not_aborted_when_forgotten() -> None:
    with FakeEngine(lambda prompt: [1]) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1])
            await generation.result()
            del generation
            gc.collect()
            await client.stats()
            assert not [m for m in engine.received if isinstance(m, Abort)]


async def test_cancelling_the_iteration_aborts() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1], request_id="r")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await generation.result()
            with pytest.raises(ValueError, match="still open"):
                await client.submit([1], request_id="r")
            await until(lambda: engine.aborted == {"r"})
            assert await collect(generation) == []
            await until(lambda: not client._streams)
            assert (await anext(await client.submit([1], request_id="r"))).token_ids == (7,)  # type: ignore[union-attr]


async def test_the_engines_totals_come_to_who_has_left_too() -> None:
    with FakeEngine(endless, delay_s=0.002) as engine:
        async with connected(engine) as client:
            stopped, cancelled, lost = [await client.submit([1, 2]) for _ in range(3)]
            await anext(stopped)
            await stopped.abort()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await cancelled.result()
            for generation in (stopped, cancelled):
                usage = await generation.usage()
                assert usage is not None and usage.prompt_tokens == 2
            engine.stop()
            assert await lost.usage() is None


# ---------------------------------------------------------------- the engine goes away


async def test_the_death_of_the_engine_fails_open_requests_at_once(endpoint: str) -> None:
    with FakeEngine(endless, endpoint=endpoint, delay_s=0.01) as engine:
        async with connected(engine) as client:
            generations = [await client.submit([1]) for _ in range(3)]
            await anext(generations[0])
            engine.stop()
            for generation in generations:
                with pytest.raises(EngineDied, match="submit again"):
                    await asyncio.wait_for(generation.result(), 3)
            assert not client.alive
            assert client.model is None
            with pytest.raises(EngineUnreachable):
                await client.submit([1])
            with FakeEngine(lambda prompt: [5], endpoint=endpoint) as successor:
                await client.ready()
                assert client.engine_id == successor.engine_id != engine.engine_id
                assert (await (await client.submit([1])).result()).token_ids == [5]


async def test_what_was_said_before_the_death_still_counts(endpoint: str) -> None:
    for _ in range(5):
        with FakeEngine(lambda prompt: range(300), endpoint=endpoint) as engine:
            async with connected(engine) as client:
                generation = await client.submit([1])
                await asyncio.to_thread(engine.wait_for, Submit)
                while engine._running:
                    await asyncio.sleep(0)
                engine.stop()
                assert (await generation.result()).token_ids == list(range(300))


async def test_pending_stats_end_when_the_engine_dies(endpoint: str) -> None:
    with FakeEngine(endpoint=endpoint) as engine:
        async with connected(engine) as client:
            engine.frozen = True
            waiting = asyncio.ensure_future(client.stats())
            await asyncio.sleep(0.02)
            engine.stop()
            with pytest.raises(EngineUnreachable, match="no stats"):
                await asyncio.wait_for(waiting, 3)


async def test_another_engine_id_on_the_same_line_is_a_restart() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine) as client:
            generation = await client.submit([1])
            await anext(generation)
            client._receive(encode(engine_welcome(engine, "another")))
            with pytest.raises(EngineDied, match="restarted"):
                await generation.result()
            assert client.engine_id == "another"
            assert client.alive


def engine_welcome(engine: FakeEngine, engine_id: str) -> Any:
    return fake_engine.Welcome(1, engine_id, engine.model, engine.events_endpoint, 10.0)


async def test_a_silent_engine_is_dead_and_comes_back_without_a_new_client() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine, **FAST) as client:
            generation = await client.submit([1], request_id="old")
            await anext(generation)
            engine.frozen = True
            with pytest.raises(EngineDied, match="pings unanswered"):
                await asyncio.wait_for(generation.result(), 5)
            assert not client.alive
            engine.frozen = False
            await client.ready()
            assert "old" in engine.aborted
            await anext(await client.submit([1]))


async def test_a_pause_of_our_own_kills_nothing() -> None:
    with FakeEngine(lambda prompt: [1], delay_s=0.3) as engine:
        async with connected(engine, **FAST) as client:
            generation = await client.submit([1])
            time.sleep(0.5)  # longer than death_s, with the event loop standing
            assert (await generation.result()).token_ids == [1]


async def test_an_engine_whose_step_loop_stands_is_not_alive() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine, heartbeat_s=0.02, stuck_s=30.0) as client:
            generation = await client.submit([1])
            engine.step_age_s = 29.0
            pings = len(engine.messages(Ping))
            await until(lambda: len(engine.messages(Ping)) > pings + 3)
            assert client.alive, "a long prefill is not dead"
            engine.step_age_s = 31.0
            await until(lambda: not client.alive)
            with pytest.raises(EngineUnreachable, match="stuck: no step for 31 s"):
                await client.submit([1])
            engine.step_age_s = 0.0
            await until(lambda: client.alive)
            await anext(generation)


async def test_an_engine_that_forgot_us_is_greeted_again() -> None:
    with FakeEngine(endless, delay_s=0.01) as engine:
        async with connected(engine, heartbeat_s=0.02) as client:
            generation = await client.submit([1])
            engine._commands.put(engine._peers.clear)
            with pytest.raises(EngineDied, match="forgotten"):
                await generation.result()
            await client.ready()
            assert len(engine.messages(Hello)) == 2


async def test_kill_9_is_noticed_in_a_fraction_of_a_heartbeat(endpoint: str) -> None:
    script = (
        f"import sys, time; sys.path.append({str(Path(fake_engine.__file__).parent)!r}); from fake_engine import *\n"
        f"FakeEngine(lambda p: iter(int, 1), endpoint={endpoint!r}, delay_s=0.01).start(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        async with AsyncClient(endpoint, heartbeat_s=1000.0, timeout_s=30.0) as client:
            await client.ready()
            generation = await client.submit([1])
            await anext(generation)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(EngineDied):
                await asyncio.wait_for(generation.result(), 10)
            assert not client.alive
    finally:
        process.kill()
        process.wait()
    with FakeEngine(endpoint=endpoint) as engine:
        assert engine.endpoint == endpoint, "the dead engine's socket file is no obstacle"


async def test_a_reader_that_does_not_read_costs_the_others_nothing() -> None:
    with FakeEngine(lambda prompt: [1] * 3000) as engine:
        async with connected(engine) as client:
            slow, quick = await client.submit([1]), await client.submit([2])
            assert len((await quick.result()).token_ids) == 3000
            assert len((await slow.result()).token_ids) == 3000


async def test_late_tokens_of_unknown_requests_are_ignored() -> None:
    with FakeEngine(lambda prompt: [1]) as engine:
        async with connected(engine) as client:
            engine.send(Tokens((TokensOut("nobody's", pack_tokens([1])),)))
            engine.send(swap_event("nobody's"))
            engine.send(Refused("nobody's", "a", "b", "c"))
            engine.send(Pong(10_000, 0.0))
            assert (await (await client.submit([1])).result()).token_ids == [1]
            assert [type(m) for m in engine.received if not isinstance(m, Ping)] == [Hello, Submit]


async def test_stats_without_anyone_waiting_are_ignored() -> None:
    with FakeEngine() as engine:
        async with connected(engine) as client:
            engine.send(engine.stats())
            assert (await client.stats()).engine_id == engine.engine_id
            assert len(engine.messages(StatsRequest)) == 1
