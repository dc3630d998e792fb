"""What the page is told of an engine: its state, and the moves between its tiers, as server-sent events.

Owns: the JSON that the page reads. Does not know: who watches, or how a browser shows it.

Fields are picked one by one, so that a snapshot that one day says more does not say it to every browser: the page
shows names and numbers, never prompts or answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.json import encode

from ...protocol.messages import LinkUse, Metric, RequestRow, Stats, SwapEvent, TierUse

MAX_ROWS = 200  # so many requests are told of, the oldest first: more would not be looked at, and cost every browser
_LATENCIES = {
    "vllm:time_to_first_token_seconds": "ttft",
    "coldblock_request_inter_token_seconds": "tpot",
    "coldblock_request_stall_seconds": "stall",
}


class Latency(Struct, frozen=True):
    """A histogram since the engine's start: how many were at most each bound, and, last, above all of them."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class Snapshot(Struct, frozen=True):
    """The part of a `Stats` that the page shows. `unlisted`: requests beyond those in `requests`."""

    engine_id: str
    time: float
    uptime_s: float
    model: str
    device: str
    kv_cache_dtype: str
    block_size: int
    kv_block_bytes: int
    running: int
    waiting: int
    swapped: int
    step_ms: float
    tokens_per_s: float
    gpu: TierUse
    cpu: TierUse | None
    link: LinkUse
    requests: tuple[RequestRow, ...]
    unlisted: int
    latencies: dict[str, Latency]


class EngineState(Struct, frozen=True):
    """An engine as it is now. `problem`: why there is no snapshot."""

    engine: int
    endpoint: str
    snapshot: Snapshot | None
    problem: str | None


class Move(Struct, frozen=True):
    """A swap event, or a copy in the background, as the page's timelines and log show it."""

    time: float
    peer: str
    request_id: str
    phase: str
    reason: str
    blocks: int
    bytes: int
    seconds: float
    queued_s: float
    detail: str


def live_state(engine: int, endpoint: str, model: str, stats: Stats) -> bytes:
    """An engine that has published this. `model`: what the API calls its model."""
    listed = stats.requests[:MAX_ROWS]
    snapshot = Snapshot(
        engine_id=stats.engine_id,
        time=stats.time,
        uptime_s=stats.uptime_s,
        model=model,
        device=stats.model.device,
        kv_cache_dtype=stats.model.kv_cache_dtype,
        block_size=stats.model.block_size,
        kv_block_bytes=stats.model.kv_block_bytes,
        running=stats.running,
        waiting=stats.waiting,
        swapped=stats.swapped,
        step_ms=stats.step_ms,
        tokens_per_s=stats.tokens_per_s,
        gpu=stats.gpu,
        cpu=stats.cpu if stats.cpu_offload.enabled else None,
        link=stats.link,
        requests=listed,
        unlisted=max(0, stats.running + stats.waiting + stats.swapped - len(listed)),
        latencies=_latencies(stats.metrics),
    )
    return _event("state", encode(EngineState(engine, endpoint, snapshot, None)))


def lost_state(engine: int, endpoint: str, problem: str) -> bytes:
    """An engine that says nothing, and why."""
    return _event("state", encode(EngineState(engine, endpoint, None, problem)))


def move(event: SwapEvent) -> bytes:
    """One move, to be sent with others by `moves`."""
    return encode(
        Move(
            event.time,
            event.peer,
            event.request_id,
            event.phase,
            event.reason,
            event.blocks,
            event.bytes,
            event.seconds,
            event.queued_s,
            event.detail,
        )
    )


def moves(engine: int, encoded: Iterable[bytes], missed: int) -> bytes:
    """Moves of an engine since the last time; `missed` older ones came too fast for this reader."""
    return _event("moves", b'{"engine":%d,"missed":%d,"moves":[%b]}' % (engine, missed, b",".join(encoded)))


def _event(name: str, data: bytes) -> bytes:
    """A server-sent event. JSON has its line breaks escaped, so it is one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _latencies(metrics: Iterable[Metric]) -> dict[str, Latency]:
    return {
        _LATENCIES[metric.name]: Latency(metric.buckets, metric.samples[0].counts)
        for metric in metrics
        if metric.name in _LATENCIES and metric.kind == "histogram" and len(metric.samples) == 1
    }
