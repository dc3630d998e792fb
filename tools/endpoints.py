"""Endpoints that a user names: checked with the other settings, before anything is started.

Owns: `usable_endpoint`. Does not know: which command asks, or whether an engine is there.
"""

from __future__ import annotations

from ..protocol.errors import ColdblockError
from ..protocol.sockets import CurveKeys, check_endpoint


def usable_endpoint(endpoint: str | None) -> str | None:
    """The endpoint itself. Raises the ValueError of a settings' validator when no socket can be made for it."""
    if endpoint is not None:
        try:
            check_endpoint(endpoint, CurveKeys.from_environment())
        except ColdblockError as error:
            raise ValueError(str(error)) from error
    return endpoint
