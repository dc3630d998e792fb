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

TURNED_ROWS = 4096
"""How many of a rotary table's rows there are turns of, if it has as many."""

_TILE = 16  # rows
_LANES = 32


@dataclass(frozen=True, slots=True)
class RotatedBias:
    """`values` fp32 [G, D], at position p turned by row p of `rotary` fp32 [P, D/2, 2], as `rope_and_write` turns K.

    A row is (cos, sin) of p times each pair's angle, all times one factor: kernels find rows from other rows. `turns`
    is `turns_of(rotary)`.
    """

    values: Tensor
    rotary: Tensor
    turns: Tensor

    def check(self, pages: KVPages) -> None:
        """Raises KernelArgumentError unless kernels can add this to the pool's K."""
        heads, dim = pages.num_kv_heads, pages.head_dim
        check_layout("k_bias.values", self.values, torch.float32, (("G", heads), ("D", dim)))
        check_layout("k_bias.rotary", self.rotary, torch.float32, (("P", None), ("D/2", dim // 2), ("cos, sin", 2)))
        tiles = -(-min(len(self.rotary), TURNED_ROWS) // _TILE)
        shape = (("tiles", tiles), ("D/16", dim // 16), ("lanes", _LANES), ("8", 8))
        check_layout("k_bias.turns", self.turns, torch.float16, shape)
        for name, tensor in (("values", self.values), ("rotary", self.rotary), ("turns", self.turns)):
            check_place(f"k_bias.{name}", tensor)

    def add_to(self, keys: Tensor, first: int) -> None:
        """Complete `keys` [G, S, D], the K of positions from `first` on as the pool holds it, in its own dtype.

        Positions past the table, where there are no tokens, keep what they have.
        """
        cos, sin = self.rotary[first : first + keys.shape[1]].to(keys.dtype).unbind(-1)
        real, values = keys[:, : len(cos)], self.values[:, None].to(keys.dtype)
        even, odd = values[..., 0::2], values[..., 1::2]
        real[..., 0::2].addcmul_(cos, even).addcmul_(sin, odd, value=-1)
        real[..., 1::2].addcmul_(sin, even).addcmul_(cos, odd)


def turns_of(rotary: Tensor) -> Tensor:
    """The first rows of `rotary` [P, D/2, 2] without their factor, as tensor cores take them: fp16 [tiles, D/16, 32, 8].

    Of each 16 rows, lane 4g + t has in step s, one after another, the pair p = 16 (s // 2) + 4t + 2 (s % 2) of rows 2g
    and 2g + 1, and the pair p + 1 of both. Rows past the table are zero.
    """
    rows = rotary[:TURNED_ROWS] / rotary[0, 0, 0]
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % _TILE))
    split = padded.view(-1, 8, 2, rotary.shape[1] // 16, 4, 2, 2, 2)  # tile, g, row, s // 2, t, s % 2, pair, cos or sin
    ordered = split.permute(0, 3, 5, 1, 4, 6, 2, 7)
    return ordered.reshape(len(split), rotary.shape[1] // 8, _LANES, 8).half()
