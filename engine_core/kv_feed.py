"""KV events as an engine tells them: numbered, published, kept for replay.

Owns: the sequence, what is kept of it, what each tier holds by all that was told. Does not know: why blocks come and
go, or threads; it lives on the socket thread, which does all encoding.

A block's hash is the first 8 bytes of its chain digest, as a big-endian integer. Numbers begin with the time of the
start, so that no engine uses those of an earlier one at its endpoint. What is kept is bounded. To whoever asks for what
is not kept any more, or for what there is not, the whole state is told instead: it begins with AllBlocksCleared, its
last number is the last one published, and what is published next goes on from it. So nobody has a gap without knowing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import zmq

from ..protocol import kv_events
from ..protocol.errors import ProtocolError
from ..protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from .control.tier_log import Content, Tier, TierChange

log = logging.getLogger(__name__)

MOST_KEPT = 9_000  # batches; a replay of all of them fits into a socket's queue
MOST_KEPT_BYTES = 64 << 20
STATE_EVENTS = 1_000  # in one batch of the whole state
WARN_EVERY_S = 10.0  # whoever sends rubbish does not fill the log with it
MOST_REPLAYS = 16  # answered at once, so that tokens do not wait behind a flood of requests

Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVFeed:
    """Publishes on `publisher`, answers on the ROUTER `replay`. The first batch is AllBlocksCleared."""

    def __init__(self, publisher: zmq.Socket[Any], replay: zmq.Socket[Any], topic: bytes, block_size: int) -> None:
        self._publisher = publisher
        self._replay = replay
        self._topic = topic
        self._block_size = block_size
        self._content: dict[bytes, Content] = {}
        self._held: dict[Tier, set[bytes]] = {"GPU": set(), "CPU": set()}
        self._next = time.time_ns() // 1000
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._warned_at = -WARN_EVERY_S
        self._publish([AllBlocksCleared()])

    def tell(self, changes: Iterable[TierChange]) -> None:
        """Publish what happened in one step, as one batch."""
        self._publish(self._events(changes))

    def answer(self) -> None:
        """Answer the replay requests that have arrived."""
        for _ in range(MOST_REPLAYS):
            try:
                identity, *frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2 or frames[0]:
                    raise ProtocolError("malformed", "a replay request is an empty frame and a sequence number")
                start = kv_events.unpack_sequence(frames[1])
            except ProtocolError as error:
                self._warn(f"ignored: {error.message}")
                continue
            self._answer(identity, start)

    def _answer(self, identity: bytes, start: int) -> None:
        """Without its end, a replay is not complete: so is one whose receiver's queue runs full."""
        first_kept = self._next - len(self._kept)
        if first_kept <= start <= self._next:
            batches = list(islice(self._kept, start - first_kept, None))
        else:
            batches = self._state()
        numbers = range(self._next - len(batches), self._next)
        replies = [(self._topic, kv_events.pack_sequence(n), b) for n, b in zip(numbers, batches, strict=True)]
        try:
            for reply in (*replies, (b"", kv_events.END, b"")):
                self._replay.send_multipart((identity, b"", *reply), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._warn(f"a replay of KV events from number {start} broke off: its receiver does not read")

    def _warn(self, text: str) -> None:
        """Log it, unless something was logged just now."""
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            log.warning("%s", text)

    def _state(self) -> list[bytes]:
        """Everything that either tier holds, parents first."""
        events: list[Event] = [AllBlocksCleared()]
        for digest, content in sorted(self._content.items(), key=lambda item: item[1].position):
            tiers = [tier for tier, held in self._held.items() if digest in held]
            events += [self._stored(tier, digest, content) for tier in tiers]
        return [_encoded(events[i : i + STATE_EVENTS]) for i in range(0, len(events), STATE_EVENTS)]

    def _publish(self, events: list[Event]) -> None:
        batch = _encoded(events)
        self._publisher.send_multipart([self._topic, kv_events.pack_sequence(self._next), batch])
        self._next += 1
        self._kept.append(batch)
        self._kept_bytes += len(batch)
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    # ------------------------------------------------------------ changes become events

    def _events(self, changes: Iterable[TierChange]) -> list[Event]:
        """The changes in order; blocks that follow one another go together."""
        events: list[Event] = []
        for change in changes:
            last = events[-1] if events else None
            event = self._arrived(change) if change.stored else self._left(change)
            if not _joined(last, event):
                events.append(event)
        return events

    def _arrived(self, change: TierChange) -> BlockStored:
        if change.content is not None:
            self._content[change.digest] = change.content
        self._held[change.tier].add(change.digest)
        return self._stored(change.tier, change.digest, self._content[change.digest])

    def _left(self, change: TierChange) -> BlockRemoved:
        self._held[change.tier].remove(change.digest)
        if not any(change.digest in held for held in self._held.values()):
            del self._content[change.digest]
        return BlockRemoved([block_hash(change.digest)], change.tier)

    def _stored(self, tier: Tier, digest: bytes, content: Content) -> BlockStored:
        parent = block_hash(content.parent) if content.parent else None
        return BlockStored([block_hash(digest)], parent, content.tokens.tolist(), self._block_size, None, tier)


def block_hash(digest: bytes) -> int:
    """The uint64 that stands for a block outside the engine."""
    return int.from_bytes(digest[:8], "big")


def _joined(last: Event | None, event: BlockStored | BlockRemoved) -> bool:
    """Make `event` part of the one before it, if it can be."""
    if isinstance(event, BlockStored):
        if not (
            isinstance(last, BlockStored)
            and last.medium == event.medium
            and last.block_hashes[-1] == event.parent_block_hash
        ):
            return False
        last.token_ids += event.token_ids
    elif not (isinstance(last, BlockRemoved) and last.medium == event.medium):
        return False
    last.block_hashes += event.block_hashes
    return True


def _encoded(events: Sequence[Event]) -> bytes:
    return kv_events.encode(EventBatch(time.time(), list(events)))
