"""Swap and recompute under pressure: who leaves, who comes back, and that no token is lost, doubled or foreign.

Every `Harness.run` ends with empty tiers and compares each text with what the prompt alone determines.
"""

from __future__ import annotations

import random
from array import array

import pytest
from coldblock.engine_core.control.plan import Direction
from coldblock.engine_core.control.policies import FirstSwappedFirst, LeastRecentlyActive
from coldblock.engine_core.control.request import Request, State
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.scheduler import MAX_COPY_FAILURES, MAX_TIMES_LEFT
from fake_executor import COPY_SECONDS, QUEUED_SECONDS
from scheduler_harness import Harness

pytestmark = pytest.mark.usefixtures("steps_ahead")

PHASES = ["swapping_out", "swapped", "swapping_in", "resumed"]


def pair(prompt_tokens: int, max_tokens: int, second_prompt: int | None = None, **settings: object) -> Harness:
    """Two requests for a pool of three blocks, the second submitted at the first's first token."""
    harness = Harness(**{"num_gpu_blocks": 3, "num_cpu_blocks": 3, **settings})  # type: ignore[arg-type]
    harness.add("first", range(prompt_tokens), max_tokens)
    harness.run_until(lambda: len(harness.tokens["first"]) == 1)
    harness.add("second", range(100, 100 + (second_prompt or prompt_tokens)), max_tokens)
    return harness


# ---------------------------------------------------------------- the forced-swap experiment


@pytest.mark.parametrize("delay", [0, 1, 5])
@pytest.mark.parametrize("prompt_tokens", [33, 36, 40])
def test_a_newcomer_of_the_whole_pool_swaps_the_first_once(prompt_tokens: int, delay: int) -> None:
    harness = pair(prompt_tokens, 48 - prompt_tokens, delay=lambda move: delay)
    harness.run_until(lambda: bool(harness.tokens["second"]))
    assert harness.state("first") is State.SWAPPED
    harness.run()
    assert [(swap.request_id, swap.phase) for swap in harness.swaps] == [("first", phase) for phase in PHASES]
    assert [swap.reason for swap in harness.swaps] == ["admission", "admission", "resume", "resume"]
    assert harness.finished["first"].swaps == 1 and harness.finished["first"].stall_s > 0
    assert harness.finished["second"].swaps == 0 and harness.finished["second"].stall_s == 0
    counters = harness.scheduler.counters
    assert (counters.requests_swapped, counters.requests_resumed, counters.preemptions) == (1, 1, 0)


@pytest.mark.parametrize("delay", [0, 1, 5])
@pytest.mark.parametrize("prompt_tokens", [1, 10, 15])
def test_two_that_grow_to_the_whole_pool_swap_once(prompt_tokens: int, delay: int) -> None:
    harness = pair(prompt_tokens, 48 - prompt_tokens, delay=lambda move: delay)
    harness.run()
    assert [swap.phase for swap in harness.swaps if swap.phase != "copied_out"] == PHASES
    assert harness.swaps[0].reason == "growth" and len({swap.request_id for swap in harness.swaps}) == 1
    assert harness.scheduler.counters.offload_blocks == 1, "more was copied than the other one lacked"


def test_the_end_of_a_request_tells_that_it_was_recomputed() -> None:
    harness = pair(10, 38, swap_or_recompute="recompute")
    harness.run()
    counters, ends = harness.scheduler.counters, harness.finished
    assert counters.preemptions == ends["first"].recomputes + ends["second"].recomputes > 0
    assert min(ends["first"].recomputes, ends["second"].recomputes) == 0


def test_swap_updates_carry_blocks_bytes_seconds_and_tier_use() -> None:
    harness = pair(40, 8)
    harness.run()
    out, swapped, back, resumed = harness.swaps
    assert [(swap.blocks, swap.bytes) for swap in harness.swaps] == [(3, 3000)] * 4
    for begun, ended in ((out, swapped), (back, resumed)):
        assert (begun.seconds, begun.queued_s) == (0.0, 0.0)
        assert (ended.seconds, ended.queued_s) == (COPY_SECONDS, QUEUED_SECONDS)
    assert harness.finished["first"].moved_bytes == 6000 and harness.finished["second"].moved_bytes == 0
    assert (out.gpu_used_blocks, out.cpu_used_bytes) == (3, 3000)
    assert (swapped.gpu_used_blocks, swapped.cpu_used_bytes) == (0, 3000)
    assert (resumed.gpu_used_blocks, resumed.cpu_used_bytes) == (3, 0)
    counters = harness.scheduler.counters
    assert (counters.offload_blocks, counters.offload_bytes, counters.reload_blocks) == (3, 3000, 3)
    assert counters.max_swapped_requests == 1


