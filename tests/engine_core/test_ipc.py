"""The socket thread: what updates become on the wire, and to whom they go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from coldblock.engine_core import ipc
from coldblock.engine_core.commands import Add, Cancel, Command
from coldblock.engine_core.control.plan import SampledToken
from coldblock.engine_core.control.updates import FinishedUpdate, SwapUpdate, TokenUpdate, Update
from coldblock.engine_core.ipc import IpcPort
from coldblock.engine_core.request_ids import split_id
from coldblock.protocol import sockets
from coldblock.protocol.codec import decode_from_engine, encode, pack_tokens, unpack_tokens
from coldblock.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    Refused,
    SamplingParams,
    Submit,
    SwapEvent,
    Tokens,
    TraceContext,
    Welcome,
)
from fake_engine import MODEL
from msgspec.structs import astuple

WAIT_MS = 10_000


@pytest.fixture
def port(tmp_path: Path) -> Iterator[IpcPort]:
    port = IpcPort(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/v", peer_timeout_s=60.0)
    welcome = Welcome(PROTOCOL_VERSION, "id", MODEL, f"ipc://{tmp_path}/v", 60.0)
    port.start(welcome, lambda scheduler, peers: pytest.fail("nobody asked"), lambda: 0.0)
    yield port
    port.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_no_file_of_a_socket_stays(tmp_path: Path) -> None:
    names = ("e", "v", "r")
    work, events, replay = (f"ipc://{tmp_path}/{name}" for name in names)
    port = IpcPort(work, events, peer_timeout_s=60.0, replay_endpoint=replay)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    port.close()
    assert not list(tmp_path.iterdir())


class Peer:
    """A raw peer, and the engine-wide ids of its requests."""

    def __init__(self, port: IpcPort, context: zmq.Context[Any], endpoint: str) -> None:
        self._port = port
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.connect(endpoint)
        self.hello()

    def hello(self) -> None:
        self.dealer.send(encode(Hello(PROTOCOL_VERSION, "peer")))
        assert isinstance(self.receive(), Welcome)

    def submit(self, own_id: str, trace: TraceContext | None = None) -> str:
        self.dealer.send(encode(Submit(own_id, pack_tokens([1, 2]), SamplingParams(), trace=trace)))
        (command,) = commands(self._port, 1)
        assert isinstance(command, Add)
        return command.request_id

    def receive(self) -> Any:
        assert self.dealer.poll(WAIT_MS), "the engine is silent"
        return decode_from_engine(self.dealer.recv())

    def outputs(self) -> list[tuple[str, list[int], str | None]]:
        """The next `Tokens`, as (request, tokens, reason)."""
        message = self.receive()
        assert isinstance(message, Tokens)
        return [(o.request_id, unpack_tokens(o.tokens), o.finished and o.finished.reason) for o in message.outputs]


@pytest.fixture
def peer(port: IpcPort, context: zmq.Context[Any], tmp_path: Path) -> Peer:
    return Peer(port, context, f"ipc://{tmp_path}/e")


def commands(port: IpcPort, count: int) -> list[Command]:
    taken: list[Command] = []
    while len(taken) < count:
        more = port.take(10.0)
        assert more, f"only {taken} came"
        taken += more
    return taken


def token(request_id: str, token_id: int, **logprobs: Any) -> TokenUpdate:
    return TokenUpdate(request_id, SampledToken(token_id, **logprobs))


def end(request_id: str) -> FinishedUpdate:
    return FinishedUpdate(request_id, "length", None, None, 2, 1, 0, 0, 0.0, 0.0, 0.0, 0.0)


def swap(request_id: str) -> SwapUpdate:
    return SwapUpdate(request_id, "swapping_out", "growth", 1, 1000, 0.0, 3, 1000)


def test_a_step_is_one_message_a_peer_and_an_end_travels_with_its_token(port: IpcPort, peer: Peer) -> None:
    a, b = peer.submit("a"), peer.submit("b/with/slashes")
    port.updates([token(a, 70000), token(b, 8), end(a), token(b, 9)])
    assert peer.outputs() == [("a", [70000], "length"), ("b/with/slashes", [8, 9], None)]


def test_an_ends_totals_travel_field_by_field(port: IpcPort, peer: Peer) -> None:
    a = peer.submit("a")
    values = (11, 12, 13, 14, 1.5, 2.5, 3.5, 4.5, 15, 16)
    port.updates([FinishedUpdate(a, "length", None, None, *values)])
    (output,) = peer.receive().outputs
    assert astuple(output.finished.usage) == values


def test_logprobs_travel_with_their_tokens(port: IpcPort, peer: Peer) -> None:
    a = peer.submit("a")
    port.updates([token(a, 5, logprob=-0.5, top=((5, -0.5), (6, -1.0))), token(a, 6, logprob=-1.5), end(a)])
    (output,) = peer.receive().outputs
    assert [(one.logprob, one.top) for one in output.logprobs] == [(-0.5, ((5, -0.5), (6, -1.0))), (-1.5, ())]


def test_a_swap_event_keeps_its_place_between_the_tokens(port: IpcPort, peer: Peer) -> None:
    a, b = peer.submit("a"), peer.submit("b")
    port.updates([token(a, 1), token(b, 2), swap(a), token(a, 3)])
    assert peer.outputs() == [("a", [1], None), ("b", [2], None)]
    event = peer.receive()
    assert isinstance(event, SwapEvent) and (event.peer, event.request_id) == split_id(a)
    assert peer.outputs() == [("a", [3], None)]


def test_a_requests_trace_is_in_its_swap_events_as_long_as_it_lives(port: IpcPort, peer: Peer) -> None:
    trace = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a=1")
    traced, plain = peer.submit("a", trace), peer.submit("b")
    port.updates([swap(traced), swap(plain)])
    assert [peer.receive().trace for _ in range(2)] == [trace, None]
    port.updates([end(traced)])
    assert peer.outputs() == [("a", [], "length")]
    peer.hello()
    assert not port._traces


def test_copies_in_the_background_are_published_and_disturb_no_stream(
    port: IpcPort, peer: Peer, context: zmq.Context[Any], tmp_path: Path
) -> None:
    watcher = context.socket(zmq.SUB)
    watcher.connect(f"ipc://{tmp_path}/v")
    watcher.subscribe(sockets.TOPIC_SWAP)
    a, published = peer.submit("a"), list[SwapEvent]()
    mine = SwapUpdate(a, "copied_out", "write_behind", 2, 2000, 0.5, 3, 1000, queued_s=0.25)
    nobodys = replace(mine, request_id="")
    while not watcher.poll(50):  # until it is subscribed
        port.updates([mine])
    port.updates([token(a, 1), mine, nobodys, token(a, 2)])
    while not published or published[-1].request_id:
        _, frame = watcher.recv_multipart()
        published.append(decode_from_engine(frame))
    assert peer.outputs() == [("a", [1, 2], None)]
    event = published[-2]
    assert (event.request_id, event.phase, event.reason) == ("a", "copied_out", "write_behind")
    assert (event.blocks, event.seconds, event.queued_s) == (2, 0.5, 0.25)
    assert event.peer and not published[-1].peer


def test_a_requests_owner_is_known_by_name_until_it_leaves(port: IpcPort, peer: Peer) -> None:
    a = peer.submit("a")
    assert port._peer_name(a) == "peer"
    peer.hello()
    assert port._peer_name(a) == ""


def test_a_refused_and_a_finished_id_may_be_used_again(port: IpcPort, peer: Peer) -> None:
    port.refuse(peer.submit("a"), "prompt", "too long", "less")
    assert peer.receive() == Refused("a", "prompt", "too long", "less")
    again = peer.submit("a")
    port.updates([token(again, 1), end(again)])
    assert peer.outputs() == [("a", [1], "length")]
    peer.submit("a")


def test_what_an_earlier_session_left_is_told_to_nobody(port: IpcPort, peer: Peer) -> None:
    old = peer.submit("a")
    peer.hello()
    assert commands(port, 1) == [Cancel(old)]
    new = peer.submit("a")
    port.updates([token(old, 1), end(old), token(new, 2)])
    assert peer.outputs() == [("a", [2], None)]


def test_only_open_requests_are_aborted(port: IpcPort, peer: Peer) -> None:
    a, b = peer.submit("a"), peer.submit("b")
    port.updates([end(a)])
    assert peer.outputs() == [("a", [], "length")]
    peer.dealer.send(encode(Abort(("a", "b", "never seen"))))
    assert commands(port, 1) == [Cancel(b)]


def test_an_update_put_out_during_a_delivery_does_not_wait_for_the_next_one(
    port: IpcPort, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wake stands for many updates, but never for one that comes after its delivery began."""
    monkeypatch.setattr(ipc, "POLL_MS", 100 * WAIT_MS)
    a = peer.submit("a")
    late: list[list[Update]] = [[token(a, 2)], [token(a, 3)]]
    deliver = port._deliver_all

    def deliver_and_be_overtaken() -> None:
        deliver()
        if late:
            port.updates(late.pop(0))

    monkeypatch.setattr(port, "_deliver_all", deliver_and_be_overtaken)
    port.updates([token(a, 1)])
    assert [peer.outputs()[0][1] for _ in range(3)] == [[1], [2], [3]]


def test_a_subscriber_that_never_reads_makes_nobody_wait_and_nothing_grow(
    port: IpcPort, peer: Peer, context: zmq.Context[Any], tmp_path: Path
) -> None:
    """All that is kept for it is what its and the engine's socket may queue; the rest it has missed."""
    stuck = sockets.subscriber(context, f"ipc://{tmp_path}/v", [sockets.TOPIC_SWAP])
    large = SwapUpdate("", "copied_out", "write_behind", 1, 1000, 0.1, 3, 1000, detail="x" * 8192)
    while not stuck.poll(50):  # until it is subscribed
        port.updates([large])
    a, published = peer.submit("a"), 4 * sockets.EVENTS_HWM
    for number in range(published):
        port.updates([large, token(a, number)])
    received: list[int] = []
    while len(received) < published:
        ((_, tokens, _),) = peer.outputs()
        received += tokens
    assert received == list(range(published)), "who reads gets everything, at once"
    assert not port._outgoing
    kept = 0
    while stuck.poll(100):
        stuck.recv_multipart()
        kept += 1
    assert sockets.EVENTS_HWM <= kept < 3 * sockets.EVENTS_HWM
