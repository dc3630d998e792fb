"""Errors of the engine-core that a person must act on.

Owns: the exception types. Does not know: who raises them, or how they are shown.
"""

from __future__ import annotations

from pathlib import Path


class EngineError(Exception):
    """Something the engine cannot serve; the text says what and what to do."""


class CheckpointError(EngineError):
    """A model folder that cannot be served: which file, and what is wrong in it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class SettingError(EngineError):
    """A setting that does not go with the model or the device; `flag` is the one to change."""

    def __init__(self, flag: str, problem: str) -> None:
        super().__init__(f"{flag}: {problem}")
        self.flag = flag
        self.problem = problem


class MemoryBudgetError(SettingError):
    """Memory that does not suffice."""
