"""Many copies of whole blocks between GPU and pinned host memory, by the GPU's copy engines, in one call.

Owns: the driver's functions for that. Does not know: what is in a block, or what orders copies and kernels.

No kernel: multiprocessors that copy would be missed by whatever runs beside.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks import check_layout
from .errors import KernelArgumentError, KernelError
from .loader import driver, error_text

Ids = NDArray[np.int64]
Addresses = NDArray[np.uint64]

_DEFAULT_STREAM = 0
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; the hints are about managed memory."""

    _fields_ = (("source_access_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def copy_blocks(source: Tensor, reads: Ids, target: Tensor, writes: Ids, counts: Ids) -> None:
    """target[writes[i] + k] = source[reads[i] + k] for every run i and k < counts[i], on the current stream, which must
    not be the default one: that takes no calls of many copies.

    source and target are uint8 [blocks, block_bytes], one on the GPU, the other pinned. No two runs may write the same
    block, nor one read what another writes: they are copied in any order. Raises KernelArgumentError and KernelError.
    """
    stream = torch.cuda.current_stream().cuda_stream
    if stream == _DEFAULT_STREAM:
        raise KernelArgumentError("stream is the default one; allowed: any other")
    check_layout("source", source, torch.uint8, [("blocks", None), ("block_bytes", None)])
    size = source.shape[1]
    check_layout("target", target, torch.uint8, [("blocks", None), ("block_bytes", size)])
    _check_runs("reads", reads, counts, len(source))
    _check_runs("writes", writes, counts, len(target))
    if len(counts):
        sources = (source.data_ptr() + reads * size).astype(np.uint64)
        targets = (target.data_ptr() + writes * size).astype(np.uint64)
        _copy()(targets, sources, (counts * size).astype(np.uint64), stream)


def _check_runs(name: str, first: Ids, counts: Ids, blocks: int) -> None:
    if len(first) != len(counts):
        raise KernelArgumentError(f"{name} has {len(first)} runs, counts has {len(counts)}")
    if len(first) and (first.min() < 0 or counts.min() < 1 or (first + counts).max() > blocks):
        raise KernelArgumentError(f"{name} reaches to block {(first + counts).max() - 1}; there are {blocks}")


_Copy = Callable[[Addresses, Addresses, Addresses, int], None]


@functools.cache
def _copy() -> _Copy:
    """How this driver takes copies: all in one call from CUDA 12.8 on, with one argument less from 13.0 on."""
    library = driver()
    if hasattr(library, "cuMemcpyBatchAsync_v2"):
        return functools.partial(_copy_together, library.cuMemcpyBatchAsync_v2, ())
    if hasattr(library, "cuMemcpyBatchAsync"):
        return functools.partial(_copy_together, library.cuMemcpyBatchAsync, (ctypes.byref(ctypes.c_size_t()),))
    return _copy_one_by_one


def _copy_together(
    function: Any, last: tuple[Any, ...], targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
) -> None:
    lists = [ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes)]
    attributes, from_first = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0)
    one, count = ctypes.c_size_t(1), ctypes.c_size_t(len(sizes))
    options = (ctypes.byref(attributes), ctypes.byref(from_first), one)
    _check(function(*lists, count, *options, *last, ctypes.c_void_p(stream)))


def _copy_one_by_one(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
    function, on = driver().cuMemcpyAsync, ctypes.c_void_p(stream)
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        _check(function(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), on))


def _check(code: int) -> None:
    if code:
        raise KernelError(f"copying blocks failed: {error_text(code)}")
