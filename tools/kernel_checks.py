"""What `coldblock validate` holds against what: each native kernel against its reference, on fresh random inputs.

Owns: the inputs, the comparison. Does not know: how results are shown, or what is good enough (`validate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine_core.device.kv_pool import KVPool
from ..engine_core.kv_layout import FormatName, KVShape
from ..engine_core.models.cuda_decoder import CudaDecoder, TokenInputs, Workspace, load_cuda_decoder
from ..engine_core.models.cuda_linears import PackedProduct
from ..engine_core.models.registry import ModelConfig
from ..engine_core.models.weights import TensorSource
from ..kernels import decode_attention, fused, prefill_attention, prefill_attention_hopper, sampling, w4, w4_wide, w8
from ..kernels.pages import HEAD_DIMS, KVPages, stored_keys_and_values
from ..kernels.rotated_bias import RotatedBias
from ..kernels.sampling import PARAMETERS, parameter_row
from .large_bias import large_bias

DEVICE = "cuda"
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


def kernel_comparisons(seed: int, architecture: str) -> Iterator[Callable[[], Comparison]]:
    """One for each kernel that this architecture has, format and head dimension, computed when called."""
    torch.manual_seed(seed)
    for dtype in (torch.float16, torch.bfloat16):
        kind = "bf16" if dtype is torch.bfloat16 else "fp16"
        yield partial(_embed, f"embed {kind}", dtype)
        yield partial(_dequantize_int8, f"w8_dequantize {kind}", dtype)
        for rows in (1, 16, 64):
            yield partial(_int8_linear, f"w8_linear {kind}, {rows} rows", dtype, rows)
        yield partial(_norm, f"rms_norm {kind}", dtype)
        yield partial(_silu, f"silu_multiply {kind}", dtype)
        for group in (32, 128):
            yield partial(_dequantize, f"w4_dequantize {kind}, groups of {group}", dtype, group)
            for rows in (1, 16, 64):
                name = f"w4_linear {kind}, groups of {group}, {rows} rows"
                yield partial(_linear, name, dtype, group, rows, w4.w4_linear)
            for rows in (33, 300) if architecture == w4_wide.ARCHITECTURE else ():
                name = f"w4_wide {kind}, groups of {group}, {rows} rows"
                yield partial(_linear, name, dtype, group, rows, w4_wide.w4_wide_linear)
    yield partial(_embed_int8, "embed int8")
    for kv_format, head_dim in product(FORMATS, HEAD_DIMS):
        name = f"{kv_format}, head_dim {head_dim}"
        yield partial(_rope, f"rotary and KV write {name}", kv_format, head_dim)
        yield partial(_decode, f"decode attention {name}", kv_format, head_dim)
        yield partial(_decode, f"decode attention {name}, K bias apart", kv_format, head_dim, biased=True)
        general = prefill_attention.paged_prefill_mma
        yield partial(_prefill, f"prefill attention {name}", kv_format, head_dim, general)
        yield partial(_prefill, f"prefill attention {name}, K bias apart", kv_format, head_dim, general, biased=True)
        yield partial(_prefill, f"prefill attention in splits {name}", kv_format, head_dim, _in_splits)
        if architecture == prefill_attention_hopper.ARCHITECTURE and head_dim in prefill_attention_hopper.HEAD_DIMS:
            attend = prefill_attention_hopper.paged_prefill_hopper
            yield partial(_prefill, f"prefill attention by warpgroups {name}", kv_format, head_dim, attend)
    yield partial(_sample, "sample, greedy and drawn")
    yield partial(_penalize, "penalize")


def _embed(name: str, dtype: torch.dtype) -> Comparison:
    table = torch.randn(100, 2048, dtype=dtype, device=DEVICE)
    return _compare_rows(name, table, table)


def _embed_int8(name: str) -> Comparison:
    matrix = _int8_matrix(100, 2048)
    return _compare_rows(name, matrix, w8.unpack_w8(matrix))


def _compare_rows(name: str, table: Tensor | w8.W8Matrix, rows: Tensor) -> Comparison:
    """The embedding of some tokens, known and drawn, against the table's `rows`."""
    ids, previous = (torch.randint(100, (33,), dtype=torch.int32, device=DEVICE) for _ in range(2))
    source = torch.randint(-33, 33, (33,), dtype=torch.int32, device=DEVICE)
    out = torch.full((33, 2048), math.nan, device=DEVICE)
    fused.embed(ids, source, previous, table, out)
    tokens = torch.where(source >= 0, previous[source.clamp_min(0).long()], ids)
    return compare(name, out, rows[tokens.long()])


