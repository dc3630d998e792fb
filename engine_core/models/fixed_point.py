"""A linear layer in 16-bit fixed point, made of exact int8 matrix products.

Owns: `FixedPointLinear`. Does not know: names of tensors, files, models.

CPUs with int8 dot products read and multiply int8 several times faster than fp32. A number is split as 256 * high +
low; of the four products low * low is below the last bit and left out. All sums are integers, hence exact, in whatever
order and batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127 * 256 + 127  # of which both halves fit into int8


def has_int8_products() -> bool:
    """Whether this CPU multiplies int8 fast; elsewhere a plain matrix is the better choice."""
    return bool(torch.cpu._is_vnni_supported())


class FixedPointLinear:
    """y = x W^T for a weight fp32 [N, K]; each row of W and of x has its own scale."""

    def __init__(self, weight: Tensor) -> None:
        self._scales = _scales(weight).view(-1)
        self._high, self._low = _split(weight, self._scales[:, None])

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        return self._high.nbytes + self._low.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, K] fp32 -> fp32 [m, N]; a row of x that is not finite gives a row of NaN."""
        rows = len(x)
        scales = _scales(x)
        high, low = _split(x, scales)
        products = torch._int_mm(torch.cat((high, low)), self._high.t())
        small = products[rows:].add_(torch._int_mm(high, self._low.t()))
        return products[:rows].float().mul_(256).add_(small).mul_(self._scales).mul_(scales * 256)


def _scales(x: Tensor) -> Tensor:
    """The value of one unit per row [R, 1]: value = (256 * high + low) * scale."""
    return (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min_(1e-30)


def _split(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [R, K] twice: x / scales is 256 * high + low."""
    fixed = (x / scales).round_()
    high = (fixed / 256).round_()
    return high.to(torch.int8), fixed.sub_(high, alpha=256).clamp_(-127, 127).to(torch.int8)
