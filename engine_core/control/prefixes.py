"""What requests find in the prefix index, and what they offer to it.

Owns: no state; it extends a request's hash chain and keeps the index true. Does not know: room, queues, or when a
block's slot is given up (`tiers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from .config import SchedulerConfig
from .policies import Work
from .request import Request
from .swap import Block, Residency
from .tiers import Tiers


class Prefixes:
    """`recompute` says whether computing KV again is better than copying it."""

    def __init__(self, config: SchedulerConfig, tiers: Tiers, recompute: Callable[[Work], bool]) -> None:
        self._enabled = config.prefix_cache
        self._block_size = config.block_size
        self._tiers = tiers
        self._recompute = recompute

    def cached(self, request: Request, running: int) -> list[Block]:
        """The indexed blocks of the request's prefix, less the one that holds its last token: that one is computed.

        From the first one on that is away: only if loading them is worth it, beside `running` requests, and has not
        failed yet.
        """
        if not self._enabled:
            return []
        full = (len(request.tokens) - 1) // self._block_size
        hits = self._match(request, full)
        away = [i for i, block in enumerate(hits) if not block.readable]
        if away:
            work = Work(0, len(away), (len(hits) - away[0]) * self._block_size, running)
            if request.copy_failures or self._recompute(work):
                del hits[away[0] :]
        return hits

    def cold(self, request: Request) -> list[Block]:
        """The same for a request that reads them from the CPU tier: as far as they have a copy there."""
        if not self._enabled:
            return []
        full = (len(request.tokens) - 1) // self._block_size
        return list(takewhile(lambda block: block.copied, self._match(request, full)))

    def _match(self, request: Request, full: int) -> list[Block]:
        request.chain.extend(request.tokens, full, self._block_size)
        return self._tiers.index.match(request.chain.digests[:full])

    def rematch(self, request: Request) -> None:
        """Blocks that are away and that others have computed as well need not be copied: share theirs.

        A block that the index does not name is not offered to it anew: it may hold what a failed request computed.
        """
        if not self._enabled:
            return
        index, digests = self._tiers.index, request.chain.digests
        full = min(len(digests), request.computed_tokens // self._block_size)
        for position in range(request.cold, full):
            block = request.blocks[position]
            if block.digest is not None or block.residency is not Residency.CPU:
                continue
            holder = index.holder(digests[position])
            if holder is not None:
                self._tiers.own([holder])
                request.blocks[position] = holder
                self._tiers.release([block], used=False)

    def offer(self, request: Request, full: int) -> None:
        """Let others find the first `full` blocks of a request that has them all; their KV has been computed."""
        if not self._enabled or request.spoiled or not request.indexed_blocks < full <= len(request.blocks):
            return
        request.chain.extend(request.tokens, full, self._block_size)
        self._tiers.name(request.blocks, request.chain.digests, range(request.indexed_blocks, full), request.tokens)
        request.indexed_blocks = full

    def forget(self, request: Request, others: Iterable[Request]) -> None:
        """Nobody may find what a failed request computed, nor what it was computed from, wherever that is by now.

        Nor what those of the `others` that share its blocks have computed, and will, from them.
        """
        shared = set(request.blocks)
        spoiled = [other for other in others if not shared.isdisjoint(other.blocks)]
        for one in (request, *spoiled):
            one.spoiled = True
            for digest in one.chain.digests:
                block = self._tiers.index.holder(digest)
                if block is not None:
                    self._tiers.forget(block)
