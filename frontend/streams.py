"""What deltas look like on the wire: server-sent events from byte templates, and whole replies.

Owns: the JSON of completions and chat completions, streamed and not; the raw ASGI response that streams events.
Does not know: how deltas come about.

Only what changes is escaped for each chunk: building a chunk costs well under a microsecond, `json.dumps` three.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.json import encode as json_bytes
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..protocol.errors import ColdblockError
from ..protocol.messages import SwapEvent
from .errors import ApiError, from_engine
from .generation import Delta, Job, Logprob, Tally
from .tokenization import ModelText

_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity
_NULL = b"null"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class ClientLeft(Exception):
    """The HTTP client disconnected before its reply was complete."""


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled, and `ClientLeft` raised, as soon as the client disconnects."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientLeft
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Format(ABC):
    """How one job's deltas are written. Subclasses say what differs between the two endpoints."""

    chunk_object: str
    whole_object: str

    def __init__(self, job: Job, tally: Tally, *, include_usage: bool = False, continuous_usage: bool = False) -> None:
        self._text = job.target.text
        self._tally = tally
        self._head = {"id": job.id, "created": int(time.time()), "model": job.target.name}
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        head = json_bytes({"object": self.chunk_object, **self._head})
        self._prefix = b"data: " + head[:-1] + b',"choices":['
        self._starts = [self._prefix + b'{"index":%d,' % choice.index + self._choice_start() for choice in job.choices]
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, delta: Delta) -> bytes:
        """One server-sent event; a comment line for a swap event."""
        if delta.event is not None:
            return _comment(delta.event)
        reason = _NULL if delta.finish_reason is None else b'"' + delta.finish_reason.encode() + b'"'
        logprobs = json_bytes(self._logprobs(delta.index, delta.logprobs)) if delta.logprobs else _NULL
        body = self._chunk_body(delta)
        end = self._end
        if self._continuous_usage:
            end = b'],"usage":' + json_bytes(self._tally.usage()) + b"}\n\n"
        start = self._starts[delta.index]
        return start + body + b',"logprobs":' + logprobs + b',"finish_reason":' + reason + b"}" + end

    def tail(self) -> bytes:
        """What ends a stream: the usage chunk when it was asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._prefix + b'],"usage":' + json_bytes(self._tally.usage()) + b"}\n\n" + DONE

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The reply that is not streamed."""
        merged: dict[int, Delta] = {}
        for delta in deltas:
            if delta.event is None:
                into = merged.setdefault(delta.index, Delta(delta.index))
                into.text += delta.text
                into.logprobs += delta.logprobs
                into.finish_reason = delta.finish_reason
        choices = [self._choice(merged[index]) for index in sorted(merged)]
        reply = {**self._head, "object": self.whole_object, "choices": choices, "usage": self._tally.usage()}
        return json_bytes(reply)

    def _choice(self, merged: Delta) -> dict[str, Any]:
        return {
            "index": merged.index,
            **self._content(merged.text),
            "logprobs": self._logprobs(merged.index, merged.logprobs) if merged.logprobs else None,
            "finish_reason": merged.finish_reason,
        }

    @abstractmethod
    def _choice_start(self) -> bytes:
        """What stands before the text in a chunk's choice."""

    @abstractmethod
    def _chunk_body(self, delta: Delta) -> bytes:
        """The text, and what closes the field it is in."""

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """The fields of a whole choice that hold its text."""

    @abstractmethod
    def _logprobs(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """The logprobs object of these tokens."""


class CompletionFormat(Format):
    """/v1/completions."""

    chunk_object = whole_object = "text_completion"

    def __init__(self, job: Job, tally: Tally, **options: bool) -> None:
        super().__init__(job, tally, **options)
        self._offsets = [len(choice.echo) for choice in job.choices]

    def _choice_start(self) -> bytes:
        return b'"text":'

    def _chunk_body(self, delta: Delta) -> bytes:
        return json_bytes(delta.text)

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        tokens = [self._text.token_text(token_id) for token_id, _ in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        tops = []
        for token, (_, entry) in zip(tokens, logprobs, strict=True):
            top = {self._text.token_text(token_id): _finite(logprob) for token_id, logprob in entry.top}
            tops.append({token: _finite(entry.logprob), **top})
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for _, entry in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatFormat(Format):
    """/v1/chat/completions. The first chunk of each choice carries the role."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, job: Job, tally: Tally, **options: bool) -> None:
        super().__init__(job, tally, **options)
        self._begun: set[int] = set()

    def chunk(self, delta: Delta) -> bytes:
        if delta.event is not None or delta.index in self._begun:
            return super().chunk(delta)
        self._begun.add(delta.index)
        role = b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._starts[delta.index] + role + self._end + super().chunk(delta)

    def _choice_start(self) -> bytes:
        return b'"delta":{'

    def _chunk_body(self, delta: Delta) -> bytes:
        return b'"content":' + json_bytes(delta.text) + b"}" if delta.text else b"}"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        content = []
        for token_id, entry in logprobs:
            top = [_chat_token(self._text, alternative, logprob) for alternative, logprob in entry.top]
            content.append({**_chat_token(self._text, token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}


class EventStream(Response, ABC):
    """A reply of server-sent events, ended as soon as the client disconnects."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft):  # nobody is there to be told
            await while_connected(receive, self._reply(scope, send))

    async def _reply(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._stream(scope, send)

    @abstractmethod
    async def _stream(self, scope: Scope, send: Send) -> None:
        """Send the events, and end the body."""


class DeltaStream(EventStream):
    """Streams a job's deltas, and stops generating when the client disconnects.

    `first` was already taken from `deltas`, so that errors before it could become an HTTP status.
    """

    def __init__(self, first: Delta, deltas: AsyncGenerator[Delta], chunks: Format) -> None:
        super().__init__()
        self._first = first
        self._deltas = deltas
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._deltas.aclose()  # wherever it was cancelled

    async def _stream(self, scope: Scope, send: Send) -> None:
        await send_chunk(send, self._chunks.chunk(self._first))
        try:
            async for delta in self._deltas:
                await send_chunk(send, self._chunks.chunk(delta))
            last = self._chunks.tail()
        except ColdblockError as error:
            last = _error_event(from_engine(error))
        except ApiError as error:
            last = _error_event(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def send_chunk(send: Send, body: bytes) -> None:
    """A part of a body that goes on."""
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _error_event(error: ApiError) -> bytes:
    return b"data: " + json_bytes(error.body()) + b"\n\n"


def _comment(event: SwapEvent) -> bytes:
    """A swap event as a comment line, which every client of server-sent events skips."""
    return (
        f": swap {event.phase} request={event.request_id} reason={event.reason} blocks={event.blocks} "
        f"bytes={event.bytes} seconds={event.seconds:.6f}\n\n"
    ).encode()


def _chat_token(text: ModelText, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": text.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(text.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
