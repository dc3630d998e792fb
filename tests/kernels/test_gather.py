"""Slices of scattered blocks, from the GPU and from pinned host memory, bit by bit; and what is refused."""

from __future__ import annotations

import pytest
import torch
from coldblock.kernels import checks, gather
from coldblock.kernels.errors import KernelArgumentError


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("slice_bytes", [16, 2112, 8192, 8320, 16384, 40_000])
def test_every_byte_and_no_other(slice_bytes: int, pinned: bool) -> None:
    layers, blocks = 3, 40
    host = torch.randint(0, 256, (blocks, layers * slice_bytes), dtype=torch.uint8)
    source = host.pin_memory() if pinned else host.cuda()
    for count in (1, 7, 40):
        ids = torch.randperm(blocks)[:count].int()
        for layer in range(layers):
            target = torch.full((count + 1, slice_bytes), 77, dtype=torch.uint8, device="cuda")
            gather.gather_slices(source, layer * slice_bytes, ids.cuda(), target[:count])
            here = slice(layer * slice_bytes, (layer + 1) * slice_bytes)
            assert torch.equal(target[:count].cpu(), host[ids.long(), here])
            assert target[count:].eq(77).all()


@pytest.mark.gpu
def test_blocks_beyond_two_gibibytes() -> None:
    block_bytes = 1 << 20
    source = torch.zeros(2200, block_bytes, dtype=torch.uint8, device="cuda")
    source[2199, 32:48] = 5
    target = torch.zeros(1, 16, dtype=torch.uint8, device="cuda")
    gather.gather_slices(source, 32, torch.tensor([2199], dtype=torch.int32, device="cuda"), target)
    assert target.eq(5).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"source": torch.zeros(4, 64)}, "source"),
        ({"source": torch.zeros(4, 72, dtype=torch.uint8)}, "block_bytes"),
        ({"offset": 8}, "offset"),
        ({"offset": 48}, "offset"),
        ({"offset": -16}, "offset"),
        ({"blocks": torch.zeros(2, dtype=torch.int64)}, "blocks"),
        ({"blocks": torch.zeros(3, dtype=torch.int32)}, "target"),
        ({"target": torch.zeros(2, 24, dtype=torch.uint8)}, "slice_bytes"),
        ({"target": torch.zeros(2, 64, dtype=torch.uint8)[:, ::2]}, "target"),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, change: dict[str, object], named: str) -> None:
    monkeypatch.setattr(checks, "check_place", lambda *_: None)
    arguments = {
        "source": torch.zeros(4, 64, dtype=torch.uint8),
        "offset": 16,
        "blocks": torch.zeros(2, dtype=torch.int32),
        "target": torch.zeros(2, 32, dtype=torch.uint8),
    }
    with pytest.raises(KernelArgumentError, match=named):
        gather.gather_slices(**{**arguments, **change})  # type: ignore[arg-type]