def test_only_what_is_lacking_is_copied_and_what_is_not_computed_is_released() -> None:
    harness = Harness(num_gpu_blocks=8, prefill_chunk_tokens=20)
    harness.add("first", range(100), 4)
    harness.step()
    assert len(harness.request("first").blocks) == 7
    harness.add("second", range(200, 300), 4)
    plan = harness.step()
    assert plan is not None and [len(move.gpu_blocks) for move in plan.moves] == [1]
    assert len(harness.request("first").blocks) == 2
    harness.run()
    assert harness.phases("resumed") == ["first"]


def test_a_prefill_goes_on_where_the_swap_stopped_it() -> None:
    harness = Harness(num_gpu_blocks=8, prefill_chunk_tokens=20)
    harness.add("first", range(100), 4)
    harness.step()
    harness.step()
    harness.add("second", range(200, 300), 4)
    harness.run_until(lambda: "first" in harness.phases("swapped"))
    first = harness.request("first")
    assert (first.state, first.state_before_swap, first.computed_tokens) == (State.SWAPPED, State.PREFILL, 40)
    harness.run_until(lambda: "first" in harness.phases("resumed"))
    assert (first.state, first.computed_tokens, len(first.block_table)) == (State.PREFILL, 40, 7)
    harness.run()
    chunks = [chunk for plan in harness.executor.plans for chunk in plan.chunks if chunk.request_id == "first"]
    prompt_starts = [chunk.start for chunk in chunks if chunk.start < 100]
    assert prompt_starts == [0, 20, 40, 60, 80], "a prompt token was computed twice or never"


def test_a_decode_goes_on_where_the_swap_stopped_it(steps_ahead: int) -> None:
    harness = pair(33, 10)
    harness.run_until(lambda: "first" in harness.phases("swapped"))
    first = harness.request("first")
    computed = 33 + steps_ahead
    assert (first.state_before_swap, first.computed_tokens) == (State.DECODE, computed)
    harness.run_until(lambda: "first" in harness.phases("resumed"))
    assert (first.state, first.computed_tokens) == (State.DECODE, computed)
    assert first.last_active_time == harness.clock.now, "who just came back would be the first to leave again"
    harness.run()


# ---------------------------------------------------------------- who leaves, who comes back, who waits


def request_at(arrival: int, last_active: float = 0.0, swapped_since: float | None = None) -> Request:
    request = Request(str(arrival), array("i", [1]), 1, Sampling(), 0, 8, (), 0, arrival, 0.0, 0.0)
    request.last_active_time, request.swapped_since = last_active, swapped_since
    return request


def test_all_that_grow_in_one_step_wait_for_one_round_of_copies() -> None:
    harness = Harness(num_gpu_blocks=16, delay=lambda move: 3)
    for index in range(8):
        harness.add(f"r{index}", range(index * 50, index * 50 + 25), 20)
    harness.run_until(lambda: bool(harness.phases("swapping_out")))
    assert harness.scheduler._tiers.leaving() + harness.scheduler._tiers.available == 5, (
        "blocks are asked for one by one"
    )
    assert harness.scheduler.running == 5
    harness.run()


def test_the_policies_choose_the_oldest_activity_and_the_oldest_swap() -> None:
    old, tied, new = request_at(1, 2.0), request_at(2, 2.0), request_at(3, 5.0)
    assert LeastRecentlyActive().choose([old, tied, new]) is tied
    assert LeastRecentlyActive().choose([old, new]) is old
    late, early, equal = request_at(1, 0.0, 9.0), request_at(2, 0.0, 4.0), request_at(3, 0.0, 4.0)
    assert FirstSwappedFirst().choose([late, equal, early]) is early


