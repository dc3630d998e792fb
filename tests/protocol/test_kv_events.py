"""KV events byte for byte, as routers read them."""

from __future__ import annotations

import msgpack
import pytest
from coldblock.protocol import kv_events
from coldblock.protocol.errors import ProtocolError
from coldblock.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

GOLDEN = bytes.fromhex(
    "93"  # [ts, events, data_parallel_rank]
    "cb41d954fc40200000"  # float64 1700000000.5
    "94"  # four events
    "97ab" + b"BlockStored".hex() + "92cfffffffffffffffff02"  # hashes: uint64, smallest size that holds it
    "c0"  # no parent
    "9401cd012c02ce00010000"  # token ids 1 300 2 65536
    "02c0a3" + b"GPU".hex() + "97ab" + b"BlockStored".hex() + "9103"
    "cfffffffffffffffff"  # the parent
    "9205060"
    "2c0a3"
    + b"CPU".hex()
    + "93ac"
    + b"BlockRemoved".hex()
    + "9103a3"
    + b"CPU".hex()
    + "91b0"
    + b"AllBlocksCleared".hex()
    + "00"  # rank 0
)
BATCH = EventBatch(
    1700000000.5,
    [
        BlockStored([2**64 - 1, 2], None, [1, 300, 2, 65536], 2, None, "GPU"),
        BlockStored([3], 2**64 - 1, [5, 6], 2, None, "CPU"),
        BlockRemoved([3], "CPU"),
        AllBlocksCleared(),
    ],
)


def test_a_batch_byte_for_byte() -> None:
    assert kv_events.encode(BATCH).hex() == GOLDEN.hex()
    assert kv_events.decode(GOLDEN) == BATCH


def test_any_msgpack_reader_sees_plain_arrays() -> None:
    time, (stored, _, removed, cleared), rank = msgpack.unpackb(GOLDEN)
    assert (time, rank, cleared) == (1700000000.5, 0, ["AllBlocksCleared"])
    assert stored == ["BlockStored", [2**64 - 1, 2], None, [1, 300, 2, 65536], 2, None, "GPU"]
    assert removed == ["BlockRemoved", [3], "CPU"]


def test_a_batch_without_a_rank_and_with_more_fields_is_read_too() -> None:
    frame = msgpack.packb([1.0, [["BlockRemoved", [3], "GPU", "new"]], None, "new"])
    assert kv_events.decode(frame) == EventBatch(1.0, [BlockRemoved([3], "GPU")], None)
    assert kv_events.decode(msgpack.packb([1.0, []])) == EventBatch(1.0, [])


@pytest.mark.parametrize("frame", [b"", b"\xc1", msgpack.packb([1.0, [["Unknown"]]]), GOLDEN[:-1], GOLDEN + b"\x00"])
def test_what_is_no_batch_is_malformed(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"malformed KV events: .*docs/kv-events\.md"):
        kv_events.decode(frame)


def test_topic_and_numbers() -> None:
    assert kv_events.topic("gpu-7", "qwen2.5-3b") == b"kv@gpu-7@qwen2.5-3b"
    assert kv_events.pack_sequence(258) == b"\x00\x00\x00\x00\x00\x00\x01\x02"
    assert kv_events.unpack_sequence(bytes(7) + b"\x05") == 5
    assert bytes([0xFF] * 8) == kv_events.END
    with pytest.raises(ProtocolError, match="of 3 bytes; allowed: 8"):
        kv_events.unpack_sequence(b"abc")
