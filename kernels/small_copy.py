"""Small copies between the GPU and pinned host memory by a kernel, which queues behind nothing but its stream.

Owns: the kernel's launches. Does not know: what is copied.

A copy engine would do them in turn: behind whatever other streams copy in the same direction.
"""

from __future__ import annotations

from torch import Tensor

from .errors import KernelArgumentError
from .loader import load, variants

THREADS = 256
VARIANTS = variants("copy_small", FROM_HOST=(0, 1))


def to_device(source: Tensor, target: Tensor) -> None:
    """target on the GPU = source in pinned host memory, which no kernel writes."""
    _copy(source, target, from_host=1)


def to_host(source: Tensor, target: Tensor) -> None:
    """target in pinned host memory = source on the GPU."""
    _copy(source, target, from_host=0)


def _copy(source: Tensor, target: Tensor, from_host: int) -> None:
    """Contiguous tensors of one dtype and size, a multiple of 4 bytes. Raises KernelArgumentError."""
    if source.dtype != target.dtype or source.shape != target.shape or source.nbytes % 4:
        kinds = f"{source.dtype} {list(source.shape)} and {target.dtype} {list(target.shape)}"
        raise KernelArgumentError(f"source and target are {kinds}; allowed: one dtype and shape, whole words")
    if not (source.is_contiguous() and target.is_contiguous()):
        raise KernelArgumentError("source or target is not contiguous")
    words = source.nbytes // 4
    load("copy_small", FROM_HOST=from_host).launch([-(-words // THREADS)], THREADS, [source, target, words])