def test_the_swapped_come_back_before_new_ones_are_admitted() -> None:
    harness = pair(40, 8)
    harness.add("third", range(300, 340), 8)
    harness.run()
    assert list(harness.finished) == ["second", "first", "third"]
    assert harness.phases("swapped") == ["first"]


def test_even_a_newcomer_that_fits_waits_for_the_swapped() -> None:
    harness = Harness(num_gpu_blocks=7)
    harness.add("first", range(40), 8)
    harness.run_until(lambda: bool(harness.tokens["first"]))
    harness.add("second", range(100, 170), 10)
    harness.run_until(lambda: bool(harness.tokens["second"]))
    harness.add("third", range(5), 2)
    while harness.state("first") is State.SWAPPED:
        harness.step()
        assert harness.state("third") is State.WAITING
    harness.run()


def test_a_newcomer_that_fits_swaps_nobody() -> None:
    harness = pair(40, 8, num_gpu_blocks=6)
    harness.run()
    assert harness.swaps == []


def test_running_requests_give_way_to_no_lower_priority() -> None:
    harness = Harness(num_gpu_blocks=3)
    harness.add("urgent", range(40), 8, priority=1)
    harness.run_until(lambda: len(harness.tokens["urgent"]) == 1)
    harness.add("patient", range(100, 140), 8)
    harness.run()
    assert harness.swaps == [] and list(harness.finished) == ["urgent", "patient"]


def test_nobody_leaves_for_a_newcomer_that_would_still_not_fit() -> None:
    harness = Harness(num_gpu_blocks=8)
    harness.add("urgent", range(60), 4, priority=1)
    harness.add("patient", range(100, 140), 8)
    harness.run_until(lambda: bool(harness.tokens["patient"]))
    harness.add("large", range(200, 270), 4)
    harness.run()
    assert harness.swaps == []


def test_a_cached_prefix_that_a_victim_leaves_behind_is_not_counted_twice() -> None:
    harness = Harness(num_gpu_blocks=5, prefix_cache=True)
    harness.add("urgent", range(500, 503), 8, priority=1)
    harness.add("first", range(40), 6)
    harness.run_until(lambda: bool(harness.tokens["first"]))
    harness.add("newcomer", [*range(32), *range(100, 146)], 2)
    harness.run()
    assert harness.swaps == [] and harness.finished["newcomer"].cached_tokens == 32


def test_admission_leaves_the_running_ones_their_next_block() -> None:
    harness = Harness(num_gpu_blocks=2)
    harness.add("urgent", range(10), 12, priority=1)
    harness.run_until(lambda: len(harness.tokens["urgent"]) == 6)
    harness.add("patient", range(100, 105), 2)
    harness.run()
    assert harness.swaps == []


def test_a_resume_leaves_the_running_ones_their_next_block() -> None:
    harness = Harness(num_gpu_blocks=3)
    harness.add("first", range(10), 5)
    harness.add("urgent", range(100, 102), 12, priority=1)
    harness.run_until(lambda: bool(harness.tokens["urgent"]))
    harness.add("second", range(200, 231), 12)
    harness.run_until(lambda: bool(harness.tokens["second"]))
    harness.abort("urgent")
    harness.run()
    assert harness.phases("swapped") == ["first"] and harness.finished["second"].swaps == 0


def test_a_newcomer_can_need_several_to_leave() -> None:
    harness = Harness(num_gpu_blocks=6)
    for name in ("a", "b"):
        harness.add(name, range(40), 8)
    harness.run_until(lambda: bool(harness.tokens["b"]))
    harness.add("large", range(200, 280), 4)
    harness.run()
    assert sorted(harness.phases("swapped")) == ["a", "b"] and next(iter(harness.finished)) == "large"


def test_each_request_gives_way_once_in_its_life() -> None:
    harness = Harness(num_gpu_blocks=3)
    harness.add("long", range(20), 28)
    for index in range(4):
        harness.run_until(lambda: bool(harness.scheduler.running and not harness.scheduler.swapped))
        harness.step()
        harness.add(f"newcomer {index}", range(100, 140), 2)
    harness.run()
    assert harness.phases("swapped").count("long") == 1


