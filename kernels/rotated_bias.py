"""The bias of K where the pool holds K without it: rotation is linear, so attention can add it when it reads K.

Owns: what is to be added at which position, in plain torch; the table from which the decode kernel takes its turns.
Does not know: why a bias is kept apart, or how a kernel adds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_layout, check_place
from .pages import KVPages

TILED_ROWS = 4096
"""How many rows `Turns.tiles` has, if the rotary table has as many."""

_SCALE = 256.0  # TURN_SCALE of key_bias.cuh
_TILE = 16  # rows
_LANES = 32


@dataclass(frozen=True, slots=True)
class Turns:
    """A rotary table [P, D/2, 2] without its factor, as halves, times 256. One serves all layers."""

    rows: Tensor
    """fp16 [P, D/2, 2]: for prefill."""
    tiles: Tensor
    """fp16 [tiles, D/16, 32, 8], for decode: the first rows, 16 to a tile, as tensor cores take them. In step s lane
    4g + t has, one after another, the pair p = 16 (s // 2) + 4t + 2 (s % 2) of rows 2g and 2g + 1, and the pair p + 1
    of both. Rows past the table are zero."""

    @classmethod
    def of(cls, rotary: Tensor) -> Turns:
        """Those of `rotary` fp32 [P, D/2, 2]."""
        rows = (rotary * (_SCALE / rotary[0, 0, 0])).half()
        first = rows[:TILED_ROWS]
        padded = torch.nn.functional.pad(first, (0, 0, 0, 0, 0, -len(first) % _TILE))
        eighths = rotary.shape[1] // 8
        split = padded.view(-1, 8, 2, eighths // 2, 4, 2, 2, 2)  # tile, g, row, s // 2, t, s % 2, pair, cos or sin
        return cls(rows, split.permute(0, 3, 5, 1, 4, 6, 2, 7).reshape(len(split), eighths, _LANES, 8))

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.rows.nbytes + self.tiles.nbytes


@dataclass(frozen=True, slots=True)
class RotatedBias:
    """`values` fp32 [G, D], at position p turned by row p of `rotary` fp32 [P, D/2, 2], as `rope_and_write` turns K.

    A row is (cos, sin) of p times each pair's angle, all times one factor: kernels find rows from other rows. `turns`
    is `Turns.of(rotary)`.
    """

    values: Tensor
    rotary: Tensor
    turns: Turns

    def check(self, pages: KVPages) -> None:
        """Raises KernelArgumentError unless kernels can add this to the pool's K."""
        heads, dim = pages.num_kv_heads, pages.head_dim
        check_layout("k_bias.values", self.values, torch.float32, (("G", heads), ("D", dim)))
        check_layout("k_bias.rotary", self.rotary, torch.float32, (("P", None), ("D/2", dim // 2), ("cos, sin", 2)))
        positions = len(self.rotary)
        tiles = -(-min(positions, TILED_ROWS) // _TILE)
        rows_shape = (("P", positions), ("D/2", dim // 2), ("cos, sin", 2))
        tiles_shape = (("tiles", tiles), ("D/16", dim // 16), ("lanes", _LANES), ("8", 8))
        check_layout("k_bias.turns.rows", self.turns.rows, torch.float16, rows_shape)
        check_layout("k_bias.turns.tiles", self.turns.tiles, torch.float16, tiles_shape)
        for tensor in (self.values, self.rotary, self.turns.rows, self.turns.tiles):
            check_place("k_bias", tensor)

    def add_to(self, keys: Tensor, first: int) -> None:
        """Complete `keys` [G, S, D], the K of positions from `first` on as the pool holds it, in its own dtype.

        Positions past the table, where there are no tokens, keep what they have.
        """
        cos, sin = self.rotary[first : first + keys.shape[1]].to(keys.dtype).unbind(-1)
        real, values = keys[:, : len(cos)], self.values[:, None].to(keys.dtype)
        even, odd = values[..., 0::2], values[..., 1::2]
        real[..., 0::2].addcmul_(cos, even).addcmul_(sin, odd, value=-1)
        real[..., 1::2].addcmul_(sin, even).addcmul_(cos, odd)
