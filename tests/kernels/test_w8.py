"""Int8 matrices: packing on any device, and their products on a GPU against fp64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coldblock.kernels import checks, fused, w8
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.loader import Variant
from coldblock.kernels.w8 import W8Matrix, pack_w8, unpack_w8, w8_dequantize, w8_linear
from torch import Tensor

TOKENS = (1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 64, 70)
SHAPES = [(64, 64, 32), (33, 96, 32), (515, 576, 32), (10007, 2048, 32), (1000, 8192, 128), (2049, 320, 320)]
DTYPES = [torch.float16, torch.bfloat16]


def random_parts(n: int, k: int, group_size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device)
    return codes, (torch.rand(n, k // group_size, device=device) * 0.02).half()


def random_matrix(n: int, k: int, group_size: int = 32, device: str = "cpu") -> W8Matrix:
    return pack_w8(*random_parts(n, k, group_size, device))


@pytest.mark.parametrize(("n", "k", "group_size"), [*SHAPES, (16, 96, 96), (17, 64, 64)])
@pytest.mark.parametrize("at_once", [1, 1 << 15, 1 << 24])
def test_packing_keeps_every_weight(
    monkeypatch: pytest.MonkeyPatch, n: int, k: int, group_size: int, at_once: int
) -> None:
    monkeypatch.setattr(w8, "_PACKED_AT_ONCE", at_once)
    torch.manual_seed(0)
    codes, scales = random_parts(n, k, group_size)
    matrix = pack_w8(codes, scales)
    assert torch.equal(unpack_w8(matrix), codes.float() * scales.float().repeat_interleave(group_size, 1))
    assert matrix.nbytes == -(-n // 16) * 16 * (-(-k // 64) * 64) * 17 // 16


def test_packing_puts_codes_where_the_tensor_core_wants_them() -> None:
    torch.manual_seed(0)
    codes, scales = random_parts(64, 128, 32)
    matrix = pack_w8(codes, scales)
    lanes = matrix.codes.view(4, 4, 32, 16)
    tile, unit, g, t = 2, 1, 5, 3
    k = 32 * unit + 8 * t
    wanted = torch.cat((codes[16 * tile + g, k : k + 8], codes[16 * tile + g + 8, k : k + 8]))
    assert torch.equal(lanes[tile, unit, 4 * g + t], wanted)
    assert torch.equal(matrix.scales[tile, unit, g], scales[[16 * tile + g, 16 * tile + g + 8], unit])


def test_packing_refuses() -> None:
    codes, scales = random_parts(64, 128, 32)
    for text, arguments in (
        (r"qweight is torch.uint8 \[64, 128\]; wanted: int8", (codes.view(torch.uint8), scales)),
        (r"qweight is .*not empty", (codes[:0], scales)),
        (r"scales are torch.float32", (codes, scales.float())),
        (r"scales are .* wanted: torch.float16 \[N=64", (codes, scales[:32])),
        (r"K=128 in 8 groups; allowed: groups of a multiple of 32", (codes, scales.repeat(1, 2))),
        (r"K=128 in 3 groups", (codes, scales[:, :3])),
    ):
        with pytest.raises(KernelArgumentError, match=text):
            pack_w8(*arguments)


@pytest.mark.parametrize(("multiprocessors", "kibibytes"), [(132, 227), (148, 227), (84, 99), (16, 99), (108, 163)])
def test_every_product_fits_on_the_device(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, kibibytes: int
) -> None:
    device = SimpleNamespace(multi_processor_count=multiprocessors, shared_memory_per_block_optin=kibibytes << 10)
    monkeypatch.setattr(w8, "_properties", lambda: device)
    for tiles, k, tokens in itertools.product((1, 20, 3072, 9496), (64, 576, 2048, 8192, 32768), TOKENS):
        form, steps = w8._form(tokens), k // w8.STEP_K
        plan = w8._plan.__wrapped__(form, tokens, tiles, steps)
        assert plan.shared_bytes <= kibibytes << 10, (form, plan)
        assert 0 < plan.grid[0] <= multiprocessors and plan.grid[1] * form.tokens >= tokens
        assert 0 < plan.chunk_steps <= steps


class Launches:
    """In place of `loader.load`: what would be launched."""

    def __init__(self) -> None:
        self.arguments: list[tuple[Any, ...]] = []

    def __call__(self, source: str, **macros: int) -> Launches:
        assert Variant(source, macros).macros in [v.macros for v in w8.VARIANTS if v.source == source]
        return self

    def launch(self, grid: object, block: object, arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
        self.arguments.append(arguments)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The wrapper as it is, on CPU tensors."""
    device = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    recorded = Launches()
    monkeypatch.setattr(w8, "_properties", lambda: device)
    monkeypatch.setattr(w8, "load", recorded)
    monkeypatch.setattr(w8, "check_tensor", lambda *args, alignment=16: checks.check_layout(*args))
    monkeypatch.setattr(checks, "check_place", lambda *_: None)
    monkeypatch.setattr(w8, "check_place", lambda *_: None)
    return recorded


