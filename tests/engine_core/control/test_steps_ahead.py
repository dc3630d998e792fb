"""Planning a step while the one before it is in flight: what is fed forward, and what happens to who ends or leaves."""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.plan import Chunk
from coldblock.engine_core.control.request import State
from fake_executor import expected_tokens
from scheduler_harness import VOCAB, Harness


def ahead(**settings: object) -> Harness:
    return Harness(steps_ahead=1, **settings)  # type: ignore[arg-type]


def chunks_of(harness: Harness, request_id: str) -> list[Chunk]:
    return [chunk for plan in harness.executor.plans for chunk in plan.chunks if chunk.request_id == request_id]


def test_a_token_in_flight_is_fed_by_the_executor_and_its_sample_counts_it() -> None:
    harness = ahead(prefill_chunk_tokens=16)
    harness.add("a", range(20), 4)
    harness.run()
    chunks = chunks_of(harness, "a")
    assert [(c.start, c.num_tokens, len(c.token_ids), c.from_previous) for c in chunks] == [
        (0, 16, 16, False),
        (16, 4, 4, False),
        (20, 1, 0, True),
        (21, 1, 0, True),
        (22, 1, 0, True),
    ]
    assert [c.sample.output_index for c in chunks if c.sample is not None] == [0, 1, 2, 3]


def test_who_ends_by_length_is_not_planned_behind_its_end() -> None:
    harness = ahead()
    for index in range(1, 6):
        harness.add(f"r{index}", range(index * 20, index * 20 + 10), index)
    harness.run()
    assert [len(chunks_of(harness, f"r{index}")) for index in range(1, 6)] == [1, 2, 3, 4, 5]


def test_a_stop_token_is_met_one_step_late_and_what_came_of_it_is_dropped() -> None:
    prompt = list(range(20))
    answer = expected_tokens(prompt, 12, VOCAB)
    harness = ahead()
    harness.add("stops", prompt, 50, stop_token_ids=(answer[4],))
    harness.run()
    assert harness.tokens["stops"] == answer[:4] and harness.finished["stops"].stop_token == answer[4]
    assert len(chunks_of(harness, "stops")) == 6, "the prompt, four tokens, and the stop token, which was not known yet"
    assert harness.scheduler.counters.generation_tokens == 4


def test_an_id_used_again_at_once_does_not_get_the_old_ones_token() -> None:
    harness = ahead()
    harness.add("id", range(20), 50)
    harness.run_until(lambda: len(harness.tokens["id"]) == 3)
    for prompt in (range(500, 530), range(600, 610)):
        assert harness.request("id").awaits_token
        harness.abort("id")
        harness.forget("id")
        harness.add("id", prompt, 4)
        harness.step()
    harness.run()
    assert harness.tokens["id"] == expected_tokens(range(600, 610), 4, VOCAB)


def test_who_needs_its_history_waits_for_it_and_nobody_else_does() -> None:
    harness = ahead()
    harness.add("penalized", range(6), 3, repetition_penalty=1.1)
    harness.add("plain", range(100, 106), 6)
    harness.run()
    steps = {name: [c.start for c in chunks_of(harness, name)] for name in ("penalized", "plain")}
    assert steps == {"penalized": [0, 6, 7], "plain": [0, 6, 7, 8, 9, 10]}
    named = [[c.request_id for c in plan.chunks] for plan in harness.executor.plans]
    assert named == [
        ["penalized", "plain"],
        ["plain"],
        ["penalized", "plain"],
        ["plain"],
        ["penalized", "plain"],
        ["plain"],
    ]
    second = chunks_of(harness, "penalized")[1]
    assert (list(second.token_ids), second.from_previous) == (harness.tokens["penalized"][:1], False)


def test_a_request_alone_that_waits_for_its_history_does_not_stand_still() -> None:
    harness = ahead()
    harness.add("penalized", range(6), 5, presence_penalty=0.5)
    harness.run()
    assert len(harness.tokens["penalized"]) == 5


@pytest.mark.parametrize("outputs", [1, 15, 16, 17])
@pytest.mark.parametrize("last", [False, True])
def test_a_recompute_with_a_token_in_flight_loses_and_doubles_nothing(outputs: int, last: bool) -> None:
    """Case 9. `last`: the token in flight is the request's last one."""
    harness = ahead(prefix_cache=True)
    harness.add("a", range(16), outputs + 1 if last else 40)
    harness.run_until(lambda: len(harness.tokens["a"]) == outputs)
    request = harness.request("a")
    assert request.awaits_token and request.ends_in_flight is last
    harness.scheduler._preempt(request, harness.clock())
    harness.step()
    assert len(harness.tokens["a"]) == outputs + 1, "the token in flight still counts"
    harness.run()
    assert harness.finished["a"].completion_tokens == (outputs + 1 if last else 40)
    assert harness.scheduler.counters.preemptions == 1


def test_a_recomputed_request_is_not_admitted_before_its_step_in_flight_is_applied() -> None:
    harness = ahead(prefill_chunk_tokens=16, prefix_cache=True)
    harness.add("a", range(100), 4)
    harness.step()
    harness.step()
    request = harness.request("a")
    harness.scheduler._preempt(request, harness.clock())
    assert harness.begin() is None and request.state is State.WAITING
    harness.complete()
    assert len(harness.scheduler._tiers.index) == 1, "what was in flight is offered to nobody"
    harness.run()


