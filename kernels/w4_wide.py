"""Linear layers over four-bit weights for many rows of activations, on SM90 (Hopper): tensor cores by warpgroup.

Owns: the launch of `w4_wide`, and how it divides a product into tiles. Does not know: the packed layout (`w4`), or
which kernel a model takes for which number of rows.

The sums of an output run over K in `splits` parts, and the parts are added in their order. So a row's result depends on
the tiling, which follows from the matrix's shape and the number of rows, and not on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import ACTIVATIONS, check_tensor
from .errors import KernelUnavailable
from .loader import Variant, device_architecture, load, variants
from .tensor_map import plain_map, swizzled_map
from .w4 import UNIT_K, W4Matrix, check_epilogue

ARCHITECTURE = "sm_90a"

_STAGE_UNITS = 2  # of 64 k, that the kernel fetches at a time
_STAGE_K = _STAGE_UNITS * UNIT_K
_UNIT_WORDS, _SCALE_HALVES = 128, 32  # of 16 rows: a unit's codes, and the scales of one group
_MOST_STAGES = 8
_SHARED_OF_MULTIPROCESSOR, _SHARED_OF_BLOCK, _RESERVED = 228 * 1024, 227 * 1024, 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided; the macros of w4_wide.cu.

    A tile is 64 * warpgroups rows of W by tile_m rows of x. A cluster is `multicast` tiles, which share what they fetch
    of x, times `splits` parts of K. `resident` blocks fit on a multiprocessor. A warpgroup converts the weights of
    `batch` steps of 16 k while it multiplies the steps before.
    """

    warpgroups: int
    tile_m: int
    splits: int
    multicast: int
    resident: int
    batch: int

    def stage_bytes(self, stage_groups: int) -> int:
        """Of a piece of 128 k: x, codes, scales."""
        x = self.tile_m * _STAGE_K * 2
        codes, scales = _STAGE_UNITS * _UNIT_WORDS * 4, stage_groups * _SCALE_HALVES * 2
        return -(-(x + 4 * self.warpgroups * (codes + scales)) // 1024) * 1024

    def stages(self, stage_groups: int) -> int:
        """As many as fit when `resident` blocks share a multiprocessor."""
        room = min(_SHARED_OF_BLOCK, _SHARED_OF_MULTIPROCESSOR // self.resident - _RESERVED) - 16 * _MOST_STAGES
        return min(_MOST_STAGES, room // self.stage_bytes(stage_groups))

    def macros(self, stage_groups: int) -> dict[str, int]:
        """Of w4_wide.cu, but for the activation type and what is done with the results."""
        return {
            "STAGE_GROUPS": stage_groups,
            "WARPGROUPS": self.warpgroups,
            "TILE_M": self.tile_m,
            "SPLITS": self.splits,
            "MULTICAST": self.multicast,
            "STAGES": self.stages(stage_groups),
            "RESIDENT": self.resident,
            "BATCH": self.batch,
        }


# Up to how many rows of x which tiling, by the shape of W: enough rows for every multiprocessor of a large GPU; few and
# a long K; few and a short K. From measurements of the linears of a 3B model on an H200.
_Table = tuple[tuple[int, Tiling], ...]
_LARGEST = Tiling(2, 256, 1, 2, 1, 1)
_MANY_ROWS, _LONG_K = 8192, 8192
_TALL: _Table = (
    (32, Tiling(3, 32, 1, 1, 1, 4)),
    (64, Tiling(3, 64, 1, 1, 1, 4)),
    (96, Tiling(3, 96, 1, 1, 1, 4)),
    (128, Tiling(3, 128, 1, 1, 1, 4)),
    (192, Tiling(3, 96, 1, 1, 1, 4)),
    (384, Tiling(3, 128, 1, 1, 1, 4)),
)
_LONG: _Table = (
    (32, Tiling(1, 32, 4, 1, 2, 4)),
    (64, Tiling(1, 64, 8, 1, 3, 4)),
    (96, Tiling(1, 96, 4, 1, 2, 4)),
    (128, Tiling(3, 128, 8, 1, 1, 4)),
    (192, Tiling(3, 96, 4, 1, 1, 4)),
    (256, Tiling(3, 128, 4, 1, 1, 4)),
    (512, Tiling(3, 128, 2, 2, 1, 4)),
    (1024, Tiling(2, 128, 1, 2, 1, 4)),
)
_SMALL: _Table = (
    (32, Tiling(1, 32, 4, 1, 2, 4)),
    (64, Tiling(1, 64, 4, 1, 2, 4)),
    (96, Tiling(1, 96, 4, 1, 2, 4)),
    (128, Tiling(1, 128, 4, 1, 2, 4)),
    (192, Tiling(2, 64, 4, 1, 2, 4)),
    (256, Tiling(1, 128, 2, 1, 2, 4)),
    (512, Tiling(3, 128, 2, 2, 1, 4)),
    (1024, Tiling(3, 128, 1, 2, 1, 4)),
)


def _all_variants() -> tuple[Variant, ...]:
    """Every tiling above with every number of groups in a stage."""
    tilings = dict.fromkeys([_LARGEST, *(tiling for table in (_TALL, _LONG, _SMALL) for _, tiling in table)])
    return tuple(
        variant
        for tiling in tilings
        for stage_groups in (1, 2, 4)
        for silu, add in ((0, 0), (1, 0), (0, 1))
        for variant in variants(
            "w4_wide",
            architectures=(ARCHITECTURE,),
            ACTIVATION_BF16=(0, 1),
            SILU=(silu,),
            ADD=(add,),
            **{name: (value,) for name, value in tiling.macros(stage_groups).items()},
        )
    )


VARIANTS = _all_variants()


def supports(matrix: W4Matrix, m: int) -> bool:
    """Whether the current device and this product of m rows are served: on SM90, every product is."""
    return device_architecture() == ARCHITECTURE


def w4_wide_linear(
    x: Tensor,
    matrix: W4Matrix,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = False,
    add: bool = False,
) -> None:
    """out [M, n] = x [M, k] W^T + bias [n], all in one activation type; with `silu`, out [M, n/2] = silu(gate) * up.

    For `silu` the matrix rows are gate and up in turns of 8. With `add`, out is fp32 and the product is added to it,
    unrounded. Any M works. Weights are rounded to the activation type. Raises KernelArgumentError, and
    KernelUnavailable when the device is no SM90.
    """
    if device_architecture() != ARCHITECTURE:
        raise KernelUnavailable("w4_wide needs a device of compute capability 9.0; use w4_linear")
    check_epilogue(matrix, silu, add)
    width = matrix.n // 2 if silu else matrix.n
    check_tensor("x", x, ACTIVATIONS, (("M", None), ("k", matrix.k)))
    check_tensor("out", out, torch.float32 if add else x.dtype, (("M", x.shape[0]), ("n/2" if silu else "n", width)))
    if bias is not None:
        check_tensor("bias", bias, x.dtype, (("n", matrix.n),), alignment=2)
    if x.shape[0]:
        _launch(_tiling(matrix, x.shape[0]), x, matrix, out, bias, {"SILU": int(silu), "ADD": int(add)})


def _tiling(matrix: W4Matrix, m: int) -> Tiling:
    table = _LONG if matrix.k >= _LONG_K else _SMALL
    if matrix.n >= _MANY_ROWS or matrix.k < 8 * _STAGE_K:  # a short K has no pieces for all splits
        table = _TALL
    return next((tiling for most, tiling in table if m <= most), _LARGEST)


def _launch(
    tiling: Tiling, x: Tensor, matrix: W4Matrix, out: Tensor, bias: Tensor | None, epilogue: dict[str, int]
) -> None:
    m, (unit_rows, units), groups = x.shape[0], matrix.codes.shape[:2], matrix.scales.shape[1]
    stage_groups = 1 if groups == 1 else max(1, _STAGE_K // matrix.group_size)
    group_shift = 30 if groups == 1 else (matrix.group_size // _STAGE_K).bit_length() - 1
    stages, tile_unit_rows = tiling.stages(stage_groups), 4 * tiling.warpgroups
    bf16 = int(x.dtype == torch.bfloat16)
    kernel = load("w4_wide", ACTIVATION_BF16=bf16, **epilogue, **tiling.macros(stage_groups))
    clusters = -(-m // tiling.tile_m) * -(-unit_rows // (tile_unit_rows * tiling.multicast))
    kernel.launch(
        (clusters * tiling.multicast * tiling.splits,),
        128 * tiling.warpgroups + 32,
        (
            swizzled_map(x, tiling.tile_m // tiling.multicast),
            plain_map(matrix.codes.view(unit_rows, -1), tile_unit_rows, _STAGE_UNITS * _UNIT_WORDS),
            plain_map(matrix.scales.view(unit_rows, -1), tile_unit_rows, stage_groups * _SCALE_HALVES),
            bias,
            out,
            m,
            matrix.n,
            -(-units // _STAGE_UNITS),
            group_shift,
        ),
        stages * (tiling.stage_bytes(stage_groups) + 16),
    )
