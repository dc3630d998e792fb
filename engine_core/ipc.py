"""The engine's sockets, on a thread of their own: bytes in, commands out; updates in, bytes out.

Owns: the ROUTERs and the PUB socket, the peers and which request is whose. Does not know: scheduling or tensors; it
meets the step loop only through two queues, so that no socket ever makes a step wait.

A peer that sends rubbish gets a `Fault`; one that reads too slowly, falls silent or leaves has its requests aborted.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import msgspec
import zmq

from ..protocol import codec, kv_events, messages, sockets
from ..protocol.errors import ProtocolError
from .commands import Add, Cancel, Command, Report, Shutdown
from .control.sampling import Sampling
from .control.tier_log import TierChange
from .control.updates import FinishedUpdate, SwapUpdate, TokenUpdate, Update
from .exporter import ExporterLease
from .kv_feed import KVFeed
from .request_ids import join_id, split_id

if TYPE_CHECKING:
    from .control.scheduler import Scheduler

log = logging.getLogger(__name__)

POLL_MS = 250
PAUSE_S = 1.0  # a longer gap between two sweeps means that this process itself stood still
MAX_BACKLOG = 8192  # messages kept for one peer beyond its socket's own queue

PeerName = Callable[[str], str]
"""What the owner of a request, by engine-wide id, calls itself; "" once it has left."""
State = Callable[[PeerName], messages.Stats]
"""A snapshot taken by the step loop; called on the socket thread, which knows the peers, it makes the message."""
Snapshot = Callable[["Scheduler", int], State]


@dataclass
class Peer:
    """One connected client, from a `Hello` to the next. `backlog`: messages its full socket queue did not take.

    `requests`: its own ids of its open requests, and the engine-wide ones. `session` is part of the latter: what an
    earlier session left behind never meets a later one. `exporter`: under which name it last asked for metrics;
    `stats_for`: the same, or "", for each of its requests for stats that was not answered yet.
    """

    identity: bytes
    name: str
    session: int
    heard_at: float
    requests: dict[str, str] = field(default_factory=dict)
    backlog: deque[bytes] = field(default_factory=deque)
    stats_for: deque[str] = field(default_factory=deque)
    exporter: str = ""


@dataclass(frozen=True, slots=True)
class _Report:
    peer: bytes | None
    state: State


@dataclass(frozen=True, slots=True)
class _Refusal:
    request_id: str
    field: str
    value: str
    allowed: str


@dataclass(frozen=True, slots=True)
class _TierChanges:
    changes: list[TierChange]


Outgoing = list[Update] | _Refusal | _Report | _TierChanges


class IpcPort:
    """The `Port` of the engine. Construction binds the endpoints; `start` begins to answer. KV events are published,
    and told again at `replay_endpoint`, if there is one.

    Raises `ColdblockError` when an endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, events_endpoint: str, *, peer_timeout_s: float, replay_endpoint: str | None = None
    ) -> None:
        self._context = zmq.Context()
        self._router = sockets.engine_router(self._context, endpoint)
        self._publisher = sockets.publisher(self._context, events_endpoint)
        self._replay = sockets.replay_router(self._context, replay_endpoint) if replay_endpoint else None
        self._peer_timeout_s = peer_timeout_s
        self._peers: dict[bytes, Peer] = {}
        self._owners: dict[str, tuple[Peer, str]] = {}  # of open requests, by engine-wide id: the peer, and its own id
        self._traces: dict[str, messages.TraceContext] = {}  # of open requests that have one, by engine-wide id
        self._sessions = itertools.count(1)
        self._lease = ExporterLease()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._outgoing: deque[Outgoing] = deque()
        self._woken = False  # a wake is on its way to the socket thread
        self._wake_address = f"inproc://wake-{id(self)}"
        self._wake_in = self._context.socket(zmq.PULL)
        self._wake_in.bind(self._wake_address)
        self._wake_out = self._context.socket(zmq.PUSH)
        self._wake_out.connect(self._wake_address)
        self._closing = False
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="coldblock-ipc", daemon=True)

    def start(self, welcome: messages.Welcome, snapshot: Snapshot, step_age: Callable[[], float]) -> None:
        """Begin to answer peers. `snapshot` runs on the engine's thread, `step_age` (seconds) on this one."""
        self._welcome = welcome
        self._model = welcome.model
        self._snapshot = snapshot
        self._step_age = step_age
        if self._replay is not None:
            topic = kv_events.topic(socket.gethostname(), welcome.model.name)
            self._feed = KVFeed(self._publisher, self._replay, topic, welcome.model.block_size)
            told_again_at = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
            log.info("KV events: %s at %s, again at %s", topic.decode(), welcome.events_endpoint, told_again_at)
        self._thread.start()

    # ------------------------------------------------------------ called by the engine's thread

    def take(self, wait_s: float) -> list[Command]:
        """The commands that have arrived; waits up to `wait_s` seconds for the first."""
        commands: list[Command] = []
        if not wait_s and self._commands.empty():
            return commands
        try:
            commands.append(self._commands.get(wait_s > 0, wait_s))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def command(self, command: Command) -> None:
        """Put a command of the process's own (a signal's) behind those of the peers. Safe from any thread."""
        self._commands.put(command)

    def updates(self, updates: list[Update]) -> None:
        """Tell the owners of these requests what happened."""
        self._send(updates)

    def tier_changes(self, changes: list[TierChange]) -> None:
        """Publish these as KV events."""
        self._send(_TierChanges(changes))

    def refuse(self, request_id: str, field: str, value: str, allowed: str) -> None:
        """Tell the owner that the request was not taken."""
        self._send(_Refusal(request_id, field, value, allowed))

    def report(self, scheduler: Scheduler, peer: bytes | None) -> None:
        """Send the engine's state to one peer, or publish it when `peer` is None."""
        self._send(_Report(peer, self._snapshot(scheduler, len(self._peers))))

    def close(self) -> None:
        """Send what is queued, then close the sockets; none of their files stays."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(timeout=5)
        self._wake_out.close()
        self._wake_in.close()
        for bound in (self._router, self._publisher, self._replay):
            if bound is not None:
                sockets.close_bound(bound)
        self._context.term()

    def _send(self, item: Outgoing) -> None:
        self._outgoing.append(item)
        self._wake()

    def _wake(self) -> None:
        """One wake is enough for all that is put out before the socket thread has taken it."""
        if not self._woken:
            self._woken = True
            self._wake_out.send(b"")

    # ------------------------------------------------------------ the socket thread

    def _run(self) -> None:
        """An engine that nobody can reach must not live on in silence: a fault here ends it."""
        try:
            self._serve()
        except Exception:
            log.exception("the socket thread failed; the engine stops")
            self.failed = True
            self._commands.put(Shutdown(0.0))

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        swept_at = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(POLL_MS))
            if self._wake_in in ready:
                self._wake_in.recv()
                self._woken = False  # before the delivery: who puts something out from now on wakes again
            self._deliver_all()
            if self._router in ready:
                self._receive()
            if self._replay in ready:
                self._feed.answer()
            now = time.monotonic()
            if now - swept_at >= POLL_MS / 1000:
                self._sweep(now, now - swept_at)
                swept_at = now
        self._deliver_all()

    def _receive(self) -> None:
        """Read what has arrived, but no more than a handful: replies must not wait behind a flood."""
        for _ in range(64):
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError("malformed", f"a message is one frame, this one had {len(frames)}")
                self._handle(identity, codec.decode_from_peer(frames[0]))
            except ProtocolError as error:
                self._write(identity, messages.Fault(error.code, error.message))

    def _handle(self, identity: bytes, message: messages.PeerMessage) -> None:
        now = time.monotonic()
        if isinstance(message, messages.Hello):
            self._greet(identity, message, now)
            return
        peer = self._peers.get(identity)
        if peer is None:
            raise ProtocolError("no_hello", "say hello first: the engine does not know this peer (any more)")
        peer.heard_at = now
        match message:
            case messages.Submit():
                self._submit(identity, peer, message)
            case messages.Abort(request_ids):
                for own_id in request_ids:
                    if request_id := peer.requests.get(own_id):
                        self._commands.put(Cancel(request_id))
            case messages.Ping(sequence):
                self._write(identity, messages.Pong(sequence, self._step_age()))
            case messages.StatsRequest(exporter):
                if exporter:
                    peer.exporter = exporter
                    self._lease.ask(exporter, now)
                peer.stats_for.append(exporter)
                self._commands.put(Report(identity))
            case messages.Goodbye():
                self._forget(identity)
            case _:
                assert_never(message)

    def _greet(self, identity: bytes, hello: messages.Hello, now: float) -> None:
        if hello.version != messages.PROTOCOL_VERSION:
            raise ProtocolError(
                "version",
                f"the peer speaks protocol version {hello.version}, this engine speaks {messages.PROTOCOL_VERSION}: "
                "install the same version of coldblock on both sides",
            )
        self._forget(identity)  # the same identity again is a peer that started anew
        self._peers[identity] = Peer(identity, hello.name, next(self._sessions), now)
        self._write(identity, self._welcome)

    def _submit(self, identity: bytes, peer: Peer, submit: messages.Submit) -> None:
        if submit.request_id in peer.requests:
            refused = messages.Refused(submit.request_id, "request_id", submit.request_id, "an id that is not in use")
            self._write(identity, refused)
            return
        prompt = codec.unpack_array(submit.prompt)
        sampling = Sampling(**msgspec.structs.asdict(submit.sampling))
        request_id = join_id(identity, peer.session, submit.request_id)
        peer.requests[submit.request_id] = request_id
        self._owners[request_id] = (peer, submit.request_id)
        if submit.trace is not None:
            self._traces[request_id] = submit.trace
        self._commands.put(Add(request_id, prompt, sampling, submit.priority))

    def _sweep(self, now: float, elapsed: float) -> None:
        """Retry full sockets, and let go of peers that have been silent too long, not counting pauses of our own."""
        pause = elapsed if elapsed > PAUSE_S else 0.0
        for identity, peer in list(self._peers.items()):
            peer.heard_at = min(now, peer.heard_at + pause)
            if peer.backlog:
                self._write_backlog(identity, peer)
            if now - peer.heard_at > self._peer_timeout_s:
                log.warning(
                    "peer %s silent for %.0f s: its %d requests are aborted",
                    peer.name,
                    now - peer.heard_at,
                    len(peer.requests),
                )
                self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        peer = self._peers.pop(identity, None)
        if peer is not None:
            for request_id in peer.requests.values():
                del self._owners[request_id]
                self._traces.pop(request_id, None)
                self._commands.put(Cancel(request_id))
            if all(other.exporter != peer.exporter for other in self._peers.values()):
                self._lease.leave(peer.exporter)

    # ------------------------------------------------------------ sending

    def _deliver_all(self) -> None:
        while self._outgoing:
            item = self._outgoing.popleft()
            match item:
                case list():
                    self._deliver(item)
                case _Refusal(request_id, field, value, allowed):
                    if owner := self._disown(request_id):
                        peer, own_id = owner
                        self._write(peer.identity, messages.Refused(own_id, field, value, allowed))
                case _Report(None, state):
                    self._publish(sockets.TOPIC_STATS, state(self._peer_name))
                case _Report(identity, state):
                    self._answer(identity, state)
                case _TierChanges(changes):
                    self._feed.tell(changes)

    def _answer(self, identity: bytes, state: State) -> None:
        """To an exporter, with the metrics only if it is the one that has them."""
        peer = self._peers.get(identity)
        if peer is None or not peer.stats_for:  # it is gone, or has said hello again since
            return
        stats = state(self._peer_name)
        if exporter := peer.stats_for.popleft():
            metrics = stats.metrics if exporter == self._lease.holder else ()
            stats = msgspec.structs.replace(stats, exporter=self._lease.holder, metrics=metrics)
        self._write(identity, stats)

    def _deliver(self, updates: list[Update]) -> None:
        """One `Tokens` a peer; a swap event goes out in its place between a request's tokens."""
        pending: defaultdict[bytes, dict[str, messages.TokensOut]] = defaultdict(dict)
        for update in updates:
            if isinstance(update, SwapUpdate):
                self._deliver_swap(update, pending)
                continue
            finished = isinstance(update, FinishedUpdate)
            owner = self._disown(update.request_id) if finished else self._owners.get(update.request_id)
            if owner is None:
                continue
            peer, own_id = owner
            outputs = pending[peer.identity]
            out = tokens_out(own_id, update)
            outputs[own_id] = _joined(outputs[own_id], out) if own_id in outputs else out
        for identity, outputs in pending.items():
            self._flush(identity, outputs)

    def _deliver_swap(self, update: SwapUpdate, pending: dict[bytes, dict[str, messages.TokensOut]]) -> None:
        """To the owner, what happens to its request; to the public, copies in the background as well."""
        event = self._swap_event(update)
        background = update.phase in ("copied_out", "copied_in")
        if not background and (owner := self._owners.get(update.request_id)):
            peer, _ = owner
            self._flush(peer.identity, pending.pop(peer.identity, {}))
            self._write(peer.identity, event)
        self._publish(sockets.TOPIC_SWAP, event)

    def _flush(self, identity: bytes, outputs: dict[str, messages.TokensOut]) -> None:
        if outputs and identity in self._peers:
            self._write(identity, messages.Tokens(tuple(outputs.values())))

    def _peer_name(self, request_id: str) -> str:
        owner = self._owners.get(request_id)
        return owner[0].name if owner else ""

    def _disown(self, request_id: str) -> tuple[Peer, str] | None:
        """The owner of a request whose last word this is."""
        owner = self._owners.pop(request_id, None)
        self._traces.pop(request_id, None)
        if owner is not None:
            peer, own_id = owner
            del peer.requests[own_id]
        return owner

    def _swap_event(self, update: SwapUpdate) -> messages.SwapEvent:
        peer, own_id = split_id(update.request_id)
        return messages.SwapEvent(
            request_id=own_id,
            phase=update.phase,
            reason=update.reason,
            blocks=update.blocks,
            bytes=update.bytes,
            seconds=update.seconds,
            gpu_used_blocks=update.gpu_used_blocks,
            gpu_total_blocks=self._model.num_gpu_blocks,
            cpu_used_bytes=update.cpu_used_bytes,
            cpu_budget_bytes=self._model.num_cpu_blocks * self._model.kv_block_bytes,
            time=time.time(),
            detail=update.detail,
            queued_s=update.queued_s,
            trace=self._traces.get(update.request_id),
            peer=peer,
        )

    def _publish(self, topic: bytes, message: messages.EngineMessage | messages.Stats) -> None:
        self._publisher.send_multipart([topic, codec.encode(message)])

    def _write(self, identity: bytes, message: messages.EngineMessage | messages.Stats) -> None:
        """Send, or keep in the peer's backlog while its queue is full. Peers that never said hello get no backlog."""
        frame = codec.encode(message)
        peer = self._peers.get(identity)
        if peer is None:
            self._try_send(identity, frame)
            return
        peer.backlog.append(frame)
        self._write_backlog(identity, peer)
        if len(peer.backlog) > MAX_BACKLOG:
            log.warning("peer %s does not read: its %d requests are aborted", peer.name, len(peer.requests))
            self._forget(identity)

    def _write_backlog(self, identity: bytes, peer: Peer) -> None:
        while peer.backlog and self._try_send(identity, peer.backlog[0]):
            peer.backlog.popleft()

    def _try_send(self, identity: bytes, frame: bytes) -> bool:
        """False while the peer's queue is full. A peer that has gone is forgotten."""
        try:
            self._router.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(identity)
        return True


