"""A long request that leaves for another one that needs the whole pool, and comes back: its copies against the link.

Owns: the experiment, and which copies count: all of its blocks, ahead of need or not. Does not know: why the engine
copies when it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from ...protocol.client import AsyncClient
from ...protocol.messages import ModelInfo, SwapEvent, SwapPhase
from .engines import inward, outward, watched
from .figures import Figure, bars_by_format
from .link import Link, measure_link
from .measure import Timeline, all_of, greedy, random_prompts, timed
from .pressure import BLOCK_SIZE, PressureSettings, blocks_for, engine_of
from .report import VERDICT, Column, Table, table

NEW_TOKENS = 64  # it must not have ended when the other comes
OTHERS_TOKENS = 8


class LongSettings(PressureSettings):
    """Settings of the long request."""

    long_tokens: int = Field(1024, ge=64, description="long: length of its prompt")


@dataclass(frozen=True)
class LongResult:
    """One KV format's long request. `blocks` is what it has; seconds of copies without their waits.

    `left_s` and `returned_s`: from when it stopped to run until it was out, and from when it began to come back until
    it ran; less than its copies take where these ran ahead of need.
    """

    kv_cache_dtype: str
    tokens: int
    blocks: int
    blocks_out: int
    blocks_in: int
    bytes_out: int
    bytes_in: int
    copy_out_s: float
    copy_in_s: float
    link_out_gb_per_s: float
    link_in_gb_per_s: float
    link_s: float
    ratio: float
    left_s: float
    returned_s: float
    completed: bool

    @property
    def passed(self) -> bool:
        """Both ended, and all of it went out and came back."""
        return self.completed and min(self.blocks_out, self.blocks_in) >= self.blocks


async def measure(kv_cache_dtype: str, settings: LongSettings) -> tuple[LongResult, ModelInfo]:
    """The pair of requests twice on a fresh engine, as the first time memory is pinned; then the link alone."""
    tokens = settings.long_tokens
    pool = blocks_for(tokens + NEW_TOKENS)
    async with engine_of(settings, kv_cache_dtype, pool, "--swap-or-recompute", "swap") as (client, model):
        prompts = random_prompts(settings.seed, 2, tokens, model, "--long-tokens")
        others = random_prompts(settings.seed + 1, 2, pool * BLOCK_SIZE - OTHERS_TOKENS, model, "--long-tokens")
        await run_pair(client, prompts[0], others[0])
        async with watched(client) as watch:
            long, other = await run_pair(client, prompts[1], others[1])
    link = await measure_link(model)
    completed = long.completed(NEW_TOKENS) and other.completed(OTHERS_TOKENS)
    return summarize(kv_cache_dtype, tokens, long, watch.copies, link, completed), model


async def run_pair(client: AsyncClient, prompt: list[int], others_prompt: list[int]) -> list[Timeline]:
    """The long request, and at its first token the other one."""
    started = asyncio.Event()

    async def other() -> Timeline:
        await started.wait()
        return await timed(client, others_prompt, greedy(OTHERS_TOKENS))

    return await all_of(timed(client, prompt, greedy(NEW_TOKENS), started), other())


def summarize(
    kv_cache_dtype: str, tokens: int, long: Timeline, copies: Sequence[SwapEvent], link: Link, completed: bool
) -> LongResult:
    """The copies of one request, among all that ran."""
    own = [copy for copy in copies if copy.request_id == long.request_id]
    out, back = outward(own), inward(own)
    bytes_out, bytes_in = sum(copy.bytes for copy in out), sum(copy.bytes for copy in back)
    copy_out_s, copy_in_s = sum(copy.seconds for copy in out), sum(copy.seconds for copy in back)
    link_s = link.seconds(bytes_out, bytes_in)
    return LongResult(
        kv_cache_dtype=kv_cache_dtype,
        tokens=tokens,
        blocks=blocks_for(tokens),
        blocks_out=sum(copy.blocks for copy in out),
        blocks_in=sum(copy.blocks for copy in back),
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        copy_out_s=copy_out_s,
        copy_in_s=copy_in_s,
        link_out_gb_per_s=link.out_gb_per_s,
        link_in_gb_per_s=link.in_gb_per_s,
        link_s=link_s,
        ratio=(copy_out_s + copy_in_s) / link_s if link_s else 0.0,
        left_s=_between(long, "swapping_out", "swapped"),
        returned_s=_between(long, "swapping_in", "resumed"),
        completed=completed,
    )


def _between(timeline: Timeline, begun: SwapPhase, ended: SwapPhase) -> float:
    """Seconds from each of the one phase to the next of the other, in all."""
    total, since = 0.0, None
    for event in timeline.swap_events:
        if event.phase == begun:
            since = event.time
        elif event.phase == ended and since is not None:
            total, since = total + event.time - since, None
    return total


def tables(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One line a format."""
    return [table("A long request out and back in, its copies against the link's time for its bytes", LONG, results)]


LONG = (
    Column("KV", "kv_cache_dtype", case=True),
    Column("tokens", "tokens", case=True),
    Column("blocks", "blocks"),
    Column("out/in", lambda result: f"{result['blocks_out']}/{result['blocks_in']}"),
    Column("MB", lambda result: (result["bytes_out"] + result["bytes_in"]) / 1e6),
    Column("copies, ms", lambda result: 1e3 * (result["copy_out_s"] + result["copy_in_s"]), better="lower"),
    Column("link, ms", "link_s", 1e3, better="lower"),
    Column("ratio", "ratio", better="lower"),
    Column("left, ms", "left_s", 1e3, better="lower"),
    Column("back, ms", "returned_s", 1e3, better="lower"),
    VERDICT,
)


def figures(results: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The copies beside what the link takes."""
    return [
        bars_by_format(
            f"A request of {results[0]['tokens']} tokens out and back in",
            "Its copies; the strokes are what plain copies of as many bytes take when nothing else runs.",
            "ms",
            results,
            {"out": lambda r: 1e3 * r["copy_out_s"], "in": lambda r: 1e3 * r["copy_in_s"]},
            {
                "out": lambda r: r["bytes_out"] / r["link_out_gb_per_s"] / 1e6,
                "in": lambda r: r["bytes_in"] / r["link_in_gb_per_s"] / 1e6,
            },
            "the link alone",
        )
    ]
