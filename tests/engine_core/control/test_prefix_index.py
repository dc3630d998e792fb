"""The hash chain over full blocks."""

from __future__ import annotations

from array import array

from coldblock.engine_core.control.prefix_index import PrefixIndex


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
    index = PrefixIndex(4)
    digests = chain(index, list(range(12)))
    for block, digest in zip((7, 8, 9), digests, strict=True):
        assert index.insert(digest, block)
    assert index.match(digests) == [7, 8, 9]
    index.drop(8)
    index.drop(8)
    assert index.match(digests) == [7]
    assert index.insert(digests[1], 3) and index.match(digests) == [7, 3, 9]


def test_the_first_block_of_a_prefix_stays_its_block() -> None:
    index = PrefixIndex(4)
    (digest,) = chain(index, [1, 2, 3, 4])
    assert index.insert(digest, 5)
    assert not index.insert(digest, 6)
    assert index.insert(digest, 5)
    index.drop(6)
    assert index.match([digest]) == [5]
