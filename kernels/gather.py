"""Slices of scattered blocks, gathered by a kernel, also out of pinned host memory.

Owns: the kernel's wrapper. Does not know: what is in a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_layout, check_multiple, check_tensor
from .errors import KernelArgumentError
from .loader import load, variants

_THREADS, _EACH, _WORD = 256, 4, 16
VARIANTS = variants("gather_slices", THREADS=(_THREADS,), EACH=(_EACH,))


def gather_slices(source: Tensor, offset: int, blocks: Tensor, target: Tensor) -> None:
    """target[i] = the bytes of source[blocks[i]] from `offset` on, as many as target takes.

    source uint8 [num_blocks, block_bytes] on the GPU or in pinned host memory, blocks int32 [N] and target uint8
    [N, slice_bytes] on the GPU. The ids are not checked. Offset and sizes are multiples of 16 bytes. Raises
    KernelArgumentError.
    """
    check_layout("source", source, torch.uint8, [("num_blocks", None), ("block_bytes", None)])
    check_tensor("blocks", blocks, torch.int32, [("N", None)], alignment=4)
    check_tensor("target", target, torch.uint8, [("N", len(blocks)), ("slice_bytes", None)])
    block_bytes, slice_bytes = source.shape[1], target.shape[1]
    for name, value in (("block_bytes", block_bytes), ("slice_bytes", slice_bytes)):
        check_multiple(name, value, _WORD)
    if offset % _WORD or not 0 <= offset <= block_bytes - slice_bytes:
        allowed = f"multiples of {_WORD} up to {block_bytes - slice_bytes}"
        raise KernelArgumentError(f"offset is {offset}; allowed: {allowed}")
    words = slice_bytes // _WORD
    load("gather_slices", THREADS=_THREADS, EACH=_EACH).launch(
        (len(blocks), -(-words // (_THREADS * _EACH))),
        _THREADS,
        [source, blocks, target, block_bytes, offset, words],
    )
