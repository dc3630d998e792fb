"""The CUDA executor without a GPU: every kernel replaced by plain torch, streams, events and graphs by nothing.

Checks what the kernels' wrappers check by other means: shapes follow from the arithmetic. `emulate` patches the places
that the executor calls; what it computes is exact enough to hold it against the CPU executor and transformers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coldblock.engine_core.device import cuda_executor, cuda_runner, host_memory
from coldblock.engine_core.device.kv_formats import KVFormat, make_format
from coldblock.kernels import (
    block_copy,
    decode_attention,
    fused,
    gather,
    prefill_attention,
    sampling,
    small_copy,
    w4,
    w4_wide,
    w8,
)
from coldblock.kernels.block_copy import Ids
from coldblock.kernels.decode_attention import DecodeSplits
from coldblock.kernels.pages import KVPages
from coldblock.kernels.rotated_bias import RotatedBias
from torch import Tensor

FREE = 1 << 30


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, "the GPU" is the CPU, and kernels are plain torch."""
    emulate_device(monkeypatch)
    for module, name, replacement in (
        (fused, "embed", embed),
        (fused, "rms_norm", rms_norm),
        (fused, "rope_and_write", rope_and_write),
        (fused, "silu_multiply", silu_multiply),
        (w4, "w4_linear", w4_linear),
        (w4, "w4_dequantize", w4_dequantize),
        (w4_wide, "supports", lambda matrix, m: False),
        (w8, "w8_linear", w8_linear),
        (w8, "w8_dequantize", w8_dequantize),
        (decode_attention, "paged_decode", paged_decode),
        (prefill_attention, "paged_prefill", paged_prefill),
        (sampling, "sample", sample),
        (sampling, "penalize", penalize),
        (block_copy, "copy_blocks", copy_blocks),
        (gather, "gather_slices", gather_slices),
    ):
        _check_signature(getattr(module, name), replacement)
        monkeypatch.setattr(module, name, replacement)
    monkeypatch.setattr(DecodeSplits, "allocate", decode_splits)
    monkeypatch.setattr(cuda_runner, "PrefillSplits", lambda head_dim, device: None)


def emulate_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, copies, streams, events and graphs: all on the CPU, and at once. Other kernels are left as they are."""
    for module, name, replacement in (
        (host_memory, "pinned", lambda size, dtype: torch.zeros(size, dtype=dtype)),
        (small_copy, "to_device", copy_small),
        (small_copy, "to_host", copy_small),
        (cuda_executor, "DEVICE", "cpu"),
        (cuda_runner, "DecodeGraphs", lambda: lambda rows, run: run(rows)),
        (torch, "mm", mm),
        (torch, "addmm", addmm),
        (torch.cuda, "Stream", Nothing),
        (torch.cuda, "Event", Nothing),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "get_device_name", lambda: "emulated"),
        (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4)),
        (torch.cuda, "mem_get_info", lambda: (FREE, 2 * FREE)),
        (torch.cuda, "get_per_process_memory_fraction", lambda: 1.0),
    ):
        monkeypatch.setattr(module, name, replacement)


def _check_signature(real: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Whoever calls the replacement rightly calls the kernel rightly; the kernel may have further options."""
    wanted, given = list(signature(real).parameters.values()), list(signature(replacement).parameters)
    assert [p.name for p in wanted][: len(given)] == given, f"{real.__name__}{signature(real)}"
    assert all(p.default is not Parameter.empty for p in wanted[len(given) :]), f"{real.__name__}{signature(real)}"


