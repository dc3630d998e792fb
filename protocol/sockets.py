"""Where the sockets are, and how each is made: endpoints, limits, access.

Owns: the runtime directory, endpoint checks, the ROUTER, DEALER, PUB and SUB factories, CURVE keys.
Does not know: messages, threads, event loops.

Nothing here grows memory without bound: every socket has high-water marks, a largest frame and a bounded LINGER. Only
this user can reach an ipc endpoint (0700 folder, 0600 socket); tcp off loopback needs CURVE keys.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.auth

from .codec import MAX_MESSAGE_BYTES
from .errors import ColdblockError

TOPIC_STATS = b"stats"
TOPIC_SWAP = b"swap"

MAX_IPC_PATH_BYTES = 107  # sun_path of Linux holds 108 with its terminating zero
MAX_TRANSPORT_BYTES = 2 * MAX_MESSAGE_BYTES  # twice: a frame a little too large still gets an answer, not a cut line
ROUTER_HWM = 1000
REPLAY_HWM = 10_000
DEALER_HWM = 1000
EVENTS_HWM = 1000
LINGER_MS = 500

SERVER_KEY_FILE = "COLDBLOCK_CURVE_SERVER_KEY_FILE"
CLIENT_KEY_FILE = "COLDBLOCK_CURVE_CLIENT_KEY_FILE"

_ENGINE_SOCKET = "engine.sock"
_EVENTS_SOCKET = "events.sock"
_REPLAY_SOCKET = "replay.sock"
_S = TypeVar("_S", bound="zmq.Socket[Any]")


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Keys of one side of an encrypted tcp connection, as Z85 text in bytes (40 characters each).

    An engine needs `server_public` and `server_secret`; a peer needs `server_public` and its own `client_public` and
    `client_secret`.
    """

    server_public: bytes
    server_secret: bytes | None = None
    client_public: bytes | None = None
    client_secret: bytes | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> CurveKeys | None:
        """Keys from the certificate files that the environment names (written by `zmq.auth.create_certificates`).

        None when no server key file is named. Raises ColdblockError when a named file cannot be used.
        """
        server_file = environment.get(SERVER_KEY_FILE)
        if not server_file:
            return None
        server_public, server_secret = _load_key_file(SERVER_KEY_FILE, server_file)
        client_file = environment.get(CLIENT_KEY_FILE)
        if not client_file:
            return cls(server_public, server_secret)
        return cls(server_public, server_secret, *_load_key_file(CLIENT_KEY_FILE, client_file))


def _load_key_file(variable: str, path: str) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ColdblockError(
            f"{variable}={path}: {error}; name a file written by zmq.auth.create_certificates"
        ) from error


# ---------------------------------------------------------------- where


def runtime_dir() -> Path:
    """The folder of this user's sockets, created with mode 0700.

    `$XDG_RUNTIME_DIR/coldblock` when that directory is usable, else `coldblock-<uid>` under the temporary directory; a
    place whose socket paths would be too long is passed over. Raises ColdblockError when the folder is not ours alone.
    """
    candidates = [Path(base) / f"coldblock-{os.getuid()}" for base in (tempfile.gettempdir(), "/tmp")]
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg and _is_usable_runtime_base(xdg):
        candidates.insert(0, Path(xdg) / "coldblock")
    fitting = [c for c in candidates if len(os.fsencode(c / _ENGINE_SOCKET)) <= MAX_IPC_PATH_BYTES]
    return _make_private(fitting[0])


def _is_usable_runtime_base(base: str) -> bool:
    try:
        info = os.stat(base)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and os.access(base, os.W_OK | os.X_OK)


def _make_private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise ColdblockError(
            f"cannot make the socket folder {folder}: {error.strerror}; set XDG_RUNTIME_DIR"
        ) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ColdblockError(
            f"{folder} must be a folder of this user with mode 0700, or others could pose as the engine: remove it, "
            "or set XDG_RUNTIME_DIR"
        )
    return folder


def default_endpoint() -> str:
    """Where an engine takes work unless told otherwise."""
    return f"ipc://{runtime_dir() / _ENGINE_SOCKET}"


