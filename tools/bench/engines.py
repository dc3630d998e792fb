"""The engine that a benchmark starts for itself: which one, and what it tells while something runs on it.

Owns: the settings that choose the engine, its start, and what is heard from it: copies, counters. Does not know: what a
benchmark measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from pydantic import Field, field_validator

from ...protocol.client import AsyncClient
from ...protocol.messages import Stats, SwapEvent, SwapPhase
from ..daemons import running_engine
from ..errors import ToolError
from ..fetch_model import resolve_model
from .command import ReportSettings

OUTWARD: tuple[SwapPhase, ...] = ("swapped", "copied_out")  # phases that end a copy
INWARD: tuple[SwapPhase, ...] = ("resumed", "copied_in")
HEARD_WITHIN_S = 30.0  # stats are published twice a second, but not during a long step

COUNTERS = {
    "swaps": "coldblock_requests_swapped_total",
    "resumes": "coldblock_requests_resumed_total",
    "recomputes": "vllm:num_preemptions_total",
    "rejected": "coldblock_kv_cpu_offload_rejected_total",
    "failed_out": "coldblock_kv_cpu_offload_failed_total",
    "failed_in": "coldblock_kv_cpu_reload_failed_total",
    "blocks_out": "coldblock_kv_cpu_offload_blocks_total",
    "write_behind_blocks": "coldblock_kv_write_behind_blocks_total",
    "blocks_in": "coldblock_kv_cpu_reload_blocks_total",
    "prefetch_blocks": "coldblock_kv_prefetch_blocks_total",
    "prefix_blocks": "coldblock_kv_prefix_reload_blocks_total",
}
"""What an engine counts of its swaps: our names, and those of its metrics."""


class EngineChoice(ReportSettings):
    """Settings of a benchmark that starts engines."""

    model: str = Field("smollm2-135m", description="a checkpoint folder, or a known name, for the engine it starts")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights of the model's shape; then qwen2.5-3b is a known name too"
    )
    engine_flags: str = Field("", description="flags for the engine it starts, as in --engine-flags='--threads 1'")
    seed: int = Field(0, ge=0, description="of the random prompts")

    @field_validator("engine_flags")
    @classmethod
    def _as_a_shell_reads(cls, flags: str) -> str:
        shlex.split(flags)
        return flags


def require_model(settings: EngineChoice) -> None:
    """Fetch the model when it is missing. Raises UsageError when it is not known."""
    if settings.load_format == "auto":
        resolve_model(settings.model)


@asynccontextmanager
async def chosen_engine(settings: EngineChoice, *flags: str) -> AsyncIterator[str]:
    """A fresh engine as chosen, with these flags besides; yields its endpoint."""
    chosen = ("--load-format", settings.load_format, *shlex.split(settings.engine_flags))
    async with running_engine(settings.model, *chosen, *flags) as endpoint:
        yield endpoint


class Watch:
    """What an engine publishes: all copies that end, those included that no request's owner hears of, and counters."""

    def __init__(self) -> None:
        self.copies: list[SwapEvent] = []
        self.counters: dict[str, int] = {}
        """What was counted from the beginning until things last settled."""
        self._before: dict[str, int] = {}
        self._latest: Stats | None = None
        self._heard = asyncio.Event()

    async def listen(self, client: AsyncClient) -> None:
        """For ever."""
        async for message in client.events():
            if isinstance(message, Stats):
                self._latest = message
                self._heard.set()
            elif message.phase in OUTWARD + INWARD and message.blocks:
                self.copies.append(message)

    async def begin(self) -> None:
        """Wait until things have settled, and forget what came before. From now on nothing is missed."""
        await self.settle()
        self._before = {name: self._before.get(name, 0) + count for name, count in self.counters.items()}
        self.copies.clear()

    async def settle(self) -> None:
        """Wait until no copy runs, nor is begun, and all have been heard of."""
        asked_at = time.time()
        before: dict[str, int] | None = None
        while True:
            stats = await self._next_stats()
            counters = read_counters(stats)
            if stats.time > asked_at and not stats.gpu.in_flight and counters == before:
                break
            before = counters if stats.time > asked_at else None
        self.counters = {name: count - self._before.get(name, 0) for name, count in counters.items()}

    async def _next_stats(self) -> Stats:
        self._heard.clear()
        try:
            async with asyncio.timeout(HEARD_WITHIN_S):
                await self._heard.wait()
        except TimeoutError:
            raise ToolError(f"the engine published no stats for {HEARD_WITHIN_S:g} s") from None
        assert self._latest is not None
        return self._latest


@asynccontextmanager
async def watched(client: AsyncClient) -> AsyncIterator[Watch]:
    """Hear what the engine publishes during the block; complete once the block has ended."""
    watch = Watch()
    listening = asyncio.ensure_future(watch.listen(client))
    try:
        await watch.begin()
        yield watch
        await watch.settle()
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening


def read_counters(stats: Stats) -> dict[str, int]:
    """COUNTERS at this moment; 0 for what the engine does not count."""
    totals = {metric.name: sum(sample.value for sample in metric.samples) for metric in stats.metrics}
    return {ours: int(totals.get(theirs, 0)) for ours, theirs in COUNTERS.items()}


def outward(copies: Sequence[SwapEvent]) -> list[SwapEvent]:
    """Those that went to the CPU tier."""
    return [copy for copy in copies if copy.phase in OUTWARD]


def inward(copies: Sequence[SwapEvent]) -> list[SwapEvent]:
    """Those that came from there."""
    return [copy for copy in copies if copy.phase in INWARD]
