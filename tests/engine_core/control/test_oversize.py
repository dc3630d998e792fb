"""Requests larger than the GPU pool: their cold blocks are read from the CPU tier, others run beside them.

The fake executor checks what every cold block holds, and that nothing is copied over one before its step is completed.
"""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.plan import BlockMove, Chunk, Direction
from coldblock.engine_core.control.request import State
from coldblock.engine_core.control.scheduler import MAX_COPY_FAILURES
from coldblock.engine_core.control.swap import Residency
from scheduler_harness import Harness

pytestmark = pytest.mark.usefixtures("steps_ahead")


def oversize(**settings: object) -> Harness:
    """Ten GPU blocks of 16 tokens, a window of five, forty CPU blocks."""
    values = {"num_gpu_blocks": 10, "num_cpu_blocks": 40, "allow_oversize": True, **settings}
    return Harness(**values)  # type: ignore[arg-type]


def chunks_of(harness: Harness, request_id: str) -> list[Chunk]:
    return [chunk for plan in harness.executor.plans for chunk in plan.chunks if chunk.request_id == request_id]


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_prompt_of_two_and_a_half_pools_completes_and_short_requests_run_beside_it(delay: int) -> None:
    harness = oversize(delay=lambda move: delay)
    harness.add("large", range(400), 60)
    for index in range(6):
        harness.add(f"short{index}", range(500 + index, 520 + index), 12, priority=-1)
    harness.run_until(lambda: len(harness.finished) == 6)
    assert "large" not in harness.finished
    harness.run()
    assert harness.finished["large"].reason == "length" and harness.finished["large"].swaps == 0
    chunks = chunks_of(harness, "large")
    assert max(len(chunk.cold_blocks) for chunk in chunks) == 29 - 5
    assert all(len(chunk.block_table) <= 5 for chunk in chunks)
    assert [chunk.num_tokens for chunk in chunks if chunk.start < 400] == [64] * 6 + [16]
    assert harness.finished["large"].moved_bytes <= 26_000, "a block was copied twice, or for nothing"
    assert {swap.reason for swap in harness.swaps if swap.request_id == "large"} == {"oversize"}
    assert harness.scheduler.counters.preemptions == 0


def test_chunks_are_cut_to_the_window_and_not_to_crumbs() -> None:
    harness = oversize(prefill_chunk_tokens=500, max_num_batched_tokens=600)
    harness.add("large", range(400), 2)
    harness.run()
    assert [chunk.num_tokens for chunk in chunks_of(harness, "large")] == [80] * 5 + [1]


def test_what_the_next_chunk_needs_cold_is_copied_while_this_one_runs() -> None:
    harness = oversize(prefill_chunk_tokens=32)
    harness.add("large", range(300), 40)
    steps = 0
    while not harness.finished:
        harness.step()
        steps += 1
    assert steps <= len(chunks_of(harness, "large")) + 2, "steps passed without a chunk"
    harness.run()


def test_a_request_that_outgrows_the_pool_goes_on_with_a_window() -> None:
    harness = oversize()
    harness.add("grows", range(100), None)
    harness.run_until(lambda: len(harness.tokens["grows"]) == 59)
    assert harness.request("grows").cold == 0 and harness.swaps == []
    harness.run_until(lambda: len(harness.tokens["grows"]) == 80)
    request = harness.request("grows")
    assert (request.cold, len(request.hot)) == (7, 5)
    harness.run()
    assert len(harness.tokens["grows"]) == 45 * 16 - 100, "both tiers were to be filled"
    assert harness.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("cpu_blocks", [40, 16])
def test_the_tiers_are_filled_to_the_last_block(cpu_blocks: int) -> None:
    harness = oversize(num_cpu_blocks=cpu_blocks)
    harness.add("large", range(200), None)
    harness.run()
    assert len(harness.tokens["large"]) == (5 + cpu_blocks) * 16 - 200


def test_a_swap_concerns_the_hot_part_alone() -> None:
    harness = oversize(delay=lambda move: 1)
    harness.add("large", range(300), 100)
    harness.run_until(lambda: len(harness.tokens["large"]) == 3)
    request = harness.request("large")
    cold = request.cold
    harness.add("newcomer", range(500, 630), 20, priority=1)
    harness.run_until(lambda: request.state is State.SWAPPED)
    assert request.cold == cold > 0 and len(request.hot) <= 5
    assert all(block.readers == 1 and block.users == 0 for block in request.blocks[:cold])
    harness.run()
    assert harness.finished["large"].swaps == 1 and harness.scheduler.counters.preemptions == 0
    assert harness.scheduler.counters.reload_blocks <= 5


