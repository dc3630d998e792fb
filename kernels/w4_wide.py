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
from .loader import device_architecture, load, variants
from .tensor_map import plain_map, swizzled_map
from .w4 import SMALLEST_GROUP, UNIT_K, W4Matrix, check_epilogue, check_matrix

ARCHITECTURE = "sm_90a"

_UNIT_BYTES, _SCALE_BYTES = 512, 64  # of 16 rows: a unit's codes, and the scales of one group
_MOST_STAGES = 8
_SHARED_OF_MULTIPROCESSOR, _SHARED_OF_BLOCK, _RESERVED = 228 * 1024, 227 * 1024, 1024
_FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided; the macros of w4_wide.cu.

    A tile is 64 * warpgroups rows of W by tile_m rows of x. A cluster is `multicast` tiles, which share what they fetch
    of x, times `splits` parts of K. A block fetches pieces of 64 * stage_units k, at most `most_stages` ahead.
    `resident` blocks fit on a multiprocessor. A warpgroup converts the weights of `batch` steps of 16 k while it
    multiplies those before.
    """

    warpgroups: int
    tile_m: int
    splits: int
    multicast: int
    resident: int
    batch: int
    stage_units: int = 2
    most_stages: int = _MOST_STAGES

    def stage_k(self) -> int:
        """Of a piece."""
        return self.stage_units * UNIT_K

    def stage_groups(self, matrix: W4Matrix) -> int:
        """Scales of a row in a piece."""
        return 1 if matrix.scales.shape[1] == 1 else max(1, self.stage_k() // matrix.group_size)

    def all_stage_groups(self) -> list[int]:
        """What `stage_groups` may be."""
        return [groups for groups in (1, 2, 4, 8) if groups * SMALLEST_GROUP <= self.stage_k()]

    def stage_bytes(self, stage_groups: int) -> int:
        """Of a piece: x, codes, scales."""
        x = self.tile_m * self.stage_k() * 2
        of_16_rows = self.stage_units * _UNIT_BYTES + stage_groups * _SCALE_BYTES
        return -(-(x + 4 * self.warpgroups * of_16_rows) // 1024) * 1024

    def shared_bytes(self, stage_groups: int) -> int:
        """Of a block."""
        return self.stages(stage_groups) * (self.stage_bytes(stage_groups) + 16) + self._fixed_bytes()

    def stages(self, stage_groups: int) -> int:
        """As many as fit when `resident` blocks share a multiprocessor."""
        room = min(_SHARED_OF_BLOCK, _SHARED_OF_MULTIPROCESSOR // self.resident - _RESERVED) - self._fixed_bytes()
        return min(self.most_stages, room // (self.stage_bytes(stage_groups) + 16))

    def _fixed_bytes(self) -> int:
        """Of a barrier, and of results that lie behind the ring."""
        if self.splits == 1 or self.tile_m > _FEW_ROWS:
            return 8
        row_shares = min(self.splits, self.tile_m // 8)
        rows, columns = self.tile_m // row_shares, 64 * self.warpgroups * row_shares // self.splits
        return 8 + self.splits * rows * columns * 4 + rows * (columns + 8) * 2

    def macros(self, stage_groups: int) -> dict[str, int]:
        """Of w4_wide.cu, but for the activation type and what is done with the results."""
        return {
            "STAGE_UNITS": self.stage_units,
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
# a long K; few and a short K. From measurements of the linears of a 3B model on an H200. A ring of few stages leaves
# room for blocks of the kernels in front and behind.
_Table = tuple[tuple[int, Tiling], ...]
_LARGEST = Tiling(2, 256, 1, 2, 1, 1)
_MANY_ROWS, _LONG_K, _SHORT_K = 8192, 8192, 1024
_TALL: _Table = (
    (16, Tiling(1, 16, 1, 1, 3, 4, stage_units=4, most_stages=3)),
    (32, Tiling(3, 32, 1, 1, 1, 4, most_stages=4)),
    (64, Tiling(3, 64, 1, 1, 1, 4, most_stages=4)),
    (96, Tiling(3, 96, 1, 1, 1, 4)),
    (128, Tiling(3, 128, 1, 1, 1, 4)),
    (192, Tiling(3, 96, 1, 1, 1, 4)),
    (384, Tiling(3, 128, 1, 1, 1, 4)),
)
_LONG: _Table = (
    (16, Tiling(1, 16, 8, 1, 3, 4, stage_units=4, most_stages=3)),
    (32, Tiling(1, 32, 8, 1, 3, 4)),
    (64, Tiling(1, 64, 8, 1, 3, 4)),
    (96, Tiling(1, 96, 4, 1, 2, 4)),
    (128, Tiling(3, 128, 8, 1, 1, 4)),
    (192, Tiling(3, 96, 4, 1, 1, 4)),
    (256, Tiling(3, 128, 4, 1, 1, 4)),
    (512, Tiling(3, 128, 2, 2, 1, 4)),
    (1024, Tiling(2, 128, 1, 2, 1, 4)),
)
_SMALL: _Table = (
    (16, Tiling(1, 16, 4, 1, 2, 4)),
    (32, Tiling(1, 32, 4, 1, 2, 4)),
    (64, Tiling(1, 64, 4, 1, 2, 4)),
    (96, Tiling(1, 96, 4, 1, 2, 4)),
    (128, Tiling(1, 128, 4, 1, 2, 4)),
    (192, Tiling(2, 64, 4, 1, 2, 4)),
    (256, Tiling(1, 128, 2, 1, 2, 4)),
    (512, Tiling(3, 128, 2, 2, 1, 4)),
    (1024, Tiling(3, 128, 1, 2, 1, 4)),
)


TILINGS = tuple(dict.fromkeys([_LARGEST, *(tiling for table in (_TALL, _LONG, _SMALL) for _, tiling in table)]))
VARIANTS = tuple(
    variant
    for tiling in TILINGS
    for stage_groups in tiling.all_stage_groups()
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
    check_matrix(matrix)
    if x.shape[0]:
        epilogue = {"SILU": int(silu), "ADD": int(add)}
        _launch(tiling_of(matrix.n, matrix.k, x.shape[0]), x, matrix, out, bias, epilogue)


def tiling_of(n: int, k: int, m: int) -> Tiling:
    """How the product of m rows of x and a matrix [n, k] is divided."""
    table = _LONG if k >= _LONG_K else _SMALL
    if n >= _MANY_ROWS or k < _SHORT_K:  # a short K has no pieces for all splits
        table = _TALL
    return next((tiling for most, tiling in table if m <= most), _LARGEST)


def _launch(
    tiling: Tiling, x: Tensor, matrix: W4Matrix, out: Tensor, bias: Tensor | None, epilogue: dict[str, int]
) -> None:
    m, (unit_rows, units) = x.shape[0], matrix.codes.shape[:2]
    stage_groups, tile_unit_rows = tiling.stage_groups(matrix), 4 * tiling.warpgroups
    codes = matrix.codes.view(torch.int64).view(unit_rows, -1)
    one_group = matrix.scales.shape[1] == 1
    group_shift = 30 if one_group else (matrix.group_size // tiling.stage_k()).bit_length() - 1
    bf16 = int(x.dtype == torch.bfloat16)
    kernel = load("w4_wide", ACTIVATION_BF16=bf16, **epilogue, **tiling.macros(stage_groups))
    clusters = -(-m // tiling.tile_m) * -(-unit_rows // (tile_unit_rows * tiling.multicast))
    kernel.launch(
        (clusters * tiling.multicast * tiling.splits,),
        128 * tiling.warpgroups + 32,
        (
            swizzled_map(x, tiling.tile_m // tiling.multicast),
            plain_map(codes, tile_unit_rows, tiling.stage_units * _UNIT_BYTES // 8),
            plain_map(matrix.scales.view(unit_rows, -1), tile_unit_rows, stage_groups * _SCALE_BYTES // 2),
            bias,
            out,
            m,
            matrix.n,
            -(-units // tiling.stage_units),
            group_shift,
        ),
        tiling.shared_bytes(stage_groups),
    )
