"""KV events as they are published and told again; what a router makes of them is what the engine holds."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq
from coldblock.engine_core import kv_feed
from coldblock.engine_core.control.tier_log import Content, Tier, TierChange
from coldblock.engine_core.control.updates import SwapUpdate
from coldblock.engine_core.ipc import IpcPort
from coldblock.engine_core.kv_feed import KVFeed, block_hash
from coldblock.protocol import kv_events, sockets
from coldblock.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from coldblock.protocol.messages import PROTOCOL_VERSION, Welcome
from fake_engine import MODEL
from scheduler_harness import Harness

PAGE = (Path(__file__).parents[2] / "docs" / "kv-events.md").read_text()
TOPIC = b"kv@host@model"
WAIT_MS = 10_000


class Publisher:
    """A PUB socket whose frames are kept. Numbers are counted from the first."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, int, EventBatch]] = []
        self.first = 0

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        topic, number, batch = frames
        if not self.sent:
            self.first = kv_events.unpack_sequence(number)
        self.sent.append((topic, kv_events.unpack_sequence(number) - self.first, kv_events.decode(batch)))

    @property
    def events(self) -> list[Any]:
        return [event for _, _, batch in self.sent for event in batch.events]


class Router:
    """A router's view of the engine: per medium, the hashes that it holds."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}

    def take(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.held[event.medium] |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.held[event.medium] -= set(event.block_hashes)
            else:
                self.held = {"GPU": set(), "CPU": set()}


class Bench:
    """A feed, what it published, and a peer at its replay endpoint."""

    def __init__(self, folder: Path, context: zmq.Context[Any]) -> None:
        endpoint = f"ipc://{folder}/replay"
        self.publisher = Publisher()
        self.feed = KVFeed(self.publisher, sockets.replay_router(context, endpoint), TOPIC, 2)  # type: ignore[arg-type]
        self.peer = context.socket(zmq.DEALER)
        self.peer.connect(endpoint)

    def ask(self, *frames: bytes) -> None:
        self.peer.send_multipart(frames)
        assert self.feed._replay.poll(WAIT_MS)
        self.feed.answer()

    def replay(self, start: int) -> list[tuple[int, EventBatch]]:
        """All that comes for a request, up to its end; numbers are counted from the first one published."""
        self.ask(b"", kv_events.pack_sequence(self.publisher.first + start))
        replies = []
        while self.peer.poll(WAIT_MS):
            empty, topic, number, batch = self.peer.recv_multipart()
            assert empty == b""
            if number == kv_events.END:
                assert (topic, batch) == (b"", b"")
                return replies
            assert topic == TOPIC
            replies.append((kv_events.unpack_sequence(number) - self.publisher.first, kv_events.decode(batch)))
        raise AssertionError("the replay has no end")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    context: zmq.Context[Any] = zmq.Context()
    yield Bench(tmp_path, context)
    context.destroy(linger=0)


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


def stored(number: int, tier: Tier = "GPU", parent: int = 0) -> TierChange:
    """A new block, told with its content; its hash is `number`."""
    tokens = array("i", [number, number + 1])
    return TierChange(True, tier, digest(number), Content(digest(parent) if parent else b"", number, tokens))


def copied(number: int, tier: Tier = "CPU") -> TierChange:
    return TierChange(True, tier, digest(number))


def removed(number: int, tier: Tier = "GPU") -> TierChange:
    return TierChange(False, tier, digest(number))


def test_an_engine_begins_with_nothing(bench: Bench) -> None:
    ((topic, number, batch),) = bench.publisher.sent
    assert (topic, number, batch.events) == (TOPIC, 0, [AllBlocksCleared()])


def test_a_steps_changes_are_one_batch_and_chains_go_together(bench: Bench) -> None:
    bench.feed.tell([stored(1), stored(2, parent=1), stored(3, parent=2), stored(8), removed(3), removed(8)])
    bench.feed.tell([stored(9, parent=2)])
    _, (_, first, batch), (_, second, then) = bench.publisher.sent
    assert (first, second) == (1, 2)
    assert batch.events == [
        BlockStored([1, 2, 3], None, [1, 2, 2, 3, 3, 4], 2, None, "GPU"),
        BlockStored([8], None, [8, 9], 2, None, "GPU"),
        BlockRemoved([3, 8], "GPU"),
    ]
    assert then.events == [BlockStored([9], 2, [9, 10], 2, None, "GPU")]


def test_a_swap_out_is_stored_in_the_one_tier_and_removed_from_the_other(bench: Bench) -> None:
    bench.feed.tell([stored(1), stored(2, parent=1)])
    bench.feed.tell([copied(1), copied(2), removed(2), removed(1)])
    bench.feed.tell([copied(1, "GPU")])
    assert bench.publisher.events[2:] == [
        BlockStored([1, 2], None, [1, 2, 2, 3], 2, None, "CPU"),
        BlockRemoved([2, 1], "GPU"),
        BlockStored([1], None, [1, 2], 2, None, "GPU"),
    ]


def test_a_hash_is_the_digests_first_eight_bytes() -> None:
    assert block_hash(bytes(range(250, 256)) + bytes(10)) == 0xFAFBFCFDFEFF0000


# ---------------------------------------------------------------- replay


def test_a_replay_is_what_was_published_from_its_start_on(bench: Bench) -> None:
    for number in range(1, 5):
        bench.feed.tell([stored(number)])
    published = [(number, batch) for _, number, batch in bench.publisher.sent]
    for start in range(6):
        assert bench.replay(start) == published[start:]


@pytest.mark.parametrize("limit", [("MOST_KEPT", 2), ("MOST_KEPT_BYTES", 100)])
def test_what_is_too_old_is_told_as_the_whole_state(
    limit: tuple[str, int], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_feed, *limit)
    bench.feed.tell([stored(1), stored(2, parent=1), stored(3)])
    bench.feed.tell([copied(2), removed(2), removed(1)])
    bench.feed.tell([stored(1)])
    bench.feed.tell([copied(1), removed(3)])
    assert len(bench.feed._kept) < 3
    ((number, batch),) = bench.replay(1)
    assert number == 4 and batch.events == [
        AllBlocksCleared(),
        BlockStored([1], None, [1, 2], 2, None, "GPU"),
        BlockStored([1], None, [1, 2], 2, None, "CPU"),
        BlockStored([2], 1, [2, 3], 2, None, "CPU"),
    ]
    assert bench.replay(4) == [(4, bench.publisher.sent[4][2])]


@pytest.mark.parametrize("start", [-1, 3])
def test_what_was_never_told_is_answered_with_the_state_too(start: int, bench: Bench) -> None:
    bench.feed.tell([stored(1)])
    assert bench.replay(2) == []
    ((number, batch),) = bench.replay(start)
    assert number == 1 and batch.events[0] == AllBlocksCleared() and len(batch.events) == 2


def test_a_restarted_engine_uses_no_number_again(bench: Bench) -> None:
    for number in range(1, 100):
        bench.feed.tell([stored(number)])
    again = Publisher()
    KVFeed(again, bench.feed._replay, TOPIC, 2)  # type: ignore[arg-type]
    assert again.first > bench.publisher.first + 99


def test_a_large_state_comes_in_parts_up_to_the_last_number(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "STATE_EVENTS", 10)
    bench.feed.tell([stored(number) for number in range(1, 37)])
    replies = bench.replay(-bench.publisher.first)
    assert [number for number, _ in replies] == [-2, -1, 0, 1]
    router = Router()
    for _, batch in replies:
        router.take(batch)
    assert router.held == {"GPU": set(range(1, 37)), "CPU": set()}


@pytest.mark.parametrize("frames", [(b"",), (b"x", bytes(8)), (b"", bytes(7)), (b"", bytes(8), b""), (bytes(8),)])
def test_what_is_no_request_is_ignored(frames: tuple[bytes, ...], bench: Bench, caplog: Any) -> None:
    bench.ask(*frames)
    assert "ignored: a" in caplog.text
    assert bench.replay(1) == []


def test_a_flood_of_what_is_no_request_does_not_fill_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        bench.ask(b"x")
    assert len(caplog.messages) == 1


def test_a_replay_that_nobody_reads_ends_and_nobody_waits(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1, 2000):
        bench.feed.tell([stored(number)])
    for _ in range(40):
        bench.ask(b"", kv_events.pack_sequence(bench.publisher.first))
    assert "broke off" in caplog.text


# ---------------------------------------------------------------- on the sockets


@pytest.fixture
def port(tmp_path: Path) -> Iterator[IpcPort]:
    port = IpcPort(
        f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/v", peer_timeout_s=60.0, replay_endpoint=f"ipc://{tmp_path}/r"
    )
    welcome = Welcome(PROTOCOL_VERSION, "id", MODEL, f"ipc://{tmp_path}/v", 60.0)
    port.start(welcome, lambda scheduler, peers: pytest.fail("nobody asked"), lambda: 0.0)
    yield port
    port.close()


def test_the_example_of_the_page_holds_what_the_engine_told(port: IpcPort, tmp_path: Path) -> None:
    """It begins late, so it must ask for what it missed."""
    port.tier_changes([stored(1), stored(2, parent=1), stored(3), stored(4)])
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    argv = [sys.executable, "-c", code, f"ipc://{tmp_path}/v", f"ipc://{tmp_path}/r"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as example:
        assert example.stdout is not None
        shown: list[str] = []
        reader = threading.Thread(target=lambda: shown.extend(iter(example.stdout.readline, "")))  # type: ignore[union-attr]
        reader.start()
        try:
            for number in range(5, 500):
                port.tier_changes([copied(number - 1), removed(number - 1), stored(number)])
                if "GPU 4, CPU 20\n" in shown:
                    break
                time.sleep(0.05)
        finally:
            example.kill()
            reader.join()
    firsts = [int(line.rpartition(" ")[2]) for line in shown]
    assert all(line.startswith("GPU 4, CPU ") for line in shown) and "GPU 4, CPU 20\n" in shown
    assert firsts == sorted(set(firsts))


def test_subscribers_of_one_topic_hear_nothing_of_the_others(port: IpcPort, tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    topics = (sockets.TOPIC_SWAP, kv_events.TOPIC_PREFIX)
    swaps, router = (sockets.subscriber(context, f"ipc://{tmp_path}/v", [topic]) for topic in topics)
    number = 0
    while not (swaps.poll(20) and router.poll(20)):
        port.updates([SwapUpdate("", "copied_out", "write_behind", 1, 1000, 0.1, 3, 1000)])
        port.tier_changes([stored(number := number + 1)])
    for subscriber, topic, frames in (
        (swaps, b"swap", 2),
        (router, f"kv@{socket.gethostname()}@fake-model".encode(), 3),
    ):
        while subscriber.poll(50):
            received = subscriber.recv_multipart()
            assert (received[0], len(received)) == (topic, frames)
    context.destroy(linger=0)


# ---------------------------------------------------------------- what a router makes of it


@pytest.mark.parametrize("seed", range(4))
def test_a_router_holds_what_the_index_says_is_in_each_tier(
    seed: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tiers, shared prefixes, late and failing copies, aborts. Compared after every step, and by a late comer."""
    monkeypatch.setattr(kv_feed, "MOST_KEPT", 50)
    rng, router = random.Random(seed), Router()
    harness = Harness(
        num_gpu_blocks=12,
        num_cpu_blocks=16,
        prefix_cache=True,
        write_behind_above=0.5,
        steps_ahead=seed % 2,
        delay=lambda move: rng.randrange(4),
        fails=lambda move: rng.random() < 0.1,
    )
    seen, told = 0, 0
    monkeypatch.setattr(harness.told, "take", bench.feed.tell)
    monkeypatch.setattr(harness.told, "check", lambda index: None)
    for added in range(80):
        prefix = [rng.randrange(3)] * rng.randrange(16, 80)
        harness.add(f"r{added}", [*prefix, added], rng.randrange(1, 60))
        for _ in range(rng.randrange(12)):
            if harness.scheduler.has_work():
                harness.step()
            if rng.random() < 0.05:
                harness.abort(f"r{rng.randrange(added + 1)}")
            harness.check()
            for _, _, batch in bench.publisher.sent[seen:]:
                router.take(batch)
                told += len(batch.events)
            seen = len(bench.publisher.sent)
            assert router.held == held(harness)
    harness.run()
    counters = harness.scheduler.counters
    assert counters.requests_resumed > 5 and counters.offload_failed and counters.finished["abort"] and told > 150
    late = Router()
    for _, batch in bench.replay(-bench.publisher.first):
        late.take(batch)
    assert late.held == held(harness) and late.held["CPU"]


def held(harness: Harness) -> dict[str, set[int]]:
    """What is where, by the engine's own index."""
    named = harness.scheduler._tiers.index._block_of.items()
    return {
        "GPU": {block_hash(digest) for digest, block in named if block.readable},
        "CPU": {block_hash(digest) for digest, block in named if block.copied},
    }
