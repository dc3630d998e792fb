"""Requests with a stopwatch, and the statistics of what it showed.

Owns: how a token's arrival is timed (at this client, monotonic seconds) and what the percentiles mean.
Does not know: what a benchmark compares, or where results go.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...progress import Advance, progress
from ...protocol.client import AsyncClient
from ...protocol.messages import Finished, ModelInfo, SamplingParams, SwapEvent
from ..errors import ToolError

T = TypeVar("T")

FIRST_PROMPT_ID = 20  # ids below are special tokens in many vocabularies


@dataclass
class Timeline:
    """One request as its client saw it: when each token arrived, and the swap events. Seconds on one clock."""

    submitted: float
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    swap_events: list[SwapEvent] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token."""
        return self.arrivals[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the one before."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, len(self.arrivals) - 1)

    @property
    def longest_gap(self) -> float:
        """The longest wait for a token after the first, in seconds."""
        return max(self.gaps, default=0.0)

    @property
    def stall_s(self) -> float:
        """Seconds swapped out, as the engine counts them."""
        return self.finished.usage.stall_s if self.finished is not None else 0.0

    @property
    def is_victim(self) -> bool:
        """Whether it was swapped out or recomputed to make room."""
        recomputed = self.finished is not None and self.finished.usage.recomputes > 0
        return recomputed or self.count("swapping_out") + self.count("swapped") > 0

    def completed(self, new_tokens: int) -> bool:
        """Whether it ended with all its tokens."""
        return self.finished is not None and len(self.token_ids) == new_tokens

    def count(self, phase: str) -> int:
        """How many swap events of that phase there were."""
        return sum(event.phase == phase for event in self.swap_events)

    def copy_seconds(self, phase: str) -> float:
        """Seconds that the copies reported by that phase's events took."""
        return sum(event.seconds for event in self.swap_events if event.phase == phase)


async def timed(
    client: AsyncClient,
    prompt: Sequence[int],
    sampling: SamplingParams,
    first_token: asyncio.Event | None = None,
    advance: Advance = lambda count: None,
) -> Timeline:
    """Run one request to its end; `first_token` is set when its first token arrives, or when it fails before that.

    `advance` is called with the number of tokens that came.
    """
    timeline = Timeline(time.perf_counter())
    first_token = first_token or asyncio.Event()
    try:
        generation = await client.submit(prompt, sampling)
        timeline.request_id = generation.request_id
        async for item in generation:
            if isinstance(item, SwapEvent):
                timeline.swap_events.append(item)
                continue
            timeline.arrivals += [time.perf_counter()] * len(item.token_ids)
            timeline.token_ids += item.token_ids
            timeline.finished = item.finished
            advance(len(item.token_ids))
            if item.token_ids:
                first_token.set()
    finally:
        first_token.set()
    return timeline


async def all_of(*works: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all, run at once. The first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def timed_load(
    client: AsyncClient,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    concurrency: int,
    what: str = "warming up",
) -> tuple[list[Timeline], float]:
    """Run all prompts with `concurrency` of them open at any time; the timelines and the seconds it took.

    `what` it is called while it runs.
    """
    waiting = list(reversed(prompts))
    timelines: list[Timeline] = []

    async def work() -> None:
        while waiting:
            timelines.append(await timed(client, waiting.pop(), sampling, advance=advance))

    with progress(what, len(prompts) * (sampling.max_tokens or 0), "token") as advance:
        began = time.perf_counter()
        await all_of(*(work() for _ in range(concurrency)))
        seconds = time.perf_counter() - began
    return timelines, seconds


def greedy(new_tokens: int) -> SamplingParams:
    """Exactly `new_tokens` greedy tokens."""
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def random_prompts(
    seed: int, count: int, length: int, model: ModelInfo, flag: str = "--prompt-tokens"
) -> list[list[int]]:
    """Prompts that share no beginning, so that the prefix cache helps none. Raises ToolError when they cannot fit.

    `flag` is where the user gave the length.
    """
    if length >= model.max_request_tokens:
        raise ToolError(f"{flag} {length}: this engine takes at most {model.max_request_tokens - 1}")
    dice = random.Random(seed)
    return [[dice.randrange(FIRST_PROMPT_ID, model.vocab_size) for _ in range(length)] for _ in range(count)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly between neighbours; nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Count, p50, p95, p99 and the largest; None-free, so that JSON stays valid (zeros for no values)."""
    if not values:
        return {"count": 0, "p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    percents = {f"p{percent}": percentile(values, percent) for percent in (50, 95, 99)}
    return {"count": len(values), **percents, "max": max(values)}
