"""Child processes that never outlive us: start, wait, stop within a bounded time.

Owns: the processes it starts and what happens to them when we end, by whatever means.
Does not know: what the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ..settings import EXIT_INTERRUPTED, EXIT_OK

Result = TypeVar("Result")

STOP_GRACE_S = 15.0  # the engine lets open requests finish for 10 s
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def own_command(*arguments: str) -> list[str]:
    """The command line of one of our own subcommands, run by this Python.

    -P keeps the current folder off sys.path, where a file of the user's could stand in for a library.
    """
    return [sys.executable, "-P", "-m", "coldblock", *arguments]


async def start(command: Sequence[str], *, env: Mapping[str, str] | None = None, output: int | None = None) -> Process:
    """Start `command` in a session of its own: a terminal's Ctrl-C reaches us alone, and we decide the order.

    `env` is added to our own environment; `output` is a file descriptor for stdout and stderr, ours if absent.
    Call it from the main thread: the child is tied to the thread that forks.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()),
    )


async def stop(process: Process, grace_s: float = STOP_GRACE_S) -> int:
    """End the child and everything in its session: SIGTERM, then SIGKILL after `grace_s` or when we are cancelled."""
    try:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), grace_s)
    except (ProcessLookupError, TimeoutError):
        pass  # it is gone already, or it is killed below
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    return await process.wait()


async def until_ready(process: Process, ready: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `ready`, or None when the child ended first. Raises what `ready` raises."""
    waiting, ended = asyncio.create_task(ready), asyncio.create_task(process.wait())
    try:
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        ended.cancel()
        await asyncio.gather(waiting, ended, return_exceptions=True)


def describe_exit(code: int) -> str:
    """What an exit code says: "exit code 3", or "killed by SIGKILL" for -9."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def run_until_signal(work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `work` and return its exit code. SIGINT, SIGTERM and SIGHUP cancel it, so that it cleans up.

    A further signal cancels again, which cuts a graceful stop short. Returns 0 after SIGTERM or SIGHUP, 130 after
    Ctrl-C.
    """
    caught: list[int] = []

    async def cancellable() -> int:
        task = asyncio.ensure_future(work())
        loop = asyncio.get_running_loop()

        def interrupt(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, interrupt, number)
        try:
            return await task
        except asyncio.CancelledError:
            if not caught:
                raise
            return EXIT_INTERRUPTED if caught[0] == signal.SIGINT else EXIT_OK

    return asyncio.run(cancellable())


def _die_with(parent: int) -> Callable[[], None]:
    """What the child does between fork and exec: ask for SIGTERM at the death of `parent`, even by kill -9."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return prepare
