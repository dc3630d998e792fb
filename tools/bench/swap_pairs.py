"""The forced swap: two requests of three blocks each, a pool of three.

Owns: the experiment and what counts as passing. Does not know: how swapping works; it reads events and tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ...protocol.client import AsyncClient
from ...protocol.messages import ModelInfo
from .figures import Figure, Value, bars_by_format
from .measure import Timeline, all_of, greedy, random_prompts, timed
from .pressure import BLOCK_SIZE, PressureSettings, engine_of
from .report import VERDICT, Column, Table, table

BLOCKS = 3
PROMPT_TOKENS = 33  # a third block from the start, and all three until the end
NEW_TOKENS = BLOCKS * BLOCK_SIZE - PROMPT_TOKENS
LARGE_POOL = 64


class PairsSettings(PressureSettings):
    """Settings of the forced swaps."""

    iterations: int = Field(5, ge=1, description="pairs: so many for each KV format")
    deterministic: bool = Field(False, description="pairs: also check that the tokens equal those of a large pool")


@dataclass(frozen=True)
class FormatResult:
    """What one KV format's iterations showed. Blocks, bytes and seconds are totals over all iterations."""

    kv_cache_dtype: str
    requests: int
    completed: int
    swaps: int
    resumes: int
    rejected: int
    blocks_out: int
    bytes_out: int
    copy_out_s: float
    copy_in_s: float
    stall_s: float
    tokens_equal: bool | None

    @property
    def passed(self) -> bool:
        """All complete, one swap and one resume a pair, and equal tokens where that was checked."""
        pairs = self.requests // 2
        counts = (self.completed, self.swaps, self.resumes) == (self.requests, pairs, pairs)
        return counts and self.tokens_equal is not False


async def measure(kv_cache_dtype: str, settings: PairsSettings) -> tuple[FormatResult, ModelInfo]:
    """All pairs of one KV format on a fresh engine, and on one with a large pool when tokens are compared."""
    small, model = await run_pairs(kv_cache_dtype, BLOCKS, settings)
    equal = None
    if settings.deterministic:
        large, _ = await run_pairs(kv_cache_dtype, LARGE_POOL, settings)
        equal = [timeline.token_ids for timeline in small] == [timeline.token_ids for timeline in large]
    return summarize(kv_cache_dtype, small, equal), model


async def run_pairs(kv_cache_dtype: str, blocks: int, settings: PairsSettings) -> tuple[list[Timeline], ModelInfo]:
    """The timelines of all pairs in order; a pair's second request is submitted at the first one's first token."""
    flags = ["--swap-or-recompute", "swap", *(["--deterministic"] if settings.deterministic else [])]
    timelines: list[Timeline] = []
    async with engine_of(settings, kv_cache_dtype, blocks, *flags) as (client, model):
        prompts = random_prompts(settings.seed, 2 * settings.iterations, PROMPT_TOKENS, model)
        for first, second in zip(prompts[::2], prompts[1::2], strict=True):
            timelines += await run_pair(client, first, second)
    return timelines, model


async def run_pair(client: AsyncClient, first: list[int], second: list[int]) -> list[Timeline]:
    """Both requests to their ends."""
    started = asyncio.Event()

    async def after_first_token() -> Timeline:
        await started.wait()
        return await timed(client, second, greedy(NEW_TOKENS))

    return await all_of(timed(client, first, greedy(NEW_TOKENS), started), after_first_token())


def summarize(kv_cache_dtype: str, timelines: list[Timeline], tokens_equal: bool | None) -> FormatResult:
    """The counts and sums over all requests."""
    out = [event for timeline in timelines for event in timeline.swap_events if event.phase == "swapped"]
    return FormatResult(
        kv_cache_dtype=kv_cache_dtype,
        requests=len(timelines),
        completed=sum(timeline.completed(NEW_TOKENS) for timeline in timelines),
        swaps=len(out),
        resumes=sum(timeline.count("resumed") for timeline in timelines),
        rejected=sum(timeline.count("rejected") for timeline in timelines),
        blocks_out=sum(event.blocks for event in out),
        bytes_out=sum(event.bytes for event in out),
        copy_out_s=sum(timeline.copy_seconds("swapped") for timeline in timelines),
        copy_in_s=sum(timeline.copy_seconds("resumed") for timeline in timelines),
        stall_s=sum(timeline.stall_s for timeline in timelines),
        tokens_equal=tokens_equal,
    )


def tables(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One line a format; copies and stall per swap."""
    return [table(f"Forced swaps of {BLOCKS} blocks, two requests at a time", PAIRS, results)]


def _per(total: str, count: str, scale: float) -> Value:
    return lambda result: float(result[total] * scale / max(1, result[count]))


PAIRS = (
    Column("KV", "kv_cache_dtype", case=True),
    Column("requests", "requests"),
    Column("completed", "completed", better="higher"),
    Column("swaps", "swaps"),
    Column("resumes", "resumes"),
    Column("KiB a swap", _per("bytes_out", "swaps", 1 / 1024)),
    Column("out, ms", _per("copy_out_s", "swaps", 1e3), better="lower"),
    Column("in, ms", _per("copy_in_s", "resumes", 1e3), better="lower"),
    Column("stall, ms", _per("stall_s", "swaps", 1e3), better="lower"),
    Column("tokens", lambda result: {None: "-", True: "equal", False: "DIFFER"}[result["tokens_equal"]]),
    VERDICT,
)


def figures(results: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The copies of a swap."""
    return [
        bars_by_format(
            "Copies of a forced swap",
            "What was still to be copied when the request left, and what it loaded when it came back.",
            "ms a swap",
            results,
            {"out": _per("copy_out_s", "swaps", 1e3), "in": _per("copy_in_s", "resumes", 1e3)},
        )
    ]
