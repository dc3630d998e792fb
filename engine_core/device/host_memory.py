"""Host memory that a GPU copies from and to without waiting: pinned.

Owns: the arena of the CPU tier, small pinned buffers. Does not know: what is in them.
"""

from __future__ import annotations

import logging
import mmap
import weakref

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class HostArena:
    """`memory`: uint8 [size] on the host, pinned if asked for, until `close` or until nobody has the arena any more.

    Pinned in place rather than by torch's allocator, which rounds up to a power of two; in pages of its own, as a page
    can be pinned but once. What cannot be pinned is used as it is: copies are slower then.
    """

    def __init__(self, size: int, pin: bool) -> None:
        if not (pin and size):
            self.memory = torch.empty(size, dtype=torch.uint8)
            return
        self.memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        address = self.memory.data_ptr()
        if code := int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
            problem = "%d MiB of RAM for the CPU tier cannot be pinned (CUDA error %d), so copies are slow: %s"
            log.warning(problem, size >> 20, code, "allow less with --max-cpu-offload-mb, see also ulimit -l")
            return
        self._unpin = weakref.finalize(self, _unpin, address)
        self._unpin.atexit = False  # the process ends, and CUDA may have ended before

    def close(self) -> None:
        """Wait for copies, and unpin."""
        if hasattr(self, "_unpin"):
            self._unpin()


def _unpin(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """A small pinned tensor [size]."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def to_host(tensor: Tensor) -> Tensor:
    """A pinned copy of a small tensor, complete once the current stream has come this far."""
    return pinned(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
