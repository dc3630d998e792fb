"""Which block holds the KV of which token prefix: a hash chain over full blocks, one index over both tiers.

Owns: the map from a chain digest to the block that holds it.
Does not know: where a block is and when it is given up (`tiers`), or when tokens have been computed (`scheduler`).

A block's digest covers its tokens and, through its parent's digest, every token before it. Digests are
blake2b of 16 bytes, so that two prefixes never share KV by accident or on purpose.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .swap import Block

DIGEST_BYTES = 16


class PrefixIndex:
    """Digest of a full block's prefix -> block. `Block.digest` is set exactly while the index names the block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_of: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def extend_chain(self, digests: list[bytes], tokens: array[int], full_blocks: int) -> None:
        """Append to `digests` until it covers the first `full_blocks` blocks of `tokens`."""
        size = self._block_size
        for start in range(len(digests) * size, full_blocks * size, size):
            parent = digests[-1] if digests else b""
            content = tokens[start : start + size].tobytes()
            digests.append(blake2b(parent + content, digest_size=DIGEST_BYTES).digest())

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
