"""Endpoints and sockets: who may reach them, what they refuse, what bounds them."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from coldblock.protocol import sockets
from coldblock.protocol.errors import ColdblockError
from coldblock.protocol.sockets import (
    CurveKeys,
    check_endpoint,
    default_endpoint,
    default_events_endpoint,
    engine_router,
    peer_dealer,
    publisher,
    runtime_dir,
    subscriber,
)

Context = zmq.Context[zmq.Socket[Any]]


@pytest.fixture
def ctx() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cb-") as folder:
        yield Path(folder)


@pytest.fixture
def temp_base(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No XDG directory, and a temporary directory of our own."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(short_dir))
    return short_dir


# ---------------------------------------------------------------- the runtime directory


def test_runtime_dir_is_under_xdg_and_private(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    folder = runtime_dir()
    assert folder == short_dir / "coldblock"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert default_endpoint() == f"ipc://{short_dir}/coldblock/engine.sock"
    assert default_events_endpoint() == f"ipc://{short_dir}/coldblock/events.sock"


def test_without_a_usable_xdg_the_temporary_directory_is_used(temp_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = temp_base / f"coldblock-{os.getuid()}"
    assert runtime_dir() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temp_base / "not there"))
    assert runtime_dir() == own


def test_a_long_temporary_directory_falls_back_to_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(long))
    assert runtime_dir() == Path(f"/tmp/coldblock-{os.getuid()}")
    check_endpoint(default_events_endpoint())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert runtime_dir() == Path(f"/tmp/coldblock-{os.getuid()}")


def test_a_folder_that_others_may_enter_is_refused(temp_base: Path) -> None:
    own = temp_base / f"coldblock-{os.getuid()}"
    own.mkdir(mode=0o755)
    own.chmod(0o755)
    with pytest.raises(ColdblockError, match=r"mode 0700.*remove it"):
        runtime_dir()


def test_a_link_in_place_of_the_folder_is_refused(temp_base: Path) -> None:
    (temp_base / "elsewhere").mkdir(mode=0o700)
    (temp_base / f"coldblock-{os.getuid()}").symlink_to(temp_base / "elsewhere")
    with pytest.raises(ColdblockError, match="mode 0700"):
        runtime_dir()


def test_a_folder_of_another_user_is_refused(temp_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.getuid() + 1
    (temp_base / f"coldblock-{other}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(ColdblockError, match="of this user"):
        runtime_dir()


# ---------------------------------------------------------------- endpoints


def test_a_long_ipc_path_of_the_user_is_refused_with_path_and_limit() -> None:
    path = "/tmp/" + "x" * 103
    check_endpoint("ipc://" + path[:107])
    with pytest.raises(ColdblockError, match=rf"{path}.*108 bytes.*107"):
        check_endpoint("ipc://" + path)
    with pytest.raises(ColdblockError, match="109 bytes"):
        check_endpoint("ipc:///tmp/" + "é" * 52)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "tcp://127.8.8.8:1", "tcp://localhost:*", "tcp://[::1]:9"]
)
def test_loopback_is_fine(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "192.168.1.5", "[::]", "eth0", "example.org", "localhost.example.org"]
)
def test_tcp_off_loopback_needs_keys(host: str, ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sockets.SERVER_KEY_FILE, raising=False)
    endpoint = f"tcp://{host}:5555"
    for use in (
        lambda: check_endpoint(endpoint),
        lambda: engine_router(ctx, endpoint),
        lambda: publisher(ctx, endpoint),
        lambda: peer_dealer(ctx, endpoint),
        lambda: subscriber(ctx, endpoint, [b""]),
    ):
        with pytest.raises(ColdblockError, match=sockets.SERVER_KEY_FILE):
            use()
    check_endpoint(endpoint, CurveKeys(b"k" * 40))


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ipc://",
        "/tmp/x",
        "http://h:1",
        "tcp://127.0.0.1",
        "tcp://:5",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:70000",
        "ipc://@open-to-all",
        "ipc://*",
    ],
)
def test_nonsense_is_refused_and_named(endpoint: str) -> None:
    with pytest.raises(ColdblockError) as caught:
        check_endpoint(endpoint)
    assert endpoint in str(caught.value)


# ---------------------------------------------------------------- binding


def test_a_live_ipc_endpoint_is_refused_and_still_works(ctx: Context, short_dir: Path) -> None:
    endpoint = f"ipc://{short_dir}/e.sock"
    router = engine_router(ctx, endpoint)
    for bind in (engine_router, publisher):
        with pytest.raises(ColdblockError, match=rf"{endpoint}: a running engine uses it"):
            bind(ctx, endpoint)
    dealer = peer_dealer(ctx, endpoint)
    assert dealer.poll(2000, zmq.POLLOUT)
    dealer.send(b"hi")
    assert router.poll(2000)
    assert router.recv_multipart()[1] == b"hi"


def test_the_socket_of_a_dead_engine_is_taken_over(ctx: Context, short_dir: Path) -> None:
    path = short_dir / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    router = engine_router(ctx, f"ipc://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    dealer = peer_dealer(ctx, f"ipc://{path}")
    assert dealer.poll(2000, zmq.POLLOUT)
    dealer.send(b"hi")
    assert router.poll(2000)


def test_a_file_that_is_no_socket_is_left_alone(ctx: Context, short_dir: Path) -> None:
    path = short_dir / "precious"
    path.write_text("data")
    with pytest.raises(ColdblockError, match="no socket"):
        engine_router(ctx, f"ipc://{path}")
    assert path.read_text() == "data"


def test_a_busy_port_is_named(ctx: Context) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ColdblockError, match=f"cannot bind {endpoint}"):
            engine_router(ctx, endpoint)


def test_a_missing_folder_is_named(ctx: Context, short_dir: Path) -> None:
    endpoint = f"ipc://{short_dir}/missing/e.sock"
    with pytest.raises(ColdblockError, match=f"cannot bind {endpoint}.*make its folder"):
        publisher(ctx, endpoint)


# ---------------------------------------------------------------- bounds


def test_every_socket_is_bounded(ctx: Context, short_dir: Path) -> None:
    work, events = f"ipc://{short_dir}/w.sock", f"ipc://{short_dir}/e.sock"
    made = [
        engine_router(ctx, work),
        publisher(ctx, events),
        peer_dealer(ctx, work),
        subscriber(ctx, events, [b"stats"]),
    ]
    for sock in made:
        assert 0 < sock.getsockopt(zmq.SNDHWM) <= 1000
        assert 0 < sock.getsockopt(zmq.RCVHWM) <= 1000
        assert sock.getsockopt(zmq.MAXMSGSIZE) == sockets.MAX_TRANSPORT_BYTES
        assert 0 <= sock.getsockopt(zmq.LINGER) <= 1000


def test_sending_to_a_peer_that_is_gone_raises(ctx: Context, short_dir: Path) -> None:
    router = engine_router(ctx, f"ipc://{short_dir}/e.sock")
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_the_queue_to_an_engine_that_is_not_there_is_bounded(ctx: Context, short_dir: Path) -> None:
    dealer = peer_dealer(ctx, f"ipc://{short_dir}/e.sock")
    with pytest.raises(zmq.Again):
        for _ in range(2 * sockets.DEALER_HWM):
            dealer.send(b"x", zmq.NOBLOCK)


def test_a_subscriber_that_does_not_read_stops_nobody(ctx: Context, short_dir: Path) -> None:
    endpoint = f"ipc://{short_dir}/e.sock"
    pub = publisher(ctx, endpoint)
    stuck = subscriber(ctx, endpoint, [b"stats"])
    reader = subscriber(ctx, endpoint, [b"swap"])
    while not reader.poll(20):
        pub.send_multipart([b"swap", b"first"], zmq.NOBLOCK)
    for _ in range(5000):
        pub.send_multipart([b"stats", bytes(1000)], zmq.NOBLOCK)
    pub.send_multipart([b"swap", b"last"], zmq.NOBLOCK)
    got = b""
    while got != b"last":
        assert reader.poll(5000)
        got = reader.recv_multipart()[1]
    assert stuck.poll(1000)


# ---------------------------------------------------------------- encryption


def make_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    server_public, server_secret = zmq.auth.create_certificates(folder, "server")
    _, client_secret = zmq.auth.create_certificates(folder, "client")
    monkeypatch.setenv(sockets.SERVER_KEY_FILE, server_secret)
    monkeypatch.setenv(sockets.CLIENT_KEY_FILE, client_secret)
    return server_public, server_secret


def exchange(ctx: Context, router: zmq.Socket[Any], dealer: zmq.Socket[Any], wait_ms: int = 3000) -> bool:
    if not dealer.poll(wait_ms, zmq.POLLOUT):
        return False
    dealer.send(b"hi")
    return bool(router.poll(wait_ms))


def test_an_encrypted_connection(ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_public, _ = make_keys(tmp_path, monkeypatch)
    router = engine_router(ctx, "tcp://0.0.0.0:*")
    port = router.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2]
    monkeypatch.setenv(sockets.SERVER_KEY_FILE, server_public)
    assert exchange(ctx, router, peer_dealer(ctx, f"tcp://127.0.0.1:{port}"))


def test_who_does_not_know_the_servers_key_gets_nothing(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path, monkeypatch)
    router = engine_router(ctx, "tcp://127.0.0.1:*")
    port = router.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2]
    other_public, _ = zmq.auth.create_certificates(tmp_path, "other")
    monkeypatch.setenv(sockets.SERVER_KEY_FILE, other_public)
    assert not exchange(ctx, router, peer_dealer(ctx, f"tcp://127.0.0.1:{port}"), wait_ms=200)
    monkeypatch.delenv(sockets.SERVER_KEY_FILE)
    assert not exchange(ctx, router, peer_dealer(ctx, f"tcp://127.0.0.1:{port}"), wait_ms=200)


def test_keys_that_are_missing_are_named(ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_public, _ = make_keys(tmp_path, monkeypatch)
    monkeypatch.setenv(sockets.SERVER_KEY_FILE, server_public)
    with pytest.raises(ColdblockError, match=f"{sockets.SERVER_KEY_FILE} must name the file with the secret key"):
        engine_router(ctx, "tcp://127.0.0.1:*")
    monkeypatch.delenv(sockets.CLIENT_KEY_FILE)
    with pytest.raises(ColdblockError, match=f"{sockets.CLIENT_KEY_FILE} must name the file with the secret key"):
        peer_dealer(ctx, "tcp://127.0.0.1:5555")
    monkeypatch.setenv(sockets.SERVER_KEY_FILE, str(tmp_path / "absent"))
    with pytest.raises(ColdblockError, match="absent"):
        peer_dealer(ctx, "tcp://127.0.0.1:5555")
