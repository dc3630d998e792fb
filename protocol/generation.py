"""One open request as its reader sees it: tokens and swap events in order, then an end or an error.

Owns: what arrived and was not read yet. Does not know: sockets, messages on the wire, other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

from msgspec import Struct

from .errors import ColdblockError
from .messages import Finished, SwapEvent, TokenLogprob, Usage
from .text import TextStream


class TokenChunk(Struct, frozen=True):
    """New tokens of one request. `text` is what they complete, "" without a tokenizer. The last has `finished` set."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finished: Finished | None = None
    text: str = ""


@dataclass(slots=True)
class Completion:
    """All of one answer. `logprobs` and `text` are None when they were not asked for or there was no tokenizer."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finished: Finished
    swap_events: list[SwapEvent]
    text: str | None


Item = TokenChunk | SwapEvent


@dataclass(slots=True, eq=False)
class Stream:
    """What arrived for one open request and was not read yet; bounded by the request's own length."""

    request_id: str
    text: TextStream | None
    items: deque[Item] = field(default_factory=deque)
    started: bool = False
    ended: bool = False
    abandoned: bool = False
    error: ColdblockError | None = None
    usage: Usage | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, item: Item) -> None:
        self.started = True
        if not self.abandoned:
            self.items.append(item)
            self.wake.set()

    def end(self, error: ColdblockError | None = None) -> None:
        self.ended = True
        self.error = error
        self.wake.set()

    async def last_word(self) -> None:
        while not self.ended:
            self.wake.clear()
            await self.wake.wait()

    async def next(self) -> Item:
        while not self.items:
            if self.error is not None:
                raise self.error.with_traceback(None)  # one error may end many streams
            if self.ended or self.abandoned:
                raise StopAsyncIteration
            self.wake.clear()
            await self.wake.wait()
        return self.items.popleft()


class Generation:
    """One request: an async iterator of `TokenChunk` and `SwapEvent`, ending after the chunk whose `finished` is set.

    Iterating raises RequestRefused, RequestFailed or EngineDied. A generation that is forgotten, or whose iteration is
    cancelled, aborts its request.
    """

    def __init__(
        self,
        stream: Stream,
        prompt_token_ids: list[int],
        *,
        abort: Callable[[str], Coroutine[Any, Any, None]],
        abandon: Callable[[Stream], None],
    ) -> None:
        self.request_id = stream.request_id
        self.prompt_token_ids = prompt_token_ids
        self._stream = stream
        self._abort = abort
        self._abandon = abandon
        loop = asyncio.get_running_loop()
        self._give_up = weakref.finalize(self, _abandon_soon, loop, abandon, stream)
        self._give_up.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        try:
            return await self._stream.next()
        except asyncio.CancelledError:
            self._abandon(self._stream)
            raise

    def abandon(self) -> None:
        """Abort the request and read no more of it, from any thread, without waiting."""
        self._give_up()

    async def abort(self) -> None:
        """Stop generating; the iterator then ends with a chunk whose reason is "abort". Harmless after the end."""
        await self._abort(self.request_id)

    async def usage(self) -> Usage | None:
        """The engine's totals, once it has told them, for who iterates no longer; None if it is lost before it does."""
        await self._stream.last_word()
        return self._stream.usage

    async def result(self) -> Completion:
        """Read to the end. Raises what iterating raises."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        swap_events: list[SwapEvent] = []
        text: list[str] = []
        finished: Finished | None = None
        async for item in self:
            if isinstance(item, SwapEvent):
                swap_events.append(item)
                continue
            token_ids.extend(item.token_ids)
            logprobs.extend(item.logprobs or ())
            text.append(item.text)
            finished = item.finished
        if finished is None:
            raise ColdblockError(f"request {self.request_id} was already read to its end; call result() once")
        has_text = self._stream.text is not None
        return Completion(token_ids, logprobs or None, finished, swap_events, "".join(text) if has_text else None)


def _abandon_soon(loop: asyncio.AbstractEventLoop, abandon: Callable[[Stream], None], stream: Stream) -> None:
    """Called by the garbage collector or an interrupted reader, in any thread."""
    if not stream.ended:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the request with it
            loop.call_soon_threadsafe(abandon, stream)
