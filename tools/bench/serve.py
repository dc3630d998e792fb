"""Throughput and latency over concurrency; on request against transformers, and over HTTP.

Owns: the sweep, the comparison in alternation, and their table. Does not know: how the engine or its peer works.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from ...logs import tell
from ...protocol.client import AsyncClient
from ...protocol.messages import ModelInfo
from ...settings import UsageError
from ..children import run_until_signal
from ..daemons import running_frontend
from ..endpoints import usable_endpoint
from .command import conclude, run_command, shown_name
from .engines import EngineChoice, chosen_engine, require_model
from .figures import Figure, Line, Lines
from .http_stream import timed_http
from .measure import Timeline, all_of, distribution, greedy, percentile, random_prompts, timed, timed_load
from .peer import TransformersPeer, require_transformers
from .report import Column, Table, distribution_columns, table

PROG = "coldblock bench serve"
PREFILL_TOKENS = 512
HTTP_PAIRS = 8


class ServeSettings(EngineChoice):
    """Settings of `coldblock bench serve`."""

    endpoint: str | None = Field(None, description="measure the running engine there instead of starting one")
    concurrency: Annotated[tuple[int, ...], NoDecode] = Field(
        (1, 4, 16), description="requests open at once, several separated by commas"
    )
    requests: int | None = Field(None, ge=1, description="requests for each level; twice the concurrency if absent")
    prompt_tokens: int = Field(32, ge=1, description="length of each prompt")
    new_tokens: int = Field(128, ge=2, description="tokens of each answer")
    versus_transformers: bool = Field(False, description="measure transformers (bf16) on the same weights in turn")
    rounds: int = Field(3, ge=1, description="turns of that comparison; the medians count")
    http: bool = Field(False, description="measure what streaming over HTTP adds to a token's latency")

    _usable_endpoint = field_validator("endpoint")(usable_endpoint)

    @field_validator("concurrency", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("concurrency")
    @classmethod
    def _positive(cls, levels: tuple[int, ...]) -> tuple[int, ...]:
        if not levels or min(levels) < 1:
            raise ValueError("whole numbers from 1 on, separated by commas")
        return levels


@dataclass(frozen=True)
class Level:
    """One concurrency's results; seconds.

    `tokens_per_s` counts the new tokens of all requests while `concurrency` of them are kept open. The decode and
    prefill rates come from one more wave of requests, submitted at once: prompt tokens until the last request has its
    first token, and from then on new tokens.
    """

    concurrency: int
    requests: int
    tokens_per_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    ttft_p50: float
    tpot_p50: float
    gap_p50: float
    gap_p95: float

    @property
    def jitter(self) -> float:
        """p95 - p50 of the time between two tokens of a request."""
        return self.gap_p95 - self.gap_p50


@dataclass(frozen=True)
class Versus:
    """Ours and the peer's tokens per second at one concurrency (or of a prefill): medians, least and most of rounds."""

    what: str
    ours: float
    theirs: float
    ours_range: tuple[float, float]
    theirs_range: tuple[float, float]

    @classmethod
    def of_rounds(cls, what: str, ours: Sequence[float], theirs: Sequence[float]) -> Versus:
        """What the rounds come to."""
        ranges = (min(ours), max(ours)), (min(theirs), max(theirs))
        return cls(what, statistics.median(ours), statistics.median(theirs), *ranges)

    @property
    def ratio(self) -> float:
        """How many times as fast we are."""
        return self.ours / self.theirs


def main(argv: list[str]) -> int:
    """Run the command."""
    return run_command(ServeSettings, argv, PROG, __doc__, run)


def run(settings: ServeSettings) -> int:
    """Refuse what cannot be measured, then measure."""
    refuse_without_weights(settings)
    if settings.versus_transformers:
        require_transformers()
    if settings.endpoint is None:
        require_model(settings)
    return run_until_signal(lambda: measure(settings))


def refuse_without_weights(settings: ServeSettings) -> None:
    """Raises UsageError for what needs more of a model than its shape."""
    wanting = {"--versus-transformers": settings.versus_transformers, "--http": settings.http}
    for flag, asked in wanting.items():
        if asked and settings.load_format == "dummy" and settings.endpoint is None:
            raise UsageError(f"{flag} needs a model with weights and tokenizer; --load-format dummy has neither")


async def measure(settings: ServeSettings) -> int:
    """Measure what was asked for, then report."""
    results: dict[str, Any] = {}
    async with _engine(settings) as endpoint, AsyncClient(endpoint, name="bench serve") as client:
        model = await client.ready()
        levels = await sweep(client, model, settings)
        results["sweep"] = [{**asdict(level), "jitter": level.jitter} for level in levels]
        if settings.versus_transformers:
            versus = await compare(client, model, settings)
            results["versus_transformers"] = [{**asdict(row), "ratio": row.ratio} for row in versus]
        if settings.http:
            results["http"] = await http_overhead(client, endpoint, model, settings)
    title = (
        f"{shown_name(model.name)} on {model.device}, {model.kv_cache_dtype} KV: "
        f"requests of {settings.prompt_tokens} + {settings.new_tokens} tokens"
    )
    return conclude(settings, PROG, title, model, results, tables(results), figures(results))