@pytest.mark.parametrize("ends", ["goes on", "stop", "error", "abort"])
def test_a_swap_out_with_a_token_in_flight(ends: str) -> None:
    """The copy begins behind the step that still writes its blocks; the token comes while the blocks leave."""
    answer = expected_tokens(range(40), 8, VOCAB)
    harness = ahead(num_gpu_blocks=3, num_cpu_blocks=3, delay=lambda move: 3)
    harness.add("first", range(40), 8, stop_token_ids=(answer[2],) if ends == "stop" else ())
    harness.run_until(lambda: len(harness.tokens["first"]) == 1)
    harness.add("second", range(100, 140), 8)
    request = harness.request("first")
    plan = harness.begin()
    while plan is None or not plan.moves:
        harness.complete()
        plan = harness.begin()
    assert request.state is State.SWAPPING_OUT and request.awaits_token
    assert len(plan.moves[0].gpu_blocks) == 3 and request.computed_tokens == len(request.tokens)
    if ends == "error":
        harness.executor.failing.add("first")
    if ends == "abort":
        harness.abort("first")
    harness.run()
    assert harness.finished["first"].reason == {"goes on": "length", "stop": "stop", "error": "error"}.get(
        ends, "abort"
    )
    assert harness.finished["second"].reason == "length"


def test_blocks_of_who_ends_with_the_step_in_flight_are_waited_for_not_swapped_for() -> None:
    harness = ahead(num_gpu_blocks=4)
    harness.add("eldest", range(10), 20)
    harness.add("short", range(100, 116), 7)
    harness.add("other", range(200, 210), 20)
    harness.run_until(lambda: harness.request("eldest").num_tokens == 17)
    assert harness.request("short").ends_in_flight and harness.scheduler.gpu_use().free == 0
    harness.run()
    assert harness.swaps == []


def test_nobody_gives_way_to_a_newcomer_whose_room_is_about_to_be_free() -> None:
    harness = ahead(num_gpu_blocks=6)
    harness.add("long", range(20), 40)
    harness.add("short", range(100, 140), 6)
    harness.run_until(lambda: len(harness.tokens["short"]) == 5)
    assert harness.request("short").ends_in_flight
    harness.add("newcomer", range(200, 240), 4)
    harness.step()
    harness.run()
    assert harness.swaps == []


def test_who_ends_anyway_does_not_give_way_and_no_more_do_than_lack_beside_it() -> None:
    harness = ahead(num_gpu_blocks=8)
    harness.add("first", range(20), 40)
    harness.add("second", range(100, 120), 40)
    harness.add("ends", range(200, 240), 6)
    harness.run_until(lambda: harness.request("ends").ends_in_flight)
    harness.add("newcomer", range(300, 365), 4)
    harness.step()
    assert harness.phases("swapping_out") == ["second"]
    harness.run()
    assert harness.finished["ends"].swaps == 0


def test_nobody_needs_room_behind_its_last_token() -> None:
    harness = ahead(num_gpu_blocks=3)
    harness.add("ends", range(10), 22)
    request = harness.request("ends")
    harness.run_until(lambda: request.ends_in_flight)
    assert (request.num_tokens, len(request.block_table)) == (32, 2)
    harness.add("newcomer", range(100, 105), 4)
    harness.begin()
    assert harness.state("newcomer") is not State.WAITING
    harness.complete()
    harness.run()

    harness = ahead()
    harness.add("ends", range(10), 23)
    request = harness.request("ends")
    harness.run_until(lambda: request.ends_in_flight)
    harness.begin()
    assert (request.num_tokens, len(request.block_table)) == (33, 2), "the last token's KV is never computed"
    harness.complete()
    harness.run()


@pytest.mark.parametrize("leaves", ["stays", "recomputed"])
def test_what_a_request_that_fails_in_flight_computed_is_found_by_nobody(leaves: str) -> None:
    """Case 11: also when the request has left its blocks to the cache before it is known to have failed."""
    harness = ahead(prefix_cache=True)
    harness.add("bad", range(64), 30)
    harness.run_until(lambda: len(harness.tokens["bad"]) == 3)
    harness.executor.failing.add("bad")
    harness.step()
    if leaves == "recomputed":
        harness.scheduler._preempt(harness.request("bad"), harness.clock())
        assert harness.scheduler.gpu_use().cached == 4
    harness.run()
    assert harness.finished["bad"].reason == "error" and harness.scheduler.gpu_use().cached == 0


def test_a_block_is_offered_once_its_tokens_are_known_and_its_step_is_applied() -> None:
    harness = ahead(prefix_cache=True)
    harness.add("a", range(14), 20)
    request = harness.request("a")
    while request.computed_tokens < 16:
        harness.step()
    assert request.indexed_blocks == 0
    harness.step()
    assert request.indexed_blocks == 1
    harness.run()


def test_an_engine_with_a_step_in_flight_has_work() -> None:
    harness = ahead()
    harness.add("a", range(5), 9)
    harness.step()
    harness.abort("a")
    assert harness.scheduler.has_work()
    assert harness.step() is None and not harness.scheduler.has_work()
    harness.check_drained()
