"""The hash chain over full blocks."""

from __future__ import annotations

from array import array

from coldblock.engine_core.control.prefix_index import PrefixChain, PrefixIndex
from coldblock.engine_core.control.swap import Block


def digests_of(tokens: list[int]) -> list[bytes]:
    chain = PrefixChain()
    chain.extend(array("i", tokens), len(tokens) // 4, 4)
    return chain.digests


def test_a_digest_covers_every_token_before_it() -> None:
    first = digests_of([1, 2, 3, 4, 5, 6, 7, 8])
    other_parent = digests_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[1] != other_parent[1] and len({*first, *other_parent}) == 4
    assert digests_of([1, 2, 3, 4, 0, 0, 0, 0])[0] == first[0]


def test_a_chain_grows_to_the_same_digests() -> None:
    chain, tokens = PrefixChain(), array("i", range(14))
    for full in (1, 1, 3, 2):
        chain.extend(tokens, full, 4)
    assert chain.digests == digests_of(list(tokens))


def test_match_ends_at_the_first_gap() -> None:
    index, blocks = PrefixIndex(), [Block(), Block(), Block()]
    digests = digests_of(list(range(12)))
    assert all(map(index.insert, digests, blocks))
    assert [block.digest for block in blocks] == digests
    assert index.match(digests) == blocks
    index.drop(blocks[1])
    index.drop(blocks[1])
    assert index.match(digests) == blocks[:1] and blocks[1].digest is None
    other = Block()
    index.insert(digests[1], other)
    assert index.match(digests) == [blocks[0], other, blocks[2]]


def test_the_first_block_of_a_prefix_stays_its_block() -> None:
    index, first, second = PrefixIndex(), Block(), Block()
    (digest,) = digests_of([1, 2, 3, 4])
    assert [index.insert(digest, block) for block in (first, second, first)] == [True, False, False]
    assert (first.digest, second.digest) == (digest, None)
    index.drop(second)
    assert index.match([digest]) == [first] and index.holder(digest) is first and len(index) == 1
