"""What two tiers bring: prefixes that outlive the GPU pool, copies ahead of need, resumes that load what is missing."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from coldblock.engine_core.control.plan import Direction
from coldblock.engine_core.control.prefix_index import PrefixChain
from coldblock.engine_core.control.request import State
from coldblock.engine_core.control.scheduler import MAX_COPY_FAILURES, MOST_RESUMES
from coldblock.engine_core.control.swap import Block, Residency
from coldblock.engine_core.control.write_behind import LEAST, PAUSE_S
from fake_executor import COPY_SECONDS, QUEUED_SECONDS
from scheduler_harness import Harness

pytestmark = pytest.mark.usefixtures("steps_ahead")


def evicted_prefix(**settings: object) -> Harness:
    """A pool of six blocks from which the prefix of "warm", two blocks, fell out; the CPU tier still has it."""
    values = {"num_gpu_blocks": 6, "prefix_cache": True, "write_behind_above": 0.0, **settings}
    harness = Harness(**values)  # type: ignore[arg-type]
    harness.add("warm", range(40), 2)
    harness.run()
    harness.add("other", range(500, 585), 4)
    harness.run_until(lambda: "other" in harness.finished)
    assert [block.residency for block in blocks_of(harness, 40)] == [Residency.CPU] * 2
    return harness


def blocks_of(harness: Harness, tokens: int) -> list[Block]:
    """The indexed blocks of the prompt range(tokens)."""
    chain = PrefixChain()
    chain.extend(array("i", range(tokens)), tokens // 16, 16)
    return harness.scheduler._tiers.index.match(chain.digests)


# ---------------------------------------------------------------- prefixes


@pytest.mark.parametrize("delay", [0, 3])
def test_a_prefix_that_fell_out_of_the_pool_is_loaded_not_computed(delay: int) -> None:
    harness = evicted_prefix(delay=lambda move: delay)
    harness.add("again", range(40), 2)
    harness.run()
    assert harness.finished["again"].cached_tokens == 32
    starts = [c.start for plan in harness.executor.plans for c in plan.chunks if c.request_id == "again"]
    assert starts[0] == 32 and harness.scheduler.counters.prefix_reload_blocks == 2
    loads = [swap for swap in harness.swaps if swap.reason == "prefix_hit"]
    assert [(swap.request_id, swap.blocks) for swap in loads if swap.phase == "copied_in"] == [("again", 2)]
    assert harness.finished["again"].moved_bytes >= 2000 and harness.finished["again"].swaps == 0


def test_two_newcomers_wait_for_one_load_of_the_prefix_they_share() -> None:
    harness = evicted_prefix(delay=lambda move: 3)
    for name in ("one", "two"):
        harness.add(name, range(40), 2)
    harness.step()
    assert [harness.state(name) for name in ("one", "two")] == [State.LOADING] * 2
    harness.run()
    assert harness.scheduler.counters.prefix_reload_blocks == 2
    assert [harness.finished[name].cached_tokens for name in ("one", "two")] == [32, 32]


def test_a_prefix_whose_load_fails_is_computed() -> None:
    harness = evicted_prefix(fails=lambda move: move.direction is Direction.IN)
    harness.add("again", range(40), 2)
    harness.run()
    assert harness.finished["again"].cached_tokens == 0 and harness.scheduler.counters.reload_failed == 1
    assert [swap.detail for swap in harness.swaps if swap.phase == "rejected"] == ["copy failed: injected"]


@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_while_its_prefix_is_loaded_returns_every_block(fails: bool) -> None:
    """Case 5. The copy that is under way at the abort ends later, well or badly."""
    harness = evicted_prefix(delay=lambda move: 3, fails=lambda move: fails and move.direction is Direction.IN)
    harness.add("again", range(40), 2)
    harness.step()
    assert harness.state("again") is State.LOADING
    harness.abort("again")
    assert harness.scheduler.has_work()
    harness.run()
    assert harness.finished["again"].reason == "abort"


def test_a_prefix_that_is_cheaper_to_compute_is_not_loaded() -> None:
    harness = evicted_prefix(swap_or_recompute="recompute")
    harness.add("again", range(40), 2)
    harness.run()
    assert harness.finished["again"].cached_tokens == 0 and harness.scheduler.counters.reload_blocks == 0


def test_what_a_failed_request_computed_is_found_in_neither_tier() -> None:
    """Case 11, with copies in the CPU tier."""
    harness = evicted_prefix()
    harness.add("again", range(40), 20)
    harness.run_until(lambda: len(harness.tokens["again"]) == 2)
    harness.executor.failing.add("again")
    harness.run_until(lambda: "again" in harness.finished)
    assert harness.finished["again"].reason == "error" and blocks_of(harness, 40) == []
    harness.add("clean", range(40), 2)
    harness.run()
    assert harness.finished["clean"].cached_tokens == 0


def test_many_come_back_a_few_in_a_plan() -> None:
    """Each of them takes time to plan, and a step waits for the plan."""
    harness = Harness(num_gpu_blocks=60, num_cpu_blocks=200, max_num_seqs=64)
    for index in range(40):
        harness.add(f"small{index}", range(index, index + 5), 40)
    harness.run_until(lambda: all(harness.tokens[f"small{index}"] for index in range(40)))
    harness.add("large", range(800), 2, priority=9)
    harness.run_until(lambda: "large" in harness.finished)
    assert harness.scheduler.swapped > 2 * MOST_RESUMES
    while harness.scheduler.swapped:
        before = len(harness.phases("swapping_in"))
        harness.step()
        assert len(harness.phases("swapping_in")) - before <= MOST_RESUMES
    harness.run()


# ---------------------------------------------------------------- copies ahead of need


def test_full_blocks_are_copied_ahead_of_need_and_never_twice() -> None:
    harness = Harness(num_gpu_blocks=3, num_cpu_blocks=8, write_behind_above=0.5)
    harness.add("first", range(40), 8)
    harness.run_until(lambda: len(harness.tokens["first"]) == 5)
    assert harness.scheduler.counters.write_behind_blocks == 2
    assert {swap.phase for swap in harness.swaps} == {"copied_out"}
    assert {swap.reason for swap in harness.swaps} == {"write_behind"}
    harness.add("second", range(100, 140), 8)
    harness.run()
    out = next(swap for swap in harness.swaps if (swap.request_id, swap.phase) == ("first", "swapped"))
    assert out.blocks == 1, "what was copied before was copied again"
    assert harness.phases("resumed") == ["first"]


def test_blocks_of_running_requests_are_copied_many_at_a_time() -> None:
    """A copy of one block costs the step that begins it as much as one of many."""
    harness = Harness(num_gpu_blocks=64, num_cpu_blocks=64, write_behind_above=0.0)
    harness.add("long", range(5), 48 * harness.scheduler.config.block_size)
    harness.run()
    ahead = [swap.blocks for swap in harness.swaps if swap.reason == "write_behind"]
    assert len(ahead) > 5 and min(ahead) == 64 // LEAST


def test_nothing_is_copied_ahead_while_the_pool_is_empty_enough() -> None:
    harness = Harness(num_gpu_blocks=8, write_behind_above=0.5)
    harness.add("small", range(50), 10)
    harness.run()
    assert harness.swaps == []


def test_after_a_failed_copy_ahead_of_need_there_is_a_pause() -> None:
    harness = Harness(num_gpu_blocks=4, write_behind_above=0.0, fails=lambda move: True)
    harness.add("long", range(5), 50)
    harness.run()
    failed = harness.scheduler.counters.offload_failed
    assert 1 <= failed <= 1 + 0.01 * 50 / PAUSE_S


def test_pauses_grow_while_copies_ahead_of_need_go_on_failing() -> None:
    harness = Harness(num_gpu_blocks=130, num_cpu_blocks=130, write_behind_above=0.0, fails=lambda move: True)
    harness.add("long", range(5), 2000)
    harness.run()
    assert 2 <= harness.scheduler.counters.offload_failed <= 6, "a step takes 0.01 s: at 0, 1, 3, 7 and 15 s"


def test_copies_ahead_of_need_end_though_the_cpu_tier_is_smaller_than_what_is_cached() -> None:
    harness = Harness(num_gpu_blocks=16, num_cpu_blocks=2, prefix_cache=True, write_behind_above=0.0)
    for index in range(6):
        harness.add(f"r{index}", range(100 * index, 100 * index + 33), 2)
    harness.run()
    for _ in range(50):
        harness.step()
    assert not harness.scheduler.has_work()


@pytest.mark.parametrize("delay", [0, 2])
def test_the_next_to_resume_loads_what_fits_before_its_turn(delay: int) -> None:
    harness = Harness(num_gpu_blocks=12, delay=lambda move: delay)
    harness.add("small", range(500, 520), 12, priority=1)
    harness.add("first", range(70), 8)
    harness.run_until(lambda: bool(harness.tokens["first"]))
    harness.add("big", range(100, 230), 14)
    harness.run_until(lambda: bool(harness.tokens["big"]))
    assert sum(block.residency is Residency.CPU for block in harness.request("first").blocks) == 4
    harness.run_until(lambda: "small" in harness.finished)
    harness.run_until(lambda: "prefetch" in {swap.reason for swap in harness.swaps})
    assert harness.state("first") is State.SWAPPED and harness.state("big") is State.DECODE
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.prefetch_blocks, counters.reload_blocks) == (2, 4)
    assert harness.finished["first"].moved_bytes == 8000
    resumed = next(swap for swap in harness.swaps if swap.phase == "resumed")
    assert (resumed.request_id, resumed.blocks) == ("first", 2)


def test_a_resume_that_two_copies_serve_reports_the_blocks_and_the_time_of_both() -> None:
    harness = Harness(num_gpu_blocks=12, delay=lambda move: 20 * (move.direction is Direction.IN))
    harness.add("small", range(500, 520), 12, priority=1)
    harness.add("first", range(70), 8)
    harness.run_until(lambda: bool(harness.tokens["first"]))
    harness.add("big", range(100, 230), 14)
    harness.run()
    resumed = next(swap for swap in harness.swaps if swap.phase == "resumed")
    assert harness.scheduler.counters.prefetch_blocks == 2
    assert (resumed.blocks, resumed.seconds, resumed.queued_s) == (4, 2 * COPY_SECONDS, QUEUED_SECONDS)


# ---------------------------------------------------------------- who comes back


def test_a_resume_loads_only_what_is_missing() -> None:
    harness = Harness(num_gpu_blocks=8, num_cpu_blocks=8)
    harness.add("victim", range(70), 20)
    harness.run_until(lambda: bool(harness.tokens["victim"]))
    harness.add("newcomer", range(100, 160), 4)
    harness.run()
    counters = harness.scheduler.counters
    assert harness.phases("resumed") == ["victim"]
    assert counters.offload_blocks == counters.reload_blocks == 1, "it had five blocks and one was needed"


def test_a_resumed_request_shares_blocks_that_others_computed_meanwhile() -> None:
    """Both compute the same prompt side by side, so each has blocks of its own; only one's are named by the index."""
    harness = Harness(num_gpu_blocks=7, num_cpu_blocks=12, prefix_cache=True)
    harness.add("a", range(40), 70)
    harness.add("b", range(40), 70)
    harness.step()
    harness.step()
    a, b = harness.request("a"), harness.request("b")
    assert not set(a.blocks) & set(b.blocks)
    harness.run_until(lambda: b.state is State.SWAPPED and len(a.blocks) == 7)
    harness.run_until(lambda: b.state is State.SWAPPING_IN or b.block_table != array("i"))
    assert harness.scheduler.counters.offload_blocks >= 2
    harness.run()
    loaded = {block for plan in harness.executor.plans for move in plan.moves for block in move.gpu_blocks}
    assert loaded and harness.scheduler.counters.reload_blocks < harness.scheduler.counters.offload_blocks


