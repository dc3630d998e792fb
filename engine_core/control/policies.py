"""Choices that may be made in more than one way: who is swapped out, who comes back first.

Owns: the orders, by name. Does not know: pools, budgets, queues. A policy picks one of the requests it is given
and changes nothing; the scheduler decides who may be picked at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .request import Request


class VictimPolicy(Protocol):
    """Picks the running request to swap out; `candidates` is never empty."""

    def choose(self, candidates: Sequence[Request]) -> Request: ...


class ResumeOrder(Protocol):
    """Picks the swapped request to bring back next; `candidates` is never empty."""

    def choose(self, candidates: Sequence[Request]) -> Request: ...


class LeastRecentlyActive:
    """The one that has been idle longest; of those that are equal, the one that arrived last."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda request: (request.last_active_time, -request.arrival))


class FirstSwappedFirst:
    """The one that has been away longest."""

    def choose(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda request: (request.swapped_since or 0.0, request.arrival))


VICTIM_POLICIES: dict[str, type[VictimPolicy]] = {"least_recently_active": LeastRecentlyActive}
RESUME_ORDERS: dict[str, type[ResumeOrder]] = {"first_swapped_first": FirstSwappedFirst}
