"""How the GPU's memory is shared out at start: weights, workspace, graphs, a reserve, and KV blocks from the rest.

Owns: the sum, and the errors that name the flag to change. Does not know: models, how the figures came about.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import MemoryBudgetError

RESERVE_BYTES = 96 << 20  # cuBLAS workspaces, log-probabilities, kernels' code, the allocator's rounding
GRAPH_BYTES = 4 << 20  # of a captured decode pass, as the driver keeps it
DENSE_COPIES_SHARE = 1 / 8  # of the memory for other than asked-for KV blocks, at most
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemorySum:
    """Bytes on the GPU. `free`: what was free before the engine took anything, of which it may take `share`."""

    free: int
    share: float
    weights: int
    workspace: int
    graphs: int
    reserve: int = RESERVE_BYTES

    @property
    def left(self) -> int:
        """What is left for KV blocks; may be negative."""
        return int(self.free * self.share) - self.weights - self.workspace - self.graphs - self.reserve

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "workspace": self.workspace,
            "graphs": self.graphs,
            "reserve": self.reserve,
        }
        needs = " + ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items())
        return f"{self.share:.0%} of {self.free / MIB:,.0f} MiB free less {needs}"


@dataclass(frozen=True, slots=True)
class Start:
    """Before anything was loaded: what was `free`, and what torch had `reserved` already."""

    free: int
    reserved: int

    def now(self, share: float, weights: int, graphs: int) -> MemorySum:
        """With all loaded but the KV blocks: whatever torch has reserved since and is no weight is workspace."""
        torch.cuda.empty_cache()
        workspace = torch.cuda.memory_reserved() - self.reserved - weights
        return MemorySum(self.free, share, weights, workspace, graphs)


def start() -> Start:
    """What this process may still take on the current device: what is free, within its memory fraction."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    allowed = int(torch.cuda.get_per_process_memory_fraction() * total) - reserved
    return Start(max(0, min(free, allowed)), reserved)


def dense_copies_fit(copies: int, memory: float, asked_for: int) -> bool:
    """Whether dense copies of packed matrices, `copies` bytes, are worth their place in `memory`, which the engine
    may take and of which `asked_for` bytes are KV blocks that must fit."""
    return copies < (memory - asked_for) * DENSE_COPIES_SHARE


def num_blocks(memory: MemorySum, block_bytes: int, wanted: int | None, useful: int) -> int:
    """KV blocks in the pool: `wanted` if given, else as many as fit, up to `useful`. Raises MemoryBudgetError."""
    fitting = memory.left // block_bytes
    if wanted is None and fitting < 1:
        problem = f"no KV block of {block_bytes / MIB:.2f} MiB fits: {memory} MiB; allow more, or free GPU memory"
        raise MemoryBudgetError("--gpu-memory-utilization", problem)
    if wanted is not None and wanted > max(0, fitting):
        problem = f"{wanted} blocks of {block_bytes / MIB:.2f} MiB do not fit, {max(0, fitting)} do: {memory} MiB"
        raise MemoryBudgetError("--num-gpu-blocks", problem)
    return min(fitting, useful) if wanted is None else wanted
