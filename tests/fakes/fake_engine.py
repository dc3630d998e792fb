"""An engine that speaks the protocol and generates what a test scripted, in a thread of its own.

    with FakeEngine(tokens=lambda prompt: [5, 6, "swapped", 7]) as engine:
        client = Client(engine.endpoint)

Knows the protocol alone: no scheduler, no model.
"""

from __future__ import annotations

import dataclasses
import queue
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import zmq
from coldblock.protocol.codec import decode_from_peer, encode, pack_tokens, unpack_tokens
from coldblock.protocol.errors import ProtocolError
from coldblock.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    CpuOffload,
    Fault,
    Finished,
    Goodbye,
    Hello,
    Metric,
    ModelInfo,
    PeerMessage,
    Ping,
    Pong,
    Refused,
    RequestRow,
    Sample,
    Stats,
    StatsRequest,
    Submit,
    SwapEvent,
    TierUse,
    TokenLogprob,
    Tokens,
    TokensOut,
    Usage,
    Welcome,
)
from coldblock.protocol.sockets import TOPIC_STATS, TOPIC_SWAP, engine_router, publisher

ScriptItem = int | tuple[int, ...] | str | SwapEvent | TokensOut | Finished | Refused
"""int, tuple: tokens in one message. str: a swap event of that phase. TokensOut: sent as it is, with the request's id.
Finished: ends the request so. Refused: refuses it. Without one of these the end is "stop", at max_tokens "length"."""

Script = Callable[[list[int]], Iterable[ScriptItem]]

MODEL = ModelInfo(
    name="fake-model",
    path="/nonexistent",
    vocab_size=49152,
    max_model_len=2048,
    max_request_tokens=1024,
    eos_token_ids=(2,),
    device="cpu",
    kv_cache_dtype="fp16",
    kv_block_bytes=589824,
    block_size=16,
    num_gpu_blocks=64,
    num_cpu_blocks=64,
)

PEER = "006b8b4567"
"""The identity of a peer, as events and rows tell it."""


def swap_event(request_id: str = "", phase: Any = "swapped", **changes: Any) -> SwapEvent:
    """A plausible swap event."""
    event = SwapEvent(
        request_id, phase, "growth", 3, 3 * 589824, 0.0015, 60, 64, 3 * 589824, 2**31, time.time(), peer=PEER
    )
    return msgspec.structs.replace(event, **changes)


def usage(prompt_tokens: int = 0, completion_tokens: int = 0, **changes: Any) -> Usage:
    """Totals with nothing special about them."""
    return msgspec.structs.replace(Usage(prompt_tokens, completion_tokens, 0, 0, 0.0, 0.0, 0.01, 0.02), **changes)


@dataclasses.dataclass
class _Running:
    script: Iterator[ScriptItem]
    submit: Submit
    prompt_tokens: int
    made: int = 0
    due: float = 0.0


