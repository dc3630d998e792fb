"""What `coldblock bench kernels` times is what an engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from coldblock.engine_core.models import cuda_linears
from coldblock.kernels import w4, w4_wide
from coldblock.tools.bench import kernel_cases


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", kernel_cases.BATCHES)
def test_linears_go_the_engines_way(monkeypatch: pytest.MonkeyPatch, rows: int, wide: bool) -> None:
    called: list[tuple[str, int, bool]] = []

    def recorder(name: str) -> Callable[..., None]:
        return lambda x, matrix, out, *, bias=None, silu=False: called.append((name, len(x), silu))

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *sizes, device, **options: make(*sizes, **options)

    def matrix(n: int, k: int) -> w4.W4Matrix:
        scales = torch.ones(n, k // 64).half()
        return w4.pack_w4(torch.zeros(n, k // 2, dtype=torch.uint8), scales, scales, "cpu")

    monkeypatch.setattr(w4, "w4_linear", recorder("linear"))
    monkeypatch.setattr(w4_wide, "w4_wide_linear", recorder("wide"))
    monkeypatch.setattr(w4_wide, "supports", lambda matrix, rows: wide)
    linears = {"qkv": (256, 128), "gate_up": (256, 128)}
    monkeypatch.setattr(kernel_cases, "LINEARS", linears)
    monkeypatch.setattr(kernel_cases, "LAYERS", 2)
    monkeypatch.setattr(kernel_cases, "_matrices", lambda: {name: [matrix(*linears[name])] * 2 for name in linears})
    monkeypatch.setattr(torch, "randn", on_cpu(torch.randn))
    monkeypatch.setattr(torch, "empty", on_cpu(torch.empty))
    kernel_cases.linears(rows).calls[0]()
    wanted = "wide" if wide and rows > cuda_linears.LINEAR_MOST_ROWS else "linear"
    assert called == [(wanted, rows, False), (wanted, rows, True)] * 2
