"""The step loop, with everything around it faked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
from coldblock.engine_core.commands import Command, Shutdown
from coldblock.engine_core.engine import Engine


class Clock:
    """Seconds that pass when the loop asks its port for commands."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def endless_engine(clock: Clock, commands: dict[int, Command]) -> Engine:
    """An engine that always has work. `commands[n]` arrives with the n-th take, each a second after the last."""
    takes = 0

    def take(wait_s: float) -> Sequence[Command]:
        nonlocal takes
        clock.now += 1.0
        takes += 1
        return [commands[takes]] if takes in commands else []

    scheduler, port = MagicMock(), MagicMock()
    scheduler.has_work.return_value = True
    scheduler.requests.return_value = scheduler.drain.return_value = []
    port.take.side_effect = take
    executor: Any = MagicMock(steps_ahead=0)
    return Engine(scheduler, executor, port, MagicMock(), clock)


@pytest.mark.parametrize(
    ("commands", "ends_at"),
    [
        ({1: Shutdown(10.0)}, 111.0),
        ({1: Shutdown(10.0), 6: Shutdown(10.0)}, 111.0),
        ({1: Shutdown(10.0), 3: Shutdown(0.0)}, 103.0),
    ],
)
def test_a_second_shutdown_never_gives_more_time(commands: dict[int, Command], ends_at: float) -> None:
    clock = Clock()
    endless_engine(clock, commands).run()
    assert clock.now == ends_at