def test_an_abort_of_the_newcomer_brings_its_victim_back() -> None:
    harness = pair(40, 8, delay=lambda move: 2)
    harness.run_until(lambda: bool(harness.phases("swapping_out")))
    harness.abort("second")
    harness.run()
    assert harness.finished["first"].reason == "length" and harness.finished["second"].completion_tokens == 0


def test_growth_spares_the_eldest_running_request() -> None:
    harness = Harness(num_gpu_blocks=6)
    for index in range(4):
        harness.add(f"r{index}", range(index * 50, index * 50 + 10), 50)
    harness.run()
    assert next(iter(harness.finished)) == "r0" and harness.finished["r0"].swaps == 0
    assert harness.scheduler.counters.requests_swapped > 0


def test_growth_spares_the_eldest_even_when_it_has_been_idle_longest() -> None:
    harness = Harness(num_gpu_blocks=3)
    for index in range(3):
        harness.add(f"r{index}", range(index * 50, index * 50 + 10), 30)
    harness.run_until(lambda: len(harness.tokens["r2"]) == 7)
    harness.request("r0").last_active_time = -1.0
    harness.run_until(lambda: bool(harness.swaps))
    assert harness.swaps[0].request_id == "r2"
    harness.run()


@pytest.mark.parametrize(("spent", "victim"), [(["r2"], "r1"), (["r1", "r2"], "r2")])
def test_who_left_often_is_passed_over_unless_all_did(spent: list[str], victim: str) -> None:
    harness = Harness(num_gpu_blocks=3)
    for index in range(3):
        harness.add(f"r{index}", range(index * 50, index * 50 + 10), 30)
    harness.step()
    for name in spent:
        harness.request(name).times_left = MAX_TIMES_LEFT
    harness.run_until(lambda: bool(harness.swaps))
    assert harness.swaps[0].request_id == victim
    harness.run()


def test_no_more_leave_than_the_copies_under_way_do_not_make_up_for() -> None:
    harness = Harness(num_gpu_blocks=9, delay=lambda move: 5)
    for index in range(3):
        harness.add(f"r{index}", range(index * 50, index * 50 + 40), 20)
    harness.run_until(lambda: bool(harness.phases("swapped")))
    assert harness.phases("swapping_out") == ["r2"]
    harness.run()


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("settings", [{"num_cpu_blocks": 0}, {"num_cpu_blocks": 2}, {"cpu_offload": False}])
def test_a_newcomer_is_denied_once_when_the_budget_is_short(settings: dict[str, object]) -> None:
    harness = pair(40, 8, **settings)
    harness.run()
    (rejected,) = harness.swaps
    assert (rejected.request_id, rejected.phase, rejected.reason) == ("first", "rejected", "admission")
    assert (rejected.blocks, rejected.bytes) == (0, 0) and rejected.detail
    counters = harness.scheduler.counters
    assert (counters.offload_rejected, counters.preemptions, counters.requests_swapped) == (1, 0, 0)
    assert list(harness.finished) == ["first", "second"]


@pytest.mark.parametrize("settings", [{"num_cpu_blocks": 0}, {"cpu_offload": False}])
def test_growth_without_a_budget_recomputes(settings: dict[str, object]) -> None:
    harness = pair(10, 38, **settings)
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.requests_swapped, counters.preemptions) == (0, 1)
    assert harness.phases("rejected") == ["second"] and counters.offload_rejected == 1


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("cpu_blocks", [0, 1, 4])
def test_tiny_cpu_tiers_finish_everybody(cpu_blocks: int, delay: int) -> None:
    """Case 1: pool 12, 8 requests of 64 tokens, then n=4 of one prompt."""
    harness = Harness(num_gpu_blocks=12, num_cpu_blocks=cpu_blocks, prefix_cache=True, delay=lambda move: delay)
    for index in range(8):
        harness.add(f"r{index}", range(index * 64, index * 64 + 32), 32)
    harness.run()
    for index in range(4):
        harness.add(f"n{index}", range(40), 64)
    harness.run()
    assert harness.scheduler.counters.finished == {"length": 12}


