"""Engines and frontends that a tool starts for its own use, and where their sockets are.

Owns: their endpoints, logs and lives. Does not know: what the tool does with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..progress import waiting
from ..protocol.client import AsyncClient
from ..protocol.messages import ModelInfo
from ..protocol.sockets import runtime_dir
from ..settings import UsageError
from .children import describe_exit, own_command, start, stop, until_ready
from .errors import ToolError

START_TIMEOUT_S = 600.0  # a large model on a slow disk
_POLL_S = 0.05
_LOG_LINES = 8
_SHOW_S = 0.5


def own_endpoints(name: str) -> tuple[str, str, str]:
    """Endpoints (requests, events, replay of KV events) in the runtime folder that no other process uses."""
    stem = f"ipc://{runtime_dir()}/{name}-{os.getpid()}"
    return f"{stem}.sock", f"{stem}-events.sock", f"{stem}-replay.sock"


def free_port(host: str, port: int) -> int:
    """`port`, or a free one when it is 0. Raises UsageError when nothing can listen there."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(*info[:3]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror}; give an address of this machine and a free port"
        ) from error


async def engine_ready(endpoint: str) -> ModelInfo:
    """Wait until the engine at `endpoint` answers; for ever, so race it against the engine's end."""
    async with AsyncClient(endpoint, name="start") as client:
        return await client.ready(timeout_s=START_TIMEOUT_S)


async def frontend_ready(host: str, port: int) -> None:
    """Wait until the frontend there is healthy, which includes its engine; for ever, so race it against its end."""
    while not await _is_healthy(host, port):
        await asyncio.sleep(_POLL_S)


async def _is_healthy(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in await reader.readline()
        finally:
            writer.close()
    except OSError:
        return False


@asynccontextmanager
async def running_engine(model: str, *flags: str) -> AsyncIterator[str]:
    """A fresh engine with these flags; yields its endpoint. Raises ToolError, with its last words, if it fails."""
    endpoint, events, _ = own_endpoints("tool")
    command = own_command("engine", model, "--endpoint", endpoint, "--events-endpoint", events, *flags)
    try:
        async with _running("engine", command, engine_ready(endpoint)):
            yield endpoint
    finally:
        for socket_file in (endpoint, events):  # ZeroMQ leaves them lying
            Path(socket_file.removeprefix("ipc://")).unlink(missing_ok=True)


@asynccontextmanager
async def running_frontend(endpoint: str, *flags: str) -> AsyncIterator[tuple[str, int]]:
    """A frontend for the engine at `endpoint`; yields its host and port."""
    host, port = "127.0.0.1", free_port("127.0.0.1", 0)
    command = own_command("frontend", "--engine", endpoint, "--host", host, "--port", str(port), *flags)
    async with _running("frontend", command, frontend_ready(host, port)):
        yield host, port


@asynccontextmanager
async def _running(name: str, command: list[str], ready: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    with tempfile.NamedTemporaryFile(prefix=f"coldblock-{name}-", suffix=".log") as log:
        process = await start(command, output=log.fileno())
        try:
            await until_ready(process, _shown(name, Path(log.name), ready))
            if process.returncode is not None:
                raise ToolError(_last_words(name, process.returncode, Path(log.name)))
            yield
        finally:
            await stop(process)


async def _shown(name: str, log: Path, ready: Coroutine[Any, Any, object]) -> None:
    """Wait for `ready`, and show that, with the last line that the process has logged."""
    task = asyncio.ensure_future(ready)
    try:
        with waiting(f"starting the {name}") as tell:
            while not (await asyncio.wait({task}, timeout=_SHOW_S))[0]:
                tell("".join(_last_lines(log, 1)))
        await task
    finally:
        task.cancel()


def _last_words(name: str, code: int, log: Path) -> str:
    head = f"the {name} ended before it was ready ({describe_exit(code)}):"
    return "\n  ".join([head, *_last_lines(log, _LOG_LINES)])


def _last_lines(log: Path, count: int) -> list[str]:
    text = ""
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-count:]
