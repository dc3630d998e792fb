"""Int8 matrices with a scale per group of columns: the packed layout, and products with few rows of activations.

Owns: `W8Matrix` and `pack_w8` (the layout that all kernels over int8 weights read, `fused.embed` too), and their
reference in plain torch. Does not know: checkpoints, layers, which kernel a model takes for which number of rows.

An [N, K] matrix is cut into units of 16 rows x 32 k, a group each. `codes` holds a unit as 32 lanes x 16 bytes; lane
4g + t has columns 8t to 8t + 7 of row g, then of row g + 8: A fragments of two tensor-core instructions m16n8k16, whose
columns come in an order of their own, that of x alike. Weight = code * scale, exactly as in the checkpoint. N is padded
to a multiple of 16 and K of 64, by zeros.

`w8_linear` adds a row's groups one after the other: its result depends on nothing else, not even the number of rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import ACTIVATIONS, check_place, check_rows, check_tensor
from .errors import KernelArgumentError
from .loader import Variant, load, variants

UNIT_ROWS, UNIT_K = 16, 32
UNIT_BYTES = UNIT_ROWS * UNIT_K
STEP_UNITS = 2  # that a warp multiplies at a time
STEP_K = STEP_UNITS * UNIT_K
_STEP_BYTES = STEP_UNITS * (UNIT_BYTES + 2 * UNIT_ROWS)
_X_PADDING = 32  # between rows of x in shared memory
_PACKED_AT_ONCE = 16 << 20  # bytes of codes: bounds the temporaries of packing


@dataclass(frozen=True, slots=True)
class W8Matrix:
    """A packed [n, k] matrix.

    `codes` int8 [N/16, K/32, 8, 4, 2, 8] (row g; t; row g or g + 8; column), `scales` fp16 [N/16, K/32, 8, 2] (row g;
    row g or g + 8), with N and K the padded sizes.
    """

    codes: Tensor
    scales: Tensor
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes that the matrix takes on its device."""
        return self.codes.nbytes + self.scales.nbytes


def is_packable(columns: int, group_size: int) -> bool:
    """Whether groups of this size fall into units."""
    return group_size > 0 and columns % group_size == 0 and group_size % UNIT_K == 0


