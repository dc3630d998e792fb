"""The step loop: commands in, one plan run, updates out.

Where the executor works ahead, the next plan is made and begun before the step in flight is completed, so that the
device goes from one step to the next without waiting for the host.

Owns: the order of a step, and the end of the engine. Does not know: sockets (`ipc`), tensors (behind `Executor`), or
why a plan is what it is (`control`).
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from typing import Protocol

from .commands import Add, Cancel, Command, Report, Shutdown
from .control.scheduler import Refusal, Scheduler
from .control.tier_log import TierChange
from .control.updates import Update
from .device.executor import Executor

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 2e-4  # Python's own 5 ms are several steps: so long could the socket thread hold up the loop
IDLE_S = 0.5  # an idle loop turns twice a second, so that a watcher can tell idle from stuck


class Port(Protocol):
    """The engine's only door: where commands come from and where everything it says goes."""

    def take(self, wait_s: float) -> list[Command]:
        """The commands that have arrived; waits up to `wait_s` seconds for the first."""

    def updates(self, updates: list[Update]) -> None: ...

    def tier_changes(self, changes: list[TierChange]) -> None: ...

    def refuse(self, request_id: str, field: str, value: str, allowed: str) -> None: ...

    def report(self, scheduler: Scheduler, peer: bytes | None) -> None:
        """Send the engine's state to one peer, or publish it."""


class StepMeter(Protocol):
    """Told about everything that the metrics count."""

    def arrived(self, request_id: str, now: float) -> None: ...

    def updated(self, updates: list[Update], now: float) -> None: ...

    def stepped(self, seconds: float, executor_s: float) -> None:
        """A turn of the loop that completed a step took `seconds`; the executor spent `executor_s` on the step."""


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
        self._in_flight = 0  # steps begun and not completed
        self._reported_at = 0.0
        self._stop_at: float | None = None

    def run(self) -> None:
        """Step until `Shutdown` has been met. What is still open then is aborted, and its owner told."""
        gc.collect()
        gc.freeze()  # what was loaded stays: a later collection that looks through it would take as long as many steps
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        while not self._stopped():
            self.turned_at = self.clock()
            busy = self.step()
            self._report_when_due()
            for command in self.port.take(0.0 if busy else IDLE_S):
                self._obey(command)
        for row in list(self.scheduler.requests()):
            self.scheduler.abort(row.request_id)
        self._tell()

    def step(self) -> bool:
        """Begin the next step, complete the oldest unless it may stay in flight, tell. False: nothing was to do."""
        started = self.clock()
        result = None
        plan = self.scheduler.plan()
        if plan is not None:
            self.executor.begin_step(plan)
            self._in_flight += 1
        if self._in_flight > (0 if plan is None else self.executor.steps_ahead):
            result = self.executor.complete_step()
            self._in_flight -= 1
            self.scheduler.apply(result)
        self._tell()
        if result is not None:
            self.meter.stepped(self.clock() - started, result.seconds)
        return plan is not None or result is not None

    def _tell(self) -> None:
        """Send what happened since the last call."""
        updates = self.scheduler.drain()
        if updates:
            self.port.updates(updates)
            self.meter.updated(updates, self.clock())
        changes = self.scheduler.drain_tier_changes()
        if changes:
            self.port.tier_changes(changes)

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
