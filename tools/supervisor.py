"""Keep two children running, an engine and its frontend: start, restart after a crash, stop.

Owns: the restart policy; every start, death and restart is said. Does not know: what the children do.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..settings import EXIT_FAILED
from .children import describe_exit, start, stop

RESTART_DELAY_S = 1.0
HEALTHY_S = 60.0  # a child that lived so long earns a restart again


@dataclass(frozen=True)
class ChildSpec:
    """One child: how to start it, and a coroutine that returns once it does its work."""

    name: str
    command: Sequence[str]
    ready: Callable[[], Awaitable[str]]
    env: Mapping[str, str] = field(default_factory=dict)


def say(line: str) -> None:
    """One line of ours among the children's."""
    print(f"coldblock serve: {line}", file=sys.stderr, flush=True)


async def supervise(engine: ChildSpec, frontend: ChildSpec) -> int:
    """Keep both running until we are cancelled or one cannot be kept; the frontend is stopped before the engine."""
    engine_task = asyncio.create_task(keep_running(engine))
    frontend_task = asyncio.create_task(keep_running(frontend))
    try:
        done, _ = await asyncio.wait({engine_task, frontend_task}, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for task in (frontend_task, engine_task):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def keep_running(spec: ChildSpec, *, restart_delay_s: float = RESTART_DELAY_S) -> int:
    """Run the child, restarting it once after a crash; returns the exit code of the crash that ended it.

    A child that never became ready is not restarted: it would fail the same way again.
    """
    may_restart = True
    while True:
        started = time.monotonic()
        process = await start(spec.command, env=spec.env)
        try:
            was_ready = await _announce_ready(spec, process)
            code = await process.wait()
        finally:
            await stop(process)
        if not was_ready:
            say(f"{spec.name} ended before it was ready ({describe_exit(code)})")
            return code if code > 0 else EXIT_FAILED
        lived = time.monotonic() - started
        if not may_restart and lived < HEALTHY_S:
            say(f"{spec.name} died again ({describe_exit(code)}) after {lived:.0f} s; giving up")
            return EXIT_FAILED
        say(f"{spec.name} died ({describe_exit(code)}); restarting it in {restart_delay_s:g} s")
        may_restart = False
        await asyncio.sleep(restart_delay_s)


async def _announce_ready(spec: ChildSpec, process: Process) -> bool:
    """Wait until the child is ready and say so; False when it ended first."""
    ready = asyncio.ensure_future(spec.ready())
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() or ready.exception() is not None:
            return False
        say(f"{spec.name} is ready: {ready.result()}")
        return True
    finally:
        ready.cancel()
        ended.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)
