"""Coldblock: an LLM serving engine for GPUs too small for their load.

`Client` and `AsyncClient` talk to a running engine; the `coldblock` command starts one.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .protocol.client import AsyncClient, Client

try:
    __version__ = version("coldblock")
except PackageNotFoundError:  # used from a folder that was never installed
    __version__ = "0+unknown"

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the client only when it is asked for, so that `coldblock --version` opens no library."""
    if name in ("AsyncClient", "Client"):
        from .protocol import client

        return getattr(client, name)
    raise AttributeError(f"module 'coldblock' has no attribute {name!r}")
