"""A fake engine that publishes whatever requests a test gives it, and snapshots of that kind without an engine."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from coldblock.protocol.messages import CpuOffload, LinkUse, RequestRow, Stats, TierUse
from fake_engine import MODEL, PEER, FakeEngine

_ROW = RequestRow("req-a", PEER, "decode", 40, 12, 4, 0, 1, 0.25, 2.5, 0, ttft_s=0.5, tpot_s=0.02, peer_name="chat")


def row(request_id: str = "req-a", **changes: Any) -> RequestRow:
    """A plausible request."""
    return msgspec.structs.replace(_ROW, request_id=request_id, **changes)


def snapshot(*rows: RequestRow, **changes: Any) -> Stats:
    """A plausible snapshot of these requests."""
    stats = Stats(
        engine_id="engine-1",
        time=1000.0,
        uptime_s=75.0,
        model=MODEL,
        peers=2,
        running=sum(row.state != "swapped" for row in rows),
        waiting=0,
        swapped=sum(row.state == "swapped" for row in rows),
        gpu=TierUse(total=64, used=32, cached=16, in_flight=8, free=8, shared=4),
        cpu_offload=CpuOffload(True, 3 * 589824, 64 * 589824, 4, 3),
        step_ms=12.34,
        tokens_per_s=83.25,
        requests=rows,
        metrics=(),
        cpu=TierUse(total=64, used=3, cached=1, free=60),
        link=LinkUse(0, 0, 2.0e9, 1.0e9, 8.0e9, 1.0e10),
    )
    return msgspec.structs.replace(stats, **changes)


class ShowingEngine(FakeEngine):
    """Publishes `requests` (settable), with `changes` to the snapshot around them, twenty times a second. They age."""

    def __init__(self, *requests: RequestRow, **options: Any) -> None:
        super().__init__(**{"stats_every_s": 0.05, **options})
        self.requests = requests
        self.changes: dict[str, Any] = {}
        self._began = time.time()

    def stats(self) -> Stats:
        """What is published, and what a StatsRequest is answered with."""
        now = time.time()
        rows = (msgspec.structs.replace(row, age_s=row.age_s + now - self._began) for row in self.requests)
        return snapshot(*rows, engine_id=self.engine_id, time=now, **self.changes)