def test_a_victim_whose_copies_fail_again_and_again_is_recomputed() -> None:
    harness = Harness(num_gpu_blocks=3, num_cpu_blocks=3, fails=lambda move: True)
    for index in range(2):
        harness.add(f"r{index}", range(index * 50, index * 50 + 10), 38)
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.offload_failed, counters.preemptions) == (MAX_COPY_FAILURES, 1)


def test_priority_is_worth_waiting_time_and_no_more() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("running", range(10), 3)
    harness.step()
    harness.add("patient", range(20, 30), 1)
    harness.clock.now += 11.0
    harness.add("late but urgent", range(40, 50), 1, priority=1)
    harness.add("later and more urgent", range(60, 70), 1, priority=2)
    harness.run()
    assert list(harness.finished) == ["running", "later and more urgent", "patient", "late but urgent"]


def test_a_failed_requests_prefix_is_not_found_again_when_another_comes_back_with_it() -> None:
    harness = Harness(num_gpu_blocks=14, prefix_cache=True)
    harness.add("one", range(300, 340), 90)
    harness.add("two", range(400, 440), 90)
    harness.add("bad", [*range(32), 100], 60)
    harness.run_until(lambda: len(harness.tokens["bad"]) > 0)
    harness.add("shares it", [*range(32), *range(200, 240)], 60)
    harness.run_until(lambda: "shares it" in harness.phases("swapped"))
    harness.executor.failing.add("bad")
    harness.run_until(lambda: "shares it" in harness.phases("resumed"))
    assert harness.finished["bad"].reason == "error" and harness.scheduler.counters.reload_blocks >= 2
    harness.add("same prefix", [*range(32), 300], 4)
    harness.run()
    assert harness.finished["same prefix"].cached_tokens == 0