def tokens_out(own_id: str, update: TokenUpdate | FinishedUpdate) -> messages.TokensOut:
    """An update of one request as it travels."""
    if isinstance(update, FinishedUpdate):
        return messages.TokensOut(own_id, b"", None, _finished(update))
    token = update.token
    if token.logprob is None:
        return messages.TokensOut(own_id, codec.pack_token(token.token_id))
    logprobs = (messages.TokenLogprob(token.logprob, token.top),)
    return messages.TokensOut(own_id, codec.pack_token(token.token_id), logprobs)


def _joined(first: messages.TokensOut, then: messages.TokensOut) -> messages.TokensOut:
    logprobs = None if first.logprobs is None else first.logprobs + (then.logprobs or ())
    return messages.TokensOut(first.request_id, first.tokens + then.tokens, logprobs, then.finished)


def _finished(update: FinishedUpdate) -> messages.Finished:
    usage = messages.Usage(
        prompt_tokens=update.prompt_tokens,
        completion_tokens=update.completion_tokens,
        cached_tokens=update.cached_tokens,
        swaps=update.swaps,
        stall_s=update.stall_s,
        queue_s=update.queue_s,
        prefill_s=update.prefill_s,
        decode_s=update.decode_s,
        moved_bytes=update.moved_bytes,
        recomputes=update.recomputes,
    )
    return messages.Finished(update.reason, usage, update.stop_token, update.error)
