"""What an fp16 pool would make of a K that holds its bias."""

from __future__ import annotations

from coldblock.kernels.rotated_bias import RotatedBias
from torch import Tensor


class RoundedBias(RotatedBias):
    """For references: K is completed and then rounded as an fp16 pool rounds it."""

    def add_to(self, keys: Tensor, first: int) -> None:
        RotatedBias.add_to(self, keys, first)
        keys.copy_(keys.half())


def rounded(bias: RotatedBias) -> RoundedBias:
    return RoundedBias(bias.values, bias.rotary, bias.turns)
