"""Linear layers over four-bit weights: the packed layout, and products with few rows of activations.

Owns: `W4Matrix` and `pack_w4` (the layout that all W4 kernels read), and their reference in plain torch.
Does not know: checkpoints, layers, which kernel a model takes for which number of rows.

An [N, K] matrix is cut into units of 16 rows x 64 k. `codes` holds a unit as 32 lanes x 4 words; word j of lane 4g + t
is that lane's A fragment of the tensor-core instruction m16n8k16 for k0 = 64 * unit + 16 * j:

    nibbles 0, 4: row g,     k0 + 2t,     k0 + 2t + 1        nibbles 2, 6: row g,     k0 + 2t + 8, k0 + 2t + 9
    nibbles 1, 5: row g + 8, k0 + 2t,     k0 + 2t + 1        nibbles 3, 7: row g + 8, k0 + 2t + 8, k0 + 2t + 9

`scales` holds (s, z) in fp16 for each row and group, rows g and g + 8 beside each other: weight = (q - 8) * s + z. N
and K are padded to multiples of 64 by code 8 with s = z = 0, which is zero.

`w4_linear` adds over K in an order that depends on the matrix and on the number of rows of x, not on the other rows: it
is the same for 1 to 8 rows, for 9 to 16 and for more (for a long K also from 3 rows on another than for fewer).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import ACTIVATIONS, check_tensor
from .errors import KernelArgumentError
from .loader import Variant, load, variants

UNIT_ROWS, UNIT_K = 16, 64
PADDING = 64
SMALLEST_GROUP = 32
_SUM_BYTES = 32 << 10  # of shared memory, for sums of more than one turn
_PACKED_AT_ONCE = 16 << 20  # bytes of codes: bounds the temporaries of packing


@dataclass(frozen=True, slots=True)
class W4Matrix:
    """A packed [n, k] matrix.

    `codes` int32 [N/16, K/64, 32, 4], `scales` fp16 [N/16, groups, 8, 2, 2] (row g; row g or g + 8; s or z), with N and
    K the padded sizes and groups = ceil(K / group_size). `group_size` is a power of two from 32 on, or k.
    """

    codes: Tensor
    scales: Tensor
    n: int
    k: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes that the matrix takes on its device."""
        return self.codes.nbytes + self.scales.nbytes


