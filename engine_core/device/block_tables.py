"""Which row of the GPU's block tables belongs to which request, and what changed in it since the last step.

Owns: the assignment of rows, and a copy of what each holds. Does not know: the GPU; it computes what must be written.

Tables grow by one block now and then, so only what changed travels. Nobody says when a request ends: the row that was
not used for longest is given away when a new request needs one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..control.plan import Chunk

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TableChanges:
    """`rows` int32 [chunks]: the row of each chunk's request. Flat places int64 [n] in the tables, and their values."""

    rows: IntArray
    places: NDArray[np.int64]
    values: IntArray

    def part(self, first: int, last: int) -> TableChanges:
        """The same with some of the places."""
        return TableChanges(self.rows, self.places[first:last], self.values[first:last])


NO_CHANGES = TableChanges(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32))


class BlockTables:
    """`num_rows` tables of `width` blocks. A step may hold chunks of at most `num_rows` requests."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.width = width
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: OrderedDict[str, int] = OrderedDict()  # the least recently used first
        self._held: list[array[int]] = [array("i")] * num_rows

    def update(self, chunks: Sequence[Chunk]) -> TableChanges:
        """Rows for the chunks of one step, and what must be written into them before it runs."""
        rows, held = self._find(chunks), self._held
        first, values = [], array("i")
        lengths = []
        for row, chunk in zip(rows, chunks, strict=True):
            old, new = held[row], chunk.block_table
            if new == old:
                continue
            kept = len(old) if new[: len(old)] == old else 0
            first.append(row * self.width + kept)
            lengths.append(len(new) - kept)
            values.extend(new[kept:])
            held[row] = new
        places = np.arange(len(values), dtype=np.int64)
        if lengths:
            ends = np.cumsum(lengths)
            places += np.repeat(np.array(first) - ends + lengths, lengths)
        return TableChanges(np.array(rows, np.int32), places, np.frombuffer(values, np.int32))

    def forget(self) -> None:
        """Take nothing for written any more."""
        self._held = [array("i")] * len(self._held)

    def _find(self, chunks: Sequence[Chunk]) -> list[int]:
        """Each request's row. The known ones are marked as used before any row is given away."""
        known = self._rows
        for chunk in chunks:
            if chunk.request_id in known:
                known.move_to_end(chunk.request_id)
        return [known[chunk.request_id] if chunk.request_id in known else self._give(chunk) for chunk in chunks]

    def _give(self, chunk: Chunk) -> int:
        row = self._free.pop() if self._free else self._rows.popitem(last=False)[1]
        self._rows[chunk.request_id] = row
        self._held[row] = array("i")
        return row
