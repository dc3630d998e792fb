"""The error that a command shows to its user as one line.

Owns: `ToolError`. Does not know: which command raised it.
"""

from __future__ import annotations


class ToolError(Exception):
    """Something a user can act on: the message says what happened and what to do."""
