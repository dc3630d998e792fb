"""The same requests at once, on a pool that is too small for them or has room for all.

Owns: what such a load is, what is observed of it, who in it is a victim and who a bystander. Does not know: which pools
are compared, or how victims are chosen.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from ...protocol.client import AsyncClient
from ...protocol.messages import ModelInfo, SwapEvent
from ..errors import ToolError
from .engines import EngineChoice, chosen_engine, watched
from .measure import Timeline, distribution, greedy, random_prompts, timed_load
from .report import Column, Table, distribution_columns, table

BLOCK_SIZE = 16
OWN_FLAGS = ("--num-gpu-blocks", "--block-size", "--kv-cache-dtype")
CALM, BYSTANDERS, VICTIMS = "room for all", "bystanders", "victims"


class PressureSettings(EngineChoice):
    """Settings of a benchmark that puts a pool under pressure."""

    requests: int = Field(8, ge=2, description="requests that run at once")
    prompt_tokens: int = Field(32, ge=1, description="length of each prompt")
    new_tokens: int = Field(96, ge=2, description="tokens of each answer")
    num_gpu_blocks: int | None = Field(
        None, ge=1, description="blocks of the small pool; a share of what all requests need if absent"
    )

    @field_validator("engine_flags")
    @classmethod
    def _leaves_the_pool_alone(cls, flags: str) -> str:
        taken = [word for word in shlex.split(flags) if word.split("=")[0] in OWN_FLAGS]
        if taken:
            raise ValueError(f"{taken[0]} is the benchmark's to choose, as are all of {', '.join(OWN_FLAGS)}")
        return flags

    def pools(self, share: float) -> tuple[int, int]:
        """Blocks of the small pool (`share` of what all need, if it was not given), and of one with room for all.

        Raises ToolError when the small one holds no request, or all of them.
        """
        each = blocks_for(self.prompt_tokens + self.new_tokens)
        large = each * self.requests
        small = self.num_gpu_blocks or max(each, int(large * share))
        if not each <= small < large:
            raise ToolError(
                f"--num-gpu-blocks {small}: from {each} (one request) to {large - 1} (not all {self.requests})"
            )
        return small, large


@dataclass(frozen=True)
class Observed:
    """One load on one engine. `copies`: all that ended meanwhile. `clock_offset`: Unix time less the timelines'."""

    model: ModelInfo
    timelines: list[Timeline]
    seconds: float
    copies: list[SwapEvent]
    counters: dict[str, int]
    clock_offset: float

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all requests, from the first submission to the last end."""
        return sum(len(timeline.token_ids) for timeline in self.timelines) / self.seconds


@asynccontextmanager
async def engine_of(
    settings: PressureSettings, kv_cache_dtype: str, blocks: int, *flags: str
) -> AsyncIterator[tuple[AsyncClient, ModelInfo]]:
    """A client of a fresh engine with a pool of so many blocks, once it is ready."""
    ours = ("--kv-cache-dtype", kv_cache_dtype, "--num-gpu-blocks", str(blocks), "--block-size", str(BLOCK_SIZE))
    async with chosen_engine(settings, *ours, *flags) as endpoint, AsyncClient(endpoint, name="bench") as client:
        yield client, await client.ready()


async def observe(settings: PressureSettings, kv_cache_dtype: str, blocks: int) -> Observed:
    """All requests at once on a fresh engine; as many others before, so that speeds are known and memory is pinned."""
    async with engine_of(settings, kv_cache_dtype, blocks) as (client, model):
        prompts = random_prompts(settings.seed, 2 * settings.requests, settings.prompt_tokens, model)
        sampling = greedy(settings.new_tokens)
        await timed_load(client, prompts[settings.requests :], sampling, settings.requests)
        async with watched(client) as watch:
            what = f"{kv_cache_dtype}, {blocks} blocks"
            timelines, seconds = await timed_load(
                client, prompts[: settings.requests], sampling, settings.requests, what
            )
    return Observed(model, timelines, seconds, watch.copies, watch.counters, time.time() - time.perf_counter())


def grouped(calm: Sequence[Timeline], pressed: Sequence[Timeline]) -> dict[str, list[Timeline]]:
    """The requests by what happened to them."""
    return {
        CALM: list(calm),
        BYSTANDERS: [timeline for timeline in pressed if not timeline.is_victim],
        VICTIMS: [timeline for timeline in pressed if timeline.is_victim],
    }


def summarize_group(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """How requests fared, one value a request; seconds."""
    return {
        "tpot_s": distribution([timeline.tpot for timeline in timelines]),
        "stall_s": distribution([timeline.stall_s for timeline in timelines]),
        "longest_gap_s": distribution([timeline.longest_gap for timeline in timelines]),
    }


def group_tables(results: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Table]:
    """How the groups of each KV format fared, a table a figure. Without the format where it is ""."""
    rows = [{"kv": kv_format, "who": name, **group} for kv_format, groups in results for name, group in groups.items()]
    kv = [Column("KV", "kv", case=True)] if any(row["kv"] for row in rows) else []
    who = (*kv, Column("requests", "who", case=True))
    return [
        table(title, (*who, Column("number", f"{figure}.count"), *distribution_columns(figure)), rows)
        for figure, title in GROUP_FIGURES.items()
    ]


GROUP_FIGURES = {
    "tpot_s": "Time per output token (TPOT), one value a request",
    "stall_s": "Time swapped out, one value a request",
    "longest_gap_s": "Longest wait for a token, one value a request",
}


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens fill."""
    return -(-tokens // BLOCK_SIZE)