def pack_w8(qweight: Tensor, scales: Tensor) -> W8Matrix:
    """Pack `qweight` int8 [N, K] and `scales` fp16 [N, K/g], g a multiple of 32; weight = q * scale.

    On the device of the arguments. Raises KernelArgumentError.
    """
    group_size = _checked_group_size(qweight, scales)
    n, k = qweight.shape
    rows, columns = _padded(n, UNIT_ROWS), _padded(k, STEP_K)
    tiles, units = rows // UNIT_ROWS, columns // UNIT_K
    each = scales.repeat_interleave(group_size // UNIT_K, dim=1)
    each = F.pad(each, (0, units - each.shape[1], 0, rows - n))
    codes = torch.empty((tiles, units, 8, 4, 2, 8), dtype=torch.int8, device=qweight.device)
    at_once = max(UNIT_ROWS, _PACKED_AT_ONCE // columns // UNIT_ROWS * UNIT_ROWS)
    for start in range(0, rows, at_once):
        part = qweight[start : start + at_once]
        height = min(at_once, rows - start)
        part = F.pad(part, (0, columns - k, 0, height - len(part)))
        part = part.view(height // UNIT_ROWS, 2, 8, units, 4, 8)  # tile, row +0/+8, g, unit, t, column
        codes[start // UNIT_ROWS : (start + height) // UNIT_ROWS] = part.permute(0, 3, 2, 4, 1, 5)
    return W8Matrix(codes, each.view(tiles, 2, 8, units).permute(0, 3, 2, 1).contiguous(), n, k)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _checked_group_size(qweight: Tensor, scales: Tensor) -> int:
    """The group size of two tensors that fit together."""
    if qweight.dtype is not torch.int8 or qweight.ndim != 2 or not qweight.numel():
        raise KernelArgumentError(f"qweight is {qweight.dtype} {list(qweight.shape)}; wanted: int8 [N, K], not empty")
    n, k = qweight.shape
    if scales.dtype is not torch.float16 or scales.ndim != 2 or len(scales) != n or not scales.shape[1]:
        found = f"{scales.dtype} {list(scales.shape)}"
        raise KernelArgumentError(f"scales are {found}; wanted: torch.float16 [N={n}, K={k} / group size]")
    group_size = k // scales.shape[1]
    if k % scales.shape[1] or not is_packable(k, group_size):
        raise KernelArgumentError(f"K={k} in {scales.shape[1]} groups; allowed: groups of a multiple of {UNIT_K}")
    return group_size


def unpack_w8(matrix: W8Matrix) -> Tensor:
    """The weights of a packed matrix in fp32 [n, k]: the reference of every W8 kernel."""
    tiles, units = matrix.codes.shape[:2]
    codes = matrix.codes.permute(0, 4, 2, 1, 3, 5).reshape(tiles * UNIT_ROWS, units, UNIT_K)
    scales = matrix.scales.permute(0, 3, 2, 1).reshape(tiles * UNIT_ROWS, units, 1)
    weights = (codes.float() * scales.float()).view(tiles * UNIT_ROWS, units * UNIT_K)
    return weights[: matrix.n, : matrix.k].contiguous()


def w8_linear(x: Tensor, matrix: W8Matrix, out: Tensor) -> None:
    """out fp32 [M, n] = x [M, k] W^T, x in fp16 or bf16; rows of out may lie apart.

    Any M works, few are fast: above 32 the matrix is read once for every 32. Raises KernelArgumentError.
    """
    check_tensor("x", x, ACTIVATIONS, (("M", None), ("k", matrix.k)))
    tokens = x.shape[0]
    check_rows("out", out, torch.float32, (("M", tokens), ("n", matrix.n)))
    check_matrix(matrix)
    if not tokens:
        return
    form = _form(tokens)
    steps = matrix.codes.shape[1] // STEP_UNITS
    plan = _plan(form, tokens, matrix.codes.shape[0], steps)
    load("w8_linear", ACTIVATION_BF16=int(x.dtype is torch.bfloat16), **form.macros()).launch(
        plan.grid,
        form.warps * 32,
        (x, matrix.codes, matrix.scales, out, tokens, matrix.n, matrix.k, steps, plan.chunk_steps, out.stride(0)),
        plan.shared_bytes,
    )


def w8_dequantize(matrix: W8Matrix, out: Tensor) -> None:
    """The weights into out [n, k], fp16 or bf16, rounded once."""
    check_tensor("out", out, ACTIVATIONS, (("n", matrix.n), ("k", matrix.k)))
    check_matrix(matrix)
    tiles, units = matrix.codes.shape[:2]
    load("w8_dequantize", ACTIVATION_BF16=int(out.dtype is torch.bfloat16)).launch(
        (-(-units // 8), tiles), 256, (matrix.codes, matrix.scales, out, matrix.n, matrix.k, units)
    )


def check_matrix(matrix: W8Matrix) -> None:
    """Refuse a matrix that lies elsewhere than on the GPU: reading it would end the process's use of the device."""
    check_place("matrix.codes", matrix.codes)
    check_place("matrix.scales", matrix.scales)


@dataclass(frozen=True, slots=True)
class _Form:
    """How the kernel divides its work: macros of w8_linear.cu."""

    token_tiles: int
    warps: int
    stages: int

    @property
    def tokens(self) -> int:
        """How many a block multiplies."""
        return 8 * self.token_tiles

    def macros(self) -> dict[str, int]:
        return {
            "TOKEN_TILES": self.token_tiles,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "STEP_UNITS": STEP_UNITS,
        }


# By the most tokens, for multiprocessors with little shared memory and with much (SM90, SM100).
_SMALL_FORMS = {8: _Form(1, 8, 4), 16: _Form(2, 8, 4), 32: _Form(4, 8, 4)}
_LARGE_FORMS = {8: _Form(1, 24, 4), 16: _Form(2, 24, 4), 32: _Form(4, 12, 6)}
_SMALL_SHARED = 200 << 10

VARIANTS = (
    *variants("w8_dequantize", ACTIVATION_BF16=(0, 1)),
    *(
        Variant("w8_linear", {"ACTIVATION_BF16": bf16, **form.macros()}, architectures)
        for bf16 in (0, 1)
        for forms, architectures in (
            (_SMALL_FORMS, ("sm_80", "sm_86", "sm_89", "sm_120")),
            (_LARGE_FORMS, ("sm_90a", "sm_100")),
        )
        for form in forms.values()
    ),
)


def _form(tokens: int) -> _Form:
    forms = _SMALL_FORMS if _properties().shared_memory_per_block_optin < _SMALL_SHARED else _LARGE_FORMS
    return next((form for most, form in forms.items() if tokens <= most), forms[max(forms)])


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launch of one product; the numbers are arguments of w8_linear.cu."""

    grid: tuple[int, int]
    chunk_steps: int
    shared_bytes: int


@functools.cache
def _plan(form: _Form, tokens: int, tiles: int, steps: int) -> _Plan:
    device, rows = _properties(), min(tokens, form.tokens)

    def shared_bytes(chunk_steps: int) -> int:
        return form.warps * form.stages * _STEP_BYTES + rows * (chunk_steps * STEP_K + _X_PADDING) * 2

    limit = device.shared_memory_per_block_optin
    fitting = max(chunk for chunk in range(1, steps + 1) if chunk == 1 or shared_bytes(chunk) <= limit)
    chunk_steps = -(-steps // -(-steps // fitting))  # equal chunks
    grid = (min(device.multi_processor_count, -(-tiles // form.warps)), -(-tokens // form.tokens))
    return _Plan(grid, chunk_steps, shared_bytes(chunk_steps))


@functools.cache
def _properties() -> Any:
    return torch.cuda.get_device_properties(torch.cuda.current_device())
