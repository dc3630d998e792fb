"""The small operations between the matrix products, each one kernel: embedding, norms, rotary + KV write, activation.

Owns: their argument checks, their launches, and a reference in plain torch for each that has none elsewhere.
Does not know: layers, requests, or what the numbers are for.

T is tokens, N the hidden size, H query heads, G KV heads, D the head dimension; activations are fp16 or bf16. Every
output is written into a tensor that the caller passes. A row depends on nothing but itself, and no order of summation
on the number of rows: all of these are batch-invariant. All raise KernelArgumentError for what does not fit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import ACTIVATIONS, check_multiple, check_tensor
from .loader import load, variants
from .pages import FORMAT_NUMBERS, HEAD_DIMS, KVPages
from .w8 import W8Matrix, check_matrix

THREADS = 256
VECTOR = 8
"""Columns of one thread: 16 bytes of activations."""

MOST_NORM_COLUMNS = 1024 * VECTOR
SILU_TURN = 8
"""Gate and up columns follow each other in turns of so many."""

VARIANTS = (
    *variants("embed", ACTIVATION_BF16=(0, 1), INT8_TABLE=(0,)),
    *variants("embed", ACTIVATION_BF16=(0,), INT8_TABLE=(1,)),
    *variants("rms_norm", ACTIVATION_BF16=(0, 1)),
    *variants("rope_and_write", ACTIVATION_BF16=(0, 1), KV_FORMAT=FORMAT_NUMBERS.values(), HEAD_DIM=HEAD_DIMS),
    *variants("silu_multiply", ACTIVATION_BF16=(0, 1)),
)


def embed(ids: Tensor, source: Tensor, previous: Tensor, table: Tensor | W8Matrix, out: Tensor) -> None:
    """out fp32 [T, N] = rows of table [V, N]. Token t is previous[source[t]] where source[t] >= 0, else ids[t].

    ids, source [T] and previous [P] are int32. Every token must be in [0, V): nothing checks that on the GPU.
    """
    width = _checked_width(table)
    check_tensor("ids", ids, torch.int32, [("T", None)], alignment=4)
    tokens = ids.shape[0]
    check_multiple("N", width, VECTOR)
    check_tensor("source", source, torch.int32, [("T", tokens)], alignment=4)
    check_tensor("previous", previous, torch.int32, [("P", None)], alignment=4)
    check_tensor("out", out, torch.float32, [("T", tokens), ("N", width)])
    if isinstance(table, W8Matrix):
        kernel = load("embed", ACTIVATION_BF16=0, INT8_TABLE=1)
        rows: tuple[Tensor, Tensor | None, int] = table.codes, table.scales, table.codes.shape[1]
    else:
        kernel = load("embed", ACTIVATION_BF16=_is_bf16(table), INT8_TABLE=0)
        rows = table, None, 0
    values, scales, units = rows
    kernel.launch([tokens], min(THREADS, _threads(width)), [ids, source, previous, values, scales, out, width, units])


def _checked_width(table: Tensor | W8Matrix) -> int:
    """Columns of a table that is on the GPU."""
    if isinstance(table, W8Matrix):
        check_matrix(table)
        return table.k
    check_tensor("table", table, ACTIVATIONS, [("V", None), ("N", None)])
    return int(table.shape[1])


def rms_norm(residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out [T, N] = residual / sqrt(mean(residual^2) + eps) * weight, for residual fp32 [T, N] and weight fp32 [N].

    N is a multiple of 8 up to 8192.
    """
    check_tensor("residual", residual, torch.float32, [("T", None), ("N", None)])
    tokens, width = residual.shape
    check_multiple("N", width, VECTOR, most=MOST_NORM_COLUMNS)
    check_tensor("weight", weight, torch.float32, [("N", width)])
    check_tensor("out", out, ACTIVATIONS, [("T", tokens), ("N", width)])
    kernel = load("rms_norm", ACTIVATION_BF16=_is_bf16(out))
    kernel.launch([tokens], _threads(width), [residual, weight, out, width, float(eps)])


