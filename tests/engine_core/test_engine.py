"""The step loop, with everything around it faked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
from coldblock.engine_core.commands import Add, Cancel, Command, Shutdown
from coldblock.engine_core.control.plan import StepPlan, StepResult
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.scheduler import Scheduler
from coldblock.engine_core.control.updates import FinishedUpdate, TokenUpdate, Update
from coldblock.engine_core.device.executor import Capacity
from coldblock.engine_core.engine import Engine
from fake_executor import FakeExecutor, expected_tokens
from scheduler_harness import VOCAB, config


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


class LoggedExecutor(FakeExecutor):
    """Notes when steps begin and when they are completed."""

    def __init__(self, steps_ahead: int) -> None:
        super().__init__(Capacity(64, 64, 1000), 16, VOCAB, steps_ahead=steps_ahead)
        self.log: list[str] = []

    def begin_step(self, plan: StepPlan) -> None:
        self.log.append(f"begin {plan.step}")
        super().begin_step(plan)

    def complete_step(self) -> StepResult:
        result = super().complete_step()
        self.log.append(f"complete {result.step}")
        return result


class ListPort:
    """Hands out `commands[n]` at the n-th take, and `Shutdown` when they are at an end; keeps all updates."""

    def __init__(self, *commands: Command) -> None:
        self._commands = [*commands, Shutdown(10.0)]
        self.told: list[Update] = []

    def take(self, wait_s: float) -> list[Command]:
        return [self._commands.pop(0)] if self._commands else []

    def updates(self, updates: list[Update]) -> None:
        self.told += updates

    def refuse(self, request_id: str, field: str, value: str, allowed: str) -> None:
        raise AssertionError(f"{request_id}: {field} is {value}")

    def report(self, scheduler: Scheduler, peer: bytes | None) -> None:
        pass


def run_engine(steps_ahead: int, *commands: Command) -> tuple[list[str], list[Update], MagicMock]:
    executor, port, meter = LoggedExecutor(steps_ahead), ListPort(*commands), MagicMock()
    Engine(Scheduler(config()), executor, port, meter).run()
    return executor.log, port.told, meter


def add(request_id: str, max_tokens: int) -> Add:
    return Add(request_id, range(20), Sampling(max_tokens=max_tokens, ignore_eos=True), 0)


@pytest.mark.parametrize(
    ("steps_ahead", "log"),
    [
        (0, ["begin 1", "complete 1", "begin 2", "complete 2", "begin 3", "complete 3"]),
        (1, ["begin 1", "begin 2", "complete 1", "begin 3", "complete 2", "complete 3"]),
    ],
)
def test_a_step_begins_before_the_one_in_flight_is_completed(steps_ahead: int, log: list[str]) -> None:
    seen, told, meter = run_engine(steps_ahead, add("a", 3))
    assert seen == log and meter.stepped.call_count == 3
    tokens = [update.token.token_id for update in told if isinstance(update, TokenUpdate)]
    assert tokens == expected_tokens(range(20), 3, VOCAB)
    assert isinstance(told[-1], FinishedUpdate) and told[-1].reason == "length"


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_step_in_flight_is_completed_though_its_only_request_was_cancelled(steps_ahead: int) -> None:
    log, told, _ = run_engine(steps_ahead, add("a", 50), add("b", 50), Cancel("a"), Cancel("b"))
    begun, completed = ([int(line.split()[1]) for line in log if line.startswith(word)] for word in ("beg", "com"))
    assert begun == completed
    assert [update.reason for update in told if isinstance(update, FinishedUpdate)] == ["abort", "abort"]
