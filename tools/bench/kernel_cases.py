"""The kernels that `coldblock bench kernels` times, at the sizes of Qwen2.5-3B with four-bit weights.

Owns: sizes, inputs, and the count of bytes and operations of each case. Does not know: how time is taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine_core.kv_layout import KVShape, paged_kv_block_bytes
from ...engine_core.models.cuda_linears import PackedProduct, packed_product
from ...kernels import decode_attention, fused, prefill_attention, sampling, w4, w8
from ...kernels.pages import FORMAT_NUMBERS, KVPages, PageFormat
from ..large_bias import large_bias

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, GROUP = 36, 2048, 16, 2, 128, 11008, 151936, 128
BLOCK_SIZE = 16
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
BATCHES = (1, 4, 16, 64)
HEAD_ROWS = (1, 8, 16, 32)
DECODE = ((1, 128), (16, 160), (256, 160), (32, 8192))  # sequences, context
PREFILL = ((1, 8192), (256, 32))  # sequences, tokens of each
POOL_LAYERS = 4  # of a decode case's pool: more than a GPU's cache holds at the long contexts


@dataclass(frozen=True)
class Case:
    """`calls` do the same on different data; bytes and operations are of one of them."""

    calls: Sequence[Callable[[], Any]]
    bytes_moved: float
    flops: float


def all_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Every case's name, and what makes it: only one's memory is to be taken at a time."""
    for rows in BATCHES:
        yield f"W4 linears of all layers, {rows} rows", functools.partial(linears, rows)
    yield "dequantize gate_up", dequantize
    for rows in HEAD_ROWS:
        yield f"int8 head, {rows} rows", functools.partial(int8_head, rows)
    for attention, make, sizes in (("decode", decode, DECODE), ("prefill", prefill, PREFILL)):
        for kv_format, (sequences, tokens), biased in itertools.product(FORMAT_NUMBERS, sizes, (False, True)):
            name = f"{attention} attention {kv_format}, {sequences} x {tokens}{', K bias apart' if biased else ''}"
            yield name, functools.partial(make, kv_format, sequences, tokens, biased)
    for tokens in (1, 64, 8192):
        yield f"rms_norm, {tokens} rows", functools.partial(norm, tokens)
        yield f"silu_multiply, {tokens} rows", functools.partial(silu, tokens)
    for rows in (1, 64, 256):
        yield f"greedy sampling, {rows} rows", functools.partial(greedy, rows)


@functools.cache
def _matrices() -> dict[str, list[w4.W4Matrix]]:
    """All linears of all layers, random."""
    return {name: [_matrix(n, k) for _ in range(LAYERS)] for name, (n, k) in LINEARS.items()}


