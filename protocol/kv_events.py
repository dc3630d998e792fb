"""Which prefixes an engine has in which tier, in the wire format that prefix-aware routers already read.

Owns: the frames of a publication and of a replay, their encoding and decoding. Does not know: when anything is stored
or removed (the engine), sockets. docs/kv-events.md describes the format.

A publication is three frames: topic, sequence number, batch. A replay request is an empty frame and the first number
wanted; each reply an empty frame and the frames of a publication, the last one with END and an empty batch.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from .errors import ProtocolError

TOPIC_PREFIX = b"kv@"
_SEQUENCE_BYTES = 8
END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
"""Instead of a sequence number: the replay is complete."""


class BlockStored(Struct, array_like=True, tag=True):
    """These full blocks, each the next one's parent, can be found in a tier ("GPU" or "CPU") from now on.

    A hash stands for the tokens of a block and all tokens before it. `token_ids` are those of all blocks together.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class BlockRemoved(Struct, array_like=True, tag=True):
    """These blocks cannot be found in this tier any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(Struct, array_like=True, tag=True):
    """Nothing is in any tier."""


class EventBatch(Struct, array_like=True):
    """What happened together, in order. `ts` is Unix time."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def topic(host: str, model: str) -> bytes:
    """The topic of one engine's events."""
    return TOPIC_PREFIX + f"{host}@{model}".encode()


def pack_sequence(number: int) -> bytes:
    """A sequence number as it travels."""
    return number.to_bytes(_SEQUENCE_BYTES, "big")


def unpack_sequence(frame: bytes) -> int:
    """The number in a frame. Raises ProtocolError "malformed" when it has another size."""
    if len(frame) != _SEQUENCE_BYTES:
        raise ProtocolError("malformed", f"a sequence number of {len(frame)} bytes; allowed: {_SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


def encode(batch: EventBatch) -> bytes:
    """The last frame of a publication."""
    return _encoder.encode(batch)


def decode(frame: bytes) -> EventBatch:
    """What `encode` made. Raises ProtocolError "malformed"."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"malformed KV events: {error}; docs/kv-events.md has the format") from error
