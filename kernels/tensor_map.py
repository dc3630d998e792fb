"""Tensor maps: what the copy engine of SM90 (TMA) needs to know about a matrix in global memory.

Owns: encoding a map through the driver. Does not know: kernels, or what a matrix means.

A kernel takes a map by value (`const __grid_constant__ TensorMap` of cuda/tma.cuh) and copies boxes of it to shared
memory; what a box covers outside of the matrix reads as zero. A map is remembered by the matrix's address and shape.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .errors import KernelError, KernelUnavailable

SWIZZLED_BYTES = 128
"""Bytes of a swizzled box's row, whose pieces of 16 bytes are permuted."""

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_DATA_TYPES = {torch.int64: 5, torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_NO_INTERLEAVE, _NO_SWIZZLE, _SWIZZLE_128B, _PROMOTE_TO_256B, _FILL_ZEROS = 0, 0, 3, 3, 0


def swizzled_map(matrix: Tensor, box_rows: int) -> bytes:
    """The map of `matrix` [rows, columns], row-major, for boxes of box_rows x 128 bytes in the 128-byte swizzle.

    The dtype is int64, fp16 or bf16; a row's bytes are a multiple of 16. Raises KernelError when the driver refuses.
    """
    box_columns = SWIZZLED_BYTES // matrix.dtype.itemsize
    return _encode(matrix.data_ptr(), *matrix.shape, matrix.dtype, box_rows, box_columns, _SWIZZLE_128B)


def plain_map(matrix: Tensor, box_rows: int, box_columns: int) -> bytes:
    """The same for boxes of box_rows x box_columns that keep their order."""
    return _encode(matrix.data_ptr(), *matrix.shape, matrix.dtype, box_rows, box_columns, _NO_SWIZZLE)


@functools.lru_cache(maxsize=8192)
def _encode(
    address: int, rows: int, columns: int, dtype: torch.dtype, box_rows: int, box_columns: int, swizzle: int
) -> bytes:
    buffer = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    offset = -ctypes.addressof(buffer) % _MAP_ALIGNMENT
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + offset),
        _DATA_TYPES[dtype],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * dtype.itemsize),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        swizzle,
        _PROMOTE_TO_256B,
        _FILL_ZEROS,
    )
    if code:
        raise KernelError(
            f"no tensor map for [{rows}, {columns}] {dtype} at {address:#x}, "
            f"boxes of {box_rows} x {box_columns}: CUDA error {code}"
        )
    return buffer.raw[offset : offset + _MAP_BYTES]


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelUnavailable("libcuda.so.1 is missing: no CUDA driver is installed") from error
