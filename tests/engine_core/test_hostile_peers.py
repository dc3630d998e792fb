"""Peers that misuse the protocol, against a real engine: they harm nobody but themselves."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from coldblock.protocol.codec import pack_tokens
from coldblock.protocol.errors import ProtocolError
from coldblock.protocol.messages import SamplingParams
from processes import EngineProcess, running_engine, write_tiny_model

WAIT_MS = 10_000
HELLO = ["hello", 1, "raw"]
GOODBYE = ["goodbye"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    with running_engine(model, "--load-format", "dummy", "--num-gpu-blocks", "128") as engine:
        yield engine


class RawPeer:
    """A DEALER that sends what it is told to."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self._dealer = dealer

    def send(self, *messages: list[Any]) -> None:
        for message in messages:
            self._dealer.send(msgpack.packb(message))

    def receive(self) -> Any:
        assert self._dealer.poll(WAIT_MS), "the engine is silent"
        return msgpack.unpackb(self._dealer.recv())

    def outputs_until_end(self) -> list[tuple[int, str | None]]:
        """(number of tokens, reason) of each output until one ends a request."""
        outputs: list[tuple[int, str | None]] = []
        while not outputs or outputs[-1][1] is None:
            tag, *fields = self.receive()
            if tag == "tokens":
                outputs += [(len(packed) // 4, end and end[0]) for _, packed, _, end in fields[0]]
        return outputs


@contextlib.contextmanager
def raw_peer(engine: EngineProcess) -> Iterator[RawPeer]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(engine.endpoint)
        yield RawPeer(dealer)


def submit(request_id: str, new: int) -> list[Any]:
    sampling = [new, 0, 0.0, 1.0, 0, 0.0, None, 1.0, 0.0, 0.0, True]
    return ["submit", request_id, pack_tokens([5, 6, 7]), sampling]


@pytest.mark.parametrize("leave", [[], [GOODBYE]])
def test_a_peer_that_starts_anew_may_use_its_ids_again(engine: EngineProcess, leave: list[list[Any]]) -> None:
    with raw_peer(engine) as peer:
        for _ in range(5):
            peer.send(HELLO, submit("again", 300), *leave)
        peer.send(HELLO, submit("again", 40))
        for _ in range(6):
            assert peer.receive()[0] in ("welcome", "tokens")
        outputs = peer.outputs_until_end()
    assert outputs[-1][1] == "length"
    assert engine.process.poll() is None


def test_nothing_of_an_earlier_session_comes_back(engine: EngineProcess) -> None:
    with raw_peer(engine) as peer:
        peer.send(HELLO, submit("long", 1900))
        assert [peer.receive()[0], peer.receive()[0]] == ["welcome", "tokens"]
        peer.send(HELLO, submit("long", 40))
        while peer.receive()[0] != "welcome":
            pass
        outputs = peer.outputs_until_end()
    assert (sum(count for count, _ in outputs), outputs[-1][1]) == (40, "length")


def test_a_client_pings_as_often_as_the_engine_asks(tmp_path: Path) -> None:
    flags = ("--load-format", "dummy", "--num-gpu-blocks", "128", "--peer-timeout-s", "0.8")
    with running_engine(write_tiny_model(tmp_path), *flags) as engine, engine.client(heartbeat_s=60.0) as client:
        client.ready()
        params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
        requests = [client.submit([5, 6, 7], params) for _ in range(4)]
        assert [request.result().finished.reason for request in requests] == ["length"] * 4


def test_an_engine_that_was_stopped_does_not_blame_its_peers(tmp_path: Path) -> None:
    flags = ("--load-format", "dummy", "--num-gpu-blocks", "8", "--peer-timeout-s", "3")
    with running_engine(write_tiny_model(tmp_path), *flags) as engine, raw_peer(engine) as peer:
        peer.send(HELLO)
        assert peer.receive()[0] == "welcome"
        engine.process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)  # longer than a peer may be silent
        engine.process.send_signal(signal.SIGCONT)
        time.sleep(0.6)  # the engine has looked for silent peers
        peer.send(["ping", 1])
        assert peer.receive()[:2] == ["pong", 1]


def test_a_huge_name_is_malformed_and_spoils_nobodys_stats(engine: EngineProcess) -> None:
    with raw_peer(engine) as peer, engine.client() as client:
        client.ready()
        running = client.submit([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        peer.send(HELLO)
        assert peer.receive()[0] == "welcome"
        for message in (["hello", 1, "x" * 2**20], submit("x" * (2**24 - 100), 1900)):
            peer.send(message)
            assert peer.receive()[:2] == ["fault", "malformed"]
        assert len(client.stats().requests) <= 1
        assert len(running.result().token_ids) == 100
        with pytest.raises(ProtocolError, match="malformed"):
            client.submit([5, 6, 7], request_id="x" * 257)


def test_a_long_queue_is_counted_in_full_and_listed_in_part(engine: EngineProcess) -> None:
    with raw_peer(engine) as peer:
        peer.send(HELLO, *(submit(f"r{i}", 1900) for i in range(1100)), ["stats?"])
        while not isinstance(stats := peer.receive(), dict):
            pass
        peer.send(GOODBYE)
    assert stats["running"] + stats["waiting"] + stats["swapped"] == 1100
    assert len(stats["requests"]) == 1000
