"""The engine-wide id of a request: whose it is, and its peer's own id for it.

Owns: how these are joined and split. Does not know: peers.
"""

from __future__ import annotations


def join_id(peer: bytes, session: int, own_id: str) -> str:
    """The engine-wide id of a peer's request: no two requests ever share one, whatever ids a peer uses again."""
    return f"{peer.hex()}/{session}/{own_id}"


def split_id(request_id: str) -> tuple[str, str]:
    """The peer's identity as it is shown, and its own id. Of nobody's request, "", both are empty."""
    peer, _, own_id = request_id.split("/", 2) if request_id else ("", "", "")
    return peer, own_id