def default_events_endpoint() -> str:
    """Where an engine publishes stats and swap events unless told otherwise."""
    return f"ipc://{runtime_dir() / _EVENTS_SOCKET}"


def default_replay_endpoint() -> str:
    """Where an engine tells KV events again unless told otherwise."""
    return f"ipc://{runtime_dir() / _REPLAY_SOCKET}"


def check_endpoint(endpoint: str, curve: CurveKeys | None = None) -> None:
    """Raise ColdblockError unless `endpoint` is a usable ipc:// or tcp:// address.

    tcp off loopback needs `curve`. An ipc path is at most 107 bytes long and lies in the file system, where its folder
    protects it (an abstract one, `ipc://@name`, is open to every user).
    """
    scheme, separator, address = endpoint.partition("://")
    if separator and scheme == "ipc" and address:
        _check_ipc_path(endpoint, address)
    elif separator and scheme == "tcp" and address:
        _check_tcp_address(endpoint, address, curve)
    else:
        raise ColdblockError(f"endpoint {endpoint!r} is neither ipc://PATH nor tcp://HOST:PORT")


def _check_ipc_path(endpoint: str, path: str) -> None:
    size = len(os.fsencode(path))
    if size > MAX_IPC_PATH_BYTES:
        raise ColdblockError(
            f"endpoint {endpoint}: the path is {size} bytes long, the system's limit is {MAX_IPC_PATH_BYTES}; choose a "
            "shorter path"
        )
    if path.startswith("@") or path == "*":
        raise ColdblockError(f"endpoint {endpoint}: name a file path; an abstract or random address has no owner")


