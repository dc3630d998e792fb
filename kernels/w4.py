"""Linear layers over four-bit weights: the packed layout, and products with up to about 64 rows of activations.

Owns: `W4Matrix` and `pack_w4` (the layout that all W4 kernels read), and their reference in plain torch.
Does not know: checkpoints, layers, which kernel a model takes for which number of rows.

An [N, K] matrix is cut into units of 16 rows x 64 k. `codes` holds a unit as 32 lanes x 4 words; word j of lane 4g + t
is that lane's A fragment of the tensor-core instruction m16n8k16 for k0 = 64 * unit + 16 * j:

    nibbles 0, 4: row g,     k0 + 2t,     k0 + 2t + 1        nibbles 2, 6: row g,     k0 + 2t + 8, k0 + 2t + 9
    nibbles 1, 5: row g + 8, k0 + 2t,     k0 + 2t + 1        nibbles 3, 7: row g + 8, k0 + 2t + 8, k0 + 2t + 9

`scales` holds (s, z) in fp16 for each row and group, rows g and g + 8 beside each other: weight = (q - 8) * s + z. N
and K are padded to multiples of 64 by code 8 with s = z = 0, which is zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import ACTIVATIONS, check_tensor
from .errors import KernelArgumentError
from .loader import load

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
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    group_size = _checked_group_size(qweight, scales, mins)
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
    if qweight.dtype != torch.uint8 or qweight.ndim != 2:
        raise KernelArgumentError(f"qweight is {qweight.dtype} {list(qweight.shape)}; wanted: uint8 [N, K/2]")
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
    form: Form | None = None,
) -> None:
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
    if tokens:
        _launch(form or _form(tokens, matrix), x, matrix, out, bias, silu)


@dataclass(frozen=True, slots=True)
class Form:
    """How the kernel divides its work; the macros of w4_linear.cu."""

    token_tiles: int
    row_tiles: int
    warps: int
    cluster: int
    stages: int
    resident: int  # how many blocks of consecutive linears share a multiprocessor, 1 or 2


def _form(tokens: int, matrix: W4Matrix) -> Form:
    small = _shared_limit() < 200 << 10
    if tokens <= 8:
        return Form(1, 1, 8, 1, 2, 1) if small else Form(1, 2, 16, 1, 2, 1)
    if tokens <= 16:
        return Form(2, 1, 8, 1, 2, 1) if small else Form(2, 2, 16, 1, 2, 1)
    return Form(4, 1, 4, 1, 2, 1) if tokens <= 32 or small else Form(8, 1, 4, 1, 2, 1)


def _launch(form: Form, x: Tensor, matrix: W4Matrix, out: Tensor, bias: Tensor | None, silu: bool) -> None:
    tokens, units = x.shape[0], matrix.codes.shape[1]
    step_units = 2 if matrix.group_size % (2 * UNIT_K) == 0 and units % 2 == 0 else 1
    step_scales = 2 if matrix.group_size == SMALLEST_GROUP else 1
    slice_steps = -(-(units // step_units) // (form.cluster * form.warps))
    row_blocks = -(-matrix.n // (UNIT_ROWS * form.row_tiles))
    clusters = (_num_sms() if form.cluster <= 2 else _num_sms() - 4) // form.cluster
    if form.resident == 1:
        clusters = min(row_blocks, clusters)
    pair_shift = (-(-min(tokens, 8 * form.token_tiles) // 2) - 1).bit_length()
    turn_bytes = (form.warps + (2 if form.cluster > 1 else 0)) * form.row_tiles * 8 * 16 << pair_shift
    turns_at_once = 1
    while turns_at_once < -(-row_blocks // clusters) and 2 * turns_at_once * turn_bytes <= _SUM_BYTES:
        turns_at_once *= 2
    stage = form.row_tiles * (step_units * 512 + step_scales * 64)
    fixed = form.warps * form.stages * stage + turns_at_once * turn_bytes
    rows = min(tokens, 8 * form.token_tiles)

    def shared(chunk: int) -> int:
        x_bytes = rows * (chunk * step_units * UNIT_K + 8) * 2
        x_sums = (chunk * step_scales << (pair_shift + 1)) + 8 * form.token_tiles
        return fixed + form.warps * (x_bytes + x_sums * 4)

    limit = _shared_limit()
    fitting = max((chunk for chunk in range(1, slice_steps + 1) if shared(chunk) <= limit), default=0)
    if not fitting:
        raise KernelArgumentError(
            f"{form} with {tokens} tokens needs {shared(1)} bytes of shared memory; limit {limit}"
        )
    chunk = -(-slice_steps // -(-slice_steps // fitting))
    kernel = load(
        "w4_linear", ACTIVATION_BF16=int(x.dtype == torch.bfloat16), TOKEN_TILES=form.token_tiles,
        ROW_TILES=form.row_tiles, WARPS=form.warps, CLUSTER=form.cluster, STAGES=form.stages, STEP_UNITS=step_units,
        STEP_SCALES=step_scales,
    )  # fmt: skip
    kernel.launch(
        (clusters * form.cluster, -(-tokens // (8 * form.token_tiles))), form.warps * 32,
        (x, matrix.codes, matrix.scales, bias, out, tokens, matrix.n, matrix.k, units, matrix.scales.shape[1],
         _group_shift(matrix), int(silu), pair_shift, chunk, turns_at_once),
        max(shared(chunk), _sm_shared() // (form.resident + 1) - 1008),
    )  # fmt: skip


def _group_shift(matrix: W4Matrix) -> int:
    """A column's group is its index shifted right by this."""
    return 31 if matrix.scales.shape[1] == 1 else matrix.group_size.bit_length() - 1


@functools.cache
def _num_sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def _sm_shared() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_multiprocessor


@functools.cache
def _shared_limit() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


def w4_dequantize(matrix: W4Matrix, out: Tensor) -> None:
    """The weights into out [n, k], fp16 or bf16, rounded once; rows stay in the packed order."""
    check_tensor("out", out, ACTIVATIONS, (("n", matrix.n), ("k", matrix.k)))
    tiles, units = matrix.codes.shape[:2]
    load("w4_dequantize", ACTIVATION_BF16=int(out.dtype == torch.bfloat16)).launch(
        (-(-units // 8), tiles),
        256,
        (matrix.codes, matrix.scales, out, matrix.n, matrix.k, units, matrix.scales.shape[1], _group_shift(matrix)),
    )
