"""The fused kernels against plain torch, and what they store against the KV formats, bit for bit."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.kv_layout import KVShape
from coldblock.engine_core.models.layers import pair_order
from coldblock.kernels import fused, reference
from coldblock.kernels import pages as pages_module
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.loader import Variant
from coldblock.kernels.pages import KVPages
from coldblock.kernels.w8 import pack_w8
from torch import Tensor

gpu = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16]
FORMATS = ["fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"]
EPS = 1e-6


def close(out: Tensor, wanted: Tensor) -> None:
    """Equal but for the rounding to out's dtype and a few fp32 roundings before it."""
    wanted = wanted.double().cpu()
    tolerance = torch.finfo(out.dtype).eps * 0.51 * wanted.abs() + 1e-6 + 4e-6 * wanted.abs()
    assert ((out.double().cpu() - wanted).abs() <= tolerance).all()


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def ints(values: object) -> Tensor:
    return torch.as_tensor(values).to("cuda", torch.int32)


def test_rms_norm_reference_is_the_norm_of_the_cpu_model() -> None:
    x, weight = torch.randn(5, 48), torch.rand(48)
    wanted = reference.rms_norm(x, weight * math.sqrt(48), torch.tensor(math.sqrt(48 * EPS)))
    torch.testing.assert_close(fused.rms_norm_reference(x, weight, EPS), wanted)


def test_rope_reference_is_the_rotation_of_the_cpu_model() -> None:
    qkv, angles, positions = torch.randn(3, 6 * 8), torch.randn(10, 4), torch.tensor([4, 0, 9])
    q, k, v = fused.rope_reference(qkv, None, torch.stack([angles.cos(), angles.sin()], -1), positions, 4, 1)
    turns = torch.polar(torch.ones(3, 1, 4), angles[positions].unsqueeze(1))
    heads = qkv.view(3, 6, 8)
    torch.testing.assert_close(torch.cat([q, k], 1), reference.rotate(heads[:, :5], turns.expand(3, 5, 4).clone()))
    assert torch.equal(v, heads[:, 5:])


def test_silu_reference_is_that_of_the_cpu_model_in_turns() -> None:
    gate, up = torch.randn(3, 16), torch.randn(3, 16)
    turns = torch.cat([gate[:, :8], up[:, :8], gate[:, 8:], up[:, 8:]], 1)
    wanted = reference.silu_and_multiply(torch.cat([gate, up], 1))
    torch.testing.assert_close(fused.silu_multiply_reference(turns), wanted)


def test_arguments_that_do_not_fit_are_refused() -> None:
    half, single = functools.partial(torch.zeros, dtype=torch.float16), torch.zeros
    with pytest.raises(KernelArgumentError, match="out is on cpu"):
        fused.silu_multiply(half(2, 32), half(2, 16))
    with pytest.raises(KernelArgumentError, match=r"residual is torch\.float16"):
        fused.rms_norm(half(2, 16), single(16), EPS, half(2, 16))
    pages = KVPages(torch.zeros(1, 2 * 16 * 64 * 2, dtype=torch.uint8), "fp16", 16, 1, 1, 64)
    with pytest.raises(KernelArgumentError, match=r"qkv has shape \[2, 128\]; wanted: \[T, \(H\+2G\)\*D=384\]"):
        fused.rope_and_write(
            half(2, 128), None, single(1), single(1), single(1), single(1), pages, 0, 4, half(2, 4, 64)
        )


def test_no_layer_outside_of_the_pool_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "check_tensor", lambda *_, **__: None)
    monkeypatch.setattr(pages_module, "check_place", lambda *_: None)
    monkeypatch.setattr(fused, "load", lambda *_, **__: pytest.fail("launched"))
    pages = KVPages(torch.zeros(1, 3 * 2 * 16 * 64 * 2, dtype=torch.uint8), "fp16", 16, 3, 1, 64)
    x = torch.zeros(2, 6 * 64, dtype=torch.float16)
    for layer in (-1, 3):
        with pytest.raises(KernelArgumentError, match=f"layer is {layer}; the pool has layers 0 to 2"):
            fused.rope_and_write(x, None, x, x, x, x, pages, layer, 4, x)