class Nothing:
    """A stream on which everything has happened already, or an event that has occurred."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def record(self, *arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self) -> None: ...

    def wait_event(self, event: Nothing) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Nothing) -> float:
        return 1.0


_mm = torch.mm


def mm(x: Tensor, weight: Tensor, *, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return out.copy_(_mm(x.float(), weight.float()))


def copy_blocks(source: Tensor, reads: Ids, target: Tensor, writes: Ids, counts: Ids) -> None:
    for read, write, count in zip(reads, writes, counts, strict=True):
        assert min(read, write) >= 0 and read + count <= len(source) and write + count <= len(target)
        target[write : write + count] = source[read : read + count]


def gather_slices(source: Tensor, offset: int, blocks: Tensor, target: Tensor) -> None:
    assert len(blocks) == len(target) and 0 <= offset <= source.shape[1] - target.shape[1]
    target.copy_(source[blocks.long(), offset : offset + target.shape[1]])


def copy_small(source: Tensor, target: Tensor) -> None:
    assert source.shape == target.shape and source.dtype == target.dtype
    target.copy_(source)


def addmm(residual: Tensor, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    assert residual.dtype is out_dtype is torch.float32 and residual.data_ptr() == out.data_ptr()
    return out.add_(_mm(x.float(), weight.float()))


def embed(ids: Tensor, source: Tensor, previous: Tensor, table: Tensor | w8.W8Matrix, out: Tensor) -> None:
    tokens = torch.where(source >= 0, previous[source.clamp_min(0).long()], ids)
    rows = w8.unpack_w8(table) if isinstance(table, w8.W8Matrix) else table
    assert ((tokens >= 0) & (tokens < len(rows))).all()
    out.copy_(rows[tokens.long()])


def rms_norm(residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    out.copy_(fused.rms_norm_reference(residual, weight, eps))


def silu_multiply(gate_up: Tensor, out: Tensor) -> None:
    out.copy_(fused.silu_multiply_reference(gate_up.float()))


def w4_linear(
    x: Tensor,
    matrix: w4.W4Matrix,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = False,
    add: bool = False,
) -> None:
    y = x.float() @ w4.unpack_w4(matrix).t()
    y = y if bias is None else y + bias.float()
    if add:
        assert out.dtype is torch.float32
        out.add_(y)
    else:
        out.copy_(fused.silu_multiply_reference(y) if silu else y)


def w4_dequantize(matrix: w4.W4Matrix, out: Tensor) -> None:
    out.copy_(w4.unpack_w4(matrix))


def w8_linear(x: Tensor, matrix: w8.W8Matrix, out: Tensor) -> None:
    assert out.dtype is torch.float32
    out.copy_(x.float() @ w8.unpack_w8(matrix).t())


def w8_dequantize(matrix: w8.W8Matrix, out: Tensor) -> None:
    out.copy_(w8.unpack_w8(matrix))


class Planes:
    """One layer of a pool, through the CPU's formats."""

    def __init__(self, pages: KVPages, layer: int) -> None:
        self.pages = pages
        self.format: KVFormat = make_format(pages.format, pages.block_size, pages.head_dim)
        self.per_layer = 2 * pages.num_kv_heads
        self.rows = self.format.view(pages.pool.view(-1))[layer * self.per_layer :]

    def numbers(self, blocks: Tensor) -> Tensor:
        first = blocks.long()[..., None] * (self.pages.num_layers * self.per_layer)
        return first + torch.arange(self.per_layer)

    def write(self, blocks: Tensor, offsets: Tensor, kv: Tensor) -> None:
        slots = self.format.slots(self.numbers(blocks), offsets.long()[:, None])
        self.format.write(self.rows, slots, kv)

    def read(self, table: Tensor, context: int, k_bias: RotatedBias | None) -> tuple[Tensor, Tensor]:
        """K, completed, and V fp32 [G, context, D] of one sequence."""
        pages = self.pages
        count = math.ceil(context / pages.block_size)
        numbers = self.numbers(table[:count]).t().reshape(-1)
        kv = self.format.read(self.rows.index_select(0, numbers)).float()
        keys, values = kv.view(2, pages.num_kv_heads, -1, pages.head_dim)[:, :, :context]
        if k_bias is not None:
            k_bias.add_to(keys, 0)
        return keys, values


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
    real = positions >= 0
    if not real.any():
        return
    where = positions[real].long()
    q, k, v = fused.rope_reference(qkv[real], bias, rotary, where, num_heads, pages.num_kv_heads)
    q_out[real] = q.to(q_out.dtype)
    blocks = block_tables[sequences[real].long(), where // pages.block_size]
    Planes(pages, layer).write(blocks, where % pages.block_size, torch.cat((k, v), 1))


def attend(q: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """q [T, H, D] at positions first, first + 1, ...; fp32 [T, H * D]."""
    ratio = q.shape[1] // len(keys)
    seen = torch.arange(keys.shape[1]) <= torch.arange(first, first + len(q))[:, None]
    out = F.scaled_dot_product_attention(
        q.float().transpose(0, 1), keys.repeat_interleave(ratio, 0), values.repeat_interleave(ratio, 0), seen
    )
    return out.transpose(0, 1).reshape(len(q), -1)


def paged_decode(
    q: Tensor,
    pages: KVPages,
    layer: int,
    block_tables: Tensor,
    context_lens: Tensor,
    splits: object,
    out: Tensor,
    k_bias: RotatedBias | None = None,
) -> None:
    planes = Planes(pages, layer)
    out.zero_()
    for row, context in enumerate(context_lens.tolist()):
        if context:
            out[row] = attend(q[row : row + 1], *planes.read(block_tables[row], context, k_bias), context - 1)[0]


def paged_prefill(
    q: Tensor,
    pages: KVPages,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    max_queries: int,
    max_context: int,
    out: Tensor,
    splits: object | None = None,
    k_bias: RotatedBias | None = None,
) -> None:
    planes, starts, contexts = Planes(pages, layer), query_starts.tolist(), context_lens.tolist()
    assert max_context == max(contexts)
    assert max_queries == max(b - a for a, b in itertools.pairwise(starts))
    for row, context in enumerate(contexts):
        first, last = starts[row], starts[row + 1]
        keys, values = planes.read(block_tables[row], context, k_bias)
        out[first:last] = attend(q[first:last], keys, values, context - (last - first)).to(out.dtype)


def decode_splits(
    pages: KVPages, num_heads: int, max_batch: int, max_tokens: int, deterministic: bool = False
) -> DecodeSplits:
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(DecodeSplits)), 8)
    plan = torch.zeros(64 + 6 * max_batch, dtype=torch.int32)
    return DecodeSplits(**{**values, "plan": plan, "split_tokens": None})


def sample(
    logits: Tensor, vocab_size: int, parameters: Tensor, workspace: Tensor, tokens: Tensor, finite: Tensor
) -> None:
    rows = parameters.numpy().reshape(-1).view(sampling.PARAMETERS)
    chosen, are_finite = sampling.sample_reference(logits.numpy(), vocab_size, rows)
    tokens.copy_(torch.from_numpy(chosen))
    finite.copy_(torch.from_numpy(are_finite))


def penalize(logits: Tensor, vocab_size: int, entries: Tensor, penalties: Tensor) -> None:
    for row, token, count in entries.tolist():
        repetition, frequency, presence = penalties[row].tolist()
        value = float(logits[row, token])
        value = value / repetition if value > 0 else value * repetition
        value -= frequency * count + presence if count > 0 else 0.0
        logits[row, token] = -math.inf if count == sampling.BANNED else value
