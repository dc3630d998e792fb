"""What the socket side asks of the step loop.

Owns: the commands that cross from the socket thread to the engine thread. Does not know: sockets, or how they are met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .control.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Add:
    """Serve a new request. `request_id` is unique within the engine."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    priority: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Abort a request; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """Send the engine's state to one peer."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Take no new requests, finish the open ones within `drain_s` seconds, then stop."""

    drain_s: float


Command = Add | Cancel | Report | Shutdown
