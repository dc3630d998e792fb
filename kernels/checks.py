"""Argument checks that all kernel wrappers share: every refusal names the argument, what it is and what is allowed.

Owns: the wording. Does not know: kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import KernelArgumentError

ACTIVATIONS = (torch.float16, torch.bfloat16)


def check_tensor(
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[tuple[str, int | None]],
    alignment: int = 16,
) -> None:
    """`shape`: (name of the dimension, its size or None for any). Contiguous, on the GPU, aligned to `alignment` bytes.

    Raises KernelArgumentError, as all of these do.
    """
    check_layout(name, tensor, dtypes, shape)
    check_place(name, tensor, alignment)


def check_place(name: str, tensor: Tensor, alignment: int = 16) -> None:
    """On the GPU, aligned to `alignment` bytes."""
    if tensor.data_ptr() % alignment:
        raise KernelArgumentError(f"{name} begins at an address that is no multiple of {alignment} bytes")
    if not tensor.is_cuda:
        raise KernelArgumentError(f"{name} is on {tensor.device}; kernels take tensors on a CUDA device")


def check_rows(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: Sequence[tuple[str, int | None]],
    alignment: int = 4,
) -> None:
    """A matrix as for `check_tensor`, whose rows may lie apart."""
    _check_dtype(name, tensor, dtype)
    _check_shape(name, tensor.shape, shape)
    if tensor.stride(1) != 1 or tensor.stride(0) < tensor.shape[1]:
        raise KernelArgumentError(f"{name} has strides {tensor.stride()}; its rows must be contiguous, and not overlap")
    check_place(name, tensor, alignment)


def check_layout(
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[tuple[str, int | None]],
) -> None:
    """Dtype, shape (as for `check_tensor`) and contiguity, wherever the tensor is."""
    _check_dtype(name, tensor, dtypes)
    _check_shape(name, tensor.shape, shape)
    if not tensor.is_contiguous():
        raise KernelArgumentError(f"{name} is not contiguous: strides {tensor.stride()} for shape {list(tensor.shape)}")


def _check_dtype(name: str, tensor: Tensor, dtypes: torch.dtype | Sequence[torch.dtype]) -> None:
    if tensor.dtype is not dtypes and (isinstance(dtypes, torch.dtype) or tensor.dtype not in dtypes):
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        raise KernelArgumentError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")


def _check_shape(name: str, sizes: torch.Size, shape: Sequence[tuple[str, int | None]]) -> None:
    if len(sizes) == len(shape):
        for place, (_, wanted) in enumerate(shape):  # a loop, and no zip: this runs several times a launch
            if wanted is not None and wanted != sizes[place]:
                break
        else:
            return
    names = ", ".join(dim if size is None else f"{dim}={size}" for dim, size in shape)
    raise KernelArgumentError(f"{name} has shape {list(sizes)}; wanted: [{names}]")


def check_number(name: str, value: int, allowed: Sequence[int]) -> None:
    """Refuse a value that is not among `allowed`."""
    if value not in allowed:
        raise KernelArgumentError(f"{name} is {value}; allowed: {', '.join(map(str, allowed))}")


def check_multiple(name: str, value: int, factor: int, most: int | None = None) -> None:
    """Refuse a value that is not a positive multiple of `factor`, or above `most`."""
    if value < 1 or value % factor or (most is not None and value > most):
        limit = "" if most is None else f" up to {most}"
        raise KernelArgumentError(f"{name} is {value}; allowed: multiples of {factor}{limit}")
