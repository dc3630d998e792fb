"""Host memory that a GPU copies from and to without waiting: pinned.

Owns: the arena of the CPU tier and how it grows, small pinned buffers. Does not know: what is in them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ...kernels import small_copy
from ..errors import MemoryBudgetError
from .memory import available_memory

log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20  # pinned in some 10 ms, which a thread takes while steps run
_FLAG = "--max-cpu-offload-mb"
_NOT_PINNED = (
    "%d MiB of RAM for the CPU tier cannot be pinned (CUDA error %d): copies there are several times slower, and steps "
    "wait for them; allow less with %s, see also ulimit -l"
)


class HostArena:
    """`memory`: uint8 [size] on the host. On request pinned, slab by slab from its beginning, as `ready` is asked for
    more: one slab at once, the others on a thread.

    One range of addresses, of which the system commits what is touched or pinned. Pinned in place rather than by
    torch's allocator, which rounds up to a power of two. No `unit` of bytes, as the arena is divided in, lies in two
    slabs: a copy may not cross them. What cannot be pinned is used as it is, so that steps wait for its copies. Given
    back by `close`, or when nobody has the arena any more.
    """

    def __init__(self, size: int, pin: bool, unit: int = 1) -> None:
        self.slab = _slab_bytes(unit)
        self.pinned = self._usable = self._limit = size
        """`pinned`: so many bytes, from the beginning, are, or need not be."""
        self._growing: Future[None] | None = None
        if not (pin and size):
            self.memory = torch.empty(size, dtype=torch.uint8)
            return
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)  # committed and pinned many times faster
        pages.madvise(mmap.MADV_DONTFORK)  # a child's copy on write would move what the GPU knows by its address
        with torch.inference_mode(False):  # else the thread might not write to it
            self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self.pinned = self._usable = 0
        self._addresses: list[int] = []
        self._unpin = weakref.finalize(self, _unpin, self._addresses)
        self._unpin.atexit = False  # the process ends, and CUDA may have ended before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-pin")
        with ThreadPoolExecutor(1) as first:  # has ended, and refers to this arena no more, when work goes on here
            first.submit(self._grow).result()

    def ready(self, end: int) -> bool:
        """Whether copies may touch the first `end` bytes; if not yet, they are being pinned, so ask again.

        Raises MemoryBudgetError where there is no RAM for them.
        """
        if end > self._limit:
            raise MemoryBudgetError(_FLAG, f"RAM has run out after {self._limit >> 20} MiB of the CPU tier; allow less")
        growing = self._growing is not None and not self._growing.done()
        if end + self.slab > self._usable < self._limit and not growing:  # one slab ahead
            self._growing = self._thread.submit(self._grow)
        return end <= self._usable

    def close(self) -> None:
        """Wait for copies, and unpin."""
        if hasattr(self, "_unpin"):
            self._thread.shutdown()
            self._unpin()

    def _grow(self) -> None:
        """Commit and pin one more slab, while the system has memory; or use the rest as it is.

        Never on the thread that runs steps: CUDA remembers a refusal, and the next kernel that torch launches from the
        same thread would be taken to have failed with it.
        """
        begin, end = self._usable, min(self._usable + self.slab, len(self.memory))
        if available_memory() < end - begin:  # to touch it would end this process or another
            self._limit = begin
            log.warning("no RAM is left for the CPU tier beyond %d MiB; %s asks for more", begin >> 20, _FLAG)
            return
        self.memory[begin:end].zero_()
        address = self.memory.data_ptr() + begin
        code = int(torch.cuda.cudart().cudaHostRegister(address, end - begin, 0))
        if code:
            log.warning(_NOT_PINNED, (len(self.memory) - begin) >> 20, code, _FLAG)
            self._usable = len(self.memory)
            return
        self._addresses.append(address)
        self.pinned = self._usable = end


def _slab_bytes(unit: int) -> int:
    """SLAB_BYTES, or some more, in whole units and pages."""
    step = math.lcm(unit, mmap.PAGESIZE)
    return -(-SLAB_BYTES // step) * step


def _unpin(addresses: list[int]) -> None:
    torch.cuda.synchronize()
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def pinned(size: int, dtype: torch.dtype) -> Tensor:
    """A small pinned tensor [size]."""
    return torch.empty(size, dtype=dtype, pin_memory=True)


def to_host(tensor: Tensor) -> Tensor:
    """A pinned copy of a small tensor, complete once the current stream has come this far."""
    copy = pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
    small_copy.to_host(tensor.contiguous(), copy)
    return copy
