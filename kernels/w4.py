"""Linear layers over four-bit weights: the packed layout, and products with few rows of activations.

Owns: `W4Matrix` and `pack_w4` (the layout that all W4 kernels read), and their reference in plain torch.
Does not know: checkpoints, layers, which kernel a model takes for which number of rows.

An [N, K] matrix is cut into units of 16 rows x 64 k. `codes` holds a unit as 32 lanes x 4 words; word j of lane 4g + t
is that lane's A fragment of the tensor-core instruction m16n8k16 for k0 = 64 * unit + 16 * j:

    nibbles 0, 4: row g,     k0 + 2t,     k0 + 2t + 1        nibbles 2, 6: row g,     k0 + 2t + 8, k0 + 2t + 9
    nibbles 1, 5: row g + 8, k0 + 2t,     k0 + 2t + 1        nibbles 3, 7: row g + 8, k0 + 2t + 8, k0 + 2t + 9

`scales` holds (s, z) in fp16 for each row and group, rows g and g + 8 beside each other: weight = (q - 8) * s + z. N
and K are padded to multiples of 64 by code 8 with s = z = 0, which is zero.

`w4_linear` adds over K in an order that depends on the matrix's shape and on the number of rows of x, not on the other
rows: it is the same for 1 to 4 rows, for 5 to 8, for 9 to 16 and for more.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import ACTIVATIONS, check_place, check_tensor
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


def w4_linear(
    x: Tensor,
    matrix: W4Matrix,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = False,
    add: bool = False,
) -> None:
    """out [M, n] = x [M, k] W^T + bias [n], all in one activation type; with `silu`, out [M, n/2] = silu(gate) * up.

    For `silu` the matrix rows are gate and up in turns of 8. With `add`, and no `silu`, out is fp32 and the product is
    added to it, unrounded. Any M works, few are fast. Raises KernelArgumentError.
    """
    check_epilogue(matrix, silu, add)
    check_tensor("x", x, ACTIVATIONS, (("M", None), ("k", matrix.k)))
    tokens, width = x.shape[0], ("n/2", matrix.n // 2) if silu else ("n", matrix.n)
    check_tensor("out", out, torch.float32 if add else x.dtype, (("M", tokens), width), alignment=4 if add else 2)
    if bias is not None:
        check_tensor("bias", bias, x.dtype, (("n", matrix.n),), alignment=2)
    check_matrix(matrix)
    if not tokens:
        return
    units, groups = matrix.codes.shape[1], matrix.scales.shape[1]
    form = _form(tokens, matrix.n, matrix.k)
    plan = _plan(form, tokens, matrix.n, units, matrix.group_size)
    sizes = (tokens, matrix.n, matrix.k, units, groups, _group_shift(matrix))
    division = (plan.pair_shift, plan.chunk_steps, plan.rounds_at_once)
    purpose = {"ACTIVATION_BF16": int(x.dtype is torch.bfloat16), "ADD": int(add)}
    load("w4_linear", **purpose, **form.macros(), **plan.step.macros()).launch(
        plan.grid,
        form.warps * 32,
        (x, matrix.codes, matrix.scales, bias, out, *sizes, int(silu), *division),
        plan.shared_bytes,
    )


def check_matrix(matrix: W4Matrix) -> None:
    """Refuse a matrix that lies elsewhere than on the GPU: reading it would end the process's use of the device."""
    check_place("matrix.codes", matrix.codes)
    check_place("matrix.scales", matrix.scales)


def check_epilogue(matrix: W4Matrix, silu: bool, add: bool) -> None:
    """Refuse what no product does with its results."""
    if silu and matrix.n % UNIT_ROWS:
        raise KernelArgumentError(f"n is {matrix.n}; gate and up in turns of 8 rows need a multiple of {UNIT_ROWS}")
    if silu and add:
        raise KernelArgumentError("silu and add are both given; allowed: one of them")


