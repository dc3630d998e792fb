"""How fast bytes can move between the two tiers when nothing else runs, and how near copies came to that.

Owns: the measurement of the link, the figures of copies against it. Does not know: who copied, or why.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...protocol.messages import ModelInfo, SwapEvent
from ..errors import ToolError
from .measure import distribution
from .report import Column, Table, table

MOST_BYTES = 256 << 20  # more is not faster
REPEATS = 5


@dataclass(frozen=True)
class Link:
    """Peak GB/s (1e9 bytes) from the pool to the CPU tier and back; `size` bytes at a time."""

    out_gb_per_s: float
    in_gb_per_s: float
    size: int

    def seconds(self, bytes_out: int, bytes_in: int) -> float:
        """What so many bytes take at least, one direction after the other."""
        return bytes_out / self.out_gb_per_s / 1e9 + bytes_in / self.in_gb_per_s / 1e9


async def measure_link(model: ModelInfo) -> Link:
    """The best of a few plain copies of the pool's size. Call it while no engine runs.

    On a GPU: pinned memory over the bus, in a process of its own, which gives everything back when it ends. On the CPU
    both tiers are RAM: one core's copies there.
    """
    size = min(model.num_gpu_blocks * model.kv_block_bytes, MOST_BYTES)
    if model.device != "cuda":
        return await asyncio.to_thread(_memory_peak, size)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        try:
            return await asyncio.get_running_loop().run_in_executor(child, _bus_peak, size)
        except (RuntimeError, OSError) as error:  # of CUDA, or the child's end
            raise ToolError(f"the link between GPU and CPU memory could not be measured: {error}") from error


def _memory_peak(size: int) -> Link:
    here, there = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def copy_seconds() -> float:
        begun = time.perf_counter()
        np.copyto(there, here)
        return time.perf_counter() - begun

    peak = _best(copy_seconds, size)
    return Link(peak, peak, size)


def _bus_peak(size: int) -> Link:
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")

    def copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    out = _best(lambda: copy_seconds(host, device), size)
    return Link(out, _best(lambda: copy_seconds(device, host), size), size)


def _best(copy_seconds: Callable[[], float], size: int) -> float:
    """GB/s of the fastest; the first only warms up."""
    copy_seconds()
    return size / min(copy_seconds() for _ in range(REPEATS)) / 1e9


def summarize_copies(copies: Sequence[SwapEvent], peak_gb_per_s: float) -> dict[str, Any]:
    """The figures of copies of one direction; their waits before they began are apart."""
    size, seconds = sum(copy.bytes for copy in copies), sum(copy.seconds for copy in copies)
    largest = max(copies, key=lambda copy: copy.bytes, default=None)
    speed = _gb_per_s(size, seconds)
    return {
        "copies": len(copies),
        "bytes": size,
        "seconds": seconds,
        "gb_per_s": speed,
        "link_gb_per_s": peak_gb_per_s,
        "share_of_link": speed / peak_gb_per_s,
        "largest_bytes": largest.bytes if largest else 0,
        "largest_gb_per_s": _gb_per_s(largest.bytes, largest.seconds) if largest else 0.0,
        "queued_s": distribution([copy.queued_s for copy in copies]),
        "bytes_by_reason": {
            reason: sum(copy.bytes for copy in copies if copy.reason == reason)
            for reason in sorted({copy.reason for copy in copies})
        },
    }


COPIES = (
    Column("KV", "kv_cache_dtype", case=True),
    Column("copies", "way", case=True),
    Column("number", "copies"),
    Column("MB", "bytes", 1e-6),
    Column("GB/s", "gb_per_s", better="higher"),
    Column("link, GB/s", "link_gb_per_s", better="higher"),
    Column("% of link", "share_of_link", 100, better="higher"),
    Column("largest, MB", "largest_bytes", 1e-6),
    Column("at GB/s", "largest_gb_per_s", better="higher"),
    Column("queued p50, ms", "queued_s.p50", 1e3),
)


def copies_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Copies of either direction in each KV format, against the link."""
    rows = [
        {"kv_cache_dtype": result["kv_cache_dtype"], "way": way, **found}
        for result in results
        for way, found in result["copies"].items()
    ]
    return table("Copies between the tiers, against plain copies when nothing else runs", COPIES, rows)


def _gb_per_s(size: int, seconds: float) -> float:
    return size / seconds / 1e9 if seconds else 0.0
