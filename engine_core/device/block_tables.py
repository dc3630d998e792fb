"""Which row of the GPU's block tables belongs to which request, and what changed in it since the last step.

Owns: the assignment of rows, and a copy of what each holds. Does not know: the GPU; it computes what must be written.

Tables grow by one block now and then, so only what changed travels. Nobody says when a request ends: the row that was
not used for longest is given away when a new request needs one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import ne

import numpy as np
from numpy.typing import NDArray

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
        self._rows: dict[str, int] = {}
        self._owners = [""] * num_rows
        self._used_in = np.zeros(num_rows, np.int64)  # the step, counted from 1
        self._held: list[array[int]] = [array("i")] * num_rows
        self._steps = 0

    def update(self, request_ids: Sequence[str], block_tables: Sequence[array[int]]) -> TableChanges:
        """Rows for the requests of one step, and what must be written into them before it runs."""
        rows, held = self._find(request_ids), self._held
        first, lengths, values = [], [], array("i")
        differs = map(ne, map(held.__getitem__, rows), block_tables)
        for i in np.flatnonzero(np.fromiter(differs, np.bool_, len(rows))).tolist():
            row, new = rows[i], block_tables[i]
            kept = len(held[row]) if new[: len(held[row])] == held[row] else 0
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

    def _find(self, request_ids: Sequence[str]) -> list[int]:
        """Each request's row. The known ones are marked as used before any row is given away."""
        self._steps += 1
        found = list(map(self._rows.get, request_ids))
        rows = [row for row in found if row is not None]
        self._used_in[rows] = self._steps
        if len(rows) == len(found):
            return rows
        return [self._give(name) if row is None else row for name, row in zip(request_ids, found, strict=True)]

    def _give(self, request_id: str) -> int:
        row = int(self._used_in.argmin())
        self._rows.pop(self._owners[row], None)
        self._rows[request_id], self._owners[row] = row, request_id
        self._used_in[row], self._held[row] = self._steps, array("i")
        return row
