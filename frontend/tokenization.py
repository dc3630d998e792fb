"""A model's text side: tokenizer, special tokens and chat template, read from its checkpoint folder.

Owns: text to ids with exactly one BOS, without freezing the event loop; what single tokens look like.
Does not know: requests, engines, or incremental decoding (`detokenizer`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from ..protocol.text import encode_text, read_tokenizer
from .chat_template import ChatTemplate, Message, find_template
from .errors import invalid

THREAD_ABOVE_CHARS = 4096
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class ModelText:
    """What turns a model's text into ids and back. `load` reads it; afterwards it is immutable and thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, bos_token: str | None) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._bos_token = bos_token
        self._byte_level = isinstance(tokenizer.decoder, ByteLevelDecoder)
        self._longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, folder: Path) -> ModelText:
        """Read tokenizer.json and the template beside it. Raises OSError or ValueError that names the file."""
        tokenizer = read_tokenizer(folder)
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(tokenizer, tokenizer_config, _read_json(folder / "config.json"))
        source = find_template(folder, tokenizer_config)
        return cls(tokenizer, ChatTemplate(source, special) if source else None, special.get("bos_token"))

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, room: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Token ids of `text`, which came in the field `param`.

        BOS is not added to text that already begins with it, so that there is exactly one.

        Raises a 400 when the tokenizer has nothing for a part of the text, and when it is so long that it cannot fit
        into `room` tokens, before any work is spent on it.
        """
        if room is not None and len(text) > (room + 1) * self._longest_token:
            raise invalid(
                f"the prompt has {len(text)} characters, more than {room} tokens can hold",
                param,
                "context_length_exceeded",
            )
        if self._bos_token and text.startswith(self._bos_token):
            add_special_tokens = False
        try:
            if len(text) <= THREAD_ABOVE_CHARS:
                return self._encode(text, add_special_tokens)
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        except ValueError as error:
            raise invalid(str(error), param) from error

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return encode_text(self.tokenizer, text, add_special_tokens=add_special_tokens)

    async def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as prompt text; 400 when the model has no template or it refuses."""
        if self._template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        template = self._template

        def work() -> str:
            return template.render(messages, add_generation_prompt=add_generation_prompt, options=options)

        small = sum(len(message.get("content") or "") + 16 for message in messages) <= THREAD_ABOVE_CHARS
        return work() if small else await asyncio.to_thread(work)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of whole sequences of ids."""
        ids = list(token_ids)
        if len(ids) <= THREAD_ABOVE_CHARS:
            return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        batch = await asyncio.to_thread(
            self.tokenizer.decode_batch, [ids], skip_special_tokens=skip_special_tokens
        )  # the batch call lets other threads run
        return str(batch[0])

    def token_text(self, token_id: int) -> str:
        """One token alone as text; a part of a character shows as U+FFFD."""
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, so that parts of characters can be joined."""
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        fallback = _BYTE_FALLBACK.fullmatch(token)
        if fallback:
            return bytes([int(fallback[1], 16)])
        if self._byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return self.token_text(token_id).encode()


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: printable Latin-1 stands for itself, the other bytes for 256, 257, ..."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _special_tokens(
    tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> dict[str, str]:
    """bos_token, eos_token, ... as text, from tokenizer_config.json, else by the ids in config.json."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            token_id = model_config.get(f"{name}_id")
            token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
            token = tokenizer.id_to_token(token_id) if isinstance(token_id, int) else None
        if isinstance(token, str):
            found[name] = token
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing when there is no such file. Raises ValueError that names a malformed file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