def test_rows_of_logits_may_lie_apart_and_not_overlap(launches: Launches) -> None:
    matrix, x, out = random_matrix(37, 64), torch.zeros(2, 64).half(), torch.zeros(2, 40)
    w8_linear(x, matrix, out[:, :37])
    assert launches.arguments[-1][-1] == 40
    for wrong in (out.t()[:37].contiguous().t(), out[:1, :37].expand(2, 37)):
        with pytest.raises(KernelArgumentError, match="out has strides"):
            w8_linear(x, matrix, wrong)
    w8_linear(x[:0], matrix, out[:0, :37])
    assert len(launches.arguments) == 1


def test_refuses_what_does_not_fit(launches: Launches) -> None:
    matrix, x, out = random_matrix(40, 64), torch.zeros(2, 64).half(), torch.zeros(2, 40)
    for text, arguments in (
        ("x is torch.float32; allowed: torch.float16", (x.float(), matrix, out)),
        ("k=64", (x[:, :32].contiguous(), matrix, out)),
        ("out is torch.float16; allowed: torch.float32", (x, matrix, out.half())),
        ("M=2, n=40", (x, matrix, out[:, :39])),
    ):
        with pytest.raises(KernelArgumentError, match=text):
            w8_linear(*arguments)
    assert not launches.arguments


def test_a_matrix_that_is_not_on_the_gpu_is_refused(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    matrix, ids = random_matrix(40, 64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"matrix\.codes is on cpu"):
        w8.check_matrix(matrix)
    with pytest.raises(KernelArgumentError, match=r"matrix\.codes is on cpu"):
        fused.embed(ids, ids, ids, matrix, torch.zeros(2, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_linear(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    """Against fp64, in rows that lie apart; and a token's bits do not depend on its company, nor on the number."""
    torch.manual_seed(n + k)
    matrix = random_matrix(n, k, group_size, "cuda")
    weights = unpack_w8(matrix).double()
    x = torch.randn(max(TOKENS), k, device="cuda").to(dtype)
    wanted, magnitude = x.double() @ weights.T, x.double().abs() @ weights.abs().T
    whole = torch.full((max(TOKENS), n), torch.nan, device="cuda")
    w8_linear(x, matrix, whole)
    assert ((whole.double() - wanted).abs() <= 2.0**-19 * magnitude + 1e-7).all()
    for tokens in TOKENS:
        out = torch.full((tokens, n + 3), torch.nan, device="cuda")
        w8_linear(x[-tokens:].contiguous(), matrix, out[:, :n])
        assert torch.equal(out[:, :n], whole[-tokens:]) and out[:, n:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_exact(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128, device="cuda").to(torch.int8).view(4, 64)
    matrix = pack_w8(codes, torch.ones(4, 2, device="cuda").half())
    out = torch.full((64, 4), torch.nan, device="cuda")
    w8_linear(torch.eye(64, device="cuda").to(dtype), matrix, out)
    assert torch.equal(out, codes.t().float())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 16, 32])
def test_graph_of_a_head_behind_a_norm(tokens: int) -> None:
    """The rings are filled while the norm runs: x must be waited for, and `out` until the reader before has ended."""
    torch.manual_seed(0)
    matrix, weight = random_matrix(20000, 1024, 32, "cuda"), torch.rand(1024, device="cuda")
    residual, start = torch.empty(tokens, 1024, device="cuda"), torch.randn(tokens, 1024, device="cuda")
    normed = torch.empty(tokens, 1024, device="cuda", dtype=torch.float16)
    out, best = torch.empty(tokens, 20000, device="cuda"), torch.empty(6, tokens, device="cuda", dtype=torch.int64)

    def steps() -> None:
        for step in range(6):
            residual.mul_(-1.5)
            fused.rms_norm(residual, weight, 1e-5, normed)
            w8_linear(normed, matrix, out)
            best[step].copy_(out.argmax(1))

    residual.copy_(start)
    steps()
    wanted = best.clone(), out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    for _ in range(5):
        residual.copy_(start)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(best, wanted[0]) and torch.equal(out, wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_dequantize(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(n, k, group_size, "cuda")
    out = torch.full((n, k), torch.nan, device="cuda", dtype=dtype)
    w8_dequantize(matrix, out)
    assert torch.equal(out, unpack_w8(matrix).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_embed(n: int, k: int, group_size: int) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(n, k, group_size, "cuda")
    ids, previous = (torch.randint(n, (33,), device="cuda").int() for _ in range(2))
    source = torch.randint(-33, 33, (33,), device="cuda").int()
    out = torch.full((33, k), torch.nan, device="cuda")
    fused.embed(ids, source, previous, matrix, out)
    tokens = torch.where(source >= 0, previous[source.clamp_min(0).long()], ids)
    assert torch.equal(out, unpack_w8(matrix)[tokens.long()])