@asynccontextmanager
async def _engine(settings: ServeSettings) -> AsyncIterator[str]:
    if settings.endpoint is not None:
        yield settings.endpoint
        return
    async with chosen_engine(settings) as endpoint:
        yield endpoint


async def sweep(client: AsyncClient, model: ModelInfo, settings: ServeSettings) -> list[Level]:
    """Every concurrency in turn, after a short run to warm up."""
    warm_up = random_prompts(settings.seed, 2, settings.prompt_tokens, model)
    await timed_load(client, warm_up, greedy(8), 2)
    levels = []
    for concurrency in settings.concurrency:
        count = settings.requests or 2 * concurrency
        prompts = random_prompts(settings.seed + concurrency, count + concurrency, settings.prompt_tokens, model)
        sampling = greedy(settings.new_tokens)
        what = f"concurrency {concurrency}"
        tell(PROG, f"{what}, {count} requests of {settings.prompt_tokens} + {settings.new_tokens} tokens ...")
        timelines, seconds = await timed_load(client, prompts[:count], sampling, concurrency, what)
        wave, _ = await timed_load(client, prompts[count:], sampling, concurrency, f"{what}, one wave")
        levels.append(summarize_level(timelines, seconds, wave, settings.prompt_tokens))
    return levels


def summarize_level(
    timelines: Sequence[Timeline], seconds: float, wave: Sequence[Timeline], prompt_tokens: int
) -> Level:
    """The numbers of one concurrency: of a steady load, and of one wave of as many requests as were kept open."""
    gaps = distribution([gap for timeline in timelines for gap in timeline.gaps])
    return Level(
        concurrency=len(wave),
        requests=len(timelines),
        tokens_per_s=sum(len(timeline.token_ids) for timeline in timelines) / seconds,
        decode_tokens_per_s=decode_rate(wave),
        prefill_tokens_per_s=prefill_rate(wave, prompt_tokens),
        ttft_p50=percentile([timeline.ttft for timeline in timelines], 50),
        tpot_p50=percentile([timeline.tpot for timeline in timelines], 50),
        gap_p50=gaps["p50"],
        gap_p95=gaps["p95"],
    )


async def compare(client: AsyncClient, model: ModelInfo, settings: ServeSettings) -> list[Versus]:
    """Decode at every concurrency and one prefill, ours and the peer's in turn on the same prompts."""
    tell(PROG, "loading the same weights into transformers (bf16) ...")
    # the peer works on a thread, so that our heartbeats go on and the engine does not take us for gone
    peer = await asyncio.to_thread(TransformersPeer, Path(model.path))
    await asyncio.to_thread(peer.generate, random_prompts(settings.seed, 1, settings.prompt_tokens, model), 4)
    rows = []
    for concurrency in settings.concurrency:
        tell(PROG, f"concurrency {concurrency}, {settings.rounds} rounds each ...")
        ours, theirs = [], []
        for turn in range(settings.rounds):
            seed = settings.seed + 1000 * concurrency + turn
            prompts = random_prompts(seed, concurrency, settings.prompt_tokens, model)
            timelines, _ = await timed_load(client, prompts, greedy(settings.new_tokens), concurrency)
            ours.append(decode_rate(timelines))
            first, last = await asyncio.to_thread(peer.generate, prompts, settings.new_tokens)
            theirs.append(concurrency * (settings.new_tokens - 1) / (last - first))
        rows.append(Versus.of_rounds(f"decode c={concurrency}", ours, theirs))
    if model.max_request_tokens > PREFILL_TOKENS:
        rows.append(await compare_prefill(client, model, peer, settings))
    return rows


async def compare_prefill(
    client: AsyncClient, model: ModelInfo, peer: TransformersPeer, settings: ServeSettings
) -> Versus:
    """Prompt tokens per second of one long prompt: ours from submission to the first token."""
    tell(PROG, f"prefill of {PREFILL_TOKENS} tokens, {settings.rounds} rounds each ...")
    prompts = random_prompts(settings.seed + 7, settings.rounds + 1, PREFILL_TOKENS, model)
    ours, theirs = [], []
    for prompt in prompts:
        ours.append(PREFILL_TOKENS / (await timed(client, prompt, greedy(1))).ttft)
        theirs.append(PREFILL_TOKENS / await asyncio.to_thread(peer.prefill, prompt))
    # the first of each only warms up
    return Versus.of_rounds(f"prefill {PREFILL_TOKENS}", ours[1:], theirs[1:])


