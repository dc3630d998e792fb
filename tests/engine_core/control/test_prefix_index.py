"""The hash chain over full blocks."""

from __future__ import annotations

from array import array

from coldblock.engine_core.control.prefix_index import PrefixIndex
from coldblock.engine_core.control.swap import Block


def chain(index: PrefixIndex, tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    index.extend_chain(digests, array("i", tokens), len(tokens) // 4)
    return digests


def test_a_digest_covers_every_token_before_it() -> None:
    index = PrefixIndex(4)
    first = chain(index, [1, 2, 3, 4, 5, 6, 7, 8])
    other_parent = chain(index, [9, 2, 3, 4, 5, 6, 7, 8])
    assert first[1] != other_parent[1]
    assert chain(index, [1, 2, 3, 4, 0, 0, 0, 0])[0] == first[0]


def test_a_chain_grows_to_the_same_digests() -> None:
    index = PrefixIndex(4)
    tokens = list(range(12))
    digests: list[bytes] = []
    for full in (1, 1, 3):
        index.extend_chain(digests, array("i", tokens), full)
    assert digests == chain(index, tokens)


def test_match_ends_at_the_first_gap() -> None:
    index, blocks = PrefixIndex(4), [Block(), Block(), Block()]
    digests = chain(index, list(range(12)))
    for block, digest in zip(blocks, digests, strict=True):
        index.insert(digest, block)
        assert block.digest == digest
    assert index.match(digests) == blocks
    index.drop(blocks[1])
    index.drop(blocks[1])
    assert index.match(digests) == blocks[:1] and blocks[1].digest is None
    other = Block()
    index.insert(digests[1], other)
    assert index.match(digests) == [blocks[0], other, blocks[2]]


def test_the_first_block_of_a_prefix_stays_its_block() -> None:
    index, first, second = PrefixIndex(4), Block(), Block()
    (digest,) = chain(index, [1, 2, 3, 4])
    for block in (first, second, first):
        index.insert(digest, block)
    assert (first.digest, second.digest) == (digest, None)
    index.drop(second)
    assert index.match([digest]) == [first] and index.holder(digest) is first and len(index) == 1
