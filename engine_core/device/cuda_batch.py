"""The host's side of a step on the GPU: chunks become arrays, and the arrays one buffer that travels at once.

Owns: the order of a step's tokens, the layout of the buffer. Does not know: the GPU, models, sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..control.plan import Chunk

IntArray = NDArray[np.int32]

NOWHERE = -1  # as a token's source: its id is given
PADDING_POSITION = -1
_ONE_PLACE = array("i", [0])  # holds the place of a token that is still on the GPU
_ALIGNED_INTS = 4  # kernels read 16 bytes at once


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The tokens of some chunks, in order, all int32.

    `ids` [T] or, where `source` [T] is not negative, the token there among those that the step before sampled;
    `positions` [T]; `rows` [T]: each token's block table; `ends` [chunks]: the index of each chunk's last token.
    """

    ids: IntArray
    source: IntArray
    positions: IntArray
    rows: IntArray
    ends: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, first: int, last: int) -> TokenArrays:
        """Some of the tokens, with no `ends`."""
        here = slice(first, last)
        return TokenArrays(self.ids[here], self.source[here], self.positions[here], self.rows[here], self.ends[:0])


def token_arrays(chunks: Sequence[Chunk], rows: IntArray, sampled_before: Mapping[str, int]) -> TokenArrays:
    """`rows` [chunks]: each chunk's block table. `sampled_before`: where the step before left a request's token."""
    request_ids, token_ids, starts, _, _, from_previous, _ = zip(*chunks, strict=True)
    ids = array("i")
    for given in token_ids:
        ids.extend(given or _ONE_PLACE)
    if all(from_previous):
        source = list(map(sampled_before.__getitem__, request_ids))
    else:
        source = [sampled_before[chunk.request_id] if chunk.from_previous else NOWHERE for chunk in chunks]
    counts = np.fromiter(map(len, token_ids), np.int32, len(chunks))
    np.maximum(counts, 1, out=counts)
    arrays = TokenArrays(
        np.frombuffer(ids, np.int32),
        np.array(source, np.int32),
        np.array(starts, np.int32),
        rows,
        np.cumsum(counts, dtype=np.int32) - 1,
    )
    return arrays if len(ids) == len(chunks) else _spread(arrays, counts)


def _spread(arrays: TokenArrays, counts: IntArray) -> TokenArrays:
    """What is given for each chunk, for each of its tokens."""
    within = np.arange(len(arrays.ids), dtype=np.int32) - np.repeat(arrays.ends + 1 - counts, counts)
    return TokenArrays(
        arrays.ids,
        np.repeat(arrays.source, counts),
        np.repeat(arrays.positions, counts) + within,
        np.repeat(arrays.rows, counts),
        arrays.ends,
    )


class Packer:
    """Places arrays one behind another in a buffer, each where a kernel can read it 16 bytes at a time."""

    def __init__(self, buffer: IntArray, used: int = 0) -> None:
        self._buffer, self.used = buffer, used

    def add(self, values: NDArray[np.generic]) -> slice:
        """Copy `values` in; where they are now. int64 takes two places each, fp32 one."""
        ints = values.view(np.int32)
        place = slice(self.used, self.used + len(ints))
        self._buffer[place] = ints
        self.used += aligned(len(ints))
        return place


def aligned(ints: int) -> int:
    """So many ints, rounded up to 16 bytes."""
    return -(-ints // _ALIGNED_INTS) * _ALIGNED_INTS


def buckets(most_rows: int) -> list[int]:
    """Numbers of rows that decode graphs are made for; the last holds `most_rows`.

    Close together where a row more costs most, so that padding wastes little.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    while sizes[-1] < most_rows:
        sizes.append(sizes[-1] + 128)
    return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < most_rows]


def bucket_of(sizes: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `sizes` that holds so many rows."""
    return next(size for size in sizes if size >= rows)
