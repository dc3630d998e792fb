"""The errors a peer can meet, each saying what to do.

Owns: the exception classes of the protocol and the client library.
Does not know: sockets, messages, who raises them.
"""

from __future__ import annotations


class ColdblockError(Exception):
    """Base of every error that Coldblock raises on purpose."""


class ProtocolError(ColdblockError):
    """A message that could not be understood.

    `code` is one of "version", "malformed", "unknown", "too_large", "no_hello" (the codes of `Fault`).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EngineUnreachable(ColdblockError):
    """No engine answers, or it is stuck: nothing was sent, or no reply will come."""


class EngineDied(ColdblockError):
    """The engine went away while a request was open; its remaining tokens are lost."""


class RequestRefused(ColdblockError):
    """The engine did not take a request: which field, what it was, what is allowed."""

    def __init__(self, field: str, value: str, allowed: str) -> None:
        super().__init__(f"{field} {value} is not accepted; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class RequestFailed(ColdblockError):
    """The engine took a request and could not finish it; others are not affected."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
