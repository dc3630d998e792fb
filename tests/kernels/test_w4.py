"""Four-bit matrices: packing on any device, and their products on a GPU against fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from coldblock.kernels import checks, w4
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.fused import rms_norm
from coldblock.kernels.w4 import W4Matrix, pack_w4, unpack_w4, w4_dequantize, w4_linear
from torch import Tensor

TOKENS = (1, 2, 3, 7, 8, 9, 12, 16, 17, 24, 32, 33, 64, 65, 130)
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SHAPES = [
    (64, 128, 32),
    (80, 96, 32),
    (48, 72, 72),
    (33, 64, 64),
    (128, 256, 128),
    (17, 192, 64),
    (80, 2056, 2056),
    (200, 768, 256),
    (176, 5504, 128),
    (96, 8192, 128),
    (2048, 11008, 128),
    (8272, 320, 64),
    (2560, 2048, 128),
]


def random_matrix(n: int, k: int, group_size: int, device: str = "cpu", symmetric: bool = False) -> W4Matrix:
    qweight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(n, k // group_size, device=device).half() * 0.02
    mins = -8 * scales.float() if symmetric else -torch.rand(n, k // group_size, device=device) * 0.2
    return pack_w4(qweight, scales, mins, device)


def apply_silu(gate_up: Tensor) -> Tensor:
    turns = gate_up.unflatten(-1, (-1, 2, 8))
    return (F.silu(turns[..., 0, :]) * turns[..., 1, :]).flatten(-2)


def assert_rounded(out: Tensor, wanted: Tensor, magnitude: Tensor) -> None:
    """`out` is the fp64 `wanted`, rounded once, but for fp32 sums of terms that add up to `magnitude`."""
    allowed = ROUNDING[out.dtype] * wanted.abs() + 2.0**-19 * magnitude + 1e-7
    excess = (out.double() - wanted).abs() - allowed
    assert excess.max() <= 0, f"{(out.double() - wanted).abs().max()} off, {(excess > 0).sum()} of {out.numel()}"
    assert F.cosine_similarity(out.double().flatten(), wanted.flatten(), dim=0) > 0.9999


def assert_added(out: Tensor, before: Tensor, product: Tensor, magnitude: Tensor) -> None:
    """`out` is fp32 `before` plus the fp64 `product`, but for fp32 sums of terms that add up to `magnitude`."""
    wanted = before.double() + product
    allowed = 2.0**-23 * wanted.abs() + 2.0**-19 * magnitude + 1e-7
    excess = (out.double() - wanted).abs() - allowed
    assert excess.max() <= 0, f"{(out.double() - wanted).abs().max()} off, {(excess > 0).sum()} of {out.numel()}"


@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_packing_keeps_every_weight(n: int, k: int, group_size: int) -> None:
    torch.manual_seed(0)
    qweight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales, mins = torch.rand(n, k // group_size).half(), -torch.rand(n, k // group_size).half()
    matrix = pack_w4(qweight, scales, mins, "cpu")
    codes = torch.stack((qweight & 15, qweight >> 4), -1).view(n, k).float()
    zeros = (mins.float() + 8 * scales.float()).half().float()
    each = [x.float().repeat_interleave(group_size, 1) for x in (scales, zeros)]
    assert torch.equal(unpack_w4(matrix), (codes - 8) * each[0] + each[1])
    assert matrix.codes.shape[0] % 4 == 0 and matrix.nbytes >= n * k // 2


def test_packing_puts_nibbles_where_the_tensor_core_wants_them() -> None:
    torch.manual_seed(0)
    qweight = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    words = pack_w4(qweight, torch.ones(64, 4), torch.zeros(64, 4), "cpu").codes
    codes = torch.stack((qweight & 15, qweight >> 4), -1).view(64, 128)
    tile, unit, g, t, j = 2, 1, 5, 3, 2
    word, k = int(words[tile, unit, 4 * g + t, j]), 64 * unit + 16 * j + 2 * t
    places = [(g, k), (g + 8, k), (g, k + 8), (g + 8, k + 8)]
    wanted = [int(codes[16 * tile + row, column + odd]) for odd in (0, 1) for row, column in places]
    assert [(word >> 4 * i) & 15 for i in range(8)] == wanted


def test_packing_refuses() -> None:
    qweight = torch.zeros(64, 64, dtype=torch.uint8)
    ones = torch.ones(64, 4)
    with pytest.raises(KernelArgumentError, match="uint8"):
        pack_w4(qweight.int(), ones, ones, "cpu")
    for empty in (qweight[:, :0], qweight[:0], qweight.flatten(), qweight[0, 0]):
        with pytest.raises(KernelArgumentError, match=r"qweight is .*wanted: uint8 \[N, K/2\]"):
            pack_w4(empty, ones, ones, "cpu")
    with pytest.raises(KernelArgumentError, match="do not fit"):
        pack_w4(qweight, ones, ones[:32], "cpu")
    with pytest.raises(KernelArgumentError, match="groups of 32"):
        pack_w4(qweight, torch.ones(64, 8), torch.ones(64, 8), "cpu")
    with pytest.raises(KernelArgumentError, match="fp16"):
        pack_w4(qweight, ones * 1e6, ones, "cpu")


@pytest.mark.parametrize(("multiprocessors", "kibibytes"), [(132, 227), (148, 227), (84, 99), (16, 163)])
def test_every_product_fits_on_the_device(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, kibibytes: int
) -> None:
    """Shared memory, and every row of W in one cluster's turn or another's."""
    device = SimpleNamespace(multi_processor_count=multiprocessors, shared_memory_per_block_optin=kibibytes << 10)
    monkeypatch.setattr(w4, "_properties", lambda: device)
    sizes = itertools.product((16, 80, 2560, 22016, 57344), (64, 128, 2048, 11008, 29568), (1, 2, 8, 9, 16, 24, 32, 64))
    for n, k, tokens in sizes:
        form = w4._form(tokens, n, k)
        for group_size in (32, 64, 128):
            plan = w4._plan.__wrapped__(form, tokens, n, k // 64, group_size)
            assert plan.shared_bytes <= kibibytes << 10, (form, plan)
            assert 0 < plan.grid[0] <= multiprocessors and plan.grid[0] % form.cluster == 0
            clusters, rounds = w4._rounds(form, -(-n // (16 * form.row_tiles)))
            assert clusters * rounds * form.teams * form.row_tiles * 16 >= n
            assert plan.grid[1] * form.tokens >= tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_linear(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n + k)
    matrix = random_matrix(n, k, group_size, "cuda", symmetric=n % 3 == 0)
    weights = unpack_w4(matrix).double()
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device="cuda").to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype) if tokens % 2 else None
        wanted = x.double() @ weights.T + (0 if bias is None else bias.double())
        magnitude = x.double().abs() @ (weights.abs() + 0.2).T
        out = torch.full((tokens, n), torch.nan, device="cuda", dtype=dtype)
        w4_linear(x, matrix, out, bias=bias)
        assert_rounded(out, wanted, magnitude)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(1424, 512, 128, "cuda")
    weights = unpack_w4(matrix).double()
    for tokens in (1, 5, 16, 33, 64):
        x = torch.randn(tokens, 512, device="cuda").to(dtype)
        out = torch.full((tokens, 712), torch.nan, device="cuda", dtype=dtype)
        w4_linear(x, matrix, out, silu=True)
        gate_up = x.double() @ weights.T
        assert_rounded(out, apply_silu(gate_up), 16 * gate_up.unflatten(-1, (-1, 2, 8)).abs().amax(-2).flatten(-2) ** 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_adding(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n + k)
    matrix = random_matrix(n, k, group_size, "cuda")
    weights = unpack_w4(matrix).double()
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device="cuda").to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype) if tokens % 2 else None
        product = x.double() @ weights.T + (0 if bias is None else bias.double())
        magnitude = x.double().abs() @ (weights.abs() + 0.2).T
        before = 100 * torch.randn(tokens, n, device="cuda")
        out = before.clone()
        w4_linear(x, matrix, out, bias=bias, add=True)
        assert_added(out, before, product, magnitude)
        once = out.clone()
        w4_linear(x, matrix, out, bias=bias, add=True)
        assert_added(out, once, product, magnitude)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [6e-8, 1e-4, 100.0, 60000.0])
def test_extreme_scales(scale: float) -> None:
    torch.manual_seed(0)
    qweight = torch.randint(0, 256, (64, 128), dtype=torch.uint8, device="cuda")
    scales = torch.full((64, 2), scale, device="cuda")
    matrix = pack_w4(qweight, scales, -8 * scales, "cuda")
    x = torch.randn(4, 256, device="cuda").to(torch.bfloat16)
    out = torch.full((4, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    w4_linear(x, matrix, out)
    weights = unpack_w4(matrix).double()
    assert_rounded(out, x.double() @ weights.T, x.double().abs() @ weights.abs().T)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (2048, 8192), (8272, 512), (2560, 1024)])
def test_a_token_does_not_depend_on_its_company(n: int, k: int) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(n, k, 128, "cuda")
    x = torch.randn(32, k, device="cuda").half()

    def product(rows: Tensor) -> Tensor:
        out = torch.full((len(rows), n), torch.nan, device="cuda", dtype=torch.float16)
        w4_linear(rows, matrix, out)
        return out

    for few, many in ((1, 2), (3, 4), (5, 7), (6, 8), (9, 16), (11, 15), (17, 32), (24, 31)):
        assert torch.equal(product(x[:few].contiguous()), product(x[:many].contiguous())[:few])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_graph_of_dependent_linears(tokens: int) -> None:
    torch.manual_seed(0)
    first, second = random_matrix(1024, 2048, 128, "cuda"), random_matrix(2048, 512, 128, "cuda")
    start = torch.randn(tokens, 2048, device="cuda").half()
    x, hidden = start.clone(), torch.empty(tokens, 512, device="cuda", dtype=torch.float16)

    def layers() -> None:
        for _ in range(8):
            w4_linear(x, first, hidden, silu=True)
            w4_linear(hidden, second, x)
            x.div_(x.abs().amax())

    layers()
    wanted = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(3):
        x.copy_(start)
        hidden.fill_(torch.nan)
        graph.replay()
        assert torch.equal(x, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
def test_graph_of_a_residual_stream(tokens: int) -> None:
    """Every product begins while the one before runs: it must wait before it reads the residual, and before it adds."""
    torch.manual_seed(0)
    layers = [(random_matrix(2048, 1024, 128, "cuda"), random_matrix(1024, 1024, 128, "cuda")) for _ in range(8)]
    weight = torch.rand(1024, device="cuda") + 0.5
    start = torch.randn(tokens, 1024, device="cuda")
    residual = start.clone()
    normed, hidden = (torch.empty(tokens, 1024, device="cuda", dtype=torch.float16) for _ in range(2))

    def run(sync: bool) -> None:
        for up, down in layers:
            rms_norm(residual, weight, 1e-5, normed)
            w4_linear(normed, up, hidden, silu=True)
            if sync:
                torch.cuda.synchronize()
            w4_linear(hidden, down, residual, add=True)
            if sync:
                torch.cuda.synchronize()

    run(sync=True)
    wanted = residual.clone()
    assert wanted.isfinite().all() and not torch.equal(wanted, start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(sync=False)
    for _ in range(5):
        residual.copy_(start)
        hidden.fill_(torch.nan)
        graph.replay()
        assert torch.equal(residual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_dequantize(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(n, k, group_size, "cuda")
    out = torch.full((n, k), torch.nan, device="cuda", dtype=dtype)
    w4_dequantize(matrix, out)
    torch.testing.assert_close(out, unpack_w4(matrix).to(dtype), rtol=2 * ROUNDING[dtype], atol=0)


@pytest.mark.gpu
def test_packing_on_the_gpu_equals_packing_on_the_cpu() -> None:
    torch.manual_seed(0)
    qweight = torch.randint(0, 256, (70, 160), dtype=torch.uint8)
    scales, mins = torch.rand(70, 10), -torch.rand(70, 10)
    on_cpu = pack_w4(qweight, scales, mins, "cuda")
    on_gpu = pack_w4(qweight.cuda(), scales.cuda(), mins.cuda(), "cuda")
    assert torch.equal(on_cpu.codes, on_gpu.codes) and torch.equal(on_cpu.scales, on_gpu.scales)


@pytest.mark.gpu
def test_refuses() -> None:
    matrix = random_matrix(40, 128, 128, "cuda")
    x = torch.zeros(2, 128, device="cuda", dtype=torch.float16)
    out = torch.zeros(2, 40, device="cuda", dtype=torch.float16)
    with pytest.raises(KernelArgumentError, match="k=128"):
        w4_linear(x[:, :64].contiguous(), matrix, out)
    with pytest.raises(KernelArgumentError, match="turns of 8"):
        w4_linear(x, matrix, out, silu=True)
    with pytest.raises(KernelArgumentError, match="out is"):
        w4_linear(x, matrix, out.bfloat16())
    with pytest.raises(KernelArgumentError, match="bias"):
        w4_linear(x, matrix, out, bias=torch.zeros(41, device="cuda", dtype=torch.float16))


class Launches:
    """In place of `loader.load`: what would be launched."""

    def __init__(self) -> None:
        self.macros: list[dict[str, int]] = []
        self.arguments: list[tuple[object, ...]] = []

    def __call__(self, source: str, **macros: int) -> Launches:
        assert w4.Variant(source, macros).macros in [v.macros for v in w4.VARIANTS if v.source == source]
        self.macros.append(macros)
        return self

    def launch(self, grid: object, block: object, arguments: tuple[object, ...], shared_bytes: int = 0) -> None:
        self.arguments.append(arguments)


@pytest.fixture(params=[(132, 227), (16, 99)])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """The wrapper as it is, on CPU tensors, for a device of so many multiprocessors and KiB of shared memory."""
    multiprocessors, kibibytes = request.param
    device = SimpleNamespace(multi_processor_count=multiprocessors, shared_memory_per_block_optin=kibibytes << 10)
    recorded = Launches()
    monkeypatch.setattr(w4, "_properties", lambda: device)
    monkeypatch.setattr(w4, "load", recorded)
    monkeypatch.setattr(w4, "check_tensor", lambda *args, alignment=16: checks.check_layout(*args))
    monkeypatch.setattr(w4, "check_place", lambda *_: None)
    w4._plan.cache_clear()
    yield recorded
    w4._plan.cache_clear()


def test_a_matrix_that_is_not_on_the_gpu_is_refused(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever x is: the kernel would read host memory."""
    monkeypatch.setattr(w4, "check_place", checks.check_place)
    matrix = random_matrix(64, 128, 128)
    with pytest.raises(KernelArgumentError, match=r"matrix\.codes is on cpu"):
        w4_linear(torch.zeros(2, 128).half(), matrix, torch.zeros(2, 64).half())
    with pytest.raises(KernelArgumentError, match=r"matrix\.codes is on cpu"):
        w4_dequantize(matrix, torch.zeros(64, 128).half())
    assert not launches.arguments