def test_a_pool_that_is_not_on_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "check_tensor", lambda *_, **__: None)
    pages = KVPages(torch.zeros(1, 2 * 16 * 64 * 2, dtype=torch.uint8), "fp16", 16, 1, 1, 64)
    x = torch.zeros(2, 6 * 64, dtype=torch.float16)
    with pytest.raises(KernelArgumentError, match="pool is on cpu"):
        fused.rope_and_write(x, None, x, x, x, x, pages, 0, 4, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_wrappers_ask_for_variants_that_they_declare(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Variant] = []

    class Recorded:
        def launch(self, *_: object) -> None: ...

    def record(source: str, **macros: int) -> Recorded:
        asked.append(Variant(source, macros))
        return Recorded()

    monkeypatch.setattr(fused, "load", record)
    monkeypatch.setattr(fused, "check_tensor", lambda *_, **__: None)
    monkeypatch.setattr(fused, "check_matrix", lambda *_: None)
    monkeypatch.setattr(pages_module, "check_place", lambda *_: None)
    x, single = torch.zeros(2, 16, dtype=dtype), torch.zeros(2, 16)
    ids = torch.zeros(2, dtype=torch.int32)
    packed = pack_w8(torch.zeros(16, 32, dtype=torch.int8), torch.zeros(16, 1).half())
    fused.embed(ids, ids, ids, x, single)
    fused.embed(ids, ids, ids, packed, torch.zeros(2, 32))
    fused.rms_norm(single, single[0], EPS, x)
    fused.silu_multiply(x, x)
    for kv_format, head_dim in itertools.product(FORMATS, (64, 96, 128, 256)):
        pages = Written(kv_format, head_dim, 3, device="cpu").pages
        fused.rope_and_write(x, None, single, ids, ids, single, pages, 0, 4, x)
    assert len(asked) == 24
    assert all(variant in fused.VARIANTS for variant in asked)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (3, 576), (7, 8), (33, 2056), (130, 8192)])
def test_embed(tokens: int, width: int, dtype: torch.dtype) -> None:
    table = torch.randn(100, width, device="cuda", dtype=dtype)
    ids, previous = torch.randint(100, (tokens,)), torch.randint(100, (9,))
    source = torch.randint(-4, 9, (tokens,))
    out = poisoned(tokens, width, dtype=torch.float32)
    fused.embed(ints(ids), ints(source), ints(previous), table, out)
    wanted = torch.where(source >= 0, previous[source.clamp(0)], ids)
    assert torch.equal(out, table[wanted.cuda()].float())


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (2, 576), (3, 8), (9, 264), (17, 8192), (200, 2048)])
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    residual, weight = torch.randn(tokens, width, device="cuda") * 3, torch.randn(width, device="cuda")
    out = poisoned(tokens, width, dtype=dtype)
    fused.rms_norm(residual, weight, EPS, out)
    close(out, fused.rms_norm_reference(residual.double(), weight.double(), EPS))


@gpu
def test_rms_norm_of_a_row_does_not_depend_on_the_others() -> None:
    residual, weight = torch.randn(64, 2048, device="cuda"), torch.randn(2048, device="cuda")
    many, one = poisoned(64, 2048, dtype=torch.float16), poisoned(1, 2048, dtype=torch.float16)
    fused.rms_norm(residual, weight, EPS, many)
    fused.rms_norm(residual[17:18], weight, EPS, one)
    assert torch.equal(many[17:18], one)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 11008), (3, 1536), (7, 8), (65, 1000)])
def test_silu_multiply(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * width, device="cuda", dtype=dtype) * 4
    gate_up[0, 0], gate_up[-1, 0] = -200, 200
    out = poisoned(tokens, width, dtype=dtype)
    fused.silu_multiply(gate_up, out)
    close(out, fused.silu_multiply_reference(gate_up.double()))


