"""The way of a step's arrays to the GPU: one copy of one packed buffer, which nobody waits for, and which waits for no
copy of KV blocks.

Owns: the buffers on both sides, and when the host may write into one again. Does not know: what is in them.
"""

from __future__ import annotations

import torch

from ...kernels import small_copy
from . import host_memory
from .cuda_batch import IntArray

_BUFFERS = 3  # one being filled, two whose steps may not have begun on the GPU yet


class Staging:
    """`device`: int32 [ints] on the GPU, always the same memory. Copies are queued on the current stream."""

    def __init__(self, ints: int, device: str) -> None:
        self.device = torch.empty(ints, dtype=torch.int32, device=device)
        self._host = [host_memory.pinned(ints, torch.int32) for _ in range(_BUFFERS)]
        self._sent = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._turn = 0

    def take(self) -> IntArray:
        """A host buffer that nothing reads any more."""
        self._turn = (self._turn + 1) % _BUFFERS
        self._sent[self._turn].synchronize()
        array: IntArray = self._host[self._turn].numpy()
        return array

    def send(self, used: int) -> None:
        """Copy the first ints of the buffer just taken."""
        small_copy.to_device(self._host[self._turn][:used], self.device[:used])
        self._sent[self._turn].record()
