"""What watching costs an engine: the time of its steps while nobody watches, and with subscribers, two of them stuck.

Owns: the comparison in alternation, and who watches. Does not know: what a step does; the engine times its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any

from pydantic import Field

from ...logs import tell
from ...protocol.client import AsyncClient
from ...protocol.messages import ModelInfo, Stats
from ..children import run_until_signal
from ..errors import ToolError
from .command import conclude, run_command, shown_name
from .engines import EngineChoice, chosen_engine, require_model
from .measure import greedy, random_prompts, timed_load
from .report import Column, Table, table

PROG = "coldblock bench monitor"
STEP, BOOKKEEPING = "coldblock_step_seconds", "coldblock_step_bookkeeping_seconds"
HEARD_WITHIN_S = 60.0  # a subscriber hears the first snapshot: its process starts, and stats are published


class MonitorSettings(EngineChoice):
    """Settings of `coldblock bench monitor`."""

    subscribers: int = Field(10, ge=1, description="those that read what the engine publishes; two more never do")
    requests: int = Field(16, ge=1, description="requests that run at once")
    prompt_tokens: int = Field(32, ge=1, description="length of each prompt")
    new_tokens: int = Field(128, ge=2, description="tokens of each answer")
    rounds: int = Field(5, ge=1, description="turns with and without subscribers; the medians count")


@dataclass(frozen=True)
class Load:
    """One load. Means over its steps, in seconds: of a step, and of what it took beside the executor."""

    steps: int
    step_s: float
    bookkeeping_s: float
    tokens_per_s: float


def main(argv: list[str]) -> int:
    """Run the command."""
    return run_command(MonitorSettings, argv, PROG, __doc__, run)


def run(settings: MonitorSettings) -> int:
    """Refuse what cannot be measured, then measure."""
    require_model(settings)
    return run_until_signal(lambda: measure(settings))


async def measure(settings: MonitorSettings) -> int:
    """All rounds on one engine, then report. Every other round begins with subscribers, as machines slow down."""
    alone: list[Load] = []
    watched: list[Load] = []
    async with chosen_engine(settings) as endpoint, AsyncClient(endpoint, name="bench monitor") as client:
        model = await client.ready()
        await load(client, model, settings, "warming up")
        for number in range(settings.rounds):
            for with_subscribers in (number % 2 > 0, number % 2 == 0):
                who = f"{settings.subscribers} subscribers and two stuck ones" if with_subscribers else "nobody watches"
                tell(PROG, f"round {number + 1} of {settings.rounds}: {who} ...")
                if with_subscribers:
                    async with subscribers(endpoint, settings.subscribers):
                        watched.append(await load(client, model, settings, who))
                else:
                    alone.append(await load(client, model, settings, who))
    results = summarize(alone, watched, settings.subscribers)
    title = f"{settings.requests} requests, watched or not: {shown_name(model.name)} on {model.device}"
    return conclude(settings, PROG, title, model, results, tables(results))


async def load(client: AsyncClient, model: ModelInfo, settings: MonitorSettings, what: str) -> Load:
    """The same prompts every time, and none of their beginnings in the prefix cache."""
    prompts = random_prompts(settings.seed, settings.requests, settings.prompt_tokens, model)
    before = await client.stats()
    timelines, seconds = await timed_load(client, prompts, greedy(settings.new_tokens), settings.requests, what)
    after = await client.stats()
    steps, step_s = mean_between(before, after, STEP)
    _, bookkeeping_s = mean_between(before, after, BOOKKEEPING)
    return Load(steps, step_s, bookkeeping_s, sum(len(line.token_ids) for line in timelines) / seconds)


def mean_between(before: Stats, after: Stats, name: str) -> tuple[int, float]:
    """How often a histogram's value was observed between two snapshots, and its mean."""
    counts, sums = [], []
    for stats in (before, after):
        sample = next(metric.samples[0] for metric in stats.metrics if metric.name == name)
        counts.append(sum(sample.counts))
        sums.append(sample.sum)
    observed = counts[1] - counts[0]
    return observed, (sums[1] - sums[0]) / max(1, observed)


