"""Runs of blocks: one call where the driver has it, whatever its version; on a GPU bit by bit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from coldblock.kernels import block_copy
from coldblock.kernels.block_copy import copy_blocks
from coldblock.kernels.errors import KernelArgumentError, KernelError
from torch import Tensor

BLOCK_BYTES = (294_912, 299_520, 589_824, 2112)


class FakeDriver:
    """Copies at once. `version`: the functions of CUDA 12.0, 12.8 or 13.0."""

    def __init__(self, version: str) -> None:
        self.calls, self.answer = 0, 0
        if version == "12.0":
            self.cuMemcpyAsync = self._one
        elif version == "12.8":
            self.cuMemcpyBatchAsync = lambda *arguments: self._many(*arguments[:7], arguments[8])
        else:
            self.cuMemcpyBatchAsync_v2 = self._many
            self.cuMemcpyBatchAsync = None

    def _one(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        self.calls += 1
        ctypes.memmove(target.value, source.value, size.value)
        return self.answer

    def _many(
        self, targets: Any, sources: Any, sizes: Any, count: Any, attributes: Any, first: Any, kinds: Any, stream: Any
    ) -> int:
        self.calls += 1
        assert kinds.value == 1 and attributes._obj.source_access_order == 1 and first._obj.value == 0
        assert ctypes.sizeof(attributes._obj) == 24 and stream.value == 77
        lists = [
            np.ctypeslib.as_array(ctypes.cast(one, ctypes.POINTER(ctypes.c_uint64)), (count.value,)).tolist()
            for one in (targets, sources, sizes)
        ]
        for target, source, size in zip(*lists, strict=True):
            ctypes.memmove(target, source, size)
        return self.answer


@pytest.fixture(params=["12.0", "12.8", "13.0"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver(request.param)
    monkeypatch.setattr(block_copy, "driver", lambda: fake)
    monkeypatch.setattr(block_copy, "error_text", lambda code: f"CUDA error {code}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    block_copy._copy.cache_clear()
    yield fake
    block_copy._copy.cache_clear()


def arrays(*lists: list[int]) -> list[Any]:
    return [np.array(one, dtype=np.int64) for one in lists]


def noise(blocks: int, size: int) -> Tensor:
    return torch.randint(0, 256, (blocks, size), dtype=torch.uint8)


def expected(source: Tensor, reads: Any, target: Tensor, writes: Any, counts: Any) -> Tensor:
    result = target.clone()
    for read, write, count in zip(reads, writes, counts, strict=True):
        result[write : write + count] = source[read : read + count]
    return result


def test_runs_of_blocks_by_any_driver(driver: FakeDriver) -> None:
    source, target = noise(20, 48), noise(30, 48)
    reads, writes, counts = arrays([3, 0, 10], [0, 29, 7], [2, 1, 10])
    wanted = expected(source, reads, target, writes, counts)
    copy_blocks(source, reads, target, writes, counts)
    assert torch.equal(target, wanted)
    assert driver.calls == (3 if hasattr(driver, "cuMemcpyAsync") else 1)
    copy_blocks(source, *arrays([]), target, *arrays([], []))
    assert torch.equal(target, wanted)


def test_what_the_driver_refuses_is_an_error(driver: FakeDriver) -> None:
    driver.answer = 1
    with pytest.raises(KernelError, match="copying blocks failed: CUDA error 1"):
        copy_blocks(noise(2, 16), *arrays([0]), noise(2, 16), *arrays([1], [1]))


def test_the_default_stream_is_refused_by_any_driver(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """From CUDA 12.8 on the driver would refuse it."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    with pytest.raises(KernelArgumentError, match="stream is the default one"):
        copy_blocks(noise(2, 16), *arrays([0]), noise(2, 16), *arrays([1], [1]))
    assert driver.calls == 0


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("reads", "writes", "counts"),
    [([2], [0], [1]), ([0], [2], [1]), ([1], [0], [2]), ([-1], [0], [1]), ([0], [0], [0]), ([0, 1], [0], [1])],
)
def test_blocks_that_do_not_exist_are_refused(reads: list[int], writes: list[int], counts: list[int]) -> None:
    with pytest.raises(KernelArgumentError, match=r"reads|writes|counts"):
        copy_blocks(noise(2, 16), *arrays(reads), noise(2, 16), *arrays(writes, counts))


@pytest.mark.usefixtures("driver")
def test_blocks_of_different_size_are_refused() -> None:
    with pytest.raises(KernelArgumentError, match="target has shape"):
        copy_blocks(noise(2, 16), *arrays([0]), noise(2, 32), *arrays([0], [1]))


@pytest.mark.gpu
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("size", BLOCK_BYTES)
def test_random_blocks_out_and_in_bit_by_bit(size: int, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not together:
        monkeypatch.setattr(block_copy, "_copy", lambda: block_copy._copy_one_by_one)
    with torch.cuda.stream(torch.cuda.Stream()):
        rng = np.random.default_rng(size)
        gpu, cpu = noise(60, size).cuda(), noise(70, size).pin_memory()
        for count in (1, 7, 60):
            ids, places = rng.permutation(60)[:count], rng.permutation(70)[:count]
            wanted, ones = cpu.clone(), np.ones(count, np.int64)
            wanted[places] = gpu.cpu()[ids]
            copy_blocks(gpu, ids, cpu, places, ones)
            torch.cuda.synchronize()
            assert torch.equal(cpu, wanted)
            back = gpu.cpu()
            ids = rng.permutation(60)[:count]
            back[ids] = cpu[places]
            copy_blocks(cpu, places, gpu, ids, ones)
            torch.cuda.synchronize()
            assert torch.equal(gpu.cpu(), back)
