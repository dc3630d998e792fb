"""The output head as exact int8 matrix products, for CPUs with int8 dot products.

Owns: `FixedPointHead`. Does not know: names of tensors, files, models.

The head is the largest matrix and is read once per step, so its bytes decide: int8 is a quarter of fp32. Weights and
inputs are 16-bit fixed point, split as 256 * high + low. All logits are computed from the weights' high halves (8
bits), the most likely `LIKELY` of each row then get the low halves' share. Measured on the embedded model
against the fp32 head over 512 tokens of English: mean KL divergence 2.5e-4 nats per token, the same most likely token
everywhere. Integer sums are exact, in whatever order and batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LIKELY = 64
_LARGEST = 127 * 256 + 127  # of which both halves fit into int8
_TILE = 64


def has_int8_products() -> bool:
    """Whether this CPU multiplies int8 fast; elsewhere a plain matrix is the better choice."""
    return bool(torch.cpu._is_vnni_supported())


class FixedPointHead:
    """y = x W^T for W fp32 [V, N]; every row of W and of x has its own scale.

    `input_size` [N] is the usual magnitude of x per column: columns are balanced with it before they are rounded.
    """

    def __init__(self, weight: Tensor, input_size: Tensor) -> None:
        columns = weight.square().mean(0).sqrt()
        self._balance = (columns / input_size.abs().clamp_min(1e-6)).sqrt().clamp_min(1e-6)
        balanced = weight / self._balance
        scales = _scales(balanced)
        self._high, self._low = _split(balanced, scales)
        self._scales = scales.view(-1)

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps in memory."""
        return self._high.nbytes + self._low.nbytes + self._scales.nbytes + self._balance.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, N] fp32 -> fp32 [m, V]; a row of x that is not finite gives a row of NaN."""
        rows, x = len(x), x * self._balance
        scales = _scales(x)
        products = torch._int_mm(torch.cat(_split(x, scales)), self._high.t())
        logits = products[:rows].float().mul_(256).add_(products[rows:]).mul_(self._scales).mul_(scales * 256)
        ids = _most_likely(logits)
        low_share = torch.bmm(self._low[ids].float(), x[:, :, None]).squeeze(-1) * self._scales[ids]
        return logits.scatter_add_(1, ids, low_share)


def _scales(x: Tensor) -> Tensor:
    """The value of one unit per row [R, 1]: value = (256 * high + low) * scale."""
    return (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min_(1e-30)


def _split(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [R, K] twice: x / scales is 256 * high + low."""
    fixed = (x / scales).round_()
    high = (fixed / 256).round_()
    return high.to(torch.int8), fixed.sub_(high, alpha=256).clamp_(-127, 127).to(torch.int8)


def _most_likely(logits: Tensor) -> Tensor:
    """Ids of the LIKELY largest of each row, [m, LIKELY]. They lie in the LIKELY tiles with the largest maxima."""
    rows, size = logits.shape
    if size <= LIKELY * _TILE:
        return logits.topk(min(LIKELY, size), sorted=False).indices
    tiles = F.pad(logits, (0, -size % _TILE), value=-torch.inf).view(rows, -1, _TILE)
    best = tiles.amax(-1).topk(LIKELY, sorted=False).indices
    place = tiles[torch.arange(rows)[:, None], best].flatten(1).topk(LIKELY, sorted=False).indices
    ids = best.gather(1, place // _TILE) * _TILE + place % _TILE
    return ids.clamp_(max=size - 1)
