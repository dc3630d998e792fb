"""Which indexed blocks either tier holds, told as it changes, for those outside who want to know where prefixes are.

Owns: the changes not yet fetched. Does not know: how they are told, or why a block comes or goes; `Tiers` says when.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from .swap import Block

Tier = Literal["GPU", "CPU"]


class Content(NamedTuple):
    """What a full block holds: the KV of `tokens`, as block number `position` after the prefix `parent` (b"": none)."""

    parent: bytes
    position: int
    tokens: array[int]


class TierChange(NamedTuple):
    """From now on the block of this digest is to be found in a tier (`stored`), or is not any more.

    `content` comes when the index begins to name the block, that is with the first tier it is in.
    """

    stored: bool
    tier: Tier
    digest: bytes
    content: Content | None = None


class TierLog:
    """Blocks without a digest are nobody's business and ignored."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._changes: list[TierChange] = []

    def drain(self) -> list[TierChange]:
        """What changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def named(self, block: Block, digests: Sequence[bytes], position: int, tokens: array[int]) -> None:
        """The index names this block from now on: it is block `position` of `tokens`, whose chain is `digests`."""
        begin, digest = position * self._block_size, digests[position]
        parent = digests[position - 1] if position else b""
        content = Content(parent, position, tokens[begin : begin + self._block_size])
        if block.readable:
            self._changes.append(TierChange(True, "GPU", digest, content))
        if block.copied:
            self._changes.append(TierChange(True, "CPU", digest, content))

    def arrived(self, blocks: Iterable[Block], tier: Tier) -> None:
        """Their content is in this tier now."""
        self._changes += [TierChange(True, tier, block.digest) for block in blocks if block.digest is not None]

    def left(self, blocks: Iterable[Block], tier: Tier) -> None:
        """Their slots in this tier are given up."""
        self._changes += [TierChange(False, tier, block.digest) for block in blocks if block.digest is not None]

    def forgotten(self, block: Block) -> None:
        """The index is about to forget it."""
        if block.readable:
            self.left([block], "GPU")
        if block.copied:
            self.left([block], "CPU")