def _matrix(n: int, k: int) -> w4.W4Matrix:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.full((n, k // GROUP), 0.01, dtype=torch.float16, device="cuda")
    return w4.pack_w4(codes, scales, -7.5 * scales, "cuda")


def linears(rows: int) -> Case:
    """All linears of a model's step, by the kernels that the engine would take on this GPU; one call is the step."""
    matrices = _matrices()
    x = {k: torch.randn(rows, k, dtype=torch.float16, device="cuda") for _, k in LINEARS.values()}
    out = {name: torch.empty(rows, n, dtype=torch.float16, device="cuda") for name, (n, _) in LINEARS.items()}
    products = {name: _product(layers[0], rows) for name, layers in matrices.items()}
    gated = torch.empty(rows, FFN, dtype=torch.float16, device="cuda")

    def step() -> None:
        for layer in range(LAYERS):
            for name, (_, k) in LINEARS.items():
                silu = name == "gate_up"
                products[name](x[k], matrices[name][layer], gated if silu else out[name], silu=silu)

    weights = sum(matrix.nbytes for layers in matrices.values() for matrix in layers)
    elements = LAYERS * sum(n * k for n, k in LINEARS.values())
    return Case([step], weights, 2.0 * rows * elements)


def _product(matrix: w4.W4Matrix, rows: int) -> PackedProduct:
    product = packed_product(matrix, rows, has_dense=False)
    assert product is not None, "so few rows are multiplied with the packed matrix on every GPU"
    return product


def dequantize() -> Case:
    """One gate_up matrix to fp16."""
    matrices, (n, k) = _matrices()["gate_up"][:8], LINEARS["gate_up"]
    out = torch.empty(n, k, dtype=torch.float16, device="cuda")
    calls = [functools.partial(w4.w4_dequantize, matrix, out) for matrix in matrices]
    return Case(calls, matrices[0].nbytes + out.nbytes, 0.0)


def int8_head(rows: int) -> Case:
    """Logits from an int8 head of groups of 32."""
    codes = torch.randint(-127, 128, (VOCAB, HIDDEN), dtype=torch.int8, device="cuda")
    matrix = w8.pack_w8(codes, torch.full((VOCAB, HIDDEN // w8.UNIT_K), 0.001, dtype=torch.float16, device="cuda"))
    x = torch.randn(rows, HIDDEN, dtype=torch.float16, device="cuda")
    out = torch.empty(rows, VOCAB, device="cuda")
    call = functools.partial(w8.w8_linear, x, matrix, out)
    return Case([call] * 4, float(matrix.nbytes + out.nbytes), 2.0 * rows * VOCAB * HIDDEN)


def _pages(kv_format: PageFormat, blocks: int, layers: int) -> KVPages:
    """A pool of random, finite content."""
    block_bytes = paged_kv_block_bytes(KVShape(layers, KV_HEADS, HEAD_DIM), BLOCK_SIZE, kv_format)
    pool = torch.randint(0, 56, (blocks, block_bytes), dtype=torch.uint8, device="cuda")
    return KVPages(pool, kv_format, BLOCK_SIZE, layers, KV_HEADS, HEAD_DIM)


def _tables(sequences: int, context: int) -> Tensor:
    blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(sequences * blocks, device="cuda").int()
    return order.view(sequences, blocks)


def decode(kv_format: PageFormat, sequences: int, context: int, biased: bool) -> Case:
    """Paged decode attention, of a pool whose K lacks a bias or not; a call is one layer."""
    tables = _tables(sequences, context)
    pages = _pages(kv_format, tables.numel(), POOL_LAYERS)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    splits = decode_attention.DecodeSplits.allocate(pages, HEADS, sequences, sequences * context)
    plan = splits.plan_for(np.full(sequences, context, np.int32))
    splits.plan[: len(plan)].copy_(torch.from_numpy(plan))
    q = torch.randn(sequences, HEADS, HEAD_DIM, dtype=_activation(kv_format), device="cuda")
    out = torch.empty(sequences, HEADS * HEAD_DIM, dtype=q.dtype, device="cuda")
    k_bias = large_bias(KV_HEADS, HEAD_DIM, context) if biased else None
    calls = [
        functools.partial(decode_attention.paged_decode, q, pages, layer, tables, lengths, splits, out, k_bias)
        for layer in range(POOL_LAYERS)
    ]
    read = tables.numel() * 2 * KV_HEADS * pages.plane_bytes
    return Case(calls, read, 4.0 * sequences * context * HEADS * HEAD_DIM)


def prefill(kv_format: PageFormat, sequences: int, tokens: int, biased: bool) -> Case:
    """Causal attention of whole prompts, by the kernel that the engine would take on this GPU; a call is one layer.

    `biased`: the pool's K lacks a bias.
    """
    tables = _tables(sequences, tokens)
    pages = _pages(kv_format, tables.numel(), 1)
    lengths = torch.full((sequences,), tokens, dtype=torch.int32, device="cuda")
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * tokens
    q = torch.randn(sequences * tokens, HEADS, HEAD_DIM, dtype=_activation(kv_format), device="cuda")
    out = torch.empty(sequences * tokens, HEADS * HEAD_DIM, dtype=q.dtype, device="cuda")
    splits = prefill_attention.PrefillSplits(HEAD_DIM, q.device)
    k_bias = large_bias(KV_HEADS, HEAD_DIM, tokens) if biased else None
    arguments = (q, pages, 0, tables, starts, lengths, tokens, tokens, out, splits, k_bias)
    call = functools.partial(prefill_attention.paged_prefill, *arguments)
    flops = 2.0 * sequences * tokens * tokens * HEADS * HEAD_DIM  # half of all pairs
    return Case([call] * 4, 2.0 * q.nbytes, flops)


def _activation(kv_format: PageFormat) -> torch.dtype:
    return torch.bfloat16 if kv_format == "bf16" else torch.float16


def norm(tokens: int) -> Case:
    """RMS norm."""
    residual = torch.randn(tokens, HIDDEN, device="cuda")
    weight = torch.ones(HIDDEN, device="cuda")
    out = torch.zeros(tokens, HIDDEN, dtype=torch.float16, device="cuda")
    call = functools.partial(fused.rms_norm, residual, weight, 1e-6, out)
    return Case([call] * 16, float(residual.nbytes + out.nbytes), 0.0)


def silu(tokens: int) -> Case:
    """silu(gate) * up."""
    gate_up = torch.randn(tokens, 2 * FFN, dtype=torch.float16, device="cuda")
    out = torch.empty(tokens, FFN, dtype=torch.float16, device="cuda")
    call = functools.partial(fused.silu_multiply, gate_up, out)
    return Case([call] * 16, float(gate_up.nbytes + out.nbytes), 0.0)


def greedy(rows: int) -> Case:
    """Greedy sampling from logits."""
    logits = torch.randn(rows, VOCAB, device="cuda")
    row = np.array([sampling.parameter_row(0.0, 0, 0)] * rows, sampling.PARAMETERS)
    parameters = torch.from_numpy(row.view(np.int32).reshape(rows, -1)).cuda()
    workspace = sampling.make_workspace(rows, VOCAB, "cuda")
    tokens, finite = (torch.empty(rows, dtype=torch.int32, device="cuda") for _ in range(2))
    call = functools.partial(sampling.sample, logits, VOCAB, parameters, workspace, tokens, finite)
    return Case([call] * 8, float(logits.nbytes), 0.0)