def test_the_forms_that_add(launches: Launches) -> None:
    matrix = random_matrix(64, 2048, 128)
    for tokens in (1, 4, 5, 8, 9, 16, 17, 33):
        w4_linear(torch.empty(tokens, 2048).half(), matrix, torch.empty(tokens, 64), add=True)
        assert launches.macros[-1].items() >= {"ADD": 1, "ACTIVATION_BF16": 0}.items()


def test_refuses_sums_that_do_not_fit(launches: Launches) -> None:
    matrix = random_matrix(64, 128, 128)
    x, raw = torch.zeros(2, 128).half(), torch.zeros(2, 128)
    out, residual = torch.zeros(2, 64).half(), torch.zeros(2, 64)
    for text, arguments in (
        ("x is torch.float32; allowed: torch.float16", {"x": raw, "out": out}),
        ("out is torch.float32; allowed: torch.float16", {"x": x, "out": residual}),
        ("out is torch.float16; allowed: torch.float32", {"x": x, "out": out, "add": True}),
        ("silu and add", {"x": x, "out": residual, "silu": True, "add": True}),
        ("bias is torch.float32", {"x": x, "out": out, "bias": torch.zeros(64)}),
    ):
        with pytest.raises(KernelArgumentError, match=text):
            w4_linear(matrix=matrix, **arguments)  # type: ignore[arg-type]
    assert not launches.macros