def decode_rate(timelines: Sequence[Timeline]) -> float:
    """Tokens per second while all requests decode: from when the last has its first token until the first has ended."""
    began = max(timeline.arrivals[0] for timeline in timelines)
    ended = min(timeline.arrivals[-1] for timeline in timelines)
    together = [arrival for timeline in timelines for arrival in timeline.arrivals if began < arrival <= ended]
    return len(together) / (ended - began) if together else 0.0


def prefill_rate(timelines: Sequence[Timeline], prompt_tokens: int) -> float:
    """Prompt tokens per second of all requests, from the first submission until the last has its first token."""
    began = min(timeline.submitted for timeline in timelines)
    return len(timelines) * prompt_tokens / (max(timeline.arrivals[0] for timeline in timelines) - began)


async def http_overhead(
    client: AsyncClient, endpoint: str, model: ModelInfo, settings: ServeSettings
) -> dict[str, float]:
    """Seconds that HTTP streaming adds to a token: pairs of requests at once, one of each kind, in the same steps."""
    tell(PROG, f"HTTP against the client library, {HTTP_PAIRS} pairs of requests ...")
    prompts = random_prompts(settings.seed + 11, 2 * HTTP_PAIRS + 1, settings.prompt_tokens, model)
    added: list[float] = []
    async with running_frontend(endpoint) as address:
        await timed_http(address, model.name, prompts.pop(), 8)
        for one, other in zip(prompts[::2], prompts[1::2], strict=True):
            direct, over_http = await all_of(
                timed(client, one, greedy(settings.new_tokens)),
                timed_http(address, model.name, other, settings.new_tokens),
            )
            added += added_latency(direct.arrivals, over_http.arrivals)
    return distribution(added)


def added_latency(direct: Sequence[float], over_http: Sequence[float]) -> list[float]:
    """How much later than its own step's direct token each HTTP token arrived, while both requests ran.

    A step takes far longer than a message, so the direct arrival of the same step is the nearest one.
    """
    began, ended = max(direct[0], over_http[0]), min(direct[-1], over_http[-1])
    return [arrival - min(direct, key=lambda t: abs(t - arrival)) for arrival in over_http if began < arrival <= ended]


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The sweep, and the comparisons that were asked for."""
    found = [table("Throughput and latency over concurrency", LEVEL, results["sweep"], LEVEL_NOTE)]
    if versus := results.get("versus_transformers"):
        found.append(table("Against transformers, tokens per second", VERSUS, versus, "Medians of the rounds."))
    if http := results.get("http"):
        found.append(table("What streaming over HTTP adds to a token", HTTP, [http]))
    return found


LEVEL = (
    Column("concurrency", "concurrency", case=True),
    Column("requests", "requests"),
    Column("tok/s", "tokens_per_s", better="higher"),
    Column("decode tok/s", "decode_tokens_per_s", better="higher"),
    Column("prefill tok/s", "prefill_tokens_per_s", better="higher"),
    Column("TTFT p50, ms", "ttft_p50", 1e3, better="lower"),
    Column("TPOT p50, ms", "tpot_p50", 1e3, better="lower"),
    Column("p95-p50, ms", "jitter", 1e3, better="lower"),
)
LEVEL_NOTE = "TTFT: time to first token. TPOT: time per output token. p95-p50: of the time between two tokens."
VERSUS = (
    Column("", "what", case=True),
    Column("coldblock", "ours", better="higher", range="ours_range"),
    Column("transformers", "theirs", range="theirs_range"),
    Column("ratio", "ratio", better="higher"),
)
HTTP = (Column("tokens", "count"), *distribution_columns())


def figures(results: Mapping[str, Any]) -> list[Figure]:
    """Throughput, time per token and time to the first one, each over concurrency."""
    sweep = results["sweep"]
    places = tuple(float(level["concurrency"]) for level in sweep)

    def line(name: str, key: str, scale: float = 1) -> Line:
        return Line(name, places, tuple(level[key] * scale for level in sweep))

    throughput = [line("all tokens, steady load", "tokens_per_s"), line("while all decode", "decode_tokens_per_s")]
    decode = [row["theirs"] for row in results.get("versus_transformers", ()) if row["what"].startswith("decode")]
    if decode:
        throughput.append(Line("transformers bf16, while all decode", places, tuple(decode)))
    gaps = (line("p50", "gap_p50", 1e3), line("p95", "gap_p95", 1e3))
    over = {"x_label": "requests at once", "x_log": True}
    return [
        Lines(
            "Throughput over concurrency",
            "New tokens of all requests.",
            lines=tuple(throughput),
            y_label="tokens/s",
            **over,
        ),
        Lines("Time between two tokens", "Of one request, as its client sees it.", lines=gaps, y_label="ms", **over),
        Lines(
            "Time to the first token",
            "Median, with as many requests open as the axis says.",
            lines=(line("p50", "ttft_p50", 1e3),),
            y_label="ms",
            **over,
        ),
    ]
