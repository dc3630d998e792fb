"""Host memory that a GPU copies from and to without waiting: pinned.

Owns: the arena of the CPU tier, small pinned buffers. Does not know: what is in them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MemoryBudgetError


class HostArena:
    """`memory`: uint8 [size] on the host, pinned in place if asked for, until `close`.

    Pinned as it is rather than by torch's allocator, which rounds up to a power of two. Raises MemoryBudgetError.
    """

    def __init__(self, size: int, pin: bool) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8)
        self._pinned = pin and size > 0
        if self._pinned and (code := int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0))):
            self._pinned = False
            problem = f"{size >> 20} MiB of RAM cannot be pinned (CUDA error {code}); allow less, see also ulimit -l"
            raise MemoryBudgetError("--max-cpu-offload-mb", problem)

    def close(self) -> None:
        """Unpin. No copy may be running."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self._pinned = False


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """A small pinned tensor [size]."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def to_host(tensor: Tensor) -> Tensor:
    """A pinned copy of a small tensor, complete once the current stream has come this far."""
    return pinned(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