def _check_tcp_address(endpoint: str, address: str, curve: CurveKeys | None) -> None:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 65536)):
        raise ColdblockError(f"endpoint {endpoint!r} is not tcp://HOST:PORT with a port from 0 to 65535")
    if curve is None and not _is_loopback(host):
        raise ColdblockError(
            f"endpoint {endpoint} can be reached from other machines: set {SERVER_KEY_FILE} (and {CLIENT_KEY_FILE} "
            "on the client's side) to encrypt it, or use ipc:// or tcp://127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------- the engine's side


def engine_router(ctx: zmq.Context[_S], endpoint: str) -> _S:
    """The bound ROUTER that takes work. Sending to a peer that is gone or full raises, never blocks with NOBLOCK.

    Raises ColdblockError, naming the endpoint, when it is in use or cannot be bound.
    """
    return _router(ctx, endpoint, ROUTER_HWM)


def replay_router(ctx: zmq.Context[_S], endpoint: str) -> _S:
    """The same for replays of KV events, which are many messages for one request."""
    return _router(ctx, endpoint, REPLAY_HWM)


def _router(ctx: zmq.Context[_S], endpoint: str, high_water_mark: int) -> _S:
    router = _limited(ctx.socket(zmq.ROUTER), high_water_mark)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return _bind(router, endpoint)


def publisher(ctx: zmq.Context[_S], endpoint: str) -> _S:
    """The bound PUB for stats and events. A subscriber that does not read loses messages and costs nothing more.

    Raises ColdblockError, naming the endpoint, when it is in use or cannot be bound.
    """
    return _bind(_limited(ctx.socket(zmq.PUB), EVENTS_HWM), endpoint)


def _bind(sock: _S, endpoint: str) -> _S:
    try:
        keys = _curve_for(endpoint)
        if keys is not None:
            _serve_curve(sock, endpoint, keys)
        if endpoint.startswith("ipc://"):
            _refuse_live_ipc(endpoint)
        sock.bind(endpoint)
        if endpoint.startswith("ipc://"):
            os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    except (zmq.ZMQError, OSError) as error:
        sock.close(linger=0)
        what_to_do = "make its folder" if error.errno == errno.ENOENT else "stop what uses it"
        raise ColdblockError(
            f"cannot bind {endpoint}: {error.strerror or error}; {what_to_do}, or choose another endpoint"
        ) from error
    except ColdblockError:
        sock.close(linger=0)
        raise
    return sock


def close_bound(sock: zmq.Socket[Any]) -> None:
    """Close a bound socket, and remove the file of an ipc:// one, which ZeroMQ would leave."""
    endpoint = sock.getsockopt_string(zmq.LAST_ENDPOINT)
    sock.close()
    if endpoint.startswith("ipc://"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def _refuse_live_ipc(endpoint: str) -> None:
    """Raise unless the path is free or a dead engine's socket: zmq would silently take the path of a live one."""
    path = endpoint.removeprefix("ipc://")
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ColdblockError(f"cannot bind {endpoint}: the path exists and is no socket; choose another endpoint")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
    raise ColdblockError(f"cannot bind {endpoint}: a running engine uses it; stop that, or choose another endpoint")


def _serve_curve(sock: zmq.Socket[Any], endpoint: str, keys: CurveKeys) -> None:
    if keys.server_secret is None:
        raise ColdblockError(f"cannot bind {endpoint}: {SERVER_KEY_FILE} must name the file with the secret key")
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret)


# ---------------------------------------------------------------- the peer's side


def peer_dealer(ctx: zmq.Context[_S], endpoint: str) -> _S:
    """A DEALER that connects, and reconnects, to an engine.

    What is sent while no engine is there waits in the bounded queue for the next one: send nothing but a Hello before
    its Welcome. (ZMQ_IMMEDIATE would refuse to queue, but also drops what a dying engine said and nobody had read.)
    Raises ColdblockError when the endpoint is not usable; an absent engine is no error.
    """
    return _connect(_limited(ctx.socket(zmq.DEALER), DEALER_HWM), endpoint)


def monitored_dealer(ctx: zmq.Context[_S], endpoint: str, events: int) -> tuple[_S, _S]:
    """A `peer_dealer`, and the socket that reports these of its events (zmq.EVENT_...) from the first connection on."""
    dealer = _limited(ctx.socket(zmq.DEALER), DEALER_HWM)
    monitor = dealer.get_monitor_socket(events)
    try:
        return _connect(dealer, endpoint), monitor
    except ColdblockError:
        monitor.close(linger=0)
        raise


def subscriber(ctx: zmq.Context[_S], endpoint: str, topics: Iterable[bytes]) -> _S:
    """A SUB for these topics. Messages are two frames: topic, message; what is not read in time is lost.

    Raises ColdblockError when the endpoint is not usable; an absent engine is no error.
    """
    sub = _limited(ctx.socket(zmq.SUB), EVENTS_HWM)
    for topic in topics:
        sub.setsockopt(zmq.SUBSCRIBE, topic)
    return _connect(sub, endpoint)


def _connect(sock: _S, endpoint: str) -> _S:
    sock.setsockopt(zmq.RECONNECT_IVL, 50)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    try:
        keys = _curve_for(endpoint)
        if keys is not None:
            _join_curve(sock, endpoint, keys)
        sock.connect(endpoint)
    except zmq.ZMQError as error:
        sock.close(linger=0)
        raise ColdblockError(f"cannot connect to {endpoint}: {error.strerror}; check the address") from error
    except ColdblockError:
        sock.close(linger=0)
        raise
    return sock


def _join_curve(sock: zmq.Socket[Any], endpoint: str, keys: CurveKeys) -> None:
    if keys.client_public is None or keys.client_secret is None:
        raise ColdblockError(f"cannot connect to {endpoint}: {CLIENT_KEY_FILE} must name the file with the secret key")
    sock.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)


# ---------------------------------------------------------------- both sides


def _curve_for(endpoint: str) -> CurveKeys | None:
    """Check the endpoint; the keys to use for it (tcp only), None for a plain connection."""
    keys = CurveKeys.from_environment() if endpoint.startswith("tcp://") else None
    check_endpoint(endpoint, keys)
    return keys


def _limited(sock: _S, high_water_mark: int) -> _S:
    sock.setsockopt(zmq.SNDHWM, high_water_mark)
    sock.setsockopt(zmq.RCVHWM, high_water_mark)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_TRANSPORT_BYTES)
    sock.setsockopt(zmq.LINGER, LINGER_MS)
    return sock
