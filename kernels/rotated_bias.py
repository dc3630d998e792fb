"""The bias of K where the pool holds K without it: rotation is linear, so attention can add it when it reads K.

Owns: what is to be added at which position, in plain torch. Does not know: why a bias is kept apart, or how a kernel
adds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_layout, check_place
from .pages import KVPages


@dataclass(frozen=True, slots=True)
class RotatedBias:
    """`values` fp32 [G, D], at position p turned by row p of `rotary` fp32 [P, D/2, 2], as `rope_and_write` turns K.

    A row is (cos, sin) of p times each pair's angle, all times one factor: kernels find rows from other rows.
    """

    values: Tensor
    rotary: Tensor

    def check(self, pages: KVPages) -> None:
        """Raises KernelArgumentError unless kernels can add this to the pool's K."""
        heads, dim = pages.num_kv_heads, pages.head_dim
        check_layout("k_bias.values", self.values, torch.float32, (("G", heads), ("D", dim)))
        check_layout("k_bias.rotary", self.rotary, torch.float32, (("P", None), ("D/2", dim // 2), ("cos, sin", 2)))
        check_place("k_bias.values", self.values)
        check_place("k_bias.rotary", self.rotary)

    def add_to(self, keys: Tensor, first: int) -> None:
        """Complete `keys` [G, S, D], the K of positions from `first` on as the pool holds it, in its own dtype.

        Positions past the table, where there are no tokens, keep what they have.
        """
        cos, sin = self.rotary[first : first + keys.shape[1]].to(keys.dtype).unbind(-1)
        real, values = keys[:, : len(cos)], self.values[:, None].to(keys.dtype)
        even, odd = values[..., 0::2], values[..., 1::2]
        real[..., 0::2].addcmul_(cos, even).addcmul_(sin, odd, value=-1)
        real[..., 1::2].addcmul_(sin, even).addcmul_(cos, odd)
