"""Run an HTTP frontend for running engines.

Owns: the process: its port, its workers, its signals, its exit. Does not know: routes.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, parent_process
from types import FrameType
from typing import Any

import uvicorn

from ..logs import setup, tell
from ..protocol.client import AsyncClient
from ..settings import EXIT_FAILED, EXIT_OK, load
from .bounded_http import BoundedHttp
from .config import FrontendSettings
from .engines import Target
from .http import create_app
from .metrics import SHARED_FOLDER
from .server import HttpServer
from .tracing import tracer_from

PROG = "coldblock frontend"
_BACKLOG = 2048


def main(argv: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    summary = (__doc__ or "").partition("\n")[0]
    settings = load(FrontendSettings, argv, prog=PROG, summary=summary)
    setup_logs(settings)
    try:
        listener = bind(settings.host, settings.port)
    except OSError as error:
        tell(PROG, str(error.strerror), level=logging.ERROR)
        return EXIT_FAILED
    with listener:
        if settings.workers == 1:
            serve(settings, listener)
            return EXIT_OK
        return supervise(settings, listener)


def setup_logs(settings: FrontendSettings, worker: str = "") -> None:
    """Exceptions here may quote what a client sent, so their texts are withheld unless prompts may be logged."""
    setup(settings.log_level, settings.log_format, f"frontend{worker}", exception_texts=settings.log_prompts)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow. Raises OSError whose text says what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OSError(error.errno, f"--host {host}: {error.strerror}; name an address of this machine") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host} port {port}: {error.strerror}; choose another with --host and --port"
        raise OSError(error.errno, reason) from error
    return listener


def serve(settings: FrontendSettings, listener: socket.socket, worker: int = 0) -> None:
    """Run one worker in this process until a signal; open streams get `shutdown_timeout` seconds to finish."""
    clients = [AsyncClient(endpoint, name=f"frontend:{os.getpid()}") for endpoint in settings.engine]
    url = _url(listener)

    def on_ready(target: Target) -> None:
        if worker == 0:
            ready = f"{url}/v1 (model {target.name}, engine {target.engine.endpoint})"
            tell(PROG, ready, stream=sys.stdout)

    app = create_app(
        settings,
        clients,
        exporter=f"{socket.gethostname()} {url}/metrics",
        on_ready=on_ready,
        tracer=tracer_from(os.environ),
    )
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        loop="uvloop",
        ws="none",
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        log_config=None,  # its lines go where ours go
        access_log=False,  # it would log paths and queries as clients made them up; `http.Gate` logs each request
        timeout_graceful_shutdown=settings.shutdown_timeout,
        server_header=False,
    )
    server = HttpServer(config, app.state.end_streams)

    def stop(number: int, frame: FrameType | None) -> None:
        """A signal outside the server's own handling: before it, while it loads, or its repetition at a clean end."""
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[listener])


def supervise(settings: FrontendSettings, listener: socket.socket) -> int:
    """Run `settings.workers` processes on one listening socket; when one ends, all end."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(settings.model_dump(), listener, index), name=f"worker-{index}")
        for index in range(settings.workers)
    ]
    with tempfile.TemporaryDirectory(prefix="coldblock-metrics-") as folder:
        os.environ[SHARED_FOLDER] = folder
        for process in workers:
            process.start()
        return _watch(workers)


def _watch(workers: Sequence[BaseProcess]) -> int:
    """Until a signal, or until one ends."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()
        _terminate(workers)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    wait([process.sentinel for process in workers])
    if not stopping.is_set():
        tell(PROG, "a worker process ended; stopping the others", level=logging.ERROR)
        _terminate(workers)
    for process in workers:
        process.join()
    return EXIT_OK if stopping.is_set() else EXIT_FAILED


def _work(values: dict[str, Any], listener: socket.socket, index: int) -> None:
    """A worker process: serves with settings that its supervisor validated, and ends with it."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    settings = FrontendSettings.model_construct(**values)
    setup_logs(settings, f"-{index}")
    with suppress(KeyboardInterrupt, asyncio.CancelledError):
        serve(settings, listener, index)


def _follow_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _terminate(workers: Sequence[BaseProcess]) -> None:
    for process in workers:
        if process.is_alive():
            process.terminate()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
