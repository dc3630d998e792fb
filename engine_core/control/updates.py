"""What the scheduler reports: updates of single requests, totals, and views for monitors.

Owns: these data classes. Does not know: how they come about, nor the messages they become.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .plan import SampledToken

FinishReason = Literal["stop", "length", "abort", "error"]
SwapPhase = Literal["swapping_out", "swapped", "swapping_in", "resumed", "copied_out", "copied_in", "rejected"]
SwapReason = Literal["admission", "growth", "resume", "write_behind", "prefetch", "prefix_hit", "oversize"]


class TokenUpdate(NamedTuple):
    """One new token of a request's answer."""

    request_id: str
    token: SampledToken


@dataclass(frozen=True, slots=True)
class FinishedUpdate:
    """A request's end; nothing follows it. Seconds are durations by the clock, time spent swapped out included.

    `queue_s`: arrival to admission; `prefill_s`: admission to the first token; `decode_s`: first token to the end.
    """

    request_id: str
    reason: FinishReason
    stop_token: int | None
    error: str | None
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


@dataclass(frozen=True, slots=True)
class SwapUpdate:
    """One move of a request's blocks, begun, ended or not made. Tier use is counted after it.

    "swapping_out" to "swapped" and "swapping_in" to "resumed" are a request's way out and back; `blocks` is what that
    copies, less than it gives up or has where copies exist already. "copied_out" and "copied_in" are copies that leave
    the request where it is: ahead of need, a prefix, more of what a swapped request still had on the GPU. `request_id`
    is empty for cached blocks that nobody owns any more.

    `seconds` and `queued_s` are the copy's duration and its wait before, for phases that end one. "rejected" covers
    what the budget did not allow and copies that failed: `detail` says which, `blocks` and `bytes` are 0.
    """

    request_id: str
    phase: SwapPhase
    reason: SwapReason
    blocks: int
    bytes: int
    seconds: float
    gpu_used_blocks: int
    cpu_used_bytes: int
    detail: str = ""
    queued_s: float = 0.0


Update = TokenUpdate | FinishedUpdate | SwapUpdate


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    requests_swapped: int = 0
    requests_resumed: int = 0
    offload_blocks: int = 0  # all copies to the CPU tier
    write_behind_blocks: int = 0  # of these, ahead of need
    offload_bytes: int = 0
    offload_failed: int = 0
    offload_rejected: int = 0
    reload_blocks: int = 0  # all copies to the GPU pool
    prefetch_blocks: int = 0  # of these, before the request's turn
    prefix_reload_blocks: int = 0  # of these, for a new request with a known prefix
    reload_failed: int = 0
    max_swapped_requests: int = 0
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)


class RequestView(NamedTuple):
    """One live request as a monitor shows it. Seconds as in `FinishedUpdate`, as far as it has come.

    `stall_s`: all its time swapped out; `stalled_s`: of the swap it is in now, else 0. `ttft_s`: arrival to the first
    token; `tpot_s`: mean gap between its tokens; None while there is none.
    """

    request_id: str
    state: str
    prompt_tokens: int
    generated_tokens: int
    gpu_blocks: int
    cpu_blocks: int
    swaps: int
    stall_s: float
    age_s: float
    priority: int
    moved_blocks: int
    stalled_s: float
    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    cached_tokens: int
    recomputes: int