class Written:
    """A pool on both sides, with equal rubbish in it, and tokens spread over its blocks."""

    def __init__(
        self, kv_format: str, head_dim: int, tokens: int, kv_heads: int = 2, block_size: int = 16, device: str = "cuda"
    ) -> None:
        self.shape, blocks = KVShape(3, kv_heads, head_dim), 9
        self.pool = KVPool(self.shape, block_size, kv_format, blocks, 0)  # type: ignore[arg-type]
        self.pool.gpu.random_(0, 256)
        self.pages = KVPages(self.pool.gpu.to(device, copy=True), kv_format, block_size, 3, kv_heads, head_dim)  # type: ignore[arg-type]
        self.tables = torch.stack([torch.randperm(blocks)[:4], torch.randperm(blocks)[:4]])
        places = torch.randperm(2 * 4 * block_size)[:tokens]
        self.sequences, self.positions = places // (4 * block_size), places % (4 * block_size)
        # Two sequences may share a block here: let no slot be written twice.
        slots = self.tables[self.sequences, self.positions // block_size] * block_size + self.positions % block_size
        first = {int(slot): i for i, slot in reversed(list(enumerate(slots)))}
        self.positions[[i for i, slot in enumerate(slots) if first[int(slot)] != i]] = -1

    def check(self, qkv: Tensor, bias: Tensor | None, rotary: Tensor, num_heads: int, layer: int = 1) -> None:
        """Run the kernel and the CPU's formats, and compare every byte of the pools."""
        tokens, dim = len(qkv), self.shape.head_dim
        q_out = poisoned(tokens, num_heads, dim, dtype=qkv.dtype)
        fused.rope_and_write(
            qkv.cuda(), None if bias is None else bias.cuda(), rotary.cuda(), ints(self.positions),
            ints(self.sequences), ints(self.tables), self.pages, layer, num_heads, q_out,
        )  # fmt: skip
        real = self.positions >= 0
        q, k, v = fused.rope_reference(qkv, bias, rotary, self.positions, num_heads, self.shape.num_kv_heads)
        assert q_out[~real.cuda()].isnan().all()
        assert torch.equal(q_out.cpu()[real], rounded(q, qkv.dtype)[real])
        self.write(torch.cat([k, v], 1)[real], real, layer)
        assert torch.equal(self.pages.pool.cpu(), self.pool.gpu)

    def write(self, values: Tensor, real: Tensor, layer: int) -> None:
        size, positions = self.pool.block_size, self.positions[real]
        planes = self.pool.plane_numbers(self.tables[self.sequences[real], positions // size])
        slots = self.pool.format.slots(planes, (positions % size)[:, None])
        self.pool.format.write(self.pool.layer(layer), slots, values)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As activations are: fp16 saturates."""
    return x.clamp(-65504, 65504).half() if dtype is torch.float16 else x.to(dtype)


def rotary_of(head_dim: int, positions: int = 200) -> Tensor:
    angles = torch.outer(torch.arange(positions), 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim))
    return torch.stack([angles.cos(), angles.sin()], -1)


@gpu
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "tokens", "block_size"),
    [(64, 9, 3, 33, 16), (96, 4, 1, 7, 16), (128, 16, 2, 1, 16), (128, 16, 2, 60, 32), (256, 3, 3, 17, 16)],
)
def test_rope_and_write(
    kv_format: str, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, tokens: int, block_size: int
) -> None:
    torch.manual_seed(head_dim + tokens)
    written = Written(kv_format, head_dim, tokens, kv_heads, block_size)
    columns = (heads + 2 * kv_heads) * head_dim
    qkv = (torch.randn(tokens, columns) * torch.randn(tokens, 1).exp()).to(dtype)
    bias = (torch.randn(columns) * 20).to(dtype) if tokens % 2 else None
    written.check(qkv, bias, rotary_of(head_dim), heads)


def extreme_values(dtype: torch.dtype, count: int) -> Tensor:
    """All numbers of a 16-bit dtype but NaN, in a random order, `count` in all."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    return numbers[torch.randperm(len(numbers)).repeat(-(-count // len(numbers)))[:count]]


@gpu
@pytest.mark.parametrize(
    ("kv_format", "software_fp8"),
    [(kv_format, False) for kv_format in FORMATS] + [(kv_format, True) for kv_format in FORMATS if "fp8" in kv_format],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_every_number_is_stored_as_the_formats_store_it(
    kv_format: str, dtype: torch.dtype, biased: bool, software_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V's planes see every number, then every number plus a bias; K's too, as its rotation is by nothing."""
    if software_fp8:
        monkeypatch.setattr(fused, "load", functools.partial(fused.load, SOFTWARE_FP8=1))
    torch.manual_seed(5)
    heads, dim, tokens = 1, 64, 120
    written = Written(kv_format, dim, tokens, kv_heads=4)
    qkv = extreme_values(dtype, tokens * 9 * dim).view(tokens, 9 * dim)
    qkv[:, ::5] = qkv[:, ::5].clamp(-500, 500)
    qkv[:, -1] = -0.0
    if kv_format == "int8":  # else an infinity in nearly every head
        qkv = torch.where(torch.rand(tokens, 9).repeat_interleave(dim, 1) < 0.9, qkv.clamp(-100, 100), qkv)
    bias = (torch.randn(9 * dim) * torch.randn(9 * dim).exp()).to(dtype) if biased else None
    rotary = torch.tensor([1.0, 0.0]).expand(200, dim // 2, 2).contiguous()
    finite = qkv.isfinite().view(tokens, 9, dim)
    qkv = torch.where(torch.cat([finite[:, :5], finite[:, 5:] | True], 1).flatten(1), qkv, 0)  # inf * 0 is no number
    written.check(qkv, bias, rotary, heads)


@gpu
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_nan_stays_one(kv_format: str) -> None:
    written = Written(kv_format, 64, 20)
    qkv = torch.randn(20, 6 * 64).half()
    qkv[:, 4 * 64 + 3 :: 64] = torch.nan
    written.positions = written.positions.clamp(0)
    written.positions[1:] = -1
    fused.rope_and_write(
        qkv.cuda(), None, rotary_of(64).cuda(), ints(written.positions), ints(written.sequences),
        ints(written.tables), written.pages, 0, 2, poisoned(20, 2, 64, dtype=torch.float16),
    )  # fmt: skip
    written.pool.gpu.copy_(written.pages.pool)
    block = written.tables[written.sequences[0], written.positions[0] // 16]
    planes = written.pool.layer(0)[written.pool.plane_numbers(block)]
    row = written.pool.format.read(planes).float().view(4, 16, 64)[:, written.positions[0] % 16]
    wanted = qkv[0, 2 * 64 :].view(4, 64).isnan()
    if kv_format == "int8":
        wanted = wanted.any(-1, keepdim=True).expand(4, 64)
    assert torch.equal(row.isnan(), wanted)


@gpu
def test_pairs_in_order_give_the_scores_of_the_usual_rotation() -> None:
    """Rows of q and k reordered by `pair_order`: their products are those of the rotation by halves."""
    dim = 64
    q, k = torch.randn(dim).half(), torch.randn(dim).half()
    qkv = torch.cat([q[pair_order(dim)], k[pair_order(dim)], torch.zeros(dim).half()]).expand(2, -1).contiguous()
    written = Written("fp16", dim, 2, kv_heads=1)
    rotary = rotary_of(dim)
    rotated, keys, _ = fused.rope_reference(qkv, None, rotary, torch.tensor([5, 12]), 1, 1)
    cos, sin = rotary.repeat(1, 2, 1).unbind(-1)

    def by_halves(x: Tensor, position: int) -> Tensor:
        turned = torch.cat([-x[dim // 2 :], x[: dim // 2]])
        return x.float() * cos[position] + turned.float() * sin[position]

    wanted = by_halves(q, 5) @ by_halves(k, 12)
    torch.testing.assert_close(rotated[0, 0] @ keys[1, 0], wanted, rtol=1e-4, atol=1e-4)
    written.check(qkv, None, rotary, 1)


@gpu
def test_a_graph_replays_a_layer_on_new_inputs() -> None:
    """The launches of one layer, captured and replayed with other numbers in the same tensors."""
    dim, heads, kv_heads, tokens, width = 128, 4, 2, 5, 512
    written = Written("int8", dim, tokens, kv_heads)
    residual = torch.randn(tokens, width, device="cuda")
    weight, normed = torch.randn(width, device="cuda"), poisoned(tokens, width, dtype=torch.float16)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").half()
    rotary, positions = rotary_of(dim).cuda(), ints(written.positions)
    q_out, acted = poisoned(tokens, heads, dim, dtype=torch.float16), poisoned(tokens, 512, dtype=torch.float16)

    places = [positions, ints(written.sequences), ints(written.tables)]

    def layer() -> None:
        fused.rms_norm(residual, weight, EPS, normed)
        fused.rope_and_write(qkv, None, rotary, *places, written.pages, 2, heads, q_out)
        fused.silu_multiply(qkv, acted)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for _ in range(3):
        residual.normal_()
        qkv.normal_()
        graph.replay()
        q, k, v = fused.rope_reference(qkv.cpu(), None, rotary.cpu(), written.positions, heads, kv_heads)
        real = written.positions >= 0
        assert torch.equal(q_out.cpu()[real], q.half()[real])
        written.write(torch.cat([k, v], 1)[real], real, 2)
        close(normed, fused.rms_norm_reference(residual.double(), weight.double(), EPS))
        close(acted, fused.silu_multiply_reference(qkv.double()))
