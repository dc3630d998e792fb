"""The client library: submit a prompt, iterate its tokens and swap events, notice when the engine dies.

Owns: `AsyncClient`, and `Client`, which is the same for code without an event loop.
Does not know: HTTP, chat templates, how the engine works. Meaning of values is checked by the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import zmq

from .codec import decode_from_engine, decode_from_peer, encode, pack_tokens, unpack_tokens
from .connection import Connection, Subscription
from .errors import (
    ColdblockError,
    EngineDied,
    EngineUnreachable,
    ProtocolError,
    RequestFailed,
    RequestRefused,
)
from .generation import Completion, Generation, Item, Stream, TokenChunk
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineMessage,
    Fault,
    Goodbye,
    Hello,
    ModelInfo,
    Ping,
    Pong,
    Refused,
    SamplingParams,
    Stats,
    StatsRequest,
    Submit,
    SwapEvent,
    Tokens,
    TokensOut,
    TraceContext,
    Welcome,
)
from .sockets import LINGER_MS, TOPIC_STATS, TOPIC_SWAP, default_endpoint
from .text import TextStream, encode_text, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)
_T = TypeVar("_T")

__all__ = ["AsyncClient", "BlockingGeneration", "Client", "Completion", "Generation", "Item", "TokenChunk"]


class AsyncClient:
    """A connection to one engine, for use in one event loop.

    `endpoint` None is the default one. `tokenizer_path` is a folder with tokenizer.json; without it, the folder of the
    engine's model is used when text is submitted. `timeout_s` is for `ready` and `stats`. The client pings every
    `heartbeat_s`; an engine without an answer for `death_s` is dead, one whose step loop stands for `stuck_s` is stuck.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        events_endpoint: str | None = None,
        name: str = "client",
        tokenizer_path: str | None = None,
        timeout_s: float = 10.0,
        heartbeat_s: float = 1.0,
        death_s: float = 5.0,
        stuck_s: float = 30.0,
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        self._events_endpoint = events_endpoint
        self._hello = encode(Hello(PROTOCOL_VERSION, name))
        self._tokenizer_path = tokenizer_path
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._death_s = death_s
        self._stuck_s = stuck_s
        self._ctx: zmq.Context[zmq.Socket[Any]] | None = None
        self._connection: Connection | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._closed = False
        self._settled = asyncio.Event()  # there is a Welcome, or a fault that only the user can mend
        self._welcome: Welcome | None = None
        self._fault: ProtocolError | None = None
        self._pings_sent = 0
        self._pings_answered = 0
        self._step_age_s = 0.0
        self._streams: dict[str, Stream] = {}
        self._stats_waiters: deque[asyncio.Future[Stats]] = deque()
        self._subscriptions: set[Subscription] = set()
        self._tokenizers: dict[str, Tokenizer] = {}

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Open the sockets; an engine need not be there yet. Raises ColdblockError when the endpoint is not usable."""
        if self._closed:
            raise ColdblockError("this client was closed: make a new one")
        if self._connection is not None:
            return
        ctx: zmq.Context[zmq.Socket[Any]] = zmq.Context()
        try:
            self._connection = Connection(ctx, self.endpoint, self._receive, self._on_lost)
        except ColdblockError:
            ctx.term()
            raise
        self._ctx = ctx
        self._connection.send_soon(self._hello)
        self._heartbeat = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Say Goodbye (the engine then aborts our requests) and fail what is still open. Harmless when repeated."""
        self._closed = True
        if self._connection is None or self._ctx is None or self._heartbeat is None:
            return
        connection, self._connection = self._connection, None
        with contextlib.suppress(zmq.Again):
            connection.send(encode(Goodbye()))
        connection.close(LINGER_MS if self._welcome is not None else 0)
        for subscription in self._subscriptions:
            subscription.close()
        self._heartbeat.cancel()
        self._lose(ColdblockError("this client was closed while the request was open"))
        self._settled.set()
        await asyncio.gather(self._heartbeat, return_exceptions=True)
        await asyncio.to_thread(self._ctx.term)

    # ------------------------------------------------------------ the engine's state

    @property
    def model(self) -> ModelInfo | None:
        """The connected engine's model, None while there is none."""
        return self._welcome.model if self._welcome is not None else None

    @property
    def engine_id(self) -> str | None:
        """The connected engine, None while there is none. A restarted engine has another id."""
        return self._welcome.engine_id if self._welcome is not None else None

    @property
    def alive(self) -> bool:
        """Whether an engine answers and its step loop turns."""
        return self._welcome is not None and self._step_age_s < self._stuck_s

    async def ready(self, timeout_s: float | None = None) -> ModelInfo:
        """Wait for an engine. Raises EngineUnreachable after the timeout, ProtocolError when versions do not match."""
        self._line()
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit):
                while self._welcome is None:
                    await self._settled.wait()
                    self._line()
                    if self._fault is not None:
                        raise self._fault.with_traceback(None)
        except TimeoutError:
            raise EngineUnreachable(
                f"no engine answers at {self.endpoint} within {limit:g} s: start one (`coldblock engine`) or check it"
            ) from None
        return self._welcome.model

    async def stats(self, timeout_s: float | None = None, *, exporter: str = "") -> Stats:
        """The engine's state now. Raises EngineUnreachable when it does not answer in time, or dies meanwhile.

        Give the name of an `exporter` to show the metrics to a scraper: they are missing while another one has them.
        """
        self._require_engine()
        self._send(StatsRequest(exporter))
        waiter: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit):
                return await waiter
        except TimeoutError:
            raise EngineUnreachable(f"the engine at {self.endpoint} gave no stats within {limit:g} s") from None

    async def events(self) -> AsyncIterator[SwapEvent | Stats]:
        """Swap events of all requests, and stats twice a second, as the engine publishes them, until the client closes.

        Waits for an engine to learn where, unless `events_endpoint` was given. A reader that is slow misses some.
        """
        if self._events_endpoint is None:
            await self.ready()
        endpoint = self._events_endpoint or (self._welcome.events_endpoint if self._welcome is not None else "")
        self._line()
        assert self._ctx is not None
        subscription = Subscription(self._ctx, endpoint, (TOPIC_SWAP, TOPIC_STATS))
        self._subscriptions.add(subscription)
        try:
            while (frames := await subscription.receive()) is not None:
                message = _published(frames)
                if message is not None:
                    yield message
        finally:
            subscription.close()
            self._subscriptions.discard(subscription)

    # ------------------------------------------------------------ requests

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        trace: TraceContext | None = None,
    ) -> Generation:
        """Begin a request; its tokens come from the returned iterator. Its swap events will carry `trace`.

        Text is tokenized here. Raises EngineUnreachable at once when no engine is alive, ValueError for a token id
        that is no uint32, text that the tokenizer has no ids for or a `request_id` that is still open here,
        ProtocolError for values of wrong types or a prompt over the message limit, ColdblockError when text is given
        and there is no tokenizer. The engine refuses the rest: see `Generation`.
        """
        self._require_alive()
        tokenizer = await self._tokenizer(needed=isinstance(prompt, str))
        if isinstance(prompt, str):
            assert tokenizer is not None
            token_ids = encode_text(tokenizer, prompt)
        else:
            token_ids = list(prompt)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if request_id in self._streams:
            raise ValueError(f"request_id {request_id!r} is still open in this client: choose another")
        submit = Submit(request_id, pack_tokens(token_ids), sampling or SamplingParams(), priority, trace)
        self._require_alive()
        self._send(submit)
        stream = Stream(request_id, TextStream(tokenizer) if tokenizer is not None else None)
        self._streams[request_id] = stream
        return Generation(stream, token_ids, abort=self.abort, abandon=self._abandon)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its iterator ends with reason "abort". Ids that are not open here are ignored."""
        if request_id in self._streams:
            self._send_abort(request_id)

    async def _tokenizer(self, needed: bool) -> Tokenizer | None:
        """The tokenizer when it was named, is needed, or was needed before; else None."""
        path = self._tokenizer_path
        if path is None and self._welcome is not None:
            path = self._welcome.model.path
            if not needed:
                return self._tokenizers.get(path)
        if path is None:
            return None
        if path not in self._tokenizers:
            self._tokenizers[path] = await asyncio.to_thread(load_tokenizer, path)
        return self._tokenizers[path]

    def _abandon(self, stream: Stream) -> None:
        """Nobody reads this request any more. Its id stays taken until the engine has said the last word."""
        if self._streams.get(stream.request_id) is stream and not stream.abandoned:
            stream.abandoned = True
            stream.items.clear()
            stream.wake.set()
            self._send_abort(stream.request_id)

    def _send_abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineUnreachable):  # then the engine drops the request with this peer
            self._send(Abort((request_id,)))

    # ------------------------------------------------------------ sending

    def _line(self) -> Connection:
        if self._connection is None:
            state = "was closed: make a new one" if self._closed else "is not connected: call connect() first"
            raise ColdblockError(f"this client {state}")
        return self._connection

    def _require_engine(self) -> None:
        self._line()
        if self._fault is not None:
            raise self._fault.with_traceback(None)
        if self._welcome is None:
            raise EngineUnreachable(f"no engine answers at {self.endpoint}: start `coldblock engine`, or await ready()")

    def _require_alive(self) -> None:
        self._require_engine()
        if not self.alive:
            raise EngineUnreachable(
                f"the engine at {self.endpoint} is stuck: no step for {self._step_age_s:.0f} s; see its log, restart it"
            )

    def _send(self, message: Submit | Abort | Ping | StatsRequest) -> None:
        """Check the message as the engine will, then send it. Raises ProtocolError, EngineUnreachable."""
        line = self._line()
        frame = encode(message)
        decode_from_peer(frame)
        try:
            line.send(frame)
        except zmq.Again:
            raise EngineUnreachable(f"the engine at {self.endpoint} takes no messages: try again later") from None

    async def _beat(self) -> None:
        """Ping, and count what stays unanswered: counting, not clocks, so that a pause of our own kills nothing."""
        while True:
            await self._settled.wait()
            interval_s = self._heartbeat_s
            if self._welcome is not None:  # often enough for an engine that soon lets go of silent peers
                interval_s = min(interval_s, self._welcome.peer_timeout_s / 4)
            await asyncio.sleep(interval_s)
            if self._welcome is None:
                continue
            unanswered = self._pings_sent - self._pings_answered
            if unanswered >= max(2, round(self._death_s / interval_s)):
                self._rejoin(
                    EngineDied(f"the engine at {self.endpoint} left {unanswered} pings unanswered; submit again")
                )
                continue
            self._pings_sent += 1
            with contextlib.suppress(EngineUnreachable):  # an unsent ping stays unanswered
                self._send(Ping(self._pings_sent))

    # ------------------------------------------------------------ receiving

    def _receive(self, frame: bytes) -> None:
        try:
            self._dispatch(decode_from_engine(frame))
        except ProtocolError as error:
            if error.code == "unknown":
                log.warning("ignored a message from the engine at %s: %s", self.endpoint, error)
            elif self._welcome is not None:
                self._rejoin(error)
            else:  # its very Welcome: saying Hello again would only bring the same
                self._fault = error
                self._settled.set()

    def _dispatch(self, message: EngineMessage | Stats) -> None:
        match message:
            case Tokens():
                for out in message.outputs:
                    self._on_tokens(out)
            case SwapEvent():
                if stream := self._streams.get(message.request_id):
                    stream.put(message)
            case Pong():
                self._pings_answered = max(self._pings_answered, message.sequence)
                self._step_age_s = message.step_age_s
            case Refused():
                if stream := self._streams.pop(message.request_id, None):
                    stream.end(RequestRefused(message.field, message.value, message.allowed))
            case Stats():
                self._on_stats(message)
            case Welcome():
                self._on_welcome(message)
            case Fault():
                self._on_fault(message)

    def _on_tokens(self, out: TokensOut) -> None:
        stream = self._streams.get(out.request_id)
        if stream is None:
            return
        token_ids = tuple(unpack_tokens(out.tokens))
        text = stream.text.push(token_ids) if stream.text is not None else ""
        finished = out.finished
        if finished is not None and stream.text is not None:
            text += stream.text.finish()
        failed = finished is not None and finished.reason == "error"
        if token_ids or not failed:
            stream.put(TokenChunk(token_ids, out.logprobs, None if failed else finished, text))
        if finished is not None:
            del self._streams[out.request_id]
            stream.usage = finished.usage
            stream.end(RequestFailed(finished.error or "the engine gave no reason") if failed else None)

    def _on_stats(self, stats: Stats) -> None:
        if self._stats_waiters:
            waiter = self._stats_waiters.popleft()
            if not waiter.done():  # one that timed out still has its answer taken here
                waiter.set_result(stats)

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            self._refuse_version(f"the engine speaks version {welcome.version}, this client {PROTOCOL_VERSION}")
            return
        if self._welcome is not None and self._welcome.engine_id != welcome.engine_id:
            self._lose(
                EngineDied(f"the engine at {self.endpoint} was restarted while the request was open; submit again")
            )
        self._welcome = welcome
        self._fault = None
        self._pings_answered = self._pings_sent
        self._step_age_s = 0.0
        self._settled.set()

    def _on_fault(self, fault: Fault) -> None:
        if fault.code == "version":
            self._refuse_version(fault.message)
        elif fault.code == "no_hello":
            self._lose(EngineDied("the engine had forgotten this client, and aborted its requests; submit again"))
            self._line().send_soon(self._hello)
        else:  # it does not say which message; a request that was heard of is not the one
            log.error("the engine at %s could not understand a message: %s", self.endpoint, fault.message)
            for stream in [s for s in self._streams.values() if not s.started]:
                del self._streams[stream.request_id]
                stream.end(RequestFailed(f"the engine could not understand a message: {fault.message}"))

    def _refuse_version(self, what: str) -> None:
        self._fault = ProtocolError("version", f"{what}; install the same Coldblock version on both sides")
        self._lose(self._fault)
        self._settled.set()

    # ------------------------------------------------------------ losing the engine

    def _on_lost(self) -> None:
        self._fault = None
        self._lose(EngineDied(f"the connection to the engine at {self.endpoint} broke; submit again when it is back"))
        self._line().send_soon(self._hello)

    def _rejoin(self, error: ColdblockError) -> None:
        """Give up what is open, and start over on the same connection once the engine reads again."""
        self._lose(error)
        self._line().send_soon(encode(Goodbye()), self._hello)

    def _lose(self, error: ColdblockError) -> None:
        """No engine from now on: every open request ends with `error`, every wait for stats too."""
        self._welcome = None
        self._settled.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(error)
        waiters, self._stats_waiters = self._stats_waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(EngineUnreachable(f"no stats: {error}"))


def _published(frames: list[bytes]) -> SwapEvent | Stats | None:
    """The message of a publication (topic, message); None, and a line in the log, when it cannot be understood."""
    try:
        message = decode_from_engine(frames[-1])
    except ProtocolError as error:
        log.warning("ignored a publication: %s", error)
        return None
    return message if isinstance(message, SwapEvent | Stats) else None


# ---------------------------------------------------------------- without an event loop


class BlockingGeneration:
    """A `Generation` as a plain iterator. Forgetting it, or interrupting its iteration, aborts the request."""

    def __init__(self, client: Client, generation: Generation) -> None:
        self.request_id = generation.request_id
        self.prompt_token_ids = generation.prompt_token_ids
        self._client = client
        self._generation = generation

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        try:
            return self._client._call(self._generation.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None
        except KeyboardInterrupt:  # it may have come before there was anything to wait for, and to cancel
            self._generation.abandon()
            raise

    def abort(self) -> None:
        """As `Generation.abort`."""
        self._client._call(self._generation.abort())

    def result(self) -> Completion:
        """As `Generation.result`."""
        return self._client._call(self._generation.result())


class Client:
    """`AsyncClient` for plain code, with the same arguments; its event loop runs in a thread of its own.

    Use it as a context manager, or call `connect` and `close`. Any thread may use it. Not for use after a fork.
    """

    def __init__(self, endpoint: str | None = None, **options: Any) -> None:
        self._async = AsyncClient(endpoint, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """As `AsyncClient.connect`."""
        if self._loop is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="coldblock-client", daemon=True)
        self._thread.start()
        try:
            self._call(self._async.connect())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """As `AsyncClient.close`; calls of other threads end with an error."""
        if self._loop is not None:
            try:
                self._call(self._async.close())
            finally:
                self._stop()

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None:
            work.close()
            raise ColdblockError("this client is not connected: use it in a `with` statement, or call connect() first")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except FutureCancelled:
            raise ColdblockError("this client was closed during the call") from None
        except BaseException:
            future.cancel()  # an interrupt of the waiting thread; the work is over in all other cases
            raise

    @property
    def endpoint(self) -> str:
        """Where the engine is."""
        return self._async.endpoint

    @property
    def model(self) -> ModelInfo | None:
        """As `AsyncClient.model`."""
        return self._async.model

    @property
    def engine_id(self) -> str | None:
        """As `AsyncClient.engine_id`."""
        return self._async.engine_id

    @property
    def alive(self) -> bool:
        """As `AsyncClient.alive`."""
        return self._async.alive

    def ready(self, timeout_s: float | None = None) -> ModelInfo:
        """As `AsyncClient.ready`."""
        return self._call(self._async.ready(timeout_s))

    def stats(self, timeout_s: float | None = None) -> Stats:
        """As `AsyncClient.stats`."""
        return self._call(self._async.stats(timeout_s))

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> BlockingGeneration:
        """As `AsyncClient.submit`."""
        work = self._async.submit(prompt, sampling, request_id=request_id, priority=priority)
        return BlockingGeneration(self, self._call(work))

    def abort(self, request_id: str) -> None:
        """As `AsyncClient.abort`."""
        self._call(self._async.abort(request_id))

    def events(self) -> Iterator[SwapEvent | Stats]:
        """As `AsyncClient.events`."""
        events = self._async.events()
        try:
            while True:
                try:
                    yield self._call(_next(events))
                except StopAsyncIteration:
                    return
        finally:
            if self._loop is not None:
                self._call(_close(events))


async def _next(events: AsyncIterator[_T]) -> _T:
    return await events.__anext__()


async def _close(events: AsyncIterator[Any]) -> None:
    await events.aclose()  # type: ignore[attr-defined]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run until stopped, then end what is left so that no caller in another thread waits for ever."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
