"""How many tokens a KV pool holds in each format.

Owns: the sum and its plot. Does not know: how a format is laid out; it is told the bytes of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

from .figures import Bars

GIB = 1 << 30


def tokens_in(pool_bytes: int, bytes_per_token: float) -> int:
    """How many tokens' KV so many bytes hold."""
    return int(pool_bytes / bytes_per_token)


def capacity_bars(bytes_per_token: Mapping[str, float], pools: Mapping[str, int]) -> Bars:
    """Tokens over formats, in pools of so many bytes."""
    return Bars(
        "Tokens that fit, by KV format",
        "All layers' K and V with their scales; the weights are apart.",
        "tokens",
        tuple(bytes_per_token),
        {name: tuple(tokens_in(size, each) for each in bytes_per_token.values()) for name, size in pools.items()},
    )