def pack_w4(qweight: Tensor, scales: Tensor, mins: Tensor, device: torch.device | str) -> W4Matrix:
    """Pack `qweight` uint8 [N, K/2] (even k in the low nibble), `scales` and `mins` [N, K/g]; weight = q * scale + min.

    Computes where the arguments are. K must be a multiple of 8, g a power of two from 32 on, or K. The zero
    z = min + 8 * scale is computed in fp32 and stored in fp16. Raises KernelArgumentError.
    """
    group_size = _checked_group_size(qweight, scales, mins)
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    s, z = scales.float(), torch.add(mins.float(), scales.float(), alpha=8)
    pairs = torch.stack((s, z), dim=-1).half()
    if not pairs.isfinite().all():
        raise KernelArgumentError("scales or mins do not fit into fp16: a scale or min + 8 * scale is not finite there")
    rows, columns = _padded(n), _padded(k)
    groups = 1 if group_size == k else -(-columns // group_size)
    pairs = F.pad(pairs, (0, 0, 0, groups - pairs.shape[1], 0, rows - n))
    pairs = pairs.view(rows // UNIT_ROWS, 2, 8, groups, 2).permute(0, 3, 2, 1, 4).contiguous()
    codes = torch.empty((rows // UNIT_ROWS, columns // UNIT_K, 32, 4), dtype=torch.int32, device=device)
    at_once = max(PADDING, _PACKED_AT_ONCE // (columns // 2) // PADDING * PADDING)
    for start in range(0, rows, at_once):
        part = qweight[start : start + at_once]
        height = min(at_once, rows - start)
        part = F.pad(part, (0, (columns - k) // 2, 0, height - len(part)), value=0x88)
        codes[start // UNIT_ROWS : (start + height) // UNIT_ROWS].copy_(_pack_codes(part))
    return W4Matrix(codes, pairs.to(device), n, k, group_size)


def _padded(size: int) -> int:
    return -(-size // PADDING) * PADDING


def _checked_group_size(qweight: Tensor, scales: Tensor, mins: Tensor) -> int:
    """The group size of three tensors that fit together."""
    if qweight.dtype != torch.uint8 or qweight.ndim != 2 or not qweight.numel():
        raise KernelArgumentError(
            f"qweight is {qweight.dtype} {list(qweight.shape)}; wanted: uint8 [N, K/2], not empty"
        )
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    if scales.shape != mins.shape or scales.ndim != 2 or len(scales) != n or scales.shape[1] == 0:
        raise KernelArgumentError(
            f"scales {list(scales.shape)} and mins {list(mins.shape)} do not fit; wanted: [N={n}, K={k} / group size]"
        )
    group_size = k // scales.shape[1]
    power_of_two = group_size >= SMALLEST_GROUP and group_size & (group_size - 1) == 0
    if k % 8 or k % scales.shape[1] or not (group_size == k or power_of_two):
        raise KernelArgumentError(
            f"K={k} in {scales.shape[1]} groups; K must be a multiple of 8, groups of 32, 64, 128 or all of K"
        )
    return group_size


def _pack_codes(qweight: Tensor) -> Tensor:
    """`qweight` uint8 [N, K/2], N and K multiples of 64 -> codes int32 [N/16, K/64, 32, 4]."""
    n, half_k = qweight.shape
    pairs = qweight.view(n // UNIT_ROWS, 2, 8, 2 * half_k // UNIT_K, 4, 2, 4)  # tile, row +0/+8, g, unit, j, k +0/+8, t
    upper, lower = pairs[:, 0], pairs[:, 1]
    first_k = (upper & 0x0F) | (lower << 4)
    second_k = (upper >> 4) | (lower & 0xF0)
    word_bytes = (first_k[..., 0, :], first_k[..., 1, :], second_k[..., 0, :], second_k[..., 1, :])
    words = torch.stack(word_bytes, dim=-1).view(torch.int32)[..., 0]  # tile, g, unit, j, t
    return words.permute(0, 2, 1, 4, 3).reshape(n // UNIT_ROWS, 2 * half_k // UNIT_K, 32, 4)


def unpack_w4(matrix: W4Matrix) -> Tensor:
    """The weights of a packed matrix in fp32 [n, k]: the reference of every W4 kernel."""
    tiles, units = matrix.codes.shape[:2]
    words = matrix.codes.view(torch.uint8).view(tiles, units, 8, 4, 4, 2, 2)  # tile, unit, g, t, j, first/second, +0/+8
    nibbles = torch.stack((words & 15, words >> 4), dim=-1)  # ..., row +0/+8
    # row = (tile, row +0/+8, g), k = (unit, j, k +0/+8, t, first/second)
    codes = nibbles.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(tiles * UNIT_ROWS, units * UNIT_K)
    pairs = matrix.scales.permute(0, 3, 2, 1, 4).reshape(tiles * UNIT_ROWS, -1, 2).float()
    group = torch.arange(matrix.k, device=codes.device) // matrix.group_size
    weights = (codes[: matrix.n, : matrix.k].float() - 8) * pairs[: matrix.n, group, 0] + pairs[: matrix.n, group, 1]
    return weights


def w4_linear(x: Tensor, matrix: W4Matrix, out: Tensor, *, bias: Tensor | None = None, silu: bool = False) -> None:
    """out [M, n] = x [M, k] W^T + bias [n], all in one activation type; with `silu`, out [M, n/2] = silu(gate) * up.

    For `silu` the matrix rows are gate and up in turns of 8. Any M works, few are fast. Raises KernelArgumentError.
    """
    width = matrix.n // 2 if silu else matrix.n
    if silu and matrix.n % UNIT_ROWS:
        raise KernelArgumentError(f"n is {matrix.n}; gate and up in turns of 8 rows need a multiple of {UNIT_ROWS}")
    check_tensor("x", x, ACTIVATIONS, (("M", None), ("k", matrix.k)))
    tokens = x.shape[0]
    check_tensor("out", out, x.dtype, (("M", tokens), ("n/2" if silu else "n", width)), alignment=2)
    if bias is not None:
        check_tensor("bias", bias, x.dtype, (("n", matrix.n),), alignment=2)
    if not tokens:
        return
    units, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    form = _form(tokens, matrix.k)
    plan = _plan(form, tokens, matrix.n, units, matrix.group_size)
    sizes = (tokens, matrix.n, matrix.k, units, groups, _group_shift(matrix))
    division = (plan.pair_shift, plan.chunk_steps, plan.turns_at_once)
    load("w4_linear", ACTIVATION_BF16=int(x.dtype == torch.bfloat16), **form.macros(), **plan.step.macros()).launch(
        plan.grid,
        form.warps * 32,
        (x, matrix.codes, matrix.scales, bias, out, *sizes, int(silu), *division),
        plan.shared_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """How the kernel divides its work: macros of w4_linear.cu."""

    token_tiles: int
    row_tiles: int
    warps: int
    cluster: int
    stages: int

    @property
    def tokens(self) -> int:
        """How many a block multiplies."""
        return 8 * self.token_tiles

    def macros(self) -> dict[str, int]:
        return {
            "TOKEN_TILES": self.token_tiles,
            "ROW_TILES": self.row_tiles,
            "WARPS": self.warps,
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
        }


@dataclass(frozen=True, slots=True)
class _Step:
    """What a warp multiplies at a time: `units` of 64 k in one group, or one unit in `scales` = 2 groups."""

    units: int
    scales: int

    def macros(self) -> dict[str, int]:
        return {"STEP_UNITS": self.units, "STEP_SCALES": self.scales}


_STEPS = (_Step(2, 1), _Step(1, 1), _Step(1, 2))

# By the most tokens, for multiprocessors with much shared memory (SM90, SM100; measured on an H200) and with little.
# Where K is long, the two blocks of a cluster share it from some tokens on: or each of many blocks would load all of x.
_FORMS = {8: _Form(1, 2, 16, 1, 2), 16: _Form(2, 2, 8, 1, 2), 32: _Form(4, 2, 8, 1, 2)}
_SMALL_FORMS = {8: _Form(1, 1, 8, 1, 4), 16: _Form(2, 1, 8, 1, 3), 32: _Form(4, 1, 4, 1, 2)}
_SMALL_SHARED = 200 << 10
_LONG_K, _SHARING_TOKENS = 8192, 3

VARIANTS = (
    *variants("w4_dequantize", ACTIVATION_BF16=(0, 1)),
    *(
        Variant("w4_linear", {"ACTIVATION_BF16": bf16, **form.macros(), **step.macros()}, architectures)
        for bf16 in (0, 1)
        for step in _STEPS
        for forms, architectures in (
            (_SMALL_FORMS.values(), ("sm_80", "sm_86", "sm_89", "sm_120")),
            (_FORMS.values(), ("sm_90a", "sm_100")),
            ([replace(form, cluster=2) for form in _FORMS.values()], ("sm_90a", "sm_100")),
        )
        for form in forms
    ),
)


def _form(tokens: int, k: int) -> _Form:
    small = _properties().shared_memory_per_block_optin < _SMALL_SHARED
    forms = _SMALL_FORMS if small else _FORMS
    form = forms[next((most for most in forms if tokens <= most), max(forms))]
    return replace(form, cluster=2) if not small and k >= _LONG_K and tokens >= _SHARING_TOKENS else form


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launch of one product; the numbers are arguments of w4_linear.cu."""

    step: _Step
    grid: tuple[int, int]
    pair_shift: int
    chunk_steps: int
    turns_at_once: int
    shared_bytes: int


@functools.cache
def _plan(form: _Form, tokens: int, n: int, units: int, group_size: int) -> _Plan:
    step = _Step(1, 2) if group_size == SMALLEST_GROUP else _STEPS[0 if group_size % 128 == 0 and units % 2 == 0 else 1]
    row_blocks = -(-n // (UNIT_ROWS * form.row_tiles))
    clusters = min(row_blocks, _properties().multi_processor_count // form.cluster)
    rows = min(tokens, form.tokens)
    pair_shift = (-(-rows // 2) - 1).bit_length()
    sums = form.warps + (
        2 if form.cluster > 1 else 0
    )  # of a turn; a cluster's blocks also receive some, in two buffers
    turn_bytes = sums * form.row_tiles * 8 * 16 << pair_shift
    turns_at_once = 1
    while turns_at_once < -(-row_blocks // clusters) and 2 * turns_at_once * turn_bytes <= _SUM_BYTES:
        turns_at_once *= 2
    stage_bytes = form.row_tiles * (step.units * 512 + step.scales * 64)
    fixed = form.warps * form.stages * stage_bytes + turns_at_once * turn_bytes

    def shared_bytes(chunk_steps: int) -> int:
        x_bytes = rows * (chunk_steps * step.units * UNIT_K + 8) * 2
        x_sums = (chunk_steps * step.scales << (pair_shift + 1)) + form.tokens
        return fixed + form.warps * (x_bytes + x_sums * 4)

    slice_steps = -(-(units // step.units) // (form.cluster * form.warps))
    limit = _properties().shared_memory_per_block_optin
    fitting = max(chunk for chunk in range(1, slice_steps + 1) if chunk == 1 or shared_bytes(chunk) <= limit)
    chunk_steps = -(-slice_steps // -(-slice_steps // fitting))  # equal chunks
    grid = (clusters * form.cluster, -(-tokens // form.tokens))
    return _Plan(step, grid, pair_shift, chunk_steps, turns_at_once, shared_bytes(chunk_steps))


def _group_shift(matrix: W4Matrix) -> int:
    """A column's group is its index shifted right by this."""
    return 31 if matrix.scales.shape[1] == 1 else matrix.group_size.bit_length() - 1


@functools.cache
def _properties() -> Any:
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def w4_dequantize(matrix: W4Matrix, out: Tensor) -> None:
    """The weights into out [n, k], fp16 or bf16, rounded once; rows stay in the packed order."""
    check_tensor("out", out, ACTIVATIONS, (("n", matrix.n), ("k", matrix.k)))
    tiles, units = matrix.codes.shape[:2]
    load("w4_dequantize", ACTIVATION_BF16=int(out.dtype == torch.bfloat16)).launch(
        (-(-units // 8), tiles),
        256,
        (matrix.codes, matrix.scales, out, matrix.n, matrix.k, units, matrix.scales.shape[1], _group_shift(matrix)),
    )