@pytest.mark.parametrize("seed", range(8))
def test_the_copies_that_are_told_of_add_up_to_usage_and_counters(seed: int) -> None:
    """Whatever is shared, fails, is aborted in mid-copy, or outlives its request: told of once, in one name."""
    rng = random.Random(seed)
    harness = Harness(
        delay=lambda move: rng.randrange(6),
        fails=lambda move: rng.random() < 0.3 * (seed % 2),
        block_size=4,
        num_gpu_blocks=rng.choice((6, 12)),
        num_cpu_blocks=12,
        prefix_cache=True,
        write_behind_above=rng.choice((0.0, 0.5)),
    )
    for index in range(80):
        shared, own = [*range(rng.choice((0, 8)))], [100 + rng.randrange(800) for _ in range(1 + rng.randrange(8))]
        harness.add(f"r{index}", shared + own, 1 + rng.randrange(14), priority=rng.randrange(2))
        for _ in range(rng.randrange(6)):
            harness.step()
        harness.abort(f"r{rng.randrange(8 * index + 8)}")
    harness.run()
    told: Counter[str] = Counter()
    for event in harness.swaps:
        if event.phase in ("swapped", "resumed", "copied_out", "copied_in"):
            told[event.request_id] += event.bytes
    counters, block_bytes = harness.scheduler.counters, harness.config.block_bytes
    assert told.total() == block_bytes * (counters.offload_blocks + counters.reload_blocks)
    assert {name: told[name] for name in harness.finished} == {n: e.moved_bytes for n, e in harness.finished.items()}
    assert counters.requests_swapped > 0