@dataclass(frozen=True, slots=True)
class _Form:
    """How the kernel divides its work, and how many blocks shall fit on a multiprocessor: macros of w4_linear.cu."""

    token_tiles: int
    row_tiles: int
    teams: int
    slices: int
    cluster: int
    stages: int
    resident: int = 1

    @property
    def tokens(self) -> int:
        """How many a block multiplies."""
        return 8 * self.token_tiles

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.teams * self.slices

    def macros(self) -> dict[str, int]:
        return {
            "TOKEN_TILES": self.token_tiles,
            "ROW_TILES": self.row_tiles,
            "TEAMS": self.teams,
            "SLICES": self.slices,
            "CLUSTER": self.cluster,
            "STAGES": self.stages,
            "RESIDENT": self.resident,
        }


@dataclass(frozen=True, slots=True)
class _Step:
    """What a warp multiplies at a time: `units` of 64 k in one group, or one unit in `scales` = 2 groups."""

    units: int
    scales: int

    def macros(self) -> dict[str, int]:
        return {"STEP_UNITS": self.units, "STEP_SCALES": self.scales}


_STEPS = (_Step(2, 1), _Step(1, 1), _Step(1, 2))

# By the most tokens, for multiprocessors with little shared memory.
_SMALL_FORMS = {8: _Form(1, 1, 1, 8, 1, 4, 2), 16: _Form(2, 1, 1, 8, 1, 3, 2), 32: _Form(4, 1, 1, 4, 1, 2)}
_SMALL_SHARED = 200 << 10

# With much (SM90, SM100), by the shape of W too: many rows, a long K, and neither. Where W has few rows, a cluster
# shares K, or each block would load all of x. Of several forms, that with the fewest turns, idle ones counted too.
_Forms = dict[int, tuple[_Form, ...]]
_MANY_ROWS, _LONG_K = 8192, 8192
_TALL_FORMS: _Forms = {
    4: (_Form(1, 2, 2, 8, 1, 2),),
    8: (_Form(1, 2, 3, 4, 1, 3),),
    16: (_Form(2, 2, 6, 2, 1, 2),),
    32: (_Form(4, 2, 6, 2, 1, 2),),
}
_LONG_FORMS: _Forms = {
    8: (_Form(1, 1, 1, 16, 2, 2),),
    16: (_Form(2, 2, 1, 16, 2, 2),),
    32: (_Form(4, 1, 9, 1, 8, 3),),
}
_SHORT_FORMS: _Forms = {
    8: (_Form(1, 1, 1, 16, 1, 2), _Form(1, 2, 1, 16, 1, 2)),
    16: (_Form(2, 2, 1, 16, 1, 2),),
    32: (_Form(4, 1, 3, 4, 2, 2),),
}
_TABLES = (_TALL_FORMS, _LONG_FORMS, _SHORT_FORMS)
_LARGE_FORMS = tuple(dict.fromkeys(form for table in _TABLES for forms in table.values() for form in forms))


def _bucket(table: Collection[int], tokens: int) -> int:
    return next((most for most in table if tokens <= most), max(table))


VARIANTS = (
    *variants("w4_dequantize", ACTIVATION_BF16=(0, 1)),
    *(
        Variant("w4_linear", {"ACTIVATION_BF16": bf16, "ADD": add, **form.macros(), **step.macros()}, architectures)
        for bf16 in (0, 1)
        for add in (0, 1)
        for step in _STEPS
        for forms, architectures in (
            (_SMALL_FORMS.values(), ("sm_80", "sm_86", "sm_89", "sm_120")),
            (_LARGE_FORMS, ("sm_90a", "sm_100")),
        )
        for form in forms
    ),
)


