"""What every executor offers the engine: run plans, report capacity.

Owns: the `Executor` protocol. Does not know: requests, scheduling, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..control.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes the executor settled on at start. `block_bytes`: one block across all layers, K, V and scales."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_bytes: int


class Executor(Protocol):
    """Runs one step at a time. `begin_step` starts the plan's copies and compute; `complete_step` awaits the compute.

    Copies may outlive their step: each is reported once, as a `MoveDone` in the result of the step in which it was
    found complete. A plan without chunks is legal and only moves or polls.
    """

    capacity: Capacity

    def begin_step(self, plan: StepPlan) -> None: ...

    def complete_step(self) -> StepResult: ...

    def close(self) -> None: ...
