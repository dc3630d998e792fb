"""A step's arrays, as the host makes them for the GPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
from coldblock.engine_core.control.plan import NO_TOKENS, Chunk
from coldblock.engine_core.device.block_tables import BlockTables
from coldblock.engine_core.device.cuda_batch import NOWHERE, Packer, bucket_of, buckets, token_arrays
from tiny_models import GREEDY, chunk


def from_previous(request_id: str, start: int) -> Chunk:
    return chunk(request_id, [], start, [0], GREEDY)._replace(token_ids=NO_TOKENS, from_previous=True)


def test_decode_chunks() -> None:
    chunks = [chunk("a", [7], 4, [0]), from_previous("b", 9), chunk("c", [8], 0, [0])]
    tokens = token_arrays(chunks, np.array([5, 3, 1], np.int32), {"b": 12})
    assert (tokens.ids[0], tokens.ids[2]) == (7, 8)
    assert tokens.source.tolist() == [NOWHERE, 12, NOWHERE]
    assert tokens.positions.tolist() == [4, 9, 0]
    assert tokens.rows.tolist() == [5, 3, 1]
    assert tokens.ends.tolist() == [0, 1, 2]
    assert len(tokens) == 3


def test_chunks_of_several_tokens_are_spread() -> None:
    chunks = [from_previous("a", 6), chunk("b", [1, 2, 3], 10, [0]), chunk("c", [4, 5], 0, [0])]
    tokens = token_arrays(chunks, np.array([2, 0, 1], np.int32), {"a": 3})
    assert tokens.ids[1:].tolist() == [1, 2, 3, 4, 5]
    assert tokens.source.tolist() == [3, *[NOWHERE] * 5]
    assert tokens.positions.tolist() == [6, 10, 11, 12, 0, 1]
    assert tokens.rows.tolist() == [2, 0, 0, 0, 1, 1]
    assert tokens.ends.tolist() == [0, 3, 5]
    assert {a.dtype for a in (tokens.ids, tokens.source, tokens.positions, tokens.rows, tokens.ends)} == {
        np.dtype("i4")
    }


def test_packed_arrays_are_aligned_and_keep_their_bits() -> None:
    buffer = np.full(40, -1, np.int32)
    packer = Packer(buffer, used=8)
    places = [packer.add(np.arange(5, dtype=np.int32)), packer.add(np.array([2**40, 3])), packer.add(np.float32([0.5]))]
    assert [place.start for place in places] == [8, 16, 20]
    assert packer.used == 24
    assert buffer[places[0]].tolist() == [0, 1, 2, 3, 4]
    assert buffer[places[1]].view(np.int64).tolist() == [2**40, 3]
    assert buffer[places[2]].view(np.float32).tolist() == [0.5]
    assert (buffer[:8] == -1).all() and (buffer[24:] == -1).all()


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 65, 256, 257, 1000, 4096])
def test_buckets(most: int) -> None:
    sizes = buckets(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and most <= sizes[-1] <= most + max(128, most)
    for rows in {1, most // 2 + 1, most}:
        size = bucket_of(sizes, rows)
        assert rows <= size <= max(2 * rows - 1, 1)


class Tables:
    """What the GPU's tables hold after every change was written."""

    def __init__(self, rows: int, width: int) -> None:
        self.tables, self.flat = BlockTables(rows, width), np.full(rows * width, -1)
        self.written = 0

    def step(self, chunks: list[Chunk]) -> list[int]:
        changes = self.tables.update([c.request_id for c in chunks], [c.block_table for c in chunks])
        self.flat[changes.places] = changes.values
        self.written += len(changes.places)
        for row, one in zip(changes.rows, chunks, strict=True):
            start = row * self.tables.width
            assert self.flat[start : start + len(one.block_table)].tolist() == list(one.block_table)
        assert len(set(changes.rows.tolist())) == len(chunks)
        return changes.rows.tolist()


def test_only_what_changed_is_written() -> None:
    tables = Tables(4, 8)
    first = tables.step([chunk("a", [1], 0, [5, 6]), chunk("b", [1], 0, [7])])
    assert tables.written == 3
    again = tables.step([chunk("b", [1], 1, [7]), chunk("a", [1], 1, [5, 6, 9])])
    assert (again, tables.written) == (first[::-1], 4)
    tables.step([chunk("a", [1], 2, [1, 6, 9])])
    assert tables.written == 7
    tables.step([chunk("a", [1], 2, [1, 6])])
    tables.step([])


def test_a_row_is_given_away_only_when_its_request_does_not_run() -> None:
    tables = Tables(3, 4)
    a, b, c = tables.step([chunk(name, [1], 0, [1]) for name in "abc"])
    assert tables.step([chunk("d", [1], 0, [2]), chunk("a", [1], 1, [1]), chunk("c", [1], 1, [1])]) == [b, a, c]
    assert tables.step([chunk("b", [1], 1, [3, 2])])[0] in (a, b, c)


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_tables(seed: int) -> None:
    rng, tables = random.Random(seed), Tables(6, 10)
    held: dict[str, list[int]] = {}
    for _ in range(200):
        names = rng.sample("abcdefghijkl", rng.randint(0, 6))
        for name in names:
            table = held.setdefault(name, [])
            if rng.random() < 0.2 or len(table) == 10:
                table[:] = [rng.randrange(99) for _ in range(rng.randint(1, 9))]
            table.append(rng.randrange(99))
        tables.step([chunk(name, [1], 0, held[name]) for name in names])