class FakeEngine:
    """Serves one endpoint until stopped.

    `delay_s` passes between two script items. `step_age_s` is what Pongs report; `frozen` (settable) makes the engine
    deaf and mute while its sockets stay open. `logprobs`, if set, accompanies every token. `stats_every_s`:
    how often stats are published, if at all. `received` holds every message that came in, `aborted` the ids that were
    aborted, `faults` the Faults sent.
    """

    def __init__(
        self,
        tokens: Script = lambda prompt: [10, 11, 12],
        *,
        endpoint: str | None = None,
        model: ModelInfo = MODEL,
        engine_id: str | None = None,
        version: int = PROTOCOL_VERSION,
        delay_s: float = 0.0,
        logprobs: TokenLogprob | None = None,
        metrics: tuple[Metric, ...] | None = None,
        stats_every_s: float | None = None,
    ) -> None:
        self._folder: str | None = None
        if endpoint is None:
            self._folder = tempfile.mkdtemp(prefix="fake-engine-", dir="/tmp")
            endpoint = f"ipc://{self._folder}/engine.sock"
        self.endpoint = endpoint
        self.events_endpoint = endpoint.removesuffix(".sock") + "-events.sock"
        self.model = model
        self.engine_id = engine_id or uuid.uuid4().hex
        self.version = version
        self.step_age_s = 0.0
        self.frozen = False
        self.received: list[PeerMessage] = []
        self.aborted: set[str] = set()
        self.faults: list[Fault] = []
        self._tokens = tokens
        self._delay_s = delay_s
        self._logprobs = logprobs
        self._metrics = metrics or (Metric("coldblock_requests_swapped_total", "counter", "Swaps.", (Sample(1.0),)),)
        self._stats_every_s = stats_every_s
        self._stats_at = 0.0
        self._peers: dict[bytes, str] = {}
        self._running: dict[tuple[bytes, str], _Running] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._ctx: zmq.Context[zmq.Socket[Any]] = zmq.Context()
        self._router: zmq.Socket[Any]
        self._pub: zmq.Socket[Any]
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ for the test

    def start(self) -> FakeEngine:
        self._router = engine_router(self._ctx, self.endpoint)
        self._router.setsockopt(zmq.SNDTIMEO, 2000)
        self._pub = publisher(self._ctx, self.events_endpoint)
        self._thread = threading.Thread(target=self._serve, name="fake-engine", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Go away without a word, as a killed engine does."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
            self._ctx.destroy(linger=1000)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> FakeEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, message: Any) -> None:
        """Send a message (or raw bytes) to every peer."""
        frame = message if isinstance(message, bytes) else encode(message)
        self._commands.put(lambda: [self._send_frame(peer, frame) for peer in list(self._peers)] and None)

    def publish(self, message: SwapEvent | Stats) -> None:
        """Publish on the PUB socket under the message's topic."""
        topic = TOPIC_STATS if isinstance(message, Stats) else TOPIC_SWAP
        self._commands.put(lambda: self._pub.send_multipart([topic, encode(message)]))

    def messages(self, kind: type) -> list[Any]:
        """The messages of this kind that came so far."""
        return [m for m in list(self.received) if isinstance(m, kind)]

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 10.0) -> list[Any]:
        """The messages of this kind, once there are `count` of them. Blocks: not for use inside an event loop."""
        end = time.monotonic() + timeout_s
        while True:
            found = self.messages(kind)
            if len(found) >= count:
                return found
            assert time.monotonic() < end, f"only {len(found)} of {count} {kind.__name__} came: {self.received}"
            time.sleep(0.005)

    def stats(self) -> Stats:
        """What a StatsRequest is answered with."""
        rows = tuple(
            RequestRow(
                request_id=request_id,
                peer=peer.hex(),
                state="decode",
                prompt_tokens=run.prompt_tokens,
                generated_tokens=run.made,
                gpu_blocks=1,
                cpu_blocks=0,
                swaps=0,
                stall_s=0.0,
                age_s=0.1,
                priority=run.submit.priority,
                peer_name=self._peers.get(peer, ""),
            )
            for (peer, request_id), run in self._running.items()
        )
        return Stats(
            engine_id=self.engine_id,
            time=time.time(),
            uptime_s=1.0,
            model=self.model,
            peers=len(self._peers),
            running=len(rows),
            waiting=0,
            swapped=0,
            gpu=TierUse(64, len(rows), 0, 0, 64 - len(rows)),
            cpu_offload=CpuOffload(True, 0, 2**31, 0, 0),
            step_ms=1.0,
            tokens_per_s=0.0,
            requests=rows,
            metrics=self._metrics,
        )

    # ------------------------------------------------------------ the engine's thread

    def _serve(self) -> None:
        while not self._stopping.is_set():
            while not self._commands.empty():
                self._commands.get()()
            if self.frozen:
                time.sleep(0.005)
                continue
            if self._stats_every_s is not None and time.monotonic() - self._stats_at >= self._stats_every_s:
                self._stats_at = time.monotonic()
                self._pub.send_multipart([TOPIC_STATS, encode(self.stats())])
            if self._router.poll(0 if self._has_due() else 3) and not self.frozen:
                peer, *frames = self._router.recv_multipart()
                self._receive(peer, frames[-1])
            for key in list(self._running):
                self._advance(key)

    def _has_due(self) -> bool:
        return any(run.due <= time.monotonic() for run in self._running.values())

    def _receive(self, peer: bytes, frame: bytes) -> None:
        try:
            message = decode_from_peer(frame)
        except ProtocolError as error:
            self._fault(peer, error.code, error.message)
            return
        self.received.append(message)
        if isinstance(message, Hello):
            self._on_hello(peer, message)
        elif peer not in self._peers:
            self._fault(peer, "no_hello", "say hello first")
        elif isinstance(message, Submit):
            prompt = unpack_tokens(message.prompt)
            self._running[peer, message.request_id] = _Running(iter(self._tokens(prompt)), message, len(prompt))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self._abort(peer, request_id)
        elif isinstance(message, Ping):
            self._send(peer, Pong(message.sequence, self.step_age_s))
        elif isinstance(message, StatsRequest):
            self._send(peer, self.stats())
        elif isinstance(message, Goodbye):
            for _, request_id in [key for key in self._running if key[0] == peer]:
                self._abort(peer, request_id)
            self._peers.pop(peer, None)

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self._fault(peer, "version", f"this engine speaks version {PROTOCOL_VERSION}")
            return
        self._peers[peer] = hello.name
        self._send(peer, Welcome(self.version, self.engine_id, self.model, self.events_endpoint, 10.0))

    def _abort(self, peer: bytes, request_id: str) -> None:
        run = self._running.get((peer, request_id))
        if run is not None:
            self.aborted.add(request_id)
            self._finish((peer, request_id), run, Finished("abort", usage(run.prompt_tokens, run.made)))

    def _advance(self, key: tuple[bytes, str]) -> None:
        run = self._running.get(key)
        if run is None or run.due > time.monotonic():
            return
        run.due = time.monotonic() + self._delay_s
        limit = run.submit.sampling.max_tokens
        totals = usage(run.prompt_tokens, run.made)
        if limit is not None and run.made >= limit:
            self._finish(key, run, Finished("length", totals))
            return
        item = next(run.script, Finished("stop", totals, stop_token=2))
        if isinstance(item, int):
            item = (item,)
        if isinstance(item, tuple):
            item = TokensOut("", pack_tokens(item), (self._logprobs,) * len(item) if self._logprobs else None)
        self._emit(key, run, item)

    def _emit(
        self, key: tuple[bytes, str], run: _Running, item: str | SwapEvent | TokensOut | Finished | Refused
    ) -> None:
        peer, request_id = key
        if isinstance(item, Finished):
            self._finish(key, run, item)
        elif isinstance(item, TokensOut):
            run.made += len(item.tokens) // 4
            self._send(peer, Tokens((msgspec.structs.replace(item, request_id=request_id),)))
            if item.finished is not None:
                self._running.pop(key, None)
        elif isinstance(item, Refused):
            self._send(peer, msgspec.structs.replace(item, request_id=request_id))
            self._running.pop(key, None)
        else:
            event = swap_event(phase=item) if isinstance(item, str) else item
            event = msgspec.structs.replace(event, request_id=request_id, peer=peer.hex())
            self._send(peer, event)
            self._pub.send_multipart([TOPIC_SWAP, encode(event)])

    def _finish(self, key: tuple[bytes, str], run: _Running, finished: Finished) -> None:
        self._running.pop(key, None)
        self._send(key[0], Tokens((TokensOut(key[1], b"", None, finished),)))

    def _fault(self, peer: bytes, code: str, message: str) -> None:
        fault = Fault(code, message)
        self.faults.append(fault)
        self._send(peer, fault)

    def _send(self, peer: bytes, message: Any) -> None:
        self._send_frame(peer, encode(message))

    def _send_frame(self, peer: bytes, frame: bytes) -> None:
        try:
            self._router.send_multipart([peer, frame])
        except zmq.ZMQError:  # the peer is gone, or has not read for SNDTIMEO: forget it, as an engine does
            self._peers.pop(peer, None)
            self._running = {key: run for key, run in self._running.items() if key[0] != peer}
