"""Requests larger than the GPU pool: how large their next chunk may be, and which of their blocks are cold.

Owns: the cold part of a request, its leading blocks that every chunk of it reads from the CPU tier, and the copies that
bring it there. Does not know: whose slots in the CPU tier are given up for that, or when a request runs (`scheduler`).

A request is oversize while its tokens so far and one more need more blocks than the pool has. Its chunks are cut so
that they fit its window, the GPU blocks it may have, behind what can be cold by then: all of its full blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile

from .config import SchedulerConfig
from .copies import Copies
from .request import Request
from .swap import Block, Residency, residing
from .tiers import Tiers


def is_oversize(request: Request, config: SchedulerConfig) -> bool:
    """Whether its tokens so far and one more need more blocks than the GPU pool has."""
    return min(request.num_tokens + 1, request.limit) > config.num_gpu_blocks * config.block_size


def most_hot(request: Request, config: SchedulerConfig) -> int:
    """The most GPU blocks that the request may have."""
    return config.window if is_oversize(request, config) else config.num_gpu_blocks


def chunk_tokens(request: Request, config: SchedulerConfig) -> int:
    """Tokens that the request runs in one step if the step's budget allows."""
    count = min(request.remaining, config.prefill_chunk_tokens)
    if is_oversize(request, config):
        count = min(count, config.window * config.block_size - request.computed_tokens % config.block_size)
    return count


def blocks_for_next(request: Request, config: SchedulerConfig) -> int:
    """Blocks that the request is to have for its next step, cold ones included: all, unless it is oversize."""
    ahead = chunk_tokens(request, config) if is_oversize(request, config) else request.remaining
    return config.blocks_for(request.computed_tokens + ahead)


class ColdBlocks:
    """Lets blocks of requests become cold. Those of a request that has gone are held while a step may read them."""

    def __init__(self, config: SchedulerConfig, tiers: Tiers, copies: Copies) -> None:
        self._config = config
        self._tiers = tiers
        self._copies = copies

    def found(self, request: Request, blocks: list[Block]) -> None:
        """A request that is admitted finds the beginning of its prompt in the CPU tier, and reads it there."""
        self._tiers.own(blocks)
        self._tiers.read_cold(blocks, used=False)
        request.cold, request.cold_table = len(blocks), array("i", [block.cpu for block in blocks])

    def advance(self, request: Request) -> None:
        """Make cold what an oversize request needs to be for its next chunk, as far as it has copies."""
        needed = request.blocks[request.cold : self._cold_for_next(request)]
        chilled = list(takewhile(lambda block: block.copied, needed))
        if chilled:
            self._tiers.read_cold(chilled, used=True)
            request.cold += len(chilled)
            request.cold_table.extend([block.cpu for block in chilled])
            del request.block_table[: len(chilled)]

    def ready(self, request: Request) -> bool:
        """Whether the next chunk fits into the window behind what is cold by now."""
        return request.cold >= self._cold_for_next(request)

    def lacking(self, request: Request) -> list[Block]:
        """What has to become cold for the next chunk, and is not even being copied."""
        return _without_copy(request.blocks[request.cold : self._cold_for_next(request)])

    def copy(self, request: Request, blocks: Sequence[Block]) -> None:
        """Copy as much of this as the CPU tier takes."""
        if room := self._tiers.cpu_available:
            self._copies.begin_out(blocks[:room], "oversize", request)

    def copy_ahead(self, request: Request) -> None:
        """Copy what has to become cold for the chunk after the next one, while that one runs."""
        config, start = self._config, self._cold_for_next(request)
        full = request.computed_tokens // config.block_size
        end = min(full, start + config.blocks_for(chunk_tokens(request, config)))
        blocks = _without_copy(request.blocks[max(request.cold, start) : end])[: self._tiers.cpu_spare]
        if blocks:
            self._copies.begin_out(blocks, "oversize", request, ahead=True)

    def give_up(self, request: Request, held: list[Block] | None) -> None:
        """The request has gone. If a step in flight may read its cold blocks they are `held` until it is applied."""
        cold = request.blocks[: request.cold]
        self._tiers.release(cold[::-1], used=False)
        if held is None:
            self._tiers.stop_reading(cold[::-1])
        else:
            held.extend(cold)
        request.cold, request.cold_table = 0, array("i")

    def _cold_for_next(self, request: Request) -> int:
        return max(0, blocks_for_next(request, self._config) - self._config.window)


def _without_copy(blocks: Sequence[Block]) -> list[Block]:
    return residing(blocks, Residency.GPU)
