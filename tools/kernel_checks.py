"""What `coldblock validate` holds against what: each native kernel against its reference, on fresh random inputs.

Owns: the inputs, the comparison. Does not know: how results are shown, or what is good enough (`validate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..engine_core.device.kv_pool import KVPool
from ..engine_core.kv_layout import FormatName, KVShape
from ..engine_core.models.cuda_decoder import Attend, CudaDecoder, TokenInputs, Workspace, load_cuda_decoder
from ..engine_core.models.registry import ModelConfig
from ..engine_core.models.weights import TensorSource
from ..kernels import decode_attention, fused, prefill_attention, prefill_attention_hopper, w4
from ..kernels.pages import HEAD_DIMS, KVPages

FORMATS: tuple[FormatName, ...] = ("fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2")
BLOCK_SIZE = 16
LENGTHS = (1, 17, 300, 1000)
HEADS, KV_HEADS = 8, 2


@dataclass(frozen=True)
class Comparison:
    """How near `name` came to its reference: cosine of the two as vectors, largest difference, relative error."""

    name: str
    cosine: float
    max_abs_error: float
    relative_error: float


@dataclass(frozen=True)
class LogitsComparison:
    """A whole model with native and with reference attention, over all tokens of a text."""

    name: str
    cosine: float
    max_abs_error: float
    mean_kl: float
    top1_agreement: float


def compare(name: str, result: Tensor, reference: Tensor) -> Comparison:
    """In fp64."""
    found, wanted = result.double().flatten(), reference.double().flatten()
    cosine = float(found @ wanted / (found.norm() * wanted.norm()).clamp_min(1e-300))
    difference = found - wanted
    return Comparison(name, cosine, float(difference.abs().max()), float(difference.norm() / wanted.norm()))


def kernel_comparisons(seed: int) -> Iterator[Callable[[], Comparison]]:
    """One for each kernel, format and head dimension, computed when called."""
    torch.manual_seed(seed)
    for dtype in (torch.float16, torch.bfloat16):
        kind = "bf16" if dtype is torch.bfloat16 else "fp16"
        yield lambda dtype=dtype, kind=kind: _norm(f"rms_norm {kind}", dtype)
        yield lambda dtype=dtype, kind=kind: _silu(f"silu_multiply {kind}", dtype)
        for group in (32, 128):
            for rows in (1, 16, 64):
                name = f"w4_linear {kind}, groups of {group}, {rows} rows"
                yield lambda name=name, dtype=dtype, group=group, rows=rows: _linear(name, dtype, group, rows)
    for kv_format in FORMATS:
        for head_dim in HEAD_DIMS:
            name = f"{kv_format}, head_dim {head_dim}"
            yield lambda name=name, f=kv_format, d=head_dim: _decode(f"decode attention {name}", f, d)
            yield lambda name=name, f=kv_format, d=head_dim: _prefill(f"prefill attention {name}", f, d)


def _norm(name: str, dtype: torch.dtype) -> Comparison:
    residual, weight = torch.randn(33, 2048, device="cuda"), torch.rand(2048, device="cuda")
    out = torch.full((33, 2048), math.nan, dtype=dtype, device="cuda")
    fused.rms_norm(residual, weight, 1e-6, out)
    return compare(name, out, fused.rms_norm_reference(residual.double(), weight.double(), 1e-6))


def _silu(name: str, dtype: torch.dtype) -> Comparison:
    gate_up = torch.randn(33, 2 * 1536, dtype=dtype, device="cuda")
    out = torch.full((33, 1536), math.nan, dtype=dtype, device="cuda")
    fused.silu_multiply(gate_up, out)
    return compare(name, out, fused.silu_multiply_reference(gate_up.double()))


def _linear(name: str, dtype: torch.dtype, group: int, rows: int) -> Comparison:
    n, k = 1000, 2048
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales, mins = (torch.rand(n, k // group, device="cuda").half() - shift for shift in (0.0, 0.5))
    matrix = w4.pack_w4(codes, scales, 8 * mins, "cuda")
    x = torch.randn(rows, k, dtype=dtype, device="cuda")
    out = torch.full((rows, n), math.nan, dtype=dtype, device="cuda")
    w4.w4_linear(x, matrix, out)
    return compare(name, out, x.double() @ w4.unpack_w4(matrix).double().t())


def _filled_pool(kv_format: FormatName, head_dim: int) -> tuple[KVPages, Tensor]:
    """A pool whose blocks hold random K and V, and block tables of the sequences of LENGTHS, in no order."""
    counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    pool = KVPool(KVShape(1, KV_HEADS, head_dim), BLOCK_SIZE, kv_format, sum(counts), 0, "cuda")
    values = torch.randn(sum(counts) * BLOCK_SIZE, 2 * KV_HEADS, head_dim, device="cuda").cpu()
    host = KVPool(KVShape(1, KV_HEADS, head_dim), BLOCK_SIZE, kv_format, sum(counts), 0)
    blocks = torch.arange(sum(counts)).repeat_interleave(BLOCK_SIZE)
    offsets = torch.arange(BLOCK_SIZE).repeat(sum(counts))[:, None]
    host.format.write(host.layer(0), host.format.slots(host.plane_numbers(blocks), offsets), values)
    pool.gpu.copy_(host.gpu)
    order = torch.randperm(sum(counts)).int().split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    return pool.pages, tables.cuda()


def _activation(kv_format: FormatName) -> torch.dtype:
    return torch.bfloat16 if kv_format == "bf16" else torch.float16


def _decode(name: str, kv_format: FormatName, head_dim: int) -> Comparison:
    pages, tables = _filled_pool(kv_format, head_dim)
    q = torch.randn(len(LENGTHS), HEADS, head_dim, dtype=_activation(kv_format), device="cuda")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    splits = decode_attention.DecodeSplits.allocate(pages, HEADS, len(LENGTHS), sum(LENGTHS))
    plan = splits.plan_for(np.array(LENGTHS, np.int32))
    splits.plan[: len(plan)].copy_(torch.from_numpy(plan))
    out = torch.full((len(LENGTHS), HEADS * head_dim), math.nan, dtype=q.dtype, device="cuda")
    decode_attention.paged_decode(q, pages, 0, tables, lengths, splits, out)
    return compare(name, out, decode_attention.paged_decode_reference(q, pages, 0, tables, lengths))


def _prefill(name: str, kv_format: FormatName, head_dim: int) -> Comparison:
    """Of every sequence the last tokens, up to 200, as a chunk behind what is there already."""
    pages, tables = _filled_pool(kv_format, head_dim)
    counts = [min(length, 200) for length in LENGTHS]
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device="cuda")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    q = torch.randn(sum(counts), HEADS, head_dim, dtype=_activation(kv_format), device="cuda")
    out = torch.full((sum(counts), HEADS * head_dim), math.nan, dtype=q.dtype, device="cuda")
    _native_prefill(q, pages, 0, tables, starts, lengths, max(counts), max(LENGTHS), out)
    return compare(name, out, prefill_attention.paged_prefill_reference(q, pages, 0, tables, starts, lengths))


def _native_prefill(
    q: Tensor, pages: KVPages, layer: int, tables: Tensor, starts: Tensor, lengths: Tensor, most: int, longest: int,
    out: Tensor,
) -> None:  # fmt: skip
    """By the kernel that the engine takes on this GPU."""
    hopper = prefill_attention_hopper.supports(pages, q.shape[1], q.dtype)
    attend = prefill_attention_hopper.paged_prefill_hopper if hopper else prefill_attention.paged_prefill
    attend(q, pages, layer, tables, starts, lengths, most, longest, out)


def load_model(config: ModelConfig, source: TensorSource, positions: int) -> CudaDecoder:
    """The model in fp16."""
    return load_cuda_decoder(config, source, torch.float16, positions)


def compare_logits(decoder: CudaDecoder, token_ids: list[int], kv_format: FormatName) -> LogitsComparison:
    """Run the tokens as one prompt with native and with reference attention over pools of this format."""
    config, count = decoder.config, len(token_ids)
    ids = torch.tensor(token_ids, dtype=torch.int32, device="cuda")
    positions = torch.arange(count, dtype=torch.int32, device="cuda")
    none, zeros = torch.full_like(ids, -1), torch.zeros_like(ids)
    table = torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32, device="cuda")[None]
    tokens = TokenInputs(ids, none, positions, zeros, zeros, table)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, count], [count]))
    workspace = Workspace(config, decoder.dtype, count, count, decoder.scratch_elements, "cuda")

    def logits(make_attend: Callable[[KVPages], Attend]) -> Tensor:
        pool = KVPool(config.kv_shape, BLOCK_SIZE, kv_format, table.shape[1], 0, "cuda")
        run = decoder.forward(tokens, pool.pages, make_attend(pool.pages), workspace)
        return decoder.logits(run, positions, workspace).double()

    def native(pages: KVPages) -> Attend:
        return lambda layer, q, out: _native_prefill(q, pages, layer, table, starts, lengths, count, count, out)

    def reference(pages: KVPages) -> Attend:
        def attend(layer: int, q: Tensor, out: Tensor) -> None:
            out.copy_(prefill_attention.paged_prefill_reference(q, pages, layer, table, starts, lengths))

        return attend

    found, wanted = logits(native), logits(reference)
    both = compare("", found, wanted)
    p, q = wanted.log_softmax(-1), found.log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    agreement = float((found.argmax(-1) == wanted.argmax(-1)).double().mean())
    return LogitsComparison(f"logits, KV {kv_format}", both.cosine, both.max_abs_error, kl, agreement)