def _form(tokens: int, n: int, k: int) -> _Form:
    if _properties().shared_memory_per_block_optin < _SMALL_SHARED:
        return _SMALL_FORMS[_bucket(_SMALL_FORMS, tokens)]
    table = _LONG_FORMS if k >= _LONG_K else _TALL_FORMS if n >= _MANY_ROWS else _SHORT_FORMS

    def turns(form: _Form) -> int:
        return form.teams * _rounds(form, -(-n // (UNIT_ROWS * form.row_tiles)))[1]

    return min(table[_bucket(table, tokens)], key=turns)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launch of one product; the numbers are arguments of w4_linear.cu."""

    step: _Step
    grid: tuple[int, int]
    pair_shift: int
    chunk_steps: int
    rounds_at_once: int
    shared_bytes: int


@functools.cache
def _plan(form: _Form, tokens: int, n: int, units: int, group_size: int) -> _Plan:
    step = _Step(1, 2) if group_size == SMALLEST_GROUP else _STEPS[0 if group_size % 128 == 0 and units % 2 == 0 else 1]
    row_blocks = -(-n // (UNIT_ROWS * form.row_tiles))
    clusters, rounds = _rounds(form, row_blocks)
    rows = min(tokens, form.tokens)
    pair_shift = (-(-rows // 2) - 1).bit_length()
    round_bytes = form.teams * form.row_tiles * 8 * 16 << pair_shift  # of the sums of a slice
    received = 0 if form.cluster == 1 else 1 if rounds == 1 else 2  # by a cluster's block, in as many buffers
    sums = 0 if form.slices * form.cluster == 1 else form.slices
    rounds_at_once = 1
    while rounds_at_once < rounds and 2 * rounds_at_once * (sums + received) * round_bytes <= _SUM_BYTES:
        rounds_at_once *= 2
    stage_bytes = form.row_tiles * (step.units * 512 + step.scales * 64)
    fixed = form.warps * form.stages * stage_bytes + received * rounds_at_once * round_bytes
    sum_bytes = sums * rounds_at_once * round_bytes

    def shared_bytes(chunk_steps: int) -> int:
        x_bytes = rows * (chunk_steps * step.units * UNIT_K + 8) * 2
        x_sums = (chunk_steps * step.scales << (pair_shift + 1)) + form.tokens
        x_and_sums = form.slices * (x_bytes + x_sums * 4)
        return fixed + (max(sum_bytes, x_and_sums) if rounds == 1 else sum_bytes + x_and_sums)

    slice_steps = -(-(units // step.units) // (form.cluster * form.slices))
    limit = _properties().shared_memory_per_block_optin
    fitting = max(chunk for chunk in range(1, slice_steps + 1) if chunk == 1 or shared_bytes(chunk) <= limit)
    chunk_steps = -(-slice_steps // -(-slice_steps // fitting))  # equal chunks
    grid = (clusters * form.cluster, -(-tokens // form.tokens))
    return _Plan(step, grid, pair_shift, chunk_steps, rounds_at_once, shared_bytes(chunk_steps))


def _rounds(form: _Form, row_blocks: int) -> tuple[int, int]:
    """How many clusters share the rows, and in how many rounds the busiest has done its part."""
    clusters = min(row_blocks, _properties().multi_processor_count // form.cluster)
    rounds = -(-row_blocks // (clusters * form.teams))
    if form.cluster > 1:  # whatever lies beside it, a cluster needs room on neighbouring multiprocessors
        clusters = -(-row_blocks // (rounds * form.teams))
    return clusters, rounds


def _group_shift(matrix: W4Matrix) -> int:
    """A column's group is its index shifted right by this."""
    return 31 if matrix.scales.shape[1] == 1 else matrix.group_size.bit_length() - 1


@functools.cache
def _properties() -> Any:
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def w4_dequantize(matrix: W4Matrix, out: Tensor) -> None:
    """The weights into out [n, k], fp16 or bf16, rounded once; rows stay in the packed order."""
    check_tensor("out", out, ACTIVATIONS, (("n", matrix.n), ("k", matrix.k)))
    check_matrix(matrix)
    tiles, units = matrix.codes.shape[:2]
    load("w4_dequantize", ACTIVATION_BF16=int(out.dtype == torch.bfloat16)).launch(
        (-(-units // 8), tiles),
        256,
        (matrix.codes, matrix.scales, out, matrix.n, matrix.k, units, matrix.scales.shape[1], _group_shift(matrix)),
    )
