"""Keep two children running, an engine and its frontend: start, restart after a crash, stop.

Owns: the restart policy; every start, death and restart is said. Does not know: what the children do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..logs import tell
from ..settings import EXIT_FAILED, EXIT_USAGE
from .children import STOP_GRACE_S, describe_exit, start, stop, until_ready

RESTART_DELAY_S = 1.0
HEALTHY_S = 60.0  # a child that lived so long earns a restart again


@dataclass(frozen=True)
class ChildSpec:
    """One child: how to start it, a coroutine that describes it once it works, and the seconds it gets to stop."""

    name: str
    command: Sequence[str]
    ready: Callable[[], Coroutine[Any, Any, str]]
    env: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = STOP_GRACE_S


def say(line: str) -> None:
    """One line of ours among the children's."""
    tell("coldblock serve", line)


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
            description = await until_ready(process, spec.ready())
            if description is not None:
                say(f"{spec.name} is ready: {description}")
            code = await process.wait()
        finally:
            await stop(process, spec.grace_s)
        if description is None:
            if code != EXIT_USAGE:  # then it has said in one line what is wrong
                say(f"{spec.name} ended before it was ready ({describe_exit(code)})")
            return code if code > 0 else EXIT_FAILED
        lived = time.monotonic() - started
        if not may_restart and lived < HEALTHY_S:
            say(f"{spec.name} died again ({describe_exit(code)}) after {lived:.0f} s; giving up")
            return EXIT_FAILED
        say(f"{spec.name} died ({describe_exit(code)}); restarting it in {restart_delay_s:g} s")
        may_restart = False
        await asyncio.sleep(restart_delay_s)
