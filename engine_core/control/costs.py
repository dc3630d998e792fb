"""What copies and prefill cost, as measured while they happen.

Owns: the running averages. Does not know: requests, or what is decided by them (`policies`).
"""

from __future__ import annotations

from .plan import Direction

_WEIGHT = 0.2  # of the newest measurement
_MIN_PREFILL_TOKENS = 32  # a step with fewer says more of a step's fixed cost


class Speeds:
    """Measured speeds. A question whose answer has not been measured is answered with None."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._bytes: dict[Direction, float] = {}  # of a copy
        self._seconds: dict[Direction, float] = {}
        self._tokens_per_s: float | None = None
        self._queued_s: float | None = None

    def copied(self, direction: Direction, blocks: int, seconds: float, queued_s: float) -> None:
        """A copy took so long, and waited so long before.

        Bytes and seconds are averaged, not speeds: most copies are of a block or two, whose time is not that of bytes.
        """
        self._queued_s = _averaged(self._queued_s, queued_s)
        if seconds > 0:
            self._bytes[direction] = _averaged(self._bytes.get(direction), blocks * self._block_bytes)
            self._seconds[direction] = _averaged(self._seconds.get(direction), seconds)

    def stepped(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if seconds > 0 and prefill_tokens >= max(_MIN_PREFILL_TOKENS, decode_tokens):
            speed = (prefill_tokens + decode_tokens) / seconds
            self._tokens_per_s = _averaged(self._tokens_per_s, speed)

    def prefill_s(self, tokens: int) -> float | None:
        """Computing the KV of so many tokens."""
        return None if self._tokens_per_s is None else tokens / self._tokens_per_s

    def copy_s(self, direction: Direction, blocks: int) -> float | None:
        """Copying so many blocks, and the wait before; the other direction's speed will do while this one's is not
        known.
        """
        known = direction if direction in self._seconds else next(iter(self._seconds), None)
        if known is None or self._queued_s is None:
            return None
        seconds_a_byte = self._seconds[known] / self._bytes[known]
        return self._queued_s + blocks * self._block_bytes * seconds_a_byte if blocks else 0.0


def _averaged(before: float | None, new: float) -> float:
    return new if before is None else before + _WEIGHT * (new - before)