@pytest.mark.parametrize("delay", [0, 2])
def test_twenty_mixed_requests_in_fourteen_blocks_all_finish(delay: int) -> None:
    """Case 8: progress without ping-pong."""
    harness = Harness(num_gpu_blocks=14, delay=lambda move: delay)
    rng = random.Random(8)
    tokens = 0
    for index in range(20):
        prompt, answer = rng.randrange(1, 150), rng.randrange(1, 70)
        harness.add(f"r{index}", [rng.randrange(990) for _ in range(prompt)], answer)
        tokens += answer
    harness.run(max_steps=3 * tokens)
    counters = harness.scheduler.counters
    assert counters.requests_swapped == counters.requests_resumed
    assert counters.requests_swapped + counters.preemptions <= 3 * 20, "requests ping-pong"


# ---------------------------------------------------------------- recompute


@pytest.mark.parametrize("outputs", [1, 15, 16, 17])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_recompute_neither_doubles_nor_drops_a_token(outputs: int, prefix_cache: bool) -> None:
    """Case 9."""
    harness = Harness(prefix_cache=prefix_cache, prefill_chunk_tokens=8)
    harness.add("a", range(16), 40)
    harness.add("b", range(16), 40)
    harness.run_until(lambda: len(harness.tokens["a"]) == outputs)
    harness.scheduler._preempt(harness.request("a"), harness.clock())
    assert harness.state("a") is State.WAITING and harness.request("a").computed_tokens == 0
    harness.run()
    end = harness.finished["a"]
    assert (end.prompt_tokens, end.completion_tokens) == (16, 40) and len(harness.tokens["a"]) == 40
    assert harness.scheduler.counters.generation_tokens == 80 and harness.scheduler.counters.prompt_tokens == 32


def test_a_recomputed_request_waits_in_front_of_all_others() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("first", range(10), 9)
    harness.run_until(lambda: len(harness.tokens["first"]) == 2)
    harness.add("urgent", [1], 1, priority=100)
    harness.scheduler._preempt(harness.request("first"), harness.clock())
    harness.run()
    assert list(harness.finished) == ["first", "urgent"]


# ---------------------------------------------------------------- copies that fail, last, or outlive their request


def test_a_failed_swap_out_lets_the_request_go_on() -> None:
    harness = pair(40, 8, fails=lambda move: True)
    harness.run()
    assert [(swap.request_id, swap.phase) for swap in harness.swaps] == [
        ("first", "swapping_out"),
        ("first", "rejected"),
    ]
    assert harness.swaps[1].detail == "copy failed: injected"
    assert (harness.scheduler.counters.offload_failed, harness.finished["first"].swaps) == (1, 0)


def test_swap_outs_that_keep_failing_end_in_a_recompute() -> None:
    harness = pair(10, 38, fails=lambda move: True)
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.offload_failed, counters.preemptions, counters.requests_swapped) == (MAX_COPY_FAILURES, 1, 1)


def test_a_swap_in_is_tried_again_and_then_recomputed() -> None:
    failures = iter([True, False])
    harness = pair(40, 8, fails=lambda move: move.direction is Direction.IN and next(failures))
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.reload_failed, counters.requests_resumed, counters.preemptions) == (1, 1, 0)

    harness = pair(40, 8, fails=lambda move: move.direction is Direction.IN)
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.reload_failed, counters.requests_resumed, counters.preemptions) == (MAX_COPY_FAILURES, 0, 1)
    assert harness.finished["first"].stall_s > 0


ENDING = {State.SWAPPING_OUT: Direction.OUT, State.SWAPPING_IN: Direction.IN}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("state", [state for state in State if state not in (State.FINISHED, State.LOADING)])
def test_an_abort_in_any_state_returns_every_block(state: State, fails: bool) -> None:
    """Case 5. A copy that is under way at the abort ends later, well or badly."""
    aborted: list[str] = []
    harness = Harness(
        num_gpu_blocks=8,
        prefill_chunk_tokens=60,
        prefix_cache=True,
        delay=lambda move: 3,
        fails=lambda move: fails and move.direction is ENDING.get(state),
    )
    harness.add("first", range(100), 8)
    harness.add("second", range(200, 300), 4)
    for _ in range(100):
        if harness.state("first") is state:
            harness.abort("first")
            aborted.append("first")
            break
        harness.step()
    harness.run()
    assert aborted and harness.finished["first"].reason == "abort" and harness.finished["second"].reason == "length"


