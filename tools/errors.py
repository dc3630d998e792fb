"""The error that a command shows to its user as one line, and the exit code that goes with it.

Owns: `ToolError`, `report`. Does not know: which command raised it.
"""

from __future__ import annotations

import logging

from ..logs import tell
from ..protocol.errors import ColdblockError, EngineUnreachable
from ..settings import EXIT_FAILED, EXIT_UNREACHABLE, EXIT_USAGE, UsageError


class ToolError(ColdblockError):
    """Something a user can act on: the message says what happened and what to do."""


def report(prog: str, error: ColdblockError | UsageError) -> int:
    """Show `error` as the line that a failed command ends with; returns the command's exit code."""
    tell(prog, str(error), level=logging.ERROR)
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, EngineUnreachable) else EXIT_FAILED