# ---------------------------------------------------------------- who watches


@asynccontextmanager
async def subscribers(endpoint: str, count: int) -> AsyncIterator[None]:
    """So many subscribers, in a process of their own; beside them one whose process is stopped, and one that has a
    socket and does not read it. All have heard the engine once before the block begins.
    """
    reading, stopped = _Listeners(endpoint, count), _Listeners(endpoint, 1)
    try:
        async with AsyncClient(endpoint, name="bench stuck") as client:
            unread = client.events()
            await asyncio.gather(anext(unread), reading.heard(), stopped.heard())
            stopped.stop()
            yield
    finally:
        reading.end()
        stopped.end()


class _Listeners:
    """A process with subscribers that read all they hear."""

    def __init__(self, endpoint: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._heard: Event = context.Event()
        self._process: SpawnProcess = context.Process(target=_listen, args=(endpoint, count, self._heard), daemon=True)
        self._process.start()

    async def heard(self) -> None:
        """Wait until all have heard the engine."""
        if not await asyncio.to_thread(self._heard.wait, HEARD_WITHIN_S):
            raise ToolError(f"subscribers heard nothing from the engine within {HEARD_WITHIN_S:g} s")

    def stop(self) -> None:
        """It does not run any more, and keeps its sockets."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def end(self) -> None:
        self._process.kill()  # a stopped process does not hear anything milder
        self._process.join()


def _listen(endpoint: str, count: int, heard: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who started this ends it
    asyncio.run(_listen_with(endpoint, count, heard))


async def _listen_with(endpoint: str, count: int, heard: Event) -> None:
    waiting = count

    async def one() -> None:
        nonlocal waiting
        async with AsyncClient(endpoint, name="bench subscriber") as client:
            events = client.events()
            await anext(events)
            waiting -= 1
            if not waiting:
                heard.set()
            async for _ in events:
                pass

    await asyncio.gather(*(one() for _ in range(count)))


# ---------------------------------------------------------------- results


def summarize(alone: Sequence[Load], watched: Sequence[Load], count: int) -> dict[str, Any]:
    """Medians and extremes over the rounds; ratios round by round, as machines drift."""
    figures = ("step_s", "bookkeeping_s", "tokens_per_s")
    ratios = {
        name: _spread([getattr(b, name) / getattr(a, name) for a, b in zip(alone, watched, strict=True)])
        for name in figures
        if all(getattr(a, name) > 0 for a in alone)
    }
    groups = {"nobody": alone, f"{count} subscribers, 2 stuck": watched}
    return {
        "ratios": ratios,
        "medians": {
            who: {name: _spread([getattr(load, name) for load in loads]) for name in figures}
            for who, loads in groups.items()
        },
        "rounds": {who: [asdict(load) for load in loads] for who, loads in groups.items()},
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)]}


def _figure(heading: str, name: str, scale: float = 1, **more: Any) -> Column:
    return Column(heading, f"{name}.median", scale, range=f"{name}.range", **more)


LOADS = (
    Column("watched by", "who", case=True),
    _figure("step, ms", "step_s", 1e3, better="lower"),
    _figure("bookkeeping, ms", "bookkeeping_s", 1e3, better="lower"),
    _figure("tok/s", "tokens_per_s", better="higher"),
)
RATIOS = (
    _figure("step", "step_s", better="lower"),
    _figure("bookkeeping", "bookkeeping_s", better="lower"),
    _figure("tok/s", "tokens_per_s", better="higher"),
)


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Both loads, then what watching made of the one."""
    rows = [{"who": who, **figures} for who, figures in results["medians"].items()]
    return [
        table("Time of a step by the engine's own clock, median and range of the rounds", LOADS, rows),
        table("Watched, against not, round by round", RATIOS, [results["ratios"]]),
    ]
