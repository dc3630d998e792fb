"""The messages between a peer (frontend, client library, tool) and the engine-core.

Owns: the shape of every message and `PROTOCOL_VERSION`.
Does not know: bytes and sockets (`codec`, `sockets`), nor what an engine does with a message.

Work messages are tagged msgpack arrays: `[tag, field, field, ...]`. New fields are only ever appended, with a
default, so that a reader of the same PROTOCOL_VERSION accepts a message that is longer or shorter than its own.
`Stats` is a map instead, because people read it. Token ids travel as little-endian uint32 bytes: decoding a list of
4096 integers costs fifty times as much (see `pack_tokens` and `unpack_tokens` in `codec`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 1

Name = Annotated[str, Meta(max_length=256)]
"""What a peer calls itself or a request. Short, as it comes back in every message, in stats and in logs."""

MAX_TRACESTATE = 512
Traceparent = Annotated[str, Meta(max_length=256)]
Tracestate = Annotated[str, Meta(max_length=MAX_TRACESTATE)]

FinishReason = Literal["stop", "length", "abort", "error"]
SwapPhase = Literal["swapping_out", "swapped", "swapping_in", "resumed", "copied_out", "copied_in", "rejected"]
SwapReason = Literal["admission", "growth", "resume", "write_behind", "prefetch", "prefix_hit", "oversize"]


class SamplingParams(Struct, frozen=True, array_like=True):
    """How the tokens of one request are chosen and when it ends.

    temperature 0 is greedy. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 switch those filters off. `logprobs` is how many
    alternatives are reported beside each sampled token (0: the sampled token's own), None for no logprobs at all.
    `max_tokens` None means as many as fit; more than fit is clamped to what fits.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


class TraceContext(Struct, frozen=True, array_like=True):
    """Which trace a request belongs to, as in the headers of W3C Trace Context. The engine passes it on unread."""

    traceparent: Traceparent
    tracestate: Tracestate = ""


# ---------------------------------------------------------------- peer -> engine


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a peer. `name` is shown in `stats` and logs."""

    version: int
    name: Name


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """Generate from `prompt` (token ids as packed uint32). `request_id` is unique within its peer. Events of a request
    with a `trace` carry it.
    """

    request_id: Name
    prompt: bytes
    sampling: SamplingParams
    priority: int = 0
    trace: TraceContext | None = None


class Abort(Struct, frozen=True, array_like=True, tag="abort"):
    """Stop these requests. Unknown and finished ids are ignored; the others finish with reason "abort"."""

    request_ids: tuple[str, ...]


class Ping(Struct, frozen=True, array_like=True, tag="ping"):
    """Heartbeat. The engine aborts the requests of a peer that has been silent for `Welcome.peer_timeout_s`."""

    sequence: int


class StatsRequest(Struct, frozen=True, array_like=True, tag="stats?"):
    """Ask for one `Stats`. Who shows its metrics to a scraper says so with `exporter`, a name that its processes share:
    of several exporters one gets the metrics, so that no sum over all that are scraped counts an engine twice.
    """

    exporter: Name = ""


class Goodbye(Struct, frozen=True, array_like=True, tag="goodbye"):
    """The peer leaves; its open requests are aborted."""


PeerMessage = Hello | Submit | Abort | Ping | StatsRequest | Goodbye

# ---------------------------------------------------------------- engine -> peer


class ModelInfo(Struct, frozen=True):
    """What a peer must know of the model: enough to tokenize, validate and describe.

    `path` is the checkpoint folder on the engine's machine (tokenizer.json lies there). `max_request_tokens` is the
    most tokens, prompt and answer together, that one request can hold: min(max_model_len, room of the KV pool), or with
    --allow-oversize the room of half the pool and the CPU tier, if that is more.
    """

    name: str
    path: str
    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    eos_token_ids: tuple[int, ...]
    device: str
    kv_cache_dtype: str
    kv_block_bytes: int
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to `Hello`. A new `engine_id` after a reconnection tells that the engine was restarted."""

    version: int
    engine_id: str
    model: ModelInfo
    events_endpoint: str
    peer_timeout_s: float


class Pong(Struct, frozen=True, array_like=True, tag="pong"):
    """Answer to `Ping`. `step_age_s`: seconds since the step loop last turned (large: the engine is stuck)."""

    sequence: int
    step_age_s: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log-probability of the sampled token, and the most likely alternatives as (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(Struct, frozen=True, array_like=True):
    """Totals of one finished request. Seconds are durations; `stall_s` is the time it was swapped out. `moved_bytes`:
    its KV blocks copied between the tiers, in either direction and for whatever reason. `recomputes`: how often its KV
    was dropped instead, to be computed again.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    swaps: int
    stall_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    moved_bytes: int = 0
    recomputes: int = 0


class Finished(Struct, frozen=True, array_like=True):
    """How a request ended. `stop_token`: the id that ended it, when reason is "stop". `error`: set with "error"."""

    reason: FinishReason
    usage: Usage
    stop_token: int | None = None
    error: str | None = None


class TokensOut(Struct, frozen=True, array_like=True):
    """New tokens of one request (packed uint32; the stop token itself is not among them)."""

    request_id: str
    tokens: bytes
    logprobs: tuple[TokenLogprob, ...] | None = None
    finished: Finished | None = None


class Tokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """Everything one step produced for one peer: one message a peer and step, not one a token."""

    outputs: tuple[TokensOut, ...]


class SwapEvent(Struct, frozen=True, array_like=True, tag="swap"):
    """One move of a request's KV blocks between the tiers, sent to the request's owner and published.

    "copied_out" and "copied_in" are copies in the background, which leave the request where it is: they are published
    only, and `request_id` is empty when the blocks are nobody's any more. `blocks`/`bytes`: what this move carries (0
    for "rejected": what it would have carried is in `detail`). `seconds` and `queued_s`: the copy's duration and its
    wait before, where one has ended, else 0. Tier use is counted after the event. `time` is Unix time. `peer`: as in
    `RequestRow`, since two peers may use the same `request_id`.
    """

    request_id: str
    phase: SwapPhase
    reason: SwapReason
    blocks: int
    bytes: int
    seconds: float
    gpu_used_blocks: int
    gpu_total_blocks: int
    cpu_used_bytes: int
    cpu_budget_bytes: int
    time: float
    detail: str = ""
    queued_s: float = 0.0
    trace: TraceContext | None = None
    peer: str = ""


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """A `Submit` that was not taken: which field, what it was, what is allowed."""

    request_id: str
    field: str
    value: str
    allowed: str


class Fault(Struct, frozen=True, array_like=True, tag="fault"):
    """A message that could not be understood. Codes: "version", "malformed", "unknown", "too_large", "no_hello"."""

    code: str
    message: str


# ---------------------------------------------------------------- stats: a map, for people and programs


class Sample(Struct, frozen=True):
    """One labelled value of a metric. Histograms fill `counts` (per bucket, not cumulative, last is +Inf) and `sum`."""

    value: float = 0.0
    labels: dict[str, str] = {}
    counts: tuple[int, ...] = ()
    sum: float = 0.0


class Metric(Struct, frozen=True):
    """A named metric with its samples, ready to be exposed in Prometheus' text format."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[Sample, ...]
    buckets: tuple[float, ...] = ()


class TierUse(Struct, frozen=True):
    """Blocks of one tier by state. used + cached + in_flight + free == total; `shared` of the used ones are used by
    more than one request.
    """

    total: int = 0
    used: int = 0
    cached: int = 0
    in_flight: int = 0
    free: int = 0
    shared: int = 0


class LinkUse(Struct, frozen=True):
    """Copies between the tiers: payload bytes since the start, bytes a second over the last half second, and the most
    bytes a second that the link did when it was measured at load (0: there is no CPU tier).
    """

    out_bytes: int = 0
    in_bytes: int = 0
    out_bytes_per_s: float = 0.0
    in_bytes_per_s: float = 0.0
    peak_out_bytes_per_s: float = 0.0
    peak_in_bytes_per_s: float = 0.0


class CpuOffload(Struct, frozen=True):
    """The CPU tier. Bytes are real payload bytes of swapped blocks. `cached_blocks` may be given up for others."""

    enabled: bool
    payload_bytes: int
    budget_bytes: int
    max_swapped_requests: int
    blocks: int
    cached_blocks: int = 0


class RequestRow(Struct, frozen=True):
    """One live request as a monitor shows it. `peer`: whose it is, an identity that no other peer of the engine has;
    `peer_name`: what that peer calls itself, "" once it has left. `stall_s`: all its time swapped out; `stalled_s`: of
    the swap it is in now, else 0. `ttft_s` and `tpot_s`: None until there is a first and a second token.
    """

    request_id: str
    peer: str
    state: str
    prompt_tokens: int
    generated_tokens: int
    gpu_blocks: int
    cpu_blocks: int
    swaps: int
    stall_s: float
    age_s: float
    priority: int
    moved_bytes: int = 0
    stalled_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached_tokens: int = 0
    recomputes: int = 0
    peer_name: str = ""


class Stats(Struct, frozen=True, tag="stats"):
    """The engine's state at one moment. Published twice a second and sent in answer to `StatsRequest`. `exporter`: in
    an answer to one, who exports the metrics now; `metrics` is empty unless that is who asked.
    """

    engine_id: str
    time: float
    uptime_s: float
    model: ModelInfo
    peers: int
    running: int
    waiting: int
    swapped: int
    gpu: TierUse
    cpu_offload: CpuOffload
    step_ms: float
    tokens_per_s: float
    requests: tuple[RequestRow, ...]
    metrics: tuple[Metric, ...]
    cpu: TierUse = TierUse()
    link: LinkUse = LinkUse()
    exporter: str = ""


EngineMessage = Welcome | Pong | Tokens | SwapEvent | Refused | Fault
"""What arrives on a DEALER, except `Stats`: msgspec cannot mix array-like and map structs in one union."""
