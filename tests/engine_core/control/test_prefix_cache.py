"""The prefix cache as the scheduler uses it: matched when scheduled, never half computed, dropped with a failure."""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.request import State
from scheduler_harness import Harness

pytestmark = pytest.mark.usefixtures("steps_ahead")


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_full_hit_computes_its_last_token_again(length: int, hit: int) -> None:
    """Case 10: prompts of 16, 32 and 33 tokens twice."""
    harness = Harness(prefix_cache=True)
    harness.add("once", range(length), 4)
    harness.run()
    harness.add("twice", range(length), 4)
    harness.run()
    assert harness.finished["once"].cached_tokens == 0 and harness.finished["twice"].cached_tokens == hit
    assert harness.tokens["once"] == harness.tokens["twice"]
    counters = harness.scheduler.counters
    assert (counters.prefix_queries_tokens, counters.prefix_hits_tokens) == (2 * length, hit)


def test_a_prefix_is_matched_when_scheduled_not_when_queued() -> None:
    """Case 10: A's prefix is cached when A is queued, and evicted by B before A runs."""
    harness = Harness(num_gpu_blocks=6, max_num_seqs=1, prefix_cache=True)
    harness.add("warm", range(40), 2)
    harness.run()
    harness.add("b", range(500, 585), 4)
    harness.step()
    harness.add("a", range(40), 4)
    harness.run()
    assert harness.finished["a"].cached_tokens == 0


def test_a_prefix_that_is_computed_while_waiting_is_a_hit() -> None:
    harness = Harness(max_num_seqs=1, prefix_cache=True)
    for name in ("first", "second"):
        harness.add(name, range(40), 2)
    harness.run()
    assert harness.finished["second"].cached_tokens == 32


def test_identical_prompts_running_together_share_blocks() -> None:
    harness = Harness(prefix_cache=True)
    harness.add("n0", range(64), 8)
    harness.run_until(lambda: bool(harness.tokens["n0"]))
    for index in range(1, 4):
        harness.add(f"n{index}", range(64), 8)
    harness.step()
    tables = [tuple(harness.request(f"n{index}").block_table) for index in range(4)]
    assert {table[:3] for table in tables} == {tables[0][:3]} and len({table[3] for table in tables}) == 4
    harness.run()


def test_blocks_are_offered_only_when_they_have_been_computed(steps_ahead: int) -> None:
    harness = Harness(prefix_cache=True, prefill_chunk_tokens=16)
    harness.add("slow", range(64), 2)
    harness.step()
    harness.add("early", range(64), 2)
    harness.step()
    assert harness.request("early").cached_tokens == (0 if steps_ahead else 16)
    harness.run()


def test_blocks_filled_by_decoding_are_offered_too() -> None:
    harness = Harness(prefix_cache=True)
    harness.add("talk", range(10), 40)
    harness.run()
    turn = [*range(10), *harness.tokens["talk"], 5, 6, 7]
    harness.add("next turn", turn, 4)
    harness.run()
    assert harness.finished["next turn"].cached_tokens == 48


def test_the_cache_can_be_switched_off() -> None:
    harness = Harness(prefix_cache=False)
    for name in ("once", "twice"):
        harness.add(name, range(64), 4)
        harness.run()
    assert harness.finished["twice"].cached_tokens == 0 and harness.scheduler.counters.prefix_queries_tokens == 0
    assert harness.scheduler.gpu_use().cached == 0


def test_the_beginning_of_a_prefix_outlives_its_end_in_the_cache() -> None:
    harness = Harness(num_gpu_blocks=5, prefix_cache=True)
    harness.add("long", range(64), 2)
    harness.run()
    harness.add("other", range(500, 530), 2)
    harness.run()
    harness.add("long again", range(64), 2)
    harness.run()
    assert harness.finished["long again"].cached_tokens == 48


def test_blocks_of_a_failed_request_are_dropped() -> None:
    """Case 11: what a request with bad values computed is used by nobody else."""
    harness = Harness(prefix_cache=True, prefill_chunk_tokens=16)
    harness.add("bad", range(64), 4)
    harness.step()
    harness.executor.failing.add("bad")
    harness.run()
    assert harness.finished["bad"].reason == "error" and harness.scheduler.gpu_use().cached == 0
    harness.add("good", range(64), 4)
    harness.run()
    assert harness.finished["good"].cached_tokens == 0


def test_what_others_compute_from_a_failed_request_is_not_found_either() -> None:
    """One that shares its blocks leaves before its own output shows that they are bad."""
    harness = Harness(prefix_cache=True, prefill_chunk_tokens=16)
    harness.add("bad", range(100))
    for _ in range(4):
        harness.step()
    harness.add("sharer", [*range(32), *range(200, 300)])
    harness.step()
    harness.executor.failing.add("bad")
    harness.run_until(lambda: "bad" in harness.finished)
    sharer = harness.request("sharer")
    assert sharer.cached_tokens == 32 and sharer.state is State.PREFILL
    for _ in range(2):
        harness.step()
    assert len(harness.scheduler._tiers.index) == 0
    harness.abort("sharer")
    harness.add("same", [*range(32), *range(200, 300)], max_tokens=4)
    harness.run()
    assert harness.finished["same"].cached_tokens == 0
