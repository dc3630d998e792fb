"""Admission, chunked prefill, decoding and the ends of a request, without any pressure on the pool."""

from __future__ import annotations

import pytest
from coldblock.engine_core.control.plan import SampledToken, StepResult
from coldblock.engine_core.control.request import State
from coldblock.engine_core.control.updates import FinishedUpdate, RequestView, TokenUpdate
from fake_executor import expected_tokens
from scheduler_harness import EOS, VOCAB, Harness

pytestmark = pytest.mark.usefixtures("steps_ahead")


def chunks(harness: Harness) -> list[tuple[str, int, int]]:
    """One step's chunks as (request, start, tokens)."""
    plan = harness.step()
    assert plan is not None
    return [(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def test_nothing_to_do_is_no_plan() -> None:
    harness = Harness()
    assert harness.scheduler.plan() is None and not harness.scheduler.has_work()
    assert harness.scheduler.drain() == []


def test_a_prompt_runs_in_chunks_and_its_last_chunk_samples() -> None:
    harness = Harness(prefill_chunk_tokens=32)
    harness.add("a", range(70), 2)
    assert [chunks(harness) for _ in range(4)] == [[("a", 0, 32)], [("a", 32, 32)], [("a", 64, 6)], [("a", 70, 1)]]
    samples = [plan.chunks[0].sample is not None for plan in harness.executor.plans]
    assert samples == [False, False, True, True]
    harness.run()
    assert harness.finished["a"].reason == "length" and len(harness.executor.plans) == 4


def test_decodes_come_first_then_continued_prefills_then_new_ones_within_the_budget() -> None:
    harness = Harness(prefill_chunk_tokens=32, max_num_batched_tokens=48)
    harness.add("decoding", range(3), 20)
    harness.step()
    harness.add("long", range(100), 2)
    assert chunks(harness) == [("decoding", 3, 1), ("long", 0, 32)]
    harness.add("new", range(40), 2)
    assert chunks(harness) == [("decoding", 4, 1), ("long", 32, 32), ("new", 0, 15)]
    harness.run()


def test_a_step_without_tokens_to_spare_admits_nobody() -> None:
    harness = Harness(prefill_chunk_tokens=32, max_num_batched_tokens=32)
    for name in "ab":
        harness.add(name, range(64), 2)
    harness.step()
    assert (harness.scheduler.running, harness.scheduler.waiting) == (1, 1)
    harness.run()


def test_who_takes_part_in_a_step_is_active() -> None:
    harness = Harness(prefill_chunk_tokens=8, max_num_batched_tokens=8)
    harness.add("a", range(30), 1)
    harness.step()
    harness.step()
    assert harness.request("a").last_active_time == harness.clock.now
    harness.run()


def test_max_num_seqs_bounds_the_running_requests() -> None:
    harness = Harness(max_num_seqs=3)
    for index in range(8):
        harness.add(f"r{index}", range(10), 4)
    while harness.scheduler.has_work():
        harness.step()
        assert harness.scheduler.running <= 3
    harness.check_drained()


def test_higher_priority_is_admitted_first_and_equals_in_order() -> None:
    harness = Harness(max_num_seqs=1)
    for name, priority in (("low", 0), ("high", 5), ("low again", 0), ("high again", 5)):
        harness.add(name, [1, 2], 1, priority)
    harness.run()
    assert list(harness.finished) == ["high", "high again", "low", "low again"]


def test_an_end_token_stops_the_request_and_is_not_emitted() -> None:
    prompt = list(range(20))
    answer = expected_tokens(prompt, 12, VOCAB)
    harness = Harness(eos_token_ids=(answer[9],))
    harness.add("eos", prompt, 50, ignore_eos=False)
    harness.add("stop", prompt, 50, ignore_eos=True, stop_token_ids=(answer[4],))
    harness.add("neither", prompt, 12, ignore_eos=True)
    harness.run()
    eos, stop = harness.finished["eos"], harness.finished["stop"]
    assert (eos.reason, eos.stop_token, harness.tokens["eos"]) == ("stop", answer[9], answer[:9])
    assert (stop.reason, stop.stop_token, harness.tokens["stop"]) == ("stop", answer[4], answer[:4])
    assert (harness.finished["neither"].reason, harness.tokens["neither"]) == ("length", answer)


def test_end_tokens_are_banned_until_min_tokens_are_made() -> None:
    harness = Harness()
    harness.add("a", range(5), 6, min_tokens=3, ignore_eos=False, stop_token_ids=(7,))
    harness.run()
    banned = [plan.chunks[0].sample.banned for plan in harness.executor.plans if plan.chunks[0].sample is not None]
    assert banned == [(7, EOS)] * 3 + [()] * 3


def test_penalties_bring_the_history_and_others_do_not() -> None:
    harness = Harness()
    harness.add("plain", range(5), 2)
    harness.add("penalized", range(6), 2, repetition_penalty=1.1)
    harness.run()
    chunks = [chunk for plan in harness.executor.plans for chunk in plan.chunks]
    plain, penalized = ([c.sample for c in chunks if c.request_id == name][1] for name in ("plain", "penalized"))
    assert plain is not None and plain.history is None
    assert penalized is not None and penalized.history is not None
    assert tuple(penalized.history) == (*range(6), harness.tokens["penalized"][0])
    assert (penalized.output_index, penalized.prompt_length) == (1, 6)


def test_seeds_are_kept_or_drawn_reproducibly() -> None:
    drawn = []
    for _ in range(2):
        harness = Harness(seed=7)
        harness.add("given", [1], 1, seed=42)
        harness.add("drawn", [1], 1)
        drawn.append([harness.request(name).seed for name in ("given", "drawn")])
    assert drawn[0] == drawn[1] and drawn[0][0] == 42


def test_a_failed_request_ends_alone(steps_ahead: int) -> None:
    harness = Harness()
    for name in ("good", "bad"):
        harness.add(name, range(20), 6)
    harness.run_until(lambda: len(harness.tokens["bad"]) == 2)
    harness.executor.failing.add("bad")
    harness.run()
    bad = harness.finished["bad"]
    assert (bad.reason, bad.error, bad.completion_tokens) == ("error", "logits are not finite", 2 + steps_ahead)
    assert harness.finished["good"].reason == "length" and harness.scheduler.counters.finished["error"] == 1


def test_a_missing_token_is_an_error_of_that_request() -> None:
    harness = Harness()
    harness.add("a", range(5))
    plan = harness.scheduler.plan()
    assert plan is not None
    harness.scheduler.apply(StepResult(plan.step, {}, {}, (), 0.0))
    (update,) = harness.scheduler.drain()
    assert isinstance(update, FinishedUpdate) and update.error == "the executor returned no token"


def test_unknown_and_finished_ids_are_not_aborted() -> None:
    harness = Harness()
    harness.add("a", range(5), 1)
    harness.run()
    harness.scheduler.abort("a")
    harness.scheduler.abort("never seen")
    assert harness.scheduler.drain() == [] and harness.scheduler.counters.finished == {"length": 1}


def test_an_abort_while_the_step_runs_takes_no_token_and_leaks_nothing() -> None:
    harness = Harness()
    for name in ("stays", "goes"):
        harness.add(name, range(20), 4)
    plan = harness.scheduler.plan()
    assert plan is not None
    harness.executor.begin_step(plan)
    harness.scheduler.abort("goes")
    harness.scheduler.apply(harness.executor.complete_step())
    harness.run()
    assert (harness.finished["goes"].reason, harness.tokens["goes"]) == ("abort", [])
    assert len(harness.tokens["stays"]) == 4


def test_the_last_token_comes_before_the_end() -> None:
    harness = Harness()
    harness.add("a", range(5), 1)
    plan = harness.scheduler.plan()
    assert plan is not None
    harness.scheduler.apply(StepResult(plan.step, {"a": SampledToken(3)}, {}, (), 0.0))
    token, end = harness.scheduler.drain()
    assert token == TokenUpdate("a", SampledToken(3)) and isinstance(end, FinishedUpdate)


def test_durations_follow_the_clock(steps_ahead: int) -> None:
    harness = Harness(max_num_seqs=1, prefill_chunk_tokens=16)
    harness.add("first", range(10), 3)
    harness.add("second", range(40), 5)
    harness.run()
    end = harness.finished["second"]
    # Each step takes 10 ms; times count from a step's beginning, and its results are at its end, or the next one's.
    late = 0.01 * steps_ahead
    assert end.queue_s == pytest.approx(0.04 + late) and end.prefill_s == pytest.approx(0.02 + late)
    assert end.decode_s == pytest.approx(0.04) and end.stall_s == 0.0


def test_views_and_counters() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("runs", range(20), 5)
    harness.add("waits", range(7), 5)
    harness.run_until(lambda: len(harness.tokens["runs"]) == 2)
    runs, waits = harness.scheduler.requests()
    assert (runs.request_id, runs.state, runs.prompt_tokens, runs.generated_tokens) == ("runs", "decode", 20, 2)
    assert (runs.gpu_blocks, runs.cpu_blocks, waits.state, waits.gpu_blocks) == (2, 0, "waiting", 0)
    assert runs.age_s > 0 and harness.state("waits") is State.WAITING
    assert (waits.queue_s, waits.ttft_s, waits.tpot_s, waits.stalled_s) == (waits.age_s, None, None, 0.0)
    harness.run()
    counters = harness.scheduler.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (27, 10)
    assert counters.finished == {"length": 2} and counters.preemptions == 0


def test_a_views_latencies_are_those_of_its_end(steps_ahead: int) -> None:
    harness = Harness(num_gpu_blocks=8, prefill_chunk_tokens=16, prefix_cache=True)
    for name in ("a", "b", "c"):
        harness.add(name, range(33), 40)
    seen: dict[str, RequestView] = {}
    while harness.scheduler.has_work():
        seen.update((view.request_id, view) for view in harness.scheduler.requests())
        harness.step()
    assert any(end.swaps for end in harness.finished.values())
    for name, end in harness.finished.items():
        view = seen[name]
        assert view.ttft_s == pytest.approx(end.queue_s + end.prefill_s) and view.queue_s == end.queue_s
        gaps = view.generated_tokens - 1  # it was seen last before its end
        assert view.tpot_s is not None and view.tpot_s * gaps == pytest.approx(end.decode_s, abs=0.021)
        assert (view.cached_tokens, view.recomputes) == (end.cached_tokens, end.recomputes)


def test_two_thousand_short_requests_leave_nothing_behind() -> None:
    """Case 6."""
    harness = Harness(num_gpu_blocks=32, max_num_seqs=16, prefix_cache=True)
    added = 0
    while added < 2000 or harness.scheduler.has_work():
        for _ in range(min(4, 2000 - added)):
            harness.add(f"r{added}", [added % 13, *range(added % 29)], 1 + added % 4)
            if added % 10 == 3:
                harness.abort(f"r{added - added % 4}")
            added += 1
        harness.step()
    harness.check_drained()
    assert harness.scheduler.counters.finished["abort"] == 200
