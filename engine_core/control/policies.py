"""Choices that may be made in more than one way: who leaves, who comes back first, and whether KV is kept or computed
again.

Owns: the orders, by name. Does not know: pools, budgets, queues. A policy picks one of what it is given and changes
nothing; the scheduler decides who may be picked at all, and everybody finishes whatever is picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .costs import Speeds
from .plan import Direction
from .request import Request


class RequestChoice(Protocol):
    """Picks one of these requests; there is always at least one."""

    def choose(self, candidates: Sequence[Request]) -> Request: ...


# ---------------------------------------------------------------- who leaves


class LeastRecentlyActive:
    """The one that has been idle longest; of those that run in every step, the one that has come least far."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda request: (request.last_active_time, *_progress(request)))


class LowestPriority:
    """The one of least priority; of those that are equal, the one that has been idle longest."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda r: (r.priority, r.last_active_time, *_progress(r)))


class MostBlocks:
    """The one whose leaving helps most: fewest requests leave."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return max(candidates, key=lambda request: (len(request.hot), request.arrival))


class LeastProgress:
    """The one that has come least far: who is further on ends sooner, and its room is free for good."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=_progress)


def _progress(request: Request) -> tuple[int, int, int]:
    return request.num_outputs, request.computed_tokens, -request.arrival


# ---------------------------------------------------------------- who comes back


class FirstSwappedFirst:
    """The one that has been away longest."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda request: (request.swapped_since or 0.0, request.arrival))


class MostUrgent:
    """The one that is first by priority and age, as the waiting are."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda request: (request.due, request.arrival))


class FewestBlocks:
    """The one that needs least room."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda request: (len(request.hot), request.arrival))


# ---------------------------------------------------------------- keep or compute again


@dataclass(frozen=True, slots=True)
class Work:
    """What keeping KV or computing it again would take: blocks to copy out and in, or tokens to compute, while
    `running` other requests wait for every step.
    """

    blocks_out: int
    blocks_in: int
    tokens: int
    running: int


class SwapOrRecompute(Protocol):
    """Whether computing KV again is better than copying it."""

    def recompute(self, work: Work, speeds: Speeds) -> bool: ...


class Cheaper:
    """What holds requests up less, by the speeds measured so far: copies only the one that is swapped, computing all
    that run. Copies, until both speeds are known.
    """

    def recompute(self, work: Work, speeds: Speeds) -> bool:
        prefill = speeds.prefill_s(work.tokens)
        out, back = speeds.copy_s(Direction.OUT, work.blocks_out), speeds.copy_s(Direction.IN, work.blocks_in)
        if prefill is None or out is None or back is None:
            return False
        return prefill * (1 + work.running) < out + back


class AlwaysSwap:
    """Copy whatever the CPU tier takes."""

    def recompute(self, work: Work, speeds: Speeds) -> bool:
        return False


class AlwaysRecompute:
    """Copy nothing."""

    def recompute(self, work: Work, speeds: Speeds) -> bool:
        return True


VICTIM_POLICIES: dict[str, type[RequestChoice]] = {
    "least_recently_active": LeastRecentlyActive,
    "lowest_priority": LowestPriority,
    "most_blocks": MostBlocks,
    "least_progress": LeastProgress,
}
RESUME_ORDERS: dict[str, type[RequestChoice]] = {
    "first_swapped_first": FirstSwappedFirst,
    "most_urgent": MostUrgent,
    "fewest_blocks": FewestBlocks,
}
SWAP_OR_RECOMPUTE: dict[str, type[SwapOrRecompute]] = {
    "cheaper": Cheaper,
    "swap": AlwaysSwap,
    "recompute": AlwaysRecompute,
}
