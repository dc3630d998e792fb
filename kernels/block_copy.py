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
    if not len(reads) == len(writes) == len(counts):
        raise KernelArgumentError(f"reads has {len(reads)} runs, writes {len(writes)}, counts {len(counts)}")
    if len(counts):
        runs = np.array((writes, reads, counts))
        _check_runs(runs, (target.shape[0], source.shape[0]))
        runs *= size
        runs[0] += target.data_ptr()
        runs[1] += source.data_ptr()
        _copy()(runs, stream)


def _check_runs(runs: Ids, sizes: tuple[int, int]) -> None:
    least, ends = runs.min(axis=1).tolist(), (runs[:2] + runs[2]).max(axis=1).tolist()
    if least[2] < 1:
        raise KernelArgumentError(f"counts has {least[2]}; allowed: at least 1")
    for name, first, end, blocks in zip(("writes", "reads"), least[:2], ends, sizes, strict=True):
        if first < 0 or end > blocks:
            raise KernelArgumentError(f"{name} names blocks {first} to {end - 1}; allowed: 0 to {blocks - 1}")


_Copy = Callable[[Ids, int], None]
"""Takes copies, int64 [3, runs] contiguous: the addresses to write to, those to read from, and the bytes; a stream."""


@functools.cache
def _copy() -> _Copy:
    """How this driver takes copies: all in one call from CUDA 12.8 on, with one argument less from 13.0 on."""
    library = driver()
    if hasattr(library, "cuMemcpyBatchAsync_v2"):
        return functools.partial(_copy_together, library.cuMemcpyBatchAsync_v2, ())
    if hasattr(library, "cuMemcpyBatchAsync"):
        return functools.partial(_copy_together, library.cuMemcpyBatchAsync, (ctypes.byref(ctypes.c_size_t()),))
    return _copy_one_by_one


def _copy_together(function: Any, last: tuple[Any, ...], copies: Ids, stream: int) -> None:
    begin, row = copies.ctypes.data, copies.strides[0]
    lists = ctypes.c_void_p(begin), ctypes.c_void_p(begin + row), ctypes.c_void_p(begin + 2 * row)
    attributes, from_first = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0)
    one, count = ctypes.c_size_t(1), ctypes.c_size_t(copies.shape[1])
    options = (ctypes.byref(attributes), ctypes.byref(from_first), one)
    _check(function(*lists, count, *options, *last, ctypes.c_void_p(stream)))


def _copy_one_by_one(copies: Ids, stream: int) -> None:
    function, on = driver().cuMemcpyAsync, ctypes.c_void_p(stream)
    for target, source, size in copies.T.tolist():
        _check(function(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), on))


def _check(code: int) -> None:
    if code:
        raise KernelError(f"copying blocks failed: {error_text(code)}")
