"""A request: what was asked, how far it is, and the one table of its state machine.

Owns: `Request`, and which state may follow which.
Does not know: pools, scheduling, the wire. It carries block ids for the scheduler and never reads a pool.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .prefix_index import PrefixChain
from .sampling import Sampling

if TYPE_CHECKING:
    from .plan import MoveDone
    from .swap import Block, Move
    from .updates import SwapReason


class State(Enum):
    """Where a request is. It runs in PREFILL and DECODE. In LOADING its prompt's beginning is copied from the CPU tier;
    in the three swap states some of its KV is away, may be taken, or is on its way.
    """

    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPING_OUT = "swapping_out"
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"
    FINISHED = "finished"


RUNS = frozenset({State.PREFILL, State.DECODE})
USES_BLOCKS = RUNS | {State.LOADING, State.SWAPPING_IN}
"""In these a request's blocks are on the GPU, or on their way there, and must stay."""


class Event(Enum):
    """What can happen to a request. PREEMPT drops its KV for recomputation; FINISH is any end, an abort included."""

    ADMIT = "admit"
    LOAD = "load"
    PREFILL_DONE = "prefill_done"
    SWAP_OUT = "swap_out"
    OUT_DONE = "out_done"
    OUT_FAILED = "out_failed"
    SWAP_IN = "swap_in"
    IN_DONE = "in_done"
    IN_FAILED = "in_failed"
    PREEMPT = "preempt"
    FINISH = "finish"


BEFORE_SWAP = None
"""As a target in TRANSITIONS: the state the request had when its swap began, PREFILL or DECODE."""

TRANSITIONS: dict[tuple[State, Event], State | None] = {
    (State.WAITING, Event.ADMIT): State.PREFILL,
    (State.WAITING, Event.LOAD): State.LOADING,
    (State.WAITING, Event.FINISH): State.FINISHED,
    (State.LOADING, Event.IN_DONE): State.PREFILL,
    (State.LOADING, Event.IN_FAILED): State.WAITING,
    (State.LOADING, Event.FINISH): State.FINISHED,
    (State.PREFILL, Event.PREFILL_DONE): State.DECODE,
    (State.PREFILL, Event.SWAP_OUT): State.SWAPPING_OUT,
    (State.PREFILL, Event.PREEMPT): State.WAITING,
    (State.PREFILL, Event.FINISH): State.FINISHED,
    (State.DECODE, Event.SWAP_OUT): State.SWAPPING_OUT,
    (State.DECODE, Event.PREEMPT): State.WAITING,
    (State.DECODE, Event.FINISH): State.FINISHED,
    (State.SWAPPING_OUT, Event.OUT_DONE): State.SWAPPED,
    (State.SWAPPING_OUT, Event.OUT_FAILED): BEFORE_SWAP,
    (State.SWAPPING_OUT, Event.PREEMPT): State.WAITING,
    (State.SWAPPING_OUT, Event.FINISH): State.FINISHED,
    (State.SWAPPED, Event.SWAP_IN): State.SWAPPING_IN,
    (State.SWAPPED, Event.PREEMPT): State.WAITING,
    (State.SWAPPED, Event.FINISH): State.FINISHED,
    (State.SWAPPING_IN, Event.IN_DONE): BEFORE_SWAP,
    (State.SWAPPING_IN, Event.IN_FAILED): State.SWAPPED,
    (State.SWAPPING_IN, Event.FINISH): State.FINISHED,
}


class IllegalTransition(RuntimeError):
    """An event arrived that the current state does not allow: a fault in the scheduler, never in a request."""


@dataclass(slots=True)
class Copied:
    """What the request's own copies for one change of its state came to; others may bring blocks that it shares.

    They have one direction, so they ran one after another: durations add up, and the longest wait covers the others.
    """

    blocks: int = 0
    seconds: float = 0.0
    queued_s: float = 0.0
    error: str | None = None
    ended: list[tuple[Move, MoveDone]] = field(default_factory=list)  # its own ones that went well


