"""A prefix that fell out of the pool: the time to the first token when it comes again.

Owns: the experiment: prompts in turn, of which the pool holds one at a time. Does not know: whether the engine loads a
prefix or computes it again; the request's usage tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pydantic import Field

from ...protocol.messages import ModelInfo
from .engines import watched
from .figures import Figure, bars_by_format
from .measure import Timeline, greedy, random_prompts, timed
from .pressure import BLOCK_SIZE, PressureSettings, blocks_for, engine_of
from .report import VERDICT, Column, Table, table

PROMPTS = 3
NEW_TOKENS = 2
SPARE_BLOCKS = 1  # so many of a prefix may stay in the pool
MOST_OF_IT = 0.9


class PrefixSettings(PressureSettings):
    """Settings of the prefix."""

    prefix_tokens: int = Field(1024, ge=64, description="prefix: its length")


@dataclass(frozen=True)
class PrefixResult:
    """One KV format's prefix. TTFT: medians over the prompts with their ranges, in seconds; `cached_tokens`: the least
    of any repeat.
    """

    kv_cache_dtype: str
    tokens: int
    first_ttft_s: float
    first_ttft_range: tuple[float, float]
    repeat_ttft_s: float
    repeat_ttft_range: tuple[float, float]
    ratio: float
    cached_tokens: int
    loaded_blocks: int

    @property
    def blocks(self) -> int:
        """Those of all prompts that can be found again: the block of a prompt's last token is computed anyway."""
        return PROMPTS * ((self.tokens - 1) // BLOCK_SIZE)

    @property
    def passed(self) -> bool:
        """Every repeat found its prefix, and not in the pool."""
        found = PROMPTS * self.cached_tokens // BLOCK_SIZE
        wanted = MOST_OF_IT * self.blocks
        return found >= wanted and self.loaded_blocks >= wanted - PROMPTS * SPARE_BLOCKS


async def measure(kv_cache_dtype: str, settings: PrefixSettings) -> tuple[PrefixResult, ModelInfo]:
    """A prompt to warm up with, the prompts, and all once more in the same order."""
    pool = blocks_for(settings.prefix_tokens + NEW_TOKENS) + SPARE_BLOCKS
    async with engine_of(settings, kv_cache_dtype, pool) as (client, model):
        prompts = random_prompts(settings.seed, 1 + PROMPTS, settings.prefix_tokens, model, "--prefix-tokens")
        timelines, loaded = [], []
        async with watched(client) as watch:
            for prompt in prompts * 2:
                timelines.append(await timed(client, prompt, greedy(NEW_TOKENS)))
                await watch.settle()  # what is not copied yet would be lost to the next prompt
                loaded.append(watch.counters["prefix_blocks"])
    first, repeats = timelines[1 : len(prompts)], timelines[len(prompts) + 1 :]
    return summarize(kv_cache_dtype, settings.prefix_tokens, first, repeats, loaded[-1] - loaded[-1 - PROMPTS]), model


def summarize(
    kv_cache_dtype: str, tokens: int, first: Sequence[Timeline], repeats: Sequence[Timeline], loaded_blocks: int
) -> PrefixResult:
    """Every prompt's first time against its second."""
    computed, again = ([timeline.ttft for timeline in group] for group in (first, repeats))
    first_ttft_s, repeat_ttft_s = median(computed), median(again)
    return PrefixResult(
        kv_cache_dtype=kv_cache_dtype,
        tokens=tokens,
        first_ttft_s=first_ttft_s,
        first_ttft_range=(min(computed), max(computed)),
        repeat_ttft_s=repeat_ttft_s,
        repeat_ttft_range=(min(again), max(again)),
        ratio=repeat_ttft_s / first_ttft_s,
        cached_tokens=min(t.finished.usage.cached_tokens if t.finished else 0 for t in repeats),
        loaded_blocks=loaded_blocks,
    )


def tables(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One line a format."""
    return [
        table("First token of a prefix that fell out of the pool: computed, and when it comes again", PREFIX, results)
    ]


PREFIX = (
    Column("KV", "kv_cache_dtype", case=True),
    Column("tokens", "tokens", case=True),
    Column("computed, ms", "first_ttft_s", 1e3, better="lower", range="first_ttft_range"),
    Column("again, ms", "repeat_ttft_s", 1e3, better="lower", range="repeat_ttft_range"),
    Column("again/computed", "ratio", better="lower"),
    Column("cached tokens", "cached_tokens"),
    Column("blocks loaded", "loaded_blocks"),
    VERDICT,
)


def figures(results: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Both times to the first token."""
    return [
        bars_by_format(
            f"A prefix of {results[0]['tokens']} tokens: time to the first token",
            "Computed, and loaded from the CPU tier when the same prefix comes again.",
            "ms",
            results,
            {"computed": lambda r: 1e3 * r["first_ttft_s"], "again": lambda r: 1e3 * r["repeat_ttft_s"]},
        )
    ]
