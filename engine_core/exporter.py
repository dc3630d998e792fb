"""Who exports the engine's metrics: one exporter at a time, so that sums over all who are scraped count nothing twice.

Owns: the lease. Does not know: sockets, metrics, or what an exporter is; its name is all.

The first that asks gets it and keeps it by asking again. Another gets it when the holder has left, or has not asked for
longer than any scraper waits.
"""

from __future__ import annotations

LEASE_S = 180.0  # a scraper asks every minute or more often; one that failed twice counts as gone


class ExporterLease:
    """`holder` is the exporter's name, "" while there is none."""

    def __init__(self) -> None:
        self.holder = ""
        self._until = 0.0

    def ask(self, name: str, now: float) -> None:
        """`name` wants to export: it becomes or stays the holder, unless another is."""
        if self.holder in ("", name) or now >= self._until:
            self.holder, self._until = name, now + LEASE_S

    def leave(self, name: str) -> None:
        """`name` exports no longer."""
        if self.holder == name:
            self.holder = ""
