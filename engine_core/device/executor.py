"""What every executor offers the engine: run plans, report capacity and the speed of copies.

Owns: the `Executor` protocol. Does not know: requests, scheduling, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..control.plan import StepPlan, StepResult

IDLE_COPY_WAIT_S = 0.01
"""So long may completing a step without chunks wait for a copy: there is nothing else to do."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes the executor settled on at start. `block_bytes`: one block across all layers, K, V and scales."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class LinkPeak:
    """The most bytes a second that copies between the tiers did when nothing else ran; 0 where there is no CPU tier."""

    out_bytes_per_s: float = 0.0
    in_bytes_per_s: float = 0.0


class Executor(Protocol):
    """Runs steps in the order in which they begin. `begin_step` starts a plan's copies and compute; `complete_step`
    awaits the compute of the oldest step that was begun and not completed.

    `steps_ahead`, 0 or 1: how many further steps may be begun before the oldest is completed. With 1, a plan may ask
    for tokens of the step before (`Chunk.from_previous`); its copies and its compute come after that step's work.

    Copies run beside the compute, in either direction at once; `BlockMove` says what orders them. They may outlive
    their step: each is reported once, as a `MoveDone` in the result of the step at whose completion it was found
    complete, which may be the step before its own, and in any order. A plan without chunks is legal and only moves or
    polls; completing it waits for a copy to end, up to IDLE_COPY_WAIT_S, if one runs.
    """

    capacity: Capacity
    link_peak: LinkPeak
    steps_ahead: int

    def begin_step(self, plan: StepPlan) -> None: ...

    def complete_step(self) -> StepResult: ...

    def close(self) -> None: ...
