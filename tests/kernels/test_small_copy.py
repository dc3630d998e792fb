"""Small copies both ways, whole words of any number; and what is refused."""

from __future__ import annotations

import pytest
import torch
from coldblock.kernels import small_copy
from coldblock.kernels.errors import KernelArgumentError
from torch import Tensor


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64])
def test_every_word_and_no_other(dtype: torch.dtype) -> None:
    for count in (1, 3, 255, 256, 257, 5000, 200_001):
        host = torch.randint(0, 10**6, (count + 8,)).to(dtype).pin_memory()
        device = torch.zeros(count + 8, dtype=dtype, device="cuda")
        small_copy.to_device(host[4 : count + 4], device[4 : count + 4])
        back = torch.full((count + 8,), 7).to(dtype).pin_memory()
        small_copy.to_host(device[4 : count + 4], back[4 : count + 4])
        torch.cuda.synchronize()
        assert torch.equal(back[4:-4], host[4:-4])
        assert device[:4].eq(0).all() and device[-4:].eq(0).all() and back[:4].eq(7).all() and back[-4:].eq(7).all()


@pytest.mark.gpu
def test_in_order_with_the_kernels_before_and_behind() -> None:
    """Each is overwritten as soon as it was used, as often as a step's arrays are."""
    values = [torch.full((1000,), i, dtype=torch.int32).pin_memory() for i in range(300)]
    device = torch.zeros(1000, dtype=torch.int32, device="cuda")
    results = [torch.zeros(1000, dtype=torch.int32).pin_memory() for _ in values]
    for value, result in zip(values, results, strict=True):
        small_copy.to_device(value, device)
        small_copy.to_host(device, result)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(values, results, strict=True))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)),
        (torch.zeros(4, 4).t(), torch.zeros(4, 4)),
        (torch.zeros(4), torch.zeros(8)[::2]),
    ],
)
def test_what_does_not_fit_is_refused(source: Tensor, target: Tensor) -> None:
    for copy in (small_copy.to_device, small_copy.to_host):
        with pytest.raises(KernelArgumentError, match="source"):
            copy(source, target)
