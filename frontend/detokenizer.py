"""From token ids to text, piece by piece: no half characters, nothing lost, stop strings held back.

Owns: incremental detokenization and the search for stop strings.
Does not know: requests, HTTP, or where the token ids come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6
_MAX_PENDING = 16
_INCOMPLETE_TOKENS = 3  # an unfinished UTF-8 character has at most three bytes, one token each


class Detokenizer:
    """Text of one token sequence as it grows. `push` may hold tokens back until they make whole characters.

    `prompt_ids`: what the sequence continues. Its tail lets decoders that treat the first token of a text differently
    (a dropped leading space) see that this is a continuation.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._restart(list(prompt_ids[-_CONTEXT_TOKENS:]))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain through these tokens."""
        pieces = [self._step(token_id) for token_id in token_ids]
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def flush(self) -> str:
        """The text of what is still held back; an unfinished character becomes U+FFFD."""
        pending, self._pending = self._pending, []
        return self._decode(pending) if pending else ""

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library raises bare Exceptions, when new bytes change how it reads earlier ones
            return self._recover(keep=0)
        if piece is not None:
            self._pending.clear()
            return str(piece)
        if len(self._pending) > _MAX_PENDING:
            return self._recover(keep=_INCOMPLETE_TOKENS)
        return ""

    def _recover(self, keep: int) -> str:
        """Give out the pending tokens on their own, but for the last `keep`, and go on with a fresh stream."""
        cut = len(self._pending) - keep
        done, rest = self._pending[:cut], self._pending[cut:]
        self._pending = []
        self._restart(done)
        return self._decode(done) + "".join([self._step(token_id) for token_id in rest])

    def _restart(self, context: list[int]) -> None:
        """A fresh stream that continues `context`, if that decodes to text with a clean end."""
        text = self._decode(context) if context else ""
        usable = text and not text.endswith(_REPLACEMENT)
        self._stream = DecodeStream(ids=context if usable else [], skip_special_tokens=True)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class StopStrings:
    """Finds the first stop string in a growing text. Holds back only a tail that could begin one."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown. Once `matched` is set the output has ended, and nothing more is given out."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        text = self._held + text
        self._held = ""
        found = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            position, self.matched = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            return text[: position + len(self.matched)] if self._include else text[:position]
        held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text held back, when the output ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (and is not all of it)."""
    longest = min(len(text), len(stop) - 1)
    start = len(text) - longest
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
