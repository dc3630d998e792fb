"""Connection: a reader that fails or is flooded loses no frame and blocks no one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from coldblock.protocol import connection
from coldblock.protocol.connection import Connection
from coldblock.protocol.sockets import engine_router


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cb-") as folder:
        yield f"ipc://{folder}/engine.sock"


async def test_every_frame_arrives_though_the_reader_fails_now_and_then(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_BATCH", 7)
    seen: list[bytes] = []
    done = asyncio.Event()

    def on_frame(frame: bytes) -> None:
        seen.append(frame)
        if frame == b"499":
            done.set()
        if int(frame) % 10 == 0:
            raise RuntimeError("a fault in the reader")

    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context["exception"]))
    with zmq.Context() as ctx, engine_router(ctx, endpoint) as router:
        line = Connection(ctx, endpoint, on_frame, lambda: None)
        line.send_soon(b"one", b"two")
        assert await asyncio.to_thread(router.poll, 5000)
        peer, first = router.recv_multipart()
        assert await asyncio.to_thread(router.poll, 5000)
        assert (first, router.recv_multipart()[1]) == (b"one", b"two")
        for i in range(500):
            router.send_multipart([peer, b"%d" % i])
        await asyncio.wait_for(done.wait(), 10)
        line.close(0)
    assert seen == [b"%d" % i for i in range(500)]
    assert len(faults) == 50