def rope_and_write(
    qkv: Tensor,
    bias: Tensor | None,
    rotary: Tensor,
    positions: Tensor,
    sequences: Tensor,
    block_tables: Tensor,
    pages: KVPages,
    layer: int,
    num_heads: int,
    q_out: Tensor,
) -> None:
    """Add bias [(H+2G)*D] to qkv [T, (H+2G)*D], rotate q and k, write q to q_out [T, H, D], k and v into the pool.

    Heads lie in the order q, k, v; a rotary pair is two neighbouring elements. rotary is fp32 [P, D/2, 2] (cos, sin),
    positions int32 [T]; token t is put into block block_tables[sequences[t], position // block_size], int32
    [S, max_blocks] and [T]. A position below 0 is padding: nothing is written for it.
    """
    heads, dim = num_heads + 2 * pages.num_kv_heads, pages.head_dim
    check_tensor("qkv", qkv, ACTIVATIONS, [("T", None), ("(H+2G)*D", heads * dim)])
    tokens = qkv.shape[0]
    if bias is not None:
        check_tensor("bias", bias, qkv.dtype, [("(H+2G)*D", heads * dim)])
    check_tensor("rotary", rotary, torch.float32, [("P", None), ("D/2", dim // 2), ("cos, sin", 2)])
    check_tensor("positions", positions, torch.int32, [("T", tokens)], alignment=4)
    check_tensor("sequences", sequences, torch.int32, [("T", tokens)], alignment=4)
    check_tensor("block_tables", block_tables, torch.int32, [("S", None), ("max_blocks", None)], alignment=4)
    check_tensor("q_out", q_out, qkv.dtype, [("T", tokens), ("H", num_heads), ("D", dim)])
    pages.check(layer)
    kernel = load("rope_and_write", ACTIVATION_BF16=_is_bf16(qkv), KV_FORMAT=FORMAT_NUMBERS[pages.format], HEAD_DIM=dim)
    lanes = 8 if dim <= 64 else 16 if dim <= 128 else 32
    kernel.launch(
        [-(-tokens * heads * lanes // THREADS)],
        THREADS,
        [
            *(qkv, bias, rotary, positions, sequences, block_tables, pages.pool, q_out),
            *(tokens, num_heads, pages.num_kv_heads, block_tables.shape[1], pages.block_size),
            *(pages.block_bytes, pages.layer_offset(layer), pages.plane_bytes),
        ],
    )


def silu_multiply(gate_up: Tensor, out: Tensor) -> None:
    """out [T, W] = silu(gate) * up; the columns of gate_up [T, 2W] are gate and up in turns of 8."""
    check_tensor("out", out, ACTIVATIONS, [("T", None), ("W", None)])
    tokens, width = out.shape
    check_multiple("W", width, SILU_TURN)
    check_tensor("gate_up", gate_up, out.dtype, [("T", tokens), ("2W", 2 * width)])
    units = tokens * width // VECTOR
    kernel = load("silu_multiply", ACTIVATION_BF16=_is_bf16(out))
    kernel.launch([-(-units // THREADS)], THREADS, [gate_up, out, units])


def rms_norm_reference(residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` writes, before rounding, in the dtype of residual [T, N]."""
    return residual * (residual.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rope_reference(
    qkv: Tensor, bias: Tensor | None, rotary: Tensor, positions: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D] and k, v [T, G, D] in fp32, as `rope_and_write` rounds or stores them."""
    x = (qkv.float() if bias is None else qkv.float() + bias.float()).view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    turned = num_heads + num_kv_heads
    cos, sin = rotary[positions.long()].unsqueeze(1).unbind(-1)
    even, odd = x[:, :turned, 0::2], x[:, :turned, 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return rotated[:, :num_heads], rotated[:, num_heads:], x[:, turned:]


def silu_multiply_reference(gate_up: Tensor) -> Tensor:
    """What `silu_multiply` writes, before rounding, in the dtype of gate_up [T, 2W]."""
    gate, up = gate_up.view(len(gate_up), -1, 2, SILU_TURN).unbind(2)
    return (F.silu(gate) * up).flatten(1)


def _threads(columns: int) -> int:
    """Threads, in whole warps, that hold so many columns."""
    return -(-columns // (32 * VECTOR)) * 32


def _is_bf16(tensor: Tensor) -> int:
    return int(tensor.dtype is torch.bfloat16)
