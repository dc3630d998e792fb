"""Which block holds the KV of which token prefix: a digest of every full block's prefix, one index over both tiers.

Owns: the map from a prefix's digest to the block that holds it.
Does not know: where a block is and when it is given up (`tiers`), or when tokens have been computed (`scheduler`).

A block's digest is the SHA-256 of all tokens up to its end, so that two prefixes never share KV by accident or on
purpose. One hash runs through a request's tokens; so each of them is hashed once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .swap import Block


class PrefixChain:
    """The digests of one request's prefixes, the shortest first, as far as somebody has asked for them."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self._hash = sha256()

    def extend(self, tokens: array[int], full_blocks: int, block_size: int) -> None:
        """Let `digests` cover the first `full_blocks` blocks of `tokens`, which begin with those of the last call."""
        known, size = len(self.digests) * block_size, block_size * tokens.itemsize
        content = tokens[known : full_blocks * block_size].tobytes()
        for start in range(0, len(content), size):
            self._hash.update(content[start : start + size])
            self.digests.append(self._hash.digest())


class PrefixIndex:
    """Digest of a full block's prefix -> block. `Block.digest` is set exactly while the index names the block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def holder(self, digest: bytes) -> Block | None:
        """The block that holds the prefix, if one does."""
        return self._block_of.get(digest)

    def match(self, digests: Sequence[bytes]) -> list[Block]:
        """The blocks of the longest indexed beginning of a chain."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, digest: bytes, block: Block) -> bool:
        """Say that `block` holds the prefix, unless a block already does: that one stays the answer. Whether it did."""
        if digest in self._block_of:
            return False
        self._block_of[digest] = block
        block.digest = digest
        return True

    def drop(self, block: Block) -> None:
        """Forget what `block` holds; a block that is not indexed is ignored."""
        if block.digest is not None:
            del self._block_of[block.digest]
            block.digest = None
