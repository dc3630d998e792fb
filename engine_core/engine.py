"""The step loop: commands in, one plan run, updates out.

Owns: the order of a step, and the end of the engine. Does not know: sockets (`ipc`), tensors (behind `Executor`), or
why a plan is what it is (`control`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from .commands import Add, Cancel, Command, Report, Shutdown
from .control.scheduler import Refusal, Scheduler
from .control.updates import Update
from .device.executor import Executor

log = logging.getLogger(__name__)

IDLE_S = 0.5  # an idle loop turns twice a second, so that a watcher can tell idle from stuck


class Port(Protocol):
    """The engine's only door: where commands come from and where everything it says goes."""

    def take(self, wait_s: float) -> list[Command]:
        """The commands that have arrived; waits up to `wait_s` seconds for the first."""

    def updates(self, updates: list[Update]) -> None: ...

    def refuse(self, request_id: str, field: str, value: str, allowed: str) -> None: ...

    def report(self, scheduler: Scheduler, peer: bytes | None) -> None:
        """Send the engine's state to one peer, or publish it."""


class StepMeter(Protocol):
    """Told about every step, for the metrics."""

    def arrived(self, request_id: str, now: float) -> None: ...

    def stepped(self, updates: list[Update], seconds: float, executor_s: float, now: float) -> None:
        """A step took `seconds`, `executor_s` of them in the executor."""


class Engine:
    """Runs requests until told to stop. One instance, one thread; `turned_at` may be read from any."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        port: Port,
        meter: StepMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.port = port
        self.meter = meter
        self.clock = clock
        self.turned_at = clock()
        self._reported_at = 0.0
        self._stop_at: float | None = None

    def run(self) -> None:
        """Step until `Shutdown` has been met. What is still open then is aborted, and its owner told."""
        while not self._stopped():
            self.turned_at = self.clock()
            busy = self.step()
            self._report_when_due()
            for command in self.port.take(0.0 if busy else IDLE_S):
                self._obey(command)
        for row in list(self.scheduler.requests()):
            self.scheduler.abort(row.request_id)
        self.port.updates(self.scheduler.drain())

    def step(self) -> bool:
        """Plan, run, apply, tell. False when there was nothing to run."""
        started = self.clock()
        executor_s = 0.0
        plan = self.scheduler.plan()
        if plan is not None:
            self.executor.begin_step(plan)
            result = self.executor.complete_step()
            self.scheduler.apply(result)
            executor_s = result.seconds
        updates = self.scheduler.drain()
        if updates:
            self.port.updates(updates)
        if plan is not None or updates:
            now = self.clock()
            self.meter.stepped(updates, now - started, executor_s, now)
        return plan is not None

    def _obey(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Cancel(request_id):
                self.scheduler.abort(request_id)
            case Report(peer):
                self.port.report(self.scheduler, peer)
            case Shutdown(drain_s):
                log.info("shutting down: up to %.0f s for %d open requests", drain_s, len(self.scheduler.requests()))
                stop_at = self.clock() + drain_s  # a second signal does not give more time
                self._stop_at = stop_at if self._stop_at is None else min(self._stop_at, stop_at)

    def _add(self, request: Add) -> None:
        if self._stop_at is not None:
            self.port.refuse(
                request.request_id, "engine", "shutting down", "another engine, or this one once restarted"
            )
            return
        try:
            self.scheduler.add(request.request_id, request.prompt, request.sampling, request.priority)
            self.meter.arrived(request.request_id, self.clock())
        except Refusal as refusal:
            self.port.refuse(request.request_id, refusal.field, refusal.value, refusal.allowed)

    def _report_when_due(self) -> None:
        if self.turned_at - self._reported_at >= IDLE_S:
            self._reported_at = self.turned_at
            self.port.report(self.scheduler, None)

    def _stopped(self) -> bool:
        if self._stop_at is None:
            return False
        return not self.scheduler.has_work() or self.clock() >= self._stop_at
