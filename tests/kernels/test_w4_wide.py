"""Products of many rows with four-bit matrices, against fp64; on an SM90 device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from coldblock.kernels import w4_wide
from coldblock.kernels.errors import KernelArgumentError, KernelError
from coldblock.kernels.fused import rms_norm
from coldblock.kernels.loader import device_architecture
from coldblock.kernels.w4 import W4Matrix, pack_w4, unpack_w4
from coldblock.kernels.w4_wide import ARCHITECTURE, TILINGS, Tiling, tiling_of, w4_wide_linear
from torch import Tensor

ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
ROWS = (1, 7, 16, 32, 33, 64, 65, 128, 130, 300)
SHAPES = [
    (64, 128, 32),
    (80, 96, 32),
    (48, 72, 72),
    (33, 64, 64),
    (200, 768, 256),
    (17, 192, 64),
    (80, 2056, 2056),
    (176, 5504, 128),
    (2560, 2048, 128),
]
MOST_ROWS = (1, 9, 16, 17, 32, 64, 96, 128, 192, 256, 384, 500, 1000, 1100)
"""At least one number of rows for each tiling."""


def on_hopper() -> bool:
    try:
        return device_architecture() == ARCHITECTURE
    except KernelError:
        return False


needs_hopper = pytest.mark.skipif(not on_hopper(), reason="needs a device of compute capability 9.0")


def random_matrix(n: int, k: int, group_size: int, symmetric: bool = False) -> W4Matrix:
    qweight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(n, k // group_size, device="cuda") * 0.02 + 0.002).half()
    mins = -8 * scales.float() if symmetric else -torch.rand(n, k // group_size, device="cuda") * 0.2
    return pack_w4(qweight, scales, mins, "cuda")


def apply_silu(gate_up: Tensor) -> Tensor:
    turns = gate_up.unflatten(-1, (-1, 2, 8))
    return (F.silu(turns[..., 0, :]) * turns[..., 1, :]).flatten(-2)


def assert_close(out: Tensor, wanted: Tensor, scale: Tensor) -> None:
    """Weights, zeros and results are each rounded once to the activation type; `scale` is the typical size of a sum."""
    error = (out.double() - wanted).abs()
    excess = error - ROUNDING[out.dtype] * (wanted.abs() + 8 * scale)
    assert excess.max() <= 0, f"{error.max()} off, {(excess > 0).sum()} of {error.numel()}"
    assert error.norm() <= 3 * ROUNDING[out.dtype] * wanted.norm(), f"{error.norm() / wanted.norm()} off"
    assert F.cosine_similarity(out.double().flatten(), wanted.flatten(), dim=0) > 0.9999


def check(matrix: W4Matrix, rows: int, dtype: torch.dtype, silu: bool = False) -> None:
    x = torch.randn(rows, matrix.k, device="cuda").to(dtype)
    bias = torch.randn(matrix.n, device="cuda").to(dtype) if rows % 2 else None
    sums = x.double() @ unpack_w4(matrix).double().T + (0 if bias is None else bias.double())
    wanted, scale = sums, sums.square().mean(-1, keepdim=True).sqrt()
    if silu:
        wanted, scale = apply_silu(sums), scale * (1 + sums.abs().unflatten(-1, (-1, 2, 8)).sum(-2).flatten(-2))
    out = torch.full(wanted.shape, torch.nan, device="cuda", dtype=dtype)
    w4_wide_linear(x, matrix, out, bias=bias, silu=silu)
    assert_close(out, wanted, scale)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_resident_blocks_of_a_tiling_fit_on_a_multiprocessor(tiling: Tiling) -> None:
    for stage_groups in tiling.all_stage_groups():
        assert tiling.stages(stage_groups) >= 2
        assert tiling.shared_bytes(stage_groups) <= 227 * 1024
        assert tiling.resident * (tiling.shared_bytes(stage_groups) + 1024) <= 228 * 1024


@pytest.mark.parametrize("k", [1, 64, 1016, 1024, 1032, 2048, 8184, 8192, 11008])
@pytest.mark.parametrize("n", [64, 8192])
def test_every_split_has_a_piece_of_k(n: int, k: int) -> None:
    for rows in range(1, 1200):
        tiling = tiling_of(n, k, rows)
        assert tiling.splits == 1 or k >= tiling.splits * tiling.stage_k()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_product(n: int, k: int, group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n + k)
    matrix = random_matrix(n, k, group_size, symmetric=n % 3 == 0)
    for rows in ROWS:
        check(matrix, rows, dtype)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", MOST_ROWS)
def test_every_tiling(rows: int) -> None:
    torch.manual_seed(rows)
    for n, k, group_size in [(328, 768, 128), (8192, 256, 64), (328, 8192, 128), (200, 1088, 64)]:
        check(random_matrix(n, k, group_size), rows, torch.float16)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(1424, 512, 128)
    for rows in ROWS:
        check(matrix, rows, dtype, silu=True)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adding(dtype: torch.dtype) -> None:
    """For each tiling; and the rows beside out stay as they are."""
    torch.manual_seed(0)
    for n, k, group_size in [(328, 768, 128), (33, 1088, 64), (8192, 256, 64), (328, 8192, 128)]:
        matrix = random_matrix(n, k, group_size)
        weights = unpack_w4(matrix).double()
        for rows in MOST_ROWS:
            x = torch.randn(rows, k, device="cuda").to(dtype)
            bias = torch.randn(n, device="cuda").to(dtype) if rows % 2 else None
            product = x.double() @ weights.T + (0 if bias is None else bias.double())
            around = torch.randn(rows + 8, n, device="cuda")
            wanted = around.clone().double()
            for _ in range(2):
                wanted[4:-4] += product
                w4_wide_linear(x, matrix, around[4:-4], bias=bias, add=True)
            scale = product.square().mean(-1, keepdim=True).sqrt()
            # Weights and zeros are rounded to the activation type, sums are not.
            error = (around.double() - wanted)[4:-4].abs()
            assert (error <= 2 * 8 * ROUNDING[dtype] * scale).all(), f"{n} {k} {rows}: {(error / scale).max()} off"
            assert error.norm() <= 2 * ROUNDING[dtype] * 2 * product.norm()
            assert torch.equal(around[:4].double(), wanted[:4]) and torch.equal(around[-4:].double(), wanted[-4:])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [64, 256])
def test_graph_of_a_residual_stream(rows: int) -> None:
    """Every product begins while the one before runs, and must wait before it adds."""
    torch.manual_seed(0)
    layers = [(random_matrix(2048, 1024, 128), random_matrix(1024, 1024, 128)) for _ in range(8)]
    weight = torch.rand(1024, device="cuda") + 0.5
    start = torch.randn(rows, 1024, device="cuda")
    residual = start.clone()
    normed, hidden = torch.empty(2, rows, 1024, device="cuda", dtype=torch.float16)

    def run(sync: bool) -> None:
        for up, down in layers:
            rms_norm(residual, weight, 1e-5, normed)
            w4_wide_linear(normed, up, hidden, silu=True)
            w4_wide_linear(hidden, down, residual, add=True)
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
        graph.replay()
        assert torch.equal(residual, wanted)


@pytest.mark.gpu
@needs_hopper
def test_writes_nothing_but_out() -> None:
    torch.manual_seed(0)
    matrix = random_matrix(200, 256, 64)
    x = torch.randn(77, 256, device="cuda").half()
    around = torch.full((79, 200), torch.nan, device="cuda", dtype=torch.float16)
    w4_wide_linear(x, matrix, around[1:78])
    assert around[0].isnan().all() and around[78].isnan().all() and around[1:78].isfinite().all()


@pytest.mark.gpu
@needs_hopper
def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    matrix = random_matrix(512, 2048, 128)
    x = torch.randn(64, 2048, device="cuda").half()
    x[1] = torch.nan
    out = torch.empty(64, 512, device="cuda", dtype=torch.float16)
    w4_wide_linear(x, matrix, out)
    others = x.clone()
    others[2:] = torch.randn(62, 2048, device="cuda").half()
    again = torch.empty_like(out)
    w4_wide_linear(others, matrix, again)
    assert torch.equal(out[0], again[0]) and out[1].isnan().all()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [64, 256])
def test_graph_of_dependent_products(rows: int) -> None:
    torch.manual_seed(0)
    first, second = random_matrix(1024, 2048, 128), random_matrix(2048, 512, 128)
    start = torch.randn(rows, 2048, device="cuda").half()
    x, hidden = start.clone(), torch.empty(rows, 512, device="cuda", dtype=torch.float16)

    def layers() -> None:
        for _ in range(8):
            w4_wide_linear(x, first, hidden, silu=True)
            w4_wide_linear(hidden, second, x)
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
@needs_hopper
def test_refuses() -> None:
    matrix = random_matrix(40, 128, 128)
    x = torch.zeros(2, 128, device="cuda", dtype=torch.float16)
    out = torch.zeros(2, 40, device="cuda", dtype=torch.float16)
    with pytest.raises(KernelArgumentError, match="k=128"):
        w4_wide_linear(x[:, :64].contiguous(), matrix, out)
    with pytest.raises(KernelArgumentError, match="turns of 8"):
        w4_wide_linear(x, matrix, out, silu=True)
    with pytest.raises(KernelArgumentError, match="out is"):
        w4_wide_linear(x, matrix, out.bfloat16())
    with pytest.raises(KernelArgumentError, match="bias"):
        w4_wide_linear(x, matrix, out, bias=torch.zeros(41, device="cuda", dtype=torch.float16))
    with pytest.raises(KernelArgumentError, match=r"out is torch\.float16; allowed: torch\.float32"):
        w4_wide_linear(x, matrix, out, add=True)
    with pytest.raises(KernelArgumentError, match=r"out is torch\.float32; allowed: torch\.float16"):
        w4_wide_linear(x, matrix, out.float())


def test_silu_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4_wide, "device_architecture", lambda: ARCHITECTURE)
    scales = torch.ones(64, 1)
    matrix = pack_w4(torch.zeros(64, 64, dtype=torch.uint8), scales, scales, "cpu")
    with pytest.raises(KernelArgumentError, match="silu and add"):
        w4_wide_linear(torch.zeros(2, 128).half(), matrix, torch.zeros(2, 32), silu=True, add=True)
