"""Copies between the tiers as the scheduler sees them: begun for a plan, awaited by requests, ended by a `MoveDone`.

Owns: the copies of the plan being made, and who waits for which. Does not know: why a copy is made, or what becomes of
a request whose copies have ended (`scheduler`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .costs import Speeds
from .journal import Journal
from .plan import BlockMove, MoveDone
from .request import Copied, Request, State
from .swap import Block, Move, Residency, residing
from .tiers import Tiers
from .updates import SwapReason


class Ended(NamedTuple):
    """A copy that has ended. `ready`: who waited for it and now waits for none; `awaited`: its own request waited."""

    move: Move
    ready: list[Request]
    awaited: bool


class Copies:
    """Begins copies and ends them. A request waits for all that is in its `awaits`."""

    def __init__(self, tiers: Tiers, journal: Journal, speeds: Speeds) -> None:
        self._tiers = tiers
        self._journal = journal
        self._speeds = speeds
        self._planned: list[BlockMove] = []

    def take_planned(self) -> tuple[BlockMove, ...]:
        """The copies begun since the last call, for the plan."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def begin_out(
        self, blocks: Sequence[Block], reason: SwapReason, request: Request | None, ahead: bool = False
    ) -> Move:
        """Copy these blocks out, `ahead` of need or not. There must be as many CPU slots to be had."""
        move = self._tiers.begin_out(blocks, reason, request, ahead)
        self._planned.append(move.as_plan())
        return move

    def begin_in(self, blocks: Sequence[Block], reason: SwapReason, request: Request) -> None:
        """Copy these blocks in. There must be as many GPU slots available."""
        self._planned.append(self._tiers.begin_in(blocks, reason, request).as_plan())

    def wait_for(self, request: Request, move: Move) -> None:
        """The request does not go on before this copy has ended."""
        request.awaits.append(move)
        move.waiting.append(request)

    def wait_for_loads(self, request: Request) -> None:
        """Nor before all copies that bring its blocks in have, whoever began them."""
        arriving = Counter([block.move for block in residing(request.hot, Residency.COPYING_IN)])
        request.copied = Copied()
        for move, blocks in arriving.items():
            assert move is not None
            self.wait_for(request, move)
            if move.request is request:
                request.copied.blocks += blocks

    def stop_waiting(self, request: Request) -> None:
        """The request awaits no copy any more; they go on."""
        if request.awaits:
            self.tell_ended(request)
        for move in request.awaits:
            move.waiting.remove(request)
        request.awaits = []

    def tell_ended(self, request: Request) -> None:
        """Its way out or back is cut short, so it is not told as a whole: tell of its copies that went well."""
        for move, done in request.copied.ended:
            self._journal.copied_aside(move, done)
        request.copied = Copied()

    def disown(self, request: Request) -> None:
        """The request's usage is told now: what is still being copied for it is nobody's."""
        for move in self._tiers.moves.values():
            if move.request is request:
                move.request = None

    def end(self, done: MoveDone) -> Ended:
        """A copy has ended, well or badly: the blocks settle where they are now, and it is counted and told."""
        request = self._tiers.moves[done.move_id].request
        if done.error is None:
            move = self._tiers.complete(done.move_id)
            self._speeds.copied(move.direction, len(move.blocks), done.seconds, done.queued_s)
            self._journal.copied(move)
        else:
            move = self._tiers.fail(done.move_id)
            self._journal.copy_failed(move, done.error)
        awaited = request is not None and request in move.waiting
        if done.error is None and awaited and request is not None and request.state is not State.LOADING:
            request.copied.ended.append((move, done))  # part of a way out or back, which is told as a whole
        elif done.error is None:
            self._journal.copied_aside(move, done)
        ready = []
        while move.waiting:
            waiting = move.waiting.pop()
            waiting.awaits.remove(move)
            if waiting is request:  # else it is told of, and counted, as the other's
                waiting.copied.seconds += done.seconds
                waiting.copied.queued_s = max(waiting.copied.queued_s, done.queued_s)
            waiting.copied.error = waiting.copied.error or done.error
            if not waiting.awaits:
                ready.append(waiting)
        return Ended(move, ready, awaited)
