"""Text to token ids and back, as tokens arrive.

Owns: reading a tokenizer.json, encoding a text, and the incremental decoding of one answer.
Does not know: requests, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ColdblockError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises ColdblockError when there is none that can be read."""
    try:
        return read_tokenizer(Path(folder))
    except (OSError, ValueError) as error:
        raise ColdblockError(f"{error}: give tokenizer_path=FOLDER, or submit token ids instead of text") from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json, to be used on texts as they are: what it says of truncation and padding is for training.

    Raises OSError or ValueError that names the file.
    """
    from tokenizers import Tokenizer  # only who sends text pays for this import

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"no tokenizer at {path}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text. Raises ValueError when the tokenizer has nothing for a part of it."""
    try:
        # the batch call lets other threads run meanwhile, the single one does not
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"the model's tokenizer cannot encode the text: {error}") from error


class TextStream:
    """Decodes one answer piece by piece: never half a character, and nothing lost.

    The pieces joined are the decoding of all ids. A window of ids is decoded anew at each push, from the last place
    where the text was whole, so that decoders which look at neighbours (spaces, bytes) see them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown_ids = 0
        self._shown_text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The new whole characters that these ids complete; "" while a character is still open."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What was held back; a character that never became whole is shown as U+FFFD."""
        return self._take(self._decode(self._window))

    def _take(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        if new:  # ids that show nothing (special tokens) keep the context before them
            self._window = self._window[self._shown_ids :]
            self._shown_ids = len(self._window)
            self._shown_text = self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
