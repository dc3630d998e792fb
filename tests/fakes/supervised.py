"""A program that supervises two stub children as `coldblock serve` does its engine and frontend.

Usage: supervised.py FOLDER ENGINE_CODE FRONTEND_CODE. Each code is Python run with FOLDER as its argument; a child is
ready once it made FOLDER/<name>.ready.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path

from coldblock.tools import children, supervisor


def spec(name: str, folder: Path, code: str) -> supervisor.ChildSpec:
    """A child that runs `code`."""

    async def ready() -> str:
        while not (folder / f"{name}.ready").exists():
            await asyncio.sleep(0.02)
        return "stub"

    return supervisor.ChildSpec(name, [sys.executable, "-c", code, str(folder)], ready, grace_s=1.0)


def main() -> int:
    """Supervise until a signal or a failure, with short times."""
    folder = Path(sys.argv[1])
    supervisor.keep_running = functools.partial(supervisor.keep_running, restart_delay_s=0.05)
    engine, frontend = spec("engine", folder, sys.argv[2]), spec("frontend", folder, sys.argv[3])
    return children.run_until_signal(lambda: supervisor.supervise(engine, frontend))


if __name__ == "__main__":
    raise SystemExit(main())
