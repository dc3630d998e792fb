"""Block arithmetic: what a newcomer needs, what the running requests will need, what those who leave make free.

Owns: nothing; it counts over the tiers and the running and swapped requests. Does not know: who is to leave or to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from .config import SchedulerConfig
from .oversize import is_oversize, most_hot
from .prefixes import Prefixes
from .request import Request, State
from .swap import Block, Residency, residing
from .tiers import Tiers


class Entry(NamedTuple):
    """What a request coming in takes: its cached prefix `hits`, those of them `away` from the GPU, and `new` blocks.

    Instead of hits an oversize one takes the `cold` part of its prefix, which it reads from the CPU tier.
    """

    hits: list[Block]
    away: list[Block]
    new: int
    cold: list[Block]

    @property
    def needed(self) -> int:
        """GPU slots that it takes beside what of its prefix is there."""
        return self.new + len(self.away)


class Room:
    """Counts over the scheduler's own sets of requests, as they are at the time of asking."""

    def __init__(
        self,
        config: SchedulerConfig,
        tiers: Tiers,
        prefixes: Prefixes,
        running: dict[str, Request],
        swapped: dict[str, Request],
    ) -> None:
        self._config = config
        self._tiers = tiers
        self._prefixes = prefixes
        self._running = running
        self._swapped = swapped

    def entry(self, request: Request) -> Entry:
        """What a waiting request takes for its tokens so far and one more."""
        total = self._config.blocks_for(request.num_tokens + 1)
        if is_oversize(request, self._config):
            cold = self._prefixes.cold(request)
            return Entry([], [], min(self._config.window, total - len(cold)), cold)
        hits = self._prefixes.cached(request, len(self._running))
        away = residing(hits, Residency.CPU)
        return Entry(hits, away, total - len(hits), [])

    def fits(self, entry: Entry, leaving: Collection[Request] = ()) -> bool:
        """Whether it may come in once `leaving` have left."""
        return entry.needed <= self._left(entry.hits, leaving)

    def wanted(self, entry: Entry) -> int:
        """Available blocks that would let it in, less those of requests that end."""
        return entry.needed + self._tiers.available - self._left(entry.hits, self.ending())

    def _left(self, hits: Collection[Block], leaving: Collection[Request]) -> int:
        """Blocks that somebody coming in may take beside its cached prefix `hits`, once `leaving` have left.

        What the next token of every request that stays will need is left to it.
        """
        reused = self._tiers.giving_way(hits)
        return self._tiers.available + self.freed_by(leaving, hits) - reused - self.growth(leaving)

    def growth(self, leaving: Collection[Request] = (), further: int = 0) -> int:
        """Blocks that the running requests lack for their next token and `further` ones; their windows if oversize."""
        gone = set(leaving)
        return sum(
            max(0, self.lacking(request, further))
            for request in self._running.values()
            if request not in gone and not request.ends_in_flight
        )

    def lacking(self, request: Request, further: int = 0) -> int:
        """Blocks that a request lacks for its next token and `further` ones. Below 0: it has more than it may have."""
        total = self._config.blocks_for(min(request.num_tokens + 1 + further, request.limit))
        return min(total, request.cold + most_hot(request, self._config)) - len(request.blocks)

    def freed_by(self, leaving: Collection[Request], hits: Collection[Block] = ()) -> int:
        """Blocks that can be had when these running requests have left; `hits` will go on being used."""
        return len(set(self.used_only_by(leaving)).difference(hits))

    def used_only_by(self, leaving: Collection[Request]) -> list[Block]:
        """The blocks that nobody uses once these running requests have left."""
        users = Counter(block for request in leaving for block in request.hot)
        return [block for block, count in users.items() if block.users == count]

    def ending(self) -> list[Request]:
        """Running requests that leave when the step in flight is applied."""
        return [request for request in self._running.values() if request.ends_in_flight]

    def parked(
        self, most: int, spared: Request | None = None, full_only: bool = False
    ) -> tuple[Request | None, list[Block]]:
        """Blocks that a swapped request has on the GPU alone, and whose it is: the last one that left and has any.

        Full blocks first, from the end, as their copies stay valid; at last the one that is not full. None of `spared`.
        """
        if self._tiers.parked:
            for request in reversed(self._swapped.values()):
                if request is spared or request.state is State.SWAPPING_IN:
                    continue
                full = request.computed_tokens // self._config.block_size
                ordered = list(reversed(request.blocks[:full])) + ([] if full_only else request.blocks[full:])
                parked = [block for block in residing(ordered, Residency.GPU) if not block.users]
                if parked:
                    return request, parked[:most]
        return None, []

    def cpu_holds(self, request: Request) -> bool:
        """Whether the CPU tier can hold all that an oversize request, and those admitted before, may have there."""
        if not is_oversize(request, self._config):
            return True
        together = [r for r in (*self._running.values(), *self._swapped.values()) if is_oversize(r, self._config)]
        cold = sum(self._config.blocks_for(r.limit) - self._config.window for r in (request, *together))
        return cold <= self._config.cpu_blocks

    def cpu_shortage(self, blocks: int, kept: int = 0) -> str | None:
        """Why `blocks` blocks cannot be copied out beside `kept` copies, with the numbers; None when they can."""
        if not self._config.cpu_offload:
            return "CPU offload is off"
        room, total = self._tiers.cpu_available - kept, self._config.num_cpu_blocks
        return None if blocks <= room else f"{blocks} blocks to offload, {room} of {total} CPU blocks can be had"

    def leaving_shortage(self, victims: Collection[Request], lacking: int) -> str | None:
        """Why the victims' leaving cannot make `lacking` slots available; None when it can."""
        leaving = self.used_only_by(victims)
        written = len(residing(leaving, Residency.BOTH))
        copies = min(lacking - written, len(residing(leaving, Residency.GPU)))
        # What they have in both tiers already is among what the CPU tier could give up, but will be needed.
        return self.cpu_shortage(copies, kept=written) if copies > 0 else None
