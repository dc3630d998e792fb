"""Copies ahead of need: the coldest full blocks get a CPU copy while the pool fills up and the link is idle.

Owns: when to make such copies, and of what. Does not know: who leaves when, which it only guesses by the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from .config import SchedulerConfig
from .copies import Copies
from .plan import Direction
from .policies import RequestChoice
from .request import Request
from .room import Room
from .swap import Block, Residency, residing
from .tiers import Tiers

COPY_BYTES = 32 << 20  # about so much is copied at a time: a copy that is needed waits for it
MOVES = 4  # at a time
YOUNGEST = 16  # of so many running requests blocks are copied
LEAST = 16  # blocks of theirs, as a copy costs the step that begins it as much whatever its size
PAUSE_S, LONGEST_PAUSE_S = 1.0, 64.0  # after such a copy has failed: each time twice as long


class WriteBehind:
    """`victims` says who of the running requests would leave first."""

    def __init__(
        self,
        config: SchedulerConfig,
        tiers: Tiers,
        copies: Copies,
        room: Room,
        victims: RequestChoice,
        running: dict[str, Request],
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._copies = copies
        self._room = room
        self._victims = victims
        self._running = running
        self._most_blocks = max(1, COPY_BYTES // config.block_bytes)
        self._least_blocks = min(LEAST, config.num_gpu_blocks // LEAST)
        self._not_before = 0.0
        self._failures = 0  # in a row

    def ended(self, well: bool, now: float) -> None:
        """A copy ahead of need has ended."""
        if well:
            self._failures = 0
        else:
            self._not_before = now + min(PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
            self._failures += 1

    def begin(self, now: float) -> None:
        """Copy the coldest full blocks that have no copy, while the pool fills up and the link has nothing to do."""
        config = self._config
        taken = config.num_gpu_blocks - self._tiers.free
        if taken <= config.write_behind_above * config.num_gpu_blocks or now < self._not_before:
            return
        if not self._tiers.idle(Direction.OUT):
            return
        begun = 0
        for request, blocks in islice(self._coldest(), MOVES):
            self._copies.begin_out(blocks, "write_behind", request, ahead=True)
            begun += len(blocks)
            if begun >= self._most_blocks:
                return

    def _coldest(self) -> Iterator[tuple[Request | None, list[Block]]]:
        """Blocks to copy, and whose: of swapped requests, then cached, then of who would leave next.

        Who takes one part copies it before taking the next: a copy takes a block off its shelf.
        """
        size, running = self._config.block_size, reversed(self._running.values())
        while (most := self._most()) and (parked := self._room.parked(most, full_only=True))[1]:
            yield parked
        while (most := self._most()) and (cached := list(islice(self._tiers.unwritten(), most))):
            yield None, cached
        # The young leave first, by most policies: no need to look at all.
        behind = list(islice((r for r in running if r.computed_tokens // size > r.written_blocks), YOUNGEST))
        if sum(r.computed_tokens // size - r.written_blocks for r in behind) < self._least_blocks:
            return
        while behind and (most := self._most()):
            request = self._victims.choose(behind)
            behind.remove(request)
            first, full = request.written_blocks, request.computed_tokens // size
            request.written_blocks = min(full, first + most)
            blocks = residing(request.blocks[first : request.written_blocks], Residency.GPU)
            if blocks:
                yield request, blocks

    def _most(self) -> int:
        return min(self._tiers.cpu_spare, self._most_blocks)