def test_an_id_is_free_again_while_the_copy_of_its_aborted_request_still_runs() -> None:
    harness = pair(40, 8, delay=lambda move: 6)
    harness.run_until(lambda: bool(harness.phases("swapping_out")))
    harness.abort("first")
    assert harness.finished["first"].reason == "abort"
    harness.forget("first")
    harness.add("first", range(500, 540), 8)
    harness.run()


def test_no_block_is_reused_before_its_copy_has_ended() -> None:
    """Case 3, by block ids: the fake executor also asserts it slot by slot."""
    harness = pair(40, 8, delay=lambda move: 4)
    leaving: set[int] = set()
    while harness.scheduler.has_work():
        plan = harness.step()
        if plan is None:
            continue
        used = {block for chunk in plan.chunks for block in chunk.block_table}
        leaving |= {block for move in plan.moves if move.direction is Direction.OUT for block in move.gpu_blocks}
        if not harness.phases("swapped"):
            assert not leaving & used
    assert leaving
    harness.check_drained()


# ---------------------------------------------------------------- swap and the prefix cache together


@pytest.mark.parametrize("delay", [0, 2])
def test_a_resume_counts_more_blocks_than_its_swap_freed(delay: int) -> None:
    """Case 2: the victim shared its prefix, so its swap freed one block of four."""
    harness = Harness(num_gpu_blocks=7, prefix_cache=True, max_num_seqs=8, delay=lambda move: delay)
    prefix = list(range(48))
    harness.add("keeper", prefix, 60)
    harness.run_until(lambda: len(harness.tokens["keeper"]) == 1)
    harness.add("victim", [*prefix, 900], 40)
    harness.run_until(lambda: len(harness.tokens["victim"]) == 1)
    assert harness.request("victim").cached_tokens == 48
    available = harness.scheduler.gpu_use()
    harness.run_until(lambda: "victim" in harness.phases("swapped"))
    assert len(harness.request("victim").blocks) > available.total - available.used
    harness.run()
    assert harness.phases("resumed").count("victim") == harness.phases("swapped").count("victim") >= 1


def test_a_request_that_came_back_offers_its_prefix_again() -> None:
    harness = Harness(num_gpu_blocks=3, prefix_cache=True)
    harness.add("first", range(40), 8)
    harness.run_until(lambda: len(harness.tokens["first"]) == 1)
    harness.add("second", range(100, 140), 8)
    harness.run()
    harness.add("third", range(40), 4)
    harness.run()
    assert harness.phases("resumed") == ["first"] and harness.finished["third"].cached_tokens == 32


def test_a_block_being_copied_out_can_be_shared_by_a_newcomer() -> None:
    harness = Harness(num_gpu_blocks=7, prefix_cache=True, delay=lambda move: 3)
    prefix = list(range(48))
    harness.add("first", prefix, 40)
    harness.run_until(lambda: len(harness.tokens["first"]) == 1)
    harness.add("newcomer", [*prefix, *range(500, 540)], 4)
    harness.run()
    assert harness.finished["newcomer"].cached_tokens == 48


def test_allocation_never_fails_after_yes() -> None:
    """Case 2: random loads; `BlockPool.allocate` raises when admission, resume or growth counted too few."""
    for seed in range(12):
        rng = random.Random(seed)
        harness = Harness(
            num_gpu_blocks=rng.randrange(6, 20),
            num_cpu_blocks=rng.choice([0, 3, 8, 40]),
            prefix_cache=seed % 2 == 0,
            delay=lambda move, rng=rng: rng.randrange(4),  # type: ignore[misc]
        )
        limit = harness.config.max_request_tokens
        for index in range(24):
            prompt = [*range(rng.choice([0, 16, 33, 48])), *(rng.randrange(990) for _ in range(rng.randrange(1, 40)))]
            harness.add(f"r{index}", prompt[: limit - 1], rng.randrange(1, 60))
            for _ in range(rng.randrange(6)):
                harness.step()
        harness.run()
