"""Bytes <-> messages: round trips, golden bytes, and every kind of rubbish."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import get_args

import msgpack
import msgspec
import pytest
from coldblock.protocol import codec
from coldblock.protocol.codec import (
    decode_from_engine,
    decode_from_peer,
    encode,
    pack_tokens,
    unpack_array,
    unpack_tokens,
)
from coldblock.protocol.errors import ProtocolError
from coldblock.protocol.messages import (
    Abort,
    EngineMessage,
    Fault,
    Finished,
    Goodbye,
    Hello,
    PeerMessage,
    Ping,
    Pong,
    Refused,
    SamplingParams,
    StatsRequest,
    Submit,
    TokenLogprob,
    Tokens,
    TokensOut,
    Welcome,
)
from fake_engine import MODEL, FakeEngine, swap_event, usage

SAMPLING = SamplingParams(max_tokens=5, temperature=0.5, stop_token_ids=(1, 2), logprobs=3)
FROM_PEER = [
    Hello(1, "tester"),
    Submit("r1", pack_tokens([1, 2, 49151]), SAMPLING, 7),
    Abort(("r1", "r2")),
    Ping(3),
    StatsRequest(),
    Goodbye(),
]
FINISHED = Finished("stop", usage(3, 2), stop_token=2)
FROM_ENGINE = [
    Welcome(1, "e1", MODEL, "ipc:///run/events.sock", 10.0),
    Pong(3, 0.25),
    Tokens((TokensOut("r1", pack_tokens([4]), (TokenLogprob(-0.5, ((4, -0.5), (5, -1.5))),), FINISHED),)),
    swap_event("r1", detail="why"),
    Refused("r1", "prompt", "70000", "token ids from 0 to 49151"),
    Fault("malformed", "no msgpack"),
    FakeEngine().stats(),
]


@pytest.mark.parametrize("message", FROM_PEER, ids=lambda m: type(m).__name__)
def test_peer_messages_survive_the_wire(message: PeerMessage) -> None:
    assert decode_from_peer(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_engine_messages_survive_the_wire(message: EngineMessage) -> None:
    assert decode_from_engine(encode(message)) == message


def test_every_message_is_among_the_examples() -> None:
    assert {type(m) for m in FROM_PEER} == set(get_args(PeerMessage))
    assert {type(m).__name__ for m in FROM_ENGINE} == {t.__name__ for t in get_args(EngineMessage)} | {"Stats"}


def test_golden_bytes() -> None:
    assert encode(Hello(1, "me")).hex() == "93a568656c6c6f01a26d65"
    assert encode(Abort(("a",))).hex() == "92a561626f727491a161"
    assert encode(Pong(2, 0.5)).hex() == "93a4706f6e6702cb3fe0000000000000"
    submit = Submit("r", pack_tokens([1, 258]), SamplingParams(max_tokens=4))
    assert encode(submit).hex() == (
        "96a67375626d6974a172c408010000000201000"
        "09d0400cb3ff0000000000000cb3ff000000000000000cb0000000000000000c0"
        "cb3ff0000000000000cb0000000000000000cb0000000000000000c290c000c0"
    )


def test_stats_is_a_map_that_people_can_read() -> None:
    stats = msgpack.unpackb(encode(FakeEngine().stats()))
    assert stats["type"] == "stats"
    assert stats["cpu_offload"]["budget_bytes"] == 2**31


def test_a_shorter_and_a_longer_message_of_the_same_version_are_accepted() -> None:
    short = msgpack.packb(["submit", "r", b"", []])
    assert decode_from_peer(short) == Submit("r", b"", SamplingParams())
    assert decode_from_peer(msgpack.packb(["ping", 4, "a field of a later release", {"x": [1]}])) == Ping(4)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"hello",
        b"\xc1",
        b"\x92\xa4ping",
        encode(Ping(1)) + b"x",
        msgpack.packb(["ping", "one"]),
        msgpack.packb(["ping"]),
        msgpack.packb([1, 2]),
        msgpack.packb({"type": "ping"}),
        b"\x93\xa5hello\x01\xa2\xff\xfe",
        b"\x92\xa5abort\xdd\xff\xff\xff\xff",
        b"\x92\xa4ping\xcf\xff\xff\xff\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\xc0",
        b"\x93\xa4ping\x01" + b"\x91" * 100_000 + b"\xc0",
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os",
    ],
    ids=lambda frame: frame[:12].hex() or "empty",
)
def test_rubbish_is_malformed_in_both_directions(frame: bytes) -> None:
    for decode in (decode_from_peer, decode_from_engine):
        with pytest.raises(ProtocolError) as caught:
            decode(frame)
        assert caught.value.code in ("malformed", "unknown" if decode is decode_from_engine else "malformed")
        assert str(caught.value)


def test_an_unknown_tag_is_unknown_and_the_known_ones_are_listed() -> None:
    for decode, frame in (
        (decode_from_peer, msgpack.packb(["frobnicate", 1])),
        (decode_from_peer, encode(Pong(1, 0.0))),
        (decode_from_engine, msgpack.packb(["frobnicate", 1])),
        (decode_from_engine, msgpack.packb({"type": "frobnicate"})),
    ):
        with pytest.raises(ProtocolError, match="known") as caught:
            decode(frame)
        assert caught.value.code == "unknown"


def test_a_frame_over_the_limit_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10)
    assert decode_from_peer(encode(Ping(1))) == Ping(1)
    for decode in (decode_from_peer, decode_from_engine):
        with pytest.raises(ProtocolError, match="11 bytes; at most 10") as caught:
            decode(b"\xc1" * 11)
        assert caught.value.code == "too_large"


def test_token_ids_are_little_endian_uint32() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert unpack_tokens(b"\x01\x00\x00\x00\xff\xff\xff\xff") == [1, 2**32 - 1]
    assert unpack_tokens(pack_tokens([])) == []
    assert unpack_tokens(pack_tokens((7,))) == [7]
    assert unpack_array(pack_tokens([7, 2**32 - 1])) == array("I", [7, 2**32 - 1])


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, 1.5, "x", None])
def test_an_id_that_is_no_uint32_is_named(bad: object) -> None:
    with pytest.raises(ValueError, match=f"token id {bad!r} "):
        pack_tokens([0, bad, 5])  # type: ignore[list-item]


@pytest.mark.parametrize("unpack", [unpack_tokens, unpack_array])
def test_packed_ids_of_odd_length_are_malformed(unpack: Callable[[bytes], object]) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(b"12345")
    assert caught.value.code == "malformed"


def test_wild_floats_are_legal_here() -> None:
    message = Submit("r", b"", SamplingParams(temperature=float("inf"), top_p=float("nan")))
    decoded = decode_from_peer(encode(message))
    assert isinstance(decoded, Submit)
    assert decoded.sampling.temperature == float("inf")


def test_message_types_are_checked_on_receipt() -> None:
    wrong = msgspec.msgpack.encode(["submit", "r", b"", ["many"]])
    with pytest.raises(ProtocolError, match="Expected `int"):
        decode_from_peer(wrong)
