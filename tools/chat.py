"""Chat with a running engine in the terminal; every swap of the conversation is shown as it happens.

Owns: the conversation, and how it looks on a terminal or in a pipe.
Does not know: how answers are made. Template and detokenizer are the HTTP frontend's, so that both give the same text.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, field_validator

from ..frontend.detokenizer import Detokenizer
from ..frontend.errors import ApiError
from ..frontend.tokenization import ModelText
from ..protocol.client import BlockingGeneration, Client, TokenChunk
from ..protocol.errors import ColdblockError
from ..protocol.messages import SamplingParams, SwapEvent
from ..settings import EXIT_OK, Settings, load
from .endpoints import usable_endpoint
from .errors import ToolError, report
from .terminal import Style, describe_swap
from .top.plain import render_header

PROG = "coldblock chat"
HELP = "/reset forgets the conversation, /stats shows the engine, /quit leaves; Ctrl-C stops an answer"


class ChatSettings(Settings):
    """Settings of `coldblock chat`."""

    endpoint: str | None = Field(None, description="the engine's endpoint; the default one if absent")
    tokenizer: Path | None = Field(None, description="folder with tokenizer.json, if the engine's is not readable here")
    system: str | None = Field(None, description="system message; the template's own if absent")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; as long as fits if absent")
    temperature: float = Field(0.2, ge=0, description="0 takes the likeliest token always")
    top_p: float = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this total probability")
    seed: int | None = Field(None, ge=0, description="makes sampled answers repeatable")

    _usable_endpoint = field_validator("endpoint")(usable_endpoint)


def main(argv: list[str]) -> int:
    """Run the command: on a terminal with a prompt, in a pipe one message a line and only answers on stdout."""
    settings = load(ChatSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        with Client(settings.endpoint, name="chat") as client:
            model = client.ready()
            chat = Chat(client, load_text(settings.tokenizer or Path(model.path)), settings)
            if not sys.stdin.isatty():
                return read_pipe(chat)
            print(f"{model.name} on {model.device}. {HELP}")
            return read_terminal(chat)
    except ColdblockError as error:
        return report(PROG, error)


def load_text(folder: Path) -> ModelText:
    """Tokenizer and chat template of a checkpoint folder. Raises ToolError."""
    try:
        return ModelText.load(folder)
    except (OSError, ValueError) as error:
        raise ToolError(f"{error}; name the folder with --tokenizer") from error


def read_terminal(chat: Chat) -> int:
    """Ask for messages until /quit or the end of input. A failed answer is said and the chat goes on."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() editing and history)
    while True:
        try:
            line = input("\n> ").strip()
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D leaves)", end="")
            continue
        except EOFError:
            print()
            return EXIT_OK
        try:
            if not chat.take(line):
                return EXIT_OK
        except ColdblockError as error:
            report(PROG, error)


def read_pipe(chat: Chat) -> int:
    """One message a line until the input ends. The first failure ends it, so that a script notices."""
    for line in sys.stdin:
        if not chat.take(line.strip()):
            break
    return EXIT_OK


class Chat:
    """One conversation. Answers go to stdout, swap events and everything else to stderr."""

    def __init__(self, client: Client, text: ModelText, settings: ChatSettings) -> None:
        self._client = client
        self._text = text
        self._settings = settings
        self._sampling = SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed,
        )
        self._messages: list[dict[str, str]] = []
        self._style = Style(sys.stderr)
        self._commands: dict[str, Callable[[], None]] = {"/reset": self.reset, "/stats": self.show_stats}
        self.reset()

    def take(self, line: str) -> bool:
        """Answer a message or obey a command; False after /quit. Raises ColdblockError when no answer is made."""
        line = _readable(line)
        if line == "/quit":
            return False
        if line in self._commands:
            self._commands[line]()
        elif line.startswith("/"):
            self._say(f"no command {line}: {HELP}")
        elif line:
            self.answer(line)
        return True

    def reset(self) -> None:
        """Begin a new conversation."""
        system = _readable(self._settings.system or "")
        self._messages = [{"role": "system", "content": system}] if system else []

    def show_stats(self) -> None:
        """The engine's state, as `coldblock top` shows it."""
        for line in render_header(self._client.stats(), self._style):
            print(line, file=sys.stderr)

    def answer(self, message: str) -> None:
        """Stream the answer to `message`; both join the conversation unless the answer fails."""
        messages = [*self._messages, {"role": "user", "content": message}]
        prompt = asyncio.run(self._encode(messages))
        text = self._stream(self._client.submit(prompt, self._sampling), Detokenizer(self._text.tokenizer, prompt))
        self._messages = [*messages, {"role": "assistant", "content": text}]

    async def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            rendered = await self._text.render(messages)
            return await self._text.encode(rendered)
        except ApiError as error:
            raise ToolError(error.message) from error

    def _stream(self, generation: BlockingGeneration, detokenizer: Detokenizer) -> str:
        """Print the answer as it comes; returns its text. Ctrl-C ends the answer, what was said so far counts."""
        pieces: list[str] = []
        try:
            for item in generation:
                if isinstance(item, SwapEvent):
                    self._show_swap(item, mid_line="".join(pieces[-1:])[-1:] not in ("", "\n"))
                    continue
                piece = detokenizer.push(item.token_ids) + (detokenizer.flush() if item.finished else "")
                if piece:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
                self._explain_end(item)
        except KeyboardInterrupt:  # leaving the iteration has aborted the request
            self._say(" [stopped]")
        print(flush=True)
        return "".join(pieces)

    def _explain_end(self, chunk: TokenChunk) -> None:
        if chunk.finished is not None and chunk.finished.reason == "length":
            self._say(" [cut: the answer reached its longest length]")

    def _show_swap(self, event: SwapEvent, mid_line: bool) -> None:
        if mid_line and sys.stdout.isatty():
            print(flush=True)
        self._say(describe_swap(event, "this chat"))

    def _say(self, line: str) -> None:
        print(self._style.paint(line, "dim"), file=sys.stderr, flush=True)


def _readable(text: str) -> str:
    """`text` with the bytes that were no UTF-8 as replacement characters; Python reads them as lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
