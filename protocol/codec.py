"""Bytes <-> validated message, one decoder per direction.

Owns: the msgpack encoders and decoders, the size limit, the packing of token ids.
Does not know: sockets, or what a message means: values are checked for their types here, for their sense by the engine.
Every failure to decode is a `ProtocolError` with a code.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeVar, get_args

import msgspec
from msgspec import Struct

from .errors import ProtocolError
from .messages import EngineMessage, PeerMessage, Stats

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest frame that is decoded; 4 million token ids fit."""

_TOKEN_ID_LIMIT = 2**32
_T = TypeVar("_T")


class _ArrayHead(Struct, array_like=True):
    """Any array-like message: its tag alone; msgspec skips the rest."""

    tag: str


class _MapHead(Struct):
    """Any map message: its tag alone."""

    type: str


def _tags(union: object) -> frozenset[str]:
    return frozenset(str(struct.__struct_config__.tag) for struct in get_args(union))


_encoder = msgspec.msgpack.Encoder()
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_stats_decoder = msgspec.msgpack.Decoder(Stats)
_array_head_decoder = msgspec.msgpack.Decoder(_ArrayHead)
_map_head_decoder = msgspec.msgpack.Decoder(_MapHead)
_PEER_TAGS = _tags(PeerMessage)
_ENGINE_TAGS = _tags(EngineMessage)
_STATS_TAGS = frozenset({"stats"})


def encode(message: PeerMessage | EngineMessage | Stats) -> bytes:
    """One frame. The caller that sends on behalf of a user checks it against `MAX_MESSAGE_BYTES`."""
    return _encoder.encode(message)


def decode_from_peer(frame: bytes) -> PeerMessage:
    """What a peer sent. Raises ProtocolError "too_large", "malformed" or "unknown"."""
    return _decode(frame, _peer_decoder, _array_head_decoder, _PEER_TAGS)


def decode_from_engine(frame: bytes) -> EngineMessage | Stats:
    """What an engine sent. Raises ProtocolError "too_large", "malformed" or "unknown"."""
    if _is_map(frame):
        return _decode(frame, _stats_decoder, _map_head_decoder, _STATS_TAGS)
    return _decode(frame, _engine_decoder, _array_head_decoder, _ENGINE_TAGS)


def _is_map(frame: bytes) -> bool:
    """Whether msgpack's first byte announces a map (fixmap, map16, map32)."""
    return len(frame) > 0 and (frame[0] & 0xF0 == 0x80 or frame[0] in (0xDE, 0xDF))


def _decode(
    frame: bytes,
    decoder: msgspec.msgpack.Decoder[_T],
    head_decoder: msgspec.msgpack.Decoder[_ArrayHead] | msgspec.msgpack.Decoder[_MapHead],
    tags: frozenset[str],
) -> _T:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            "too_large", f"message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are accepted: send less at once"
        )
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        reason = str(error)
    tag = _tag_of(frame, head_decoder)
    if tag is not None and tag not in tags:
        raise ProtocolError("unknown", f"unknown message {tag[:40]!r}; known: {', '.join(sorted(tags))}")
    raise ProtocolError("malformed", f"malformed message: {reason}; send what docs/protocol.md describes")


def _tag_of(
    frame: bytes, head_decoder: msgspec.msgpack.Decoder[_ArrayHead] | msgspec.msgpack.Decoder[_MapHead]
) -> str | None:
    try:
        head = head_decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError):
        return None
    return head.tag if isinstance(head, _ArrayHead) else head.type


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, four bytes each. Raises ValueError that names an id which does not fit."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError):
        raise ValueError(f"token id {_first_misfit(token_ids)!r} is not an integer from 0 to 2**32 - 1") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def pack_token(token_id: int) -> bytes:
    """What `pack_tokens` makes of one id."""
    return token_id.to_bytes(4, "little")


def _first_misfit(token_ids: Iterable[object]) -> object:
    return next((i for i in token_ids if not isinstance(i, int) or not 0 <= i < _TOKEN_ID_LIMIT), None)


def unpack_tokens(packed: bytes) -> list[int]:
    """The ids that `pack_tokens` packed. Raises ProtocolError "malformed" when the length is no multiple of 4."""
    if len(packed) == 4:  # nearly all that a client sees
        return [int.from_bytes(packed, "little")]
    return unpack_array(packed).tolist()


def unpack_array(packed: bytes) -> array[int]:
    """The same as an `array("I")`: in a hundredth of the time if they are many."""
    if len(packed) % 4:
        raise ProtocolError("malformed", f"packed token ids of {len(packed)} bytes: not a multiple of 4")
    token_ids = array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids
