"""Case 6: thousands of requests, a tenth of them aborted at random moments, leave nothing behind."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from coldblock.engine_core.control.request import State
from scheduler_harness import Harness


@pytest.mark.parametrize(
    ("seed", "steps_ahead", "write_behind_above", "aborted_while"),
    [(0, 0, 0.3, State.LOADING), (2, 1, 1.0, State.SWAPPING_OUT)],
)
def test_two_thousand_requests_with_a_tenth_aborted_leave_both_tiers_empty(
    seed: int, steps_ahead: int, write_behind_above: float, aborted_while: State
) -> None:
    rng = random.Random(seed)
    harness = Harness(
        steps_ahead=steps_ahead,
        delay=lambda move: rng.randrange(4),
        fails=lambda move: rng.random() < 0.05,
        num_gpu_blocks=22,
        num_cpu_blocks=40,
        block_size=4,
        prefix_cache=True,
        write_behind_above=write_behind_above,
        max_num_seqs=12,
    )
    seen: Counter[State] = Counter()
    for index in range(2000):
        prompt = [*range(rng.choice([0, 8, 16])), *(rng.randrange(990) for _ in range(rng.randrange(1, 30)))]
        harness.add(f"r{index}", prompt, rng.randrange(1, 24), priority=rng.randrange(2))
        for _ in range(rng.randrange(12)):
            harness.step()
        live = list(harness.scheduler._requests.values())
        if live and rng.random() < 0.12:
            rarest = min(live, key=lambda request: seen[request.state])
            victim = rarest if rng.random() < 0.7 else rng.choice(live)
            seen[victim.state] += 1
            harness.abort(victim.request_id)
    harness.run(max_steps=50_000)
    assert harness.scheduler.counters.requests_swapped > 100
    finished = harness.scheduler.counters.finished
    assert sum(finished.values()) == 2000 and finished["abort"] > 100 and finished["error"] == 0
    assert seen.keys() >= {State.WAITING, State.DECODE, State.SWAPPED, State.SWAPPING_IN, aborted_while}
