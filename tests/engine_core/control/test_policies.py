"""Every policy by name: it picks one of what it is given and changes nothing, and under each everybody finishes."""

from __future__ import annotations

import copy
import itertools
import random
from array import array
from typing import get_args

import pytest
from coldblock.engine_core.config import EngineSettings
from coldblock.engine_core.control.costs import Speeds
from coldblock.engine_core.control.plan import Direction
from coldblock.engine_core.control.policies import (
    RESUME_ORDERS,
    SWAP_OR_RECOMPUTE,
    VICTIM_POLICIES,
    Cheaper,
    LeastProgress,
    LeastRecentlyActive,
    LowestPriority,
    MostBlocks,
    MostUrgent,
    Work,
)
from coldblock.engine_core.control.request import Request
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.scheduler import MAX_TIMES_LEFT, SchedulerConfig
from coldblock.engine_core.control.swap import Block
from scheduler_harness import Harness

REGISTRIES = {
    "victim_policy": VICTIM_POLICIES,
    "resume_order": RESUME_ORDERS,
    "swap_or_recompute": SWAP_OR_RECOMPUTE,
}
CHOICES = [*VICTIM_POLICIES.items(), *RESUME_ORDERS.items()]


def make(arrival: int, *, active: float = 0.0, priority: int = 0, blocks: int = 1, outputs: int = 0) -> Request:
    tokens = array("i", [1] * (1 + outputs))
    request = Request(str(arrival), tokens, 1, Sampling(), 0, 99, (), priority, arrival, 0.0, arrival - 10.0 * priority)
    request.last_active_time, request.blocks = active, [Block() for _ in range(blocks)]
    return request


@pytest.mark.parametrize("setting", REGISTRIES)
def test_every_name_can_be_set_and_the_defaults_agree(setting: str) -> None:
    field = EngineSettings.model_fields[setting]
    assert set(get_args(field.annotation)) == set(REGISTRIES[setting])
    assert field.default == SchedulerConfig.__dataclass_fields__[setting].default


@pytest.mark.parametrize(("name", "policy"), CHOICES, ids=[name for name, _ in CHOICES])
def test_a_policy_picks_one_whatever_the_order_and_changes_nothing(name: str, policy: type) -> None:
    rng = random.Random(name)
    for _ in range(50):
        candidates = [
            make(
                arrival,
                active=rng.randrange(3),
                priority=rng.randrange(3),
                blocks=rng.randrange(1, 4),
                outputs=rng.randrange(3),
            )
            for arrival in range(rng.randrange(1, 6))
        ]
        before = [copy.copy(request.blocks) for request in candidates]
        chosen = {policy().choose(list(order)) for order in itertools.permutations(candidates)}
        assert len(chosen) == 1 and chosen <= set(candidates), "equals must be told apart by something"
        assert [request.blocks for request in candidates] == before


@pytest.mark.parametrize("victim", VICTIM_POLICIES)
@pytest.mark.parametrize("resume", RESUME_ORDERS)
@pytest.mark.parametrize("choice", SWAP_OR_RECOMPUTE)
def test_everybody_finishes_under_every_policy(victim: str, resume: str, choice: str) -> None:
    """Case 8, with priorities; nobody leaves more often than the bound while others are left."""
    rng = random.Random(7)
    harness = Harness(
        num_gpu_blocks=14,
        num_cpu_blocks=20,
        steps_ahead=1,
        delay=lambda move: rng.randrange(3),
        prefix_cache=True,
        victim_policy=victim,
        resume_order=resume,
        swap_or_recompute=choice,
        write_behind_above=0.5,
    )
    for index in range(20):
        prompt = [rng.randrange(990) for _ in range(rng.randrange(1, 120))]
        harness.add(f"r{index}", prompt, rng.randrange(1, 60), priority=rng.randrange(3))
        harness.step()
    most = max(harness.asked.values(), key=lambda request: request.times_left)
    harness.run()
    assert most.times_left <= 2 * MAX_TIMES_LEFT
    counters = harness.scheduler.counters
    assert choice != "recompute" or counters.requests_swapped == 0
    assert counters.requests_swapped + counters.preemptions <= 4 * 20, "requests ping-pong"