def test_who_comes_back_with_a_full_window_goes_on_in_the_same_step() -> None:
    """Nothing is to be loaded, and the harness asserts that there is a plan while there is work."""
    harness = oversize(prefill_chunk_tokens=80, max_num_batched_tokens=80)
    harness.add("large", range(300), 4)
    harness.run_until(lambda: bool(chunks_of(harness, "large")))
    while harness.in_flight:
        harness.complete()
    harness.scheduler._begin_swap_out(harness.request("large"), "admission", harness.clock())
    harness.scheduler._settle_leaving()
    plan = harness.step()
    assert plan is not None and harness.phases("resumed") == ["large"] and plan.moves
    harness.run()


def test_a_request_that_outgrew_the_pool_and_was_swapped_out_is_recomputed_with_a_window() -> None:
    """It has more blocks than it may load."""
    harness = oversize()
    harness.add("grows", range(100), 200)
    harness.run_until(lambda: harness.request("grows").num_tokens == 160)
    harness.add("newcomer", range(500, 550), 4, priority=1)
    harness.run()
    assert harness.finished["grows"].reason == "length" and harness.phases("swapped") == ["grows"]
    assert harness.scheduler.counters.preemptions == 1


def test_a_full_cpu_tier_recomputes_who_is_swapped_out_and_no_more_than_needed() -> None:
    harness = oversize(num_cpu_blocks=22)
    for name in ("a", "b"):
        harness.add(name, range(ord(name), ord(name) + 40), 60)
    harness.run_until(lambda: len(harness.tokens["b"]) == 2)
    harness.add("large", range(300, 300 + 22 * 16), 40, priority=100)
    harness.run()
    assert {end.reason for end in harness.finished.values()} == {"length"}
    assert next(iter(harness.finished)) == "large" and harness.finished["large"].swaps == 0
    assert 1 <= harness.scheduler.counters.preemptions <= 2


def test_two_that_the_cpu_tier_cannot_hold_together_run_one_after_the_other() -> None:
    harness = oversize(num_cpu_blocks=30)
    for name in ("first", "second"):
        harness.add(name, range(ord(name[0]), ord(name[0]) + 400), 10)
    while "first" not in harness.finished:
        assert harness.state("second") is State.WAITING
        harness.step()
    harness.run()
    assert harness.scheduler.counters.preemptions == 0


def test_two_that_it_can_hold_together_run_together() -> None:
    harness = oversize(num_cpu_blocks=60, num_gpu_blocks=12)
    for name in ("first", "second"):
        harness.add(name, range(ord(name[0]), ord(name[0]) + 400), 10)
    harness.step()
    assert harness.scheduler.running == 2
    harness.run()


def test_a_known_prefix_is_read_where_it_is() -> None:
    harness = oversize(prefix_cache=True)
    harness.add("first", range(400), 4)
    harness.run()
    copied = harness.scheduler.counters.offload_blocks
    harness.add("again", range(400), 4)
    harness.run()
    assert harness.finished["again"].cached_tokens >= 20 * 16
    assert harness.scheduler.counters.reload_blocks == 0
    assert harness.scheduler.counters.offload_blocks - copied <= 4


def test_a_short_request_loads_the_prefix_that_an_oversize_one_reads_cold() -> None:
    harness = oversize(prefix_cache=True, delay=lambda move: 2)
    harness.add("large", range(400), 60)
    harness.add("filler", range(600, 660), 10)
    harness.run_until(lambda: "filler" in harness.finished and bool(harness.tokens["large"]))
    assert harness.request("large").blocks[0].residency is Residency.CPU
    harness.add("short", range(40), 20)
    harness.run()
    assert harness.finished["short"].cached_tokens == 32 and harness.scheduler.counters.prefix_reload_blocks >= 1


def large_in_decode(**settings: object) -> Harness:
    harness = oversize(num_cpu_blocks=25, **settings)
    harness.add("large", range(380), 20)
    harness.run_until(lambda: len(harness.tokens["large"]) == 3)
    return harness