@dataclass(slots=True, eq=False)
class Request:
    """One live request. `tokens` is prompt and answer so far, as far as they are known; at `limit` of them it ends.

    `num_tokens` counts, beyond `tokens`, the one that a step in flight samples. `computed_tokens` of them have their KV
    in blocks once the steps in flight are done. The KV of token i lies in `blocks[i // block_size]`, whatever its tier.
    The first `cold` of these, of a request that is larger than the GPU pool, are read from the CPU tier, where their
    slots are `cold_table`; `block_table` has the GPU slots of the others while the request runs. Times are seconds of
    the scheduler's clock. `due` orders by priority and age. Everything but `block_table` survives a swap; a recompute
    resets `computed_tokens` and keeps `tokens`, so that no token is emitted twice.
    """

    request_id: str
    tokens: array[int]
    prompt_length: int
    sampling: Sampling
    seed: int
    limit: int
    end_tokens: tuple[int, ...]
    priority: int
    arrival: int
    arrived_at: float
    due: float

    state: State = State.WAITING
    state_before_swap: State | None = None
    num_tokens: int = field(init=False)
    computed_tokens: int = 0
    last_step: int = 0  # the last step that ran tokens of it
    penalized: bool = field(init=False)  # its sampling must know all tokens before
    blocks: list[Block] = field(default_factory=list)
    block_table: array[int] = field(default_factory=lambda: array("i"))
    cold: int = 0
    cold_table: array[int] = field(default_factory=lambda: array("i"))
    written_blocks: int = 0  # so many of `blocks` have been offered for a copy ahead of need
    awaits: list[Move] = field(default_factory=list)  # the copies that it cannot go on without
    copied: Copied = field(default_factory=Copied)
    swap_reason: SwapReason = "growth"

    chain: PrefixChain = field(default_factory=PrefixChain)  # over `tokens`
    indexed_blocks: int = 0  # so many of `blocks` have been offered to the prefix index
    spoiled: bool = False  # some of `blocks` are a failed request's: no more are offered
    cached_tokens: int = 0  # found in the prefix index at the first admission
    tokens_at_admission: int = 0  # `computed_tokens` at the last admission

    last_active_time: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    swapped_since: float | None = None
    stall_s: float = 0.0

    swaps: int = 0
    moved_blocks: int = 0  # copied in either direction, for whatever reason
    times_left: int = 0  # it was swapped out or recomputed so that others could grow
    copy_failures: int = 0  # in a row
    gave_way: bool = False  # it has been swapped out for a newcomer
    denied_room: bool = False  # as a newcomer it wanted others to give way, and the CPU budget did not allow it
    recomputes: int = 0  # its KV was dropped, to be computed again

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens)
        self.penalized = self.sampling.penalizes

    @property
    def hot(self) -> list[Block]:
        """Its blocks that are read from the GPU."""
        return self.blocks[self.cold :] if self.cold else self.blocks

    @property
    def num_outputs(self) -> int:
        """Tokens of the answer that are known."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed: the rest of the prefill, or 1 in DECODE."""
        return self.num_tokens - self.computed_tokens

    @property
    def awaits_token(self) -> bool:
        """Whether a step in flight samples a token of it."""
        return self.num_tokens > len(self.tokens)

    @property
    def ends_in_flight(self) -> bool:
        """Whether a step in flight samples its last token: when that is applied, it is over."""
        return self.num_tokens >= self.limit

    def on(self, event: Event) -> None:
        """Move to the state that TRANSITIONS gives. Raises IllegalTransition for a pair that is not in it."""
        try:
            target = TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransition(f"request {self.request_id!r}: {event.name} in state {self.state.name}") from None
        if event is Event.SWAP_OUT:
            self.state_before_swap = self.state
        if target is BEFORE_SWAP:
            target, self.state_before_swap = self.state_before_swap, None
        assert target is not None
        self.state = target

    def end_stall(self, now: float) -> None:
        """Book the time since the swap-out began, if one did."""
        if self.swapped_since is not None:
            self.stall_s += now - self.swapped_since
            self.swapped_since = None