def test_the_orders_are_what_their_names_say() -> None:
    idle, busy = make(1, active=1.0, outputs=5), make(2, active=2.0)
    assert LeastRecentlyActive().choose([busy, idle]) is idle
    further, behind = make(1, outputs=5), make(2, outputs=2)
    assert LeastRecentlyActive().choose([further, behind]) is LeastProgress().choose([further, behind]) is behind
    low, high = make(1, active=9.0), make(2, active=1.0, priority=1)
    assert LowestPriority().choose([high, low]) is low
    small, large = make(1, blocks=2), make(2, blocks=5)
    assert MostBlocks().choose([small, large]) is large
    early, urgent = make(1), make(8, priority=1)
    assert MostUrgent().choose([early, urgent]) is urgent
    assert MostUrgent().choose([early, make(12, priority=1)]) is early, "priority is worth ten seconds, and it is late"


# ---------------------------------------------------------------- swap or recompute


def measured(prefill_tokens_per_s: float, blocks_per_s: float, queued_s: float = 0.0) -> Speeds:
    speeds = Speeds(block_bytes=1000)
    speeds.stepped(1000, 0, 1000 / prefill_tokens_per_s)
    speeds.copied(Direction.OUT, 10, 10 / blocks_per_s, queued_s)
    return speeds


def test_it_copies_until_both_speeds_are_known() -> None:
    work, speeds = Work(1, 1, 1, 0), Speeds(1000)
    assert not Cheaper().recompute(work, speeds)
    speeds.stepped(1000, 0, 1e-6)
    assert not Cheaper().recompute(work, speeds)
    speeds.copied(Direction.OUT, 1, 10.0, 0.0)
    assert Cheaper().recompute(work, speeds)


@pytest.mark.parametrize(
    ("work", "recompute"),
    [
        (Work(blocks_out=1, blocks_in=1, tokens=16, running=0), True),  # 16 ms against 2 * (5 + 10) ms
        (Work(blocks_out=0, blocks_in=1, tokens=16, running=0), False),  # 16 ms against 5 + 10 ms
        (Work(blocks_out=1, blocks_in=1, tokens=16, running=1), False),  # 32 ms
        (Work(blocks_out=50, blocks_in=50, tokens=800, running=0), True),
        (Work(blocks_out=50, blocks_in=50, tokens=800, running=1), False),
    ],
)
def test_it_weighs_who_is_held_up(work: Work, recompute: bool) -> None:
    speeds = measured(prefill_tokens_per_s=1000, blocks_per_s=100, queued_s=0.005)
    assert Cheaper().recompute(work, speeds) is recompute


def test_small_copies_do_not_hide_what_a_large_one_takes() -> None:
    """Each takes 1 ms, and 0.1 ms a block: ten of one block, then one of a hundred, which took 11 ms."""
    speeds = Speeds(block_bytes=1000)
    for blocks in [*[1] * 10, 100]:
        speeds.copied(Direction.OUT, blocks, 0.001 + 0.0001 * blocks, 0.0)
    assert 0.010 < (speeds.copy_s(Direction.OUT, 100) or 0) < 0.017


def test_speeds_are_averages_of_what_was_measured() -> None:
    speeds = Speeds(block_bytes=1000)
    speeds.copied(Direction.OUT, 10, 0.1, 0.0)
    assert speeds.copy_s(Direction.OUT, 20) == pytest.approx(0.2)
    assert speeds.copy_s(Direction.IN, 20) == pytest.approx(0.2), "the other way will do"
    speeds.copied(Direction.IN, 10, 0.2, 0.0)
    speeds.copied(Direction.IN, 10, 0.1, 0.0)
    assert 0.2 < (speeds.copy_s(Direction.IN, 20) or 0) < 0.4
    speeds.stepped(8, 1, 0.5)
    speeds.stepped(100, 200, 0.5)
    assert speeds.prefill_s(10) is None, "steps that are mostly decode say nothing of prefill"
    speeds.stepped(90, 10, 0.5)
    assert speeds.prefill_s(10) == pytest.approx(0.05)
    speeds.copied(Direction.IN, 10, 0.0, 1.0)
    assert (speeds.copy_s(Direction.IN, 1) or 0) > 0.2 and speeds.copy_s(Direction.IN, 0) == 0.0


def test_short_sequences_are_recomputed_where_copies_are_slow() -> None:
    harness = Harness(num_gpu_blocks=3, swap_or_recompute="cheaper")
    harness.scheduler._speeds = measured(prefill_tokens_per_s=100_000, blocks_per_s=1)
    harness.add("first", range(10), 38)
    harness.add("second", range(100, 110), 38)
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.requests_swapped, counters.preemptions, counters.offload_blocks) == (0, 1, 0)