@pytest.mark.parametrize("leaves", ["aborted", "recomputed"])
def test_cold_slots_are_held_until_the_step_that_reads_them_is_applied(leaves: str, steps_ahead: int) -> None:
    """A copy to them runs on a stream of its own: it would not wait for the step that reads them."""
    harness = large_in_decode()
    request = harness.request("large")
    harness.begin()
    cold = request.blocks[: request.cold]
    slots = {block.cpu for block in cold}
    if leaves == "aborted":
        harness.abort("large")
    else:
        harness.scheduler._preempt(request, harness.clock())
    in_use = harness.scheduler.cpu_use()
    assert in_use.used >= len(cold) == request_reads(harness)
    assert not slots & set(harness.scheduler._tiers._cpu._free)
    while harness.in_flight:
        harness.complete()
    assert slots <= set(harness.scheduler._tiers._cpu._free)
    harness.run()


def request_reads(harness: Harness) -> int:
    return sum(len(step.read_cold) for step in harness.scheduler._in_flight)


def test_copies_of_others_do_not_overwrite_what_a_step_in_flight_reads() -> None:
    """The fake executor asserts it: blocks are copied out right after the abort, into a tier that was full."""
    harness = oversize(num_cpu_blocks=20, write_behind_above=0.0)
    harness.add("other", range(500, 560), 90)
    harness.add("large", range(380), 20)
    harness.run_until(lambda: len(harness.tokens["large"]) == 3)
    assert harness.request("large").cold > 18
    begun = len(harness.executor.plans)
    harness.abort("large")
    harness.step()
    harness.step()
    harness.step()
    later = [move for plan in harness.executor.plans[begun:] for move in plan.moves]
    assert {move.direction for move in later} == {Direction.OUT}
    harness.run()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("delay", [0, 3])
def test_an_abort_at_any_moment_returns_every_block(delay: int, prefix_cache: bool) -> None:
    for moment in range(0, 60, 3):
        harness = oversize(delay=lambda move: delay, prefix_cache=prefix_cache)
        harness.add("large", range(400), 30)
        harness.add("small", range(500, 540), 40)
        for _ in range(moment):
            harness.step()
        harness.abort("large")
        harness.run()
        assert harness.finished["small"].reason == "length"


def test_copies_that_keep_failing_end_the_request_with_the_reason() -> None:
    harness = oversize(fails=lambda move: True)
    harness.add("large", range(400), 30)
    harness.add("small", range(500, 540), 10)
    harness.run()
    end = harness.finished["large"]
    assert (end.reason, end.error) == ("error", "larger than the GPU pool, and copies out fail: injected")
    assert harness.scheduler.counters.offload_failed == MAX_COPY_FAILURES
    assert harness.finished["small"].reason == "length"


def test_a_copy_that_fails_now_and_then_is_made_again() -> None:
    made: list[BlockMove] = []

    def fails(move: BlockMove) -> bool:
        made.append(move)
        return len(made) % 3 == 0

    harness = oversize(fails=fails)
    harness.add("large", range(400), 60)
    harness.run()
    assert harness.finished["large"].reason == "length" and harness.scheduler.counters.offload_failed > 1


def test_views_count_cold_blocks_in_the_cpu_tier() -> None:
    harness = large_in_decode()
    (row,) = harness.scheduler.requests()
    request = harness.request("large")
    assert (row.gpu_blocks, row.cpu_blocks) == (len(request.hot), request.cold) and request.cold > 10
    assert {block.residency for block in request.blocks[: request.cold]} <= {Residency.CPU, Residency.BOTH}
    harness.run()


def test_max_tokens_is_cut_to_what_both_tiers_hold() -> None:
    harness = oversize(num_cpu_blocks=8)
    harness.add("long", range(30), 10**6)
    harness.run()
    assert len(harness.tokens["long"]) == 13 * 16 - 30


@pytest.mark.parametrize("settings", [{"cpu_offload": False}, {"num_cpu_blocks": 0}, {"num_cpu_blocks": 5}])
def test_a_cpu_tier_that_adds_nothing_changes_nothing(settings: dict[str, object]) -> None:
    harness = oversize(**settings)
    harness.add("long", range(30), None)
    harness.run()
    assert len(harness.tokens["long"]) == 160 - 30 and harness.swaps == []


def test_a_pool_of_one_block_serves_a_long_request() -> None:
    harness = oversize(num_gpu_blocks=1)
    harness.add("large", range(100), 40)
    harness.run()
    assert harness.finished["large"].completion_tokens == 40
