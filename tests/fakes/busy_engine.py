"""A scripted engine with as many live requests as wanted, all of which change in every snapshot, and swap.

    with BusyEngine(200) as engine:
        coldblock top --endpoint engine.endpoint

Knows the protocol alone. What it tells is made up, but adds up: blocks of rows and tiers, states and counts.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from coldblock.protocol.messages import CpuOffload, LinkUse, RequestRow, Stats, SwapEvent, TierUse
from fake_engine import MODEL, PEER, FakeEngine, swap_event

SWAP_STATES = {3: "swapping_out", 4: "swapped", 5: "swapped", 6: "swapped", 7: "swapping_in"}
PHASES = {3: "swapping_out", 4: "swapped", 7: "swapping_in", 8: "resumed"}
STEP_S = 0.5


class BusyEngine(FakeEngine):
    """A fake engine whose snapshots hold `rows` requests. Each is swapped out for some of every twelve snapshots."""

    def __init__(self, rows: int, **options: Any) -> None:
        blocks = 40 * rows + 1
        model = msgspec.structs.replace(MODEL, num_gpu_blocks=blocks, num_cpu_blocks=blocks)
        super().__init__(model=model, **{"stats_every_s": STEP_S, **options})
        self.rows = rows
        self.tick = 0
        self._began = time.time()

    def stats(self) -> Stats:
        """The next snapshot; its swaps are published with it."""
        self.tick += 1
        requests = tuple(self._row(i) for i in range(self.rows))
        if self._thread is not None:
            for event in self._events():
                self.publish(event)
        counts = {state: sum(row.state == state for row in requests) for state in ("waiting", "swapped")}
        gpu, cpu = (sum(getattr(row, f"{tier}_blocks") for row in requests) for tier in ("gpu", "cpu"))
        total, rate = self.model.num_gpu_blocks, 1e9 * (1 + self.tick % 7)
        return msgspec.structs.replace(
            super().stats(),
            uptime_s=time.time() - self._began,
            running=self.rows - counts["waiting"] - counts["swapped"],
            waiting=counts["waiting"],
            swapped=counts["swapped"],
            gpu=TierUse(total, gpu, (total - gpu) // 2, 0, total - gpu - (total - gpu) // 2, gpu // 5),
            cpu=TierUse(total, cpu, (total - cpu) // 3, 0, total - cpu - (total - cpu) // 3, cpu // 9),
            cpu_offload=CpuOffload(True, cpu * 589824, total * 589824, 4, cpu),
            link=LinkUse(0, 0, rate, rate / 2, 1.2e10, 1.1e10),
            step_ms=10.0 + self.tick % 5,
            tokens_per_s=100.0 + 10 * (self.tick % 9),
            requests=requests,
        )

    def _place(self, i: int) -> int:
        return (self.tick + 5 * i) % 12

    def _row(self, i: int) -> RequestRow:
        place, tokens = self._place(i), 3 * self.tick + i
        state = SWAP_STATES.get(place, "decode" if self.tick + i > 2 else "waiting")
        blocks, swapped = min(39, 4 + tokens // 16), state == "swapped"
        return RequestRow(
            request_id=f"chatcmpl-{i:04d}",
            peer=PEER,
            state=state,
            prompt_tokens=64 + i,
            generated_tokens=tokens,
            gpu_blocks=0 if swapped else blocks,
            cpu_blocks=blocks if swapped else i % 3,
            swaps=(self.tick + 5 * i) // 12,
            stall_s=STEP_S * 5 * ((self.tick + 5 * i) // 12),
            age_s=STEP_S * self.tick + i,
            priority=i % 3,
            moved_bytes=589824 * tokens,
            stalled_s=STEP_S * max(0, place - 3) if 3 <= place <= 7 else 0.0,
            queue_s=0.01 * i,
            ttft_s=0.02 * i + 0.2,
            tpot_s=0.02 + 0.001 * ((self.tick + i) % 17),
            peer_name="frontend:4711" if i % 3 else "notebook",
        )

    def _events(self) -> list[SwapEvent]:
        return [
            swap_event(f"chatcmpl-{i:04d}", PHASES[self._place(i)])
            for i in range(self.rows)
            if self._place(i) in PHASES
        ]