def _norm(name: str, dtype: torch.dtype) -> Comparison:
    residual, weight = torch.randn(33, 2048, device=DEVICE), torch.rand(2048, device=DEVICE)
    out = torch.full((33, 2048), math.nan, dtype=dtype, device=DEVICE)
    fused.rms_norm(residual, weight, 1e-6, out)
    return compare(name, out, fused.rms_norm_reference(residual.double(), weight.double(), 1e-6))


def _silu(name: str, dtype: torch.dtype) -> Comparison:
    gate_up = torch.randn(33, 2 * 1536, dtype=dtype, device=DEVICE)
    out = torch.full((33, 1536), math.nan, dtype=dtype, device=DEVICE)
    fused.silu_multiply(gate_up, out)
    return compare(name, out, fused.silu_multiply_reference(gate_up.double()))


def _matrix(n: int, k: int, group: int) -> w4.W4Matrix:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    scales, mins = (torch.rand(n, k // group, device=DEVICE).half() - shift for shift in (0.0, 0.5))
    return w4.pack_w4(codes, scales, 8 * mins, DEVICE)


def _dequantize(name: str, dtype: torch.dtype, group: int) -> Comparison:
    matrix = _matrix(1000, 2048, group)
    out = torch.full((matrix.n, matrix.k), math.nan, dtype=dtype, device=DEVICE)
    w4.w4_dequantize(matrix, out)
    return compare(name, out, w4.unpack_w4(matrix))


def _linear(name: str, dtype: torch.dtype, group: int, rows: int, multiply: PackedProduct) -> Comparison:
    matrix = _matrix(1000, 2048, group)
    x = torch.randn(rows, matrix.k, dtype=dtype, device=DEVICE)
    out = torch.full((rows, matrix.n), math.nan, dtype=dtype, device=DEVICE)
    multiply(x, matrix, out)
    return compare(name, out, x.double() @ w4.unpack_w4(matrix).double().t())


def _int8_matrix(n: int, k: int) -> w8.W8Matrix:
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=DEVICE)
    return w8.pack_w8(codes, torch.rand(n, k // w8.UNIT_K, device=DEVICE).half())


def _dequantize_int8(name: str, dtype: torch.dtype) -> Comparison:
    matrix = _int8_matrix(1000, 2048)
    out = torch.full((matrix.n, matrix.k), math.nan, dtype=dtype, device=DEVICE)
    w8.w8_dequantize(matrix, out)
    return compare(name, out, w8.unpack_w8(matrix))


def _int8_linear(name: str, dtype: torch.dtype, rows: int) -> Comparison:
    matrix = _int8_matrix(1001, 2048)
    x = torch.randn(rows, matrix.k, dtype=dtype, device=DEVICE)
    out = torch.full((rows, matrix.n), math.nan, device=DEVICE)
    w8.w8_linear(x, matrix, out)
    return compare(name, out, x.double() @ w8.unpack_w8(matrix).double().t())


def _tables() -> Tensor:
    """Block tables of the sequences of LENGTHS, blocks in no order."""
    counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    order = torch.randperm(sum(counts)).int().split(counts)
    return torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)


def _stored(kv_format: FormatName, values: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    """A pool's bytes with these K and V [tokens, 2G, D] in one layer, as the CPU stores them."""
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    host = KVPool(KVShape(1, KV_HEADS, values.shape[2]), BLOCK_SIZE, kv_format, num_blocks, 0)
    host.gpu.zero_()
    slots = host.format.slots(host.plane_numbers(blocks), offsets[:, None])
    host.format.write(host.layer(0), slots, values.cpu().float())
    return host.gpu.to(DEVICE)


def _pages(kv_format: FormatName, pool: Tensor, head_dim: int) -> KVPages:
    assert kv_format != "fp32"
    return KVPages(pool, kv_format, BLOCK_SIZE, 1, KV_HEADS, head_dim)


def _filled_pool(kv_format: FormatName, head_dim: int) -> tuple[KVPages, Tensor]:
    """A pool whose blocks hold random K and V, and block tables."""
    tables = _tables()
    count = (int(tables.max()) + 1) * BLOCK_SIZE
    values = torch.randn(count, 2 * KV_HEADS, head_dim)
    pool = _stored(kv_format, values, torch.arange(count) // BLOCK_SIZE, torch.arange(count) % BLOCK_SIZE)
    return _pages(kv_format, pool, head_dim), tables.to(DEVICE)


def _rope(name: str, kv_format: FormatName, head_dim: int) -> Comparison:
    """Rotated queries, then K and V as they are stored, of one token for each position of the longest sequence."""
    tables, longest = _tables(), max(LENGTHS)
    row = torch.full((longest,), LENGTHS.index(longest), dtype=torch.int32)
    positions = torch.randperm(longest).int()
    qkv = torch.randn(longest, (HEADS + 2 * KV_HEADS) * head_dim).to(_activation(kv_format))
    bias = torch.randn(qkv.shape[1]).to(qkv.dtype)
    angles = torch.rand(longest, head_dim // 2) * 2 * math.pi
    rotary = torch.stack((angles.cos(), angles.sin()), -1)
    q, k, v = fused.rope_reference(qkv, bias, rotary, positions, HEADS, KV_HEADS)
    blocks = tables[row[0], positions.long() // BLOCK_SIZE]
    wanted = _stored(kv_format, torch.cat((k, v), 1), blocks.long(), positions.long() % BLOCK_SIZE)
    pages = _pages(kv_format, torch.zeros_like(wanted), head_dim)
    q_out = torch.full((longest, HEADS, head_dim), math.nan, dtype=qkv.dtype, device=DEVICE)
    inputs = [x.to(DEVICE) for x in (qkv, bias, rotary, positions, row, tables)]
    fused.rope_and_write(*inputs, pages, 0, HEADS, q_out)
    table = tables[row[0]].to(DEVICE)
    pools = (pages, _pages(kv_format, wanted, head_dim))
    found, stored = (torch.cat(stored_keys_and_values(each, 0, table, longest)).flatten() for each in pools)
    return compare(name, torch.cat((q_out.float().flatten(), found)), torch.cat((q.to(DEVICE).flatten(), stored)))


def _activation(kv_format: FormatName) -> torch.dtype:
    return torch.bfloat16 if kv_format == "bf16" else torch.float16


def _bias(head_dim: int, biased: bool) -> RotatedBias | None:
    return large_bias(KV_HEADS, head_dim, max(LENGTHS), DEVICE) if biased else None


def _decode(name: str, kv_format: FormatName, head_dim: int, biased: bool = False) -> Comparison:
    pages, tables = _filled_pool(kv_format, head_dim)
    k_bias = _bias(head_dim, biased)
    q = torch.randn(len(LENGTHS), HEADS, head_dim, dtype=_activation(kv_format), device=DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    splits = decode_attention.DecodeSplits.allocate(pages, HEADS, len(LENGTHS), sum(LENGTHS))
    plan = splits.plan_for(np.array(LENGTHS, np.int32))
    splits.plan[: len(plan)].copy_(torch.from_numpy(plan))
    out = torch.full((len(LENGTHS), HEADS * head_dim), math.nan, dtype=q.dtype, device=DEVICE)
    decode_attention.paged_decode(q, pages, 0, tables, lengths, splits, out, k_bias)
    return compare(name, out, decode_attention.paged_decode_reference(q, pages, 0, tables, lengths, k_bias))


def _prefill(
    name: str, kv_format: FormatName, head_dim: int, attend: Callable[..., None], biased: bool = False
) -> Comparison:
    """Of every sequence the last tokens, up to 200, as a chunk behind what is there already."""
    pages, tables = _filled_pool(kv_format, head_dim)
    k_bias = _bias(head_dim, biased)
    counts = [min(length, 200) for length in LENGTHS]
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    q = torch.randn(sum(counts), HEADS, head_dim, dtype=_activation(kv_format), device=DEVICE)
    out = torch.full((sum(counts), HEADS * head_dim), math.nan, dtype=q.dtype, device=DEVICE)
    bias = {"k_bias": k_bias} if biased else {}  # which not every kernel can add
    attend(q, pages, 0, tables, starts, lengths, max(counts), max(LENGTHS), out, **bias)
    wanted = prefill_attention.paged_prefill_reference(q, pages, 0, tables, starts, lengths, k_bias=k_bias)
    return compare(name, out, wanted)


def _in_splits(q: Tensor, pages: KVPages, *arguments: Any) -> None:
    splits = prefill_attention.PrefillSplits(pages.head_dim, q.device)
    prefill_attention.paged_prefill_mma(q, pages, *arguments, splits)


def _sample(name: str) -> Comparison:
    rows, vocab_size = 32, 5000
    logits = torch.randn(rows, vocab_size, device=DEVICE) * 3
    requests = [parameter_row(0.8 * (i % 2), i, i, top_k=40 * (i % 3), top_p=1 - 0.1 * (i % 5)) for i in range(rows)]
    packed = np.array(requests, PARAMETERS)
    parameters = torch.from_numpy(packed.view(np.int32).reshape(rows, -1)).to(DEVICE)
    tokens, finite = (torch.full((rows,), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    workspace = sampling.make_workspace(rows, vocab_size, DEVICE)
    sampling.sample(logits, vocab_size, parameters, workspace, tokens, finite)
    wanted, all_finite = sampling.sample_reference(logits.cpu().numpy(), vocab_size, packed)
    both = np.concatenate((wanted, all_finite))
    return compare(name, torch.cat((tokens, finite)), torch.from_numpy(both).to(DEVICE))


def _penalize(name: str) -> Comparison:
    """Repetition on all tokens that occurred, frequency and presence on those of the output."""
    logits, (repetition, frequency, presence) = torch.randn(2, 5000), (1.3, 0.3, 0.7)
    counts = torch.randint(0, 4, (1000,), dtype=torch.int32)
    entries = torch.stack((torch.arange(1000) % 2, torch.randperm(5000)[:1000], counts), 1).int()
    before = logits[entries[:, 0].long(), entries[:, 1].long()].double()
    after = torch.where(before > 0, before / repetition, before * repetition)
    wanted = logits.double()
    wanted[entries[:, 0].long(), entries[:, 1].long()] = after - frequency * counts - presence * (counts > 0)
    out, penalties = logits.to(DEVICE), torch.tensor([(repetition, frequency, presence)] * 2, device=DEVICE)
    sampling.penalize(out, 5000, entries.to(DEVICE), penalties)
    return compare(name, out, wanted.to(DEVICE))


def load_model(config: ModelConfig, source: TensorSource, positions: int) -> CudaDecoder:
    """The model in fp16."""
    return load_cuda_decoder(config, source, torch.float16, positions, dense_copies=False)


def compare_logits(decoder: CudaDecoder, token_ids: list[int], kv_format: FormatName) -> LogitsComparison:
    """Run the tokens as one prompt, with native attention, then with reference attention to what the first run stored.

    Reference attention to K and V of its own would differ by codes that a rounding has tipped, which is no fault.
    """
    config, count = decoder.config, len(token_ids)
    ids = torch.tensor(token_ids, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE)
    none, zeros = torch.full_like(ids, -1), torch.zeros_like(ids)
    table = torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32, device=DEVICE)[None]
    tokens = TokenInputs(ids, none, positions, zeros, zeros, table)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, count], [count]))
    workspace = Workspace(config, decoder.dtype, count, count, decoder.scratch_elements, DEVICE)
    stored, ignored = (
        KVPool(config.kv_shape, BLOCK_SIZE, kv_format, table.shape[1], 0, DEVICE).pages for _ in range(2)
    )
    splits = prefill_attention.PrefillSplits(stored.head_dim, ids.device)

    def native(layer: int, q: Tensor, out: Tensor, k_bias: RotatedBias | None) -> None:
        prefill_attention.paged_prefill(q, stored, layer, table, starts, lengths, count, count, out, splits, k_bias)

    def reference(layer: int, q: Tensor, out: Tensor, k_bias: RotatedBias | None) -> None:
        parts = (stored, layer, table, starts, lengths)
        out.copy_(prefill_attention.paged_prefill_reference(q, *parts, k_bias=k_bias))

    found = decoder.logits(tokens, stored, native, workspace, None).double()
    wanted = decoder.logits(tokens, ignored, reference, workspace, None).double()
    both = compare("", found, wanted)
    p, q = wanted.log_softmax(-1), found.log_softmax(-1)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    agreement = float((found.argmax(-1) == wanted.argmax(-1)).double().mean())
    return LogitsComparison(f"logits, KV {kv_format}", both.cosine, both.max_abs_error, kl, agreement)
