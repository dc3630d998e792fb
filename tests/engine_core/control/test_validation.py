"""What is refused at once, with field, value and what is allowed (cases 7, 21, 22, 23)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.validation import Refusal, check_sampling
from scheduler_harness import VOCAB, Harness


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 999999.0),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),  # 0 in fp32: logits would become infinite
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("logprobs", -1),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (3, -1)),
    ],
)
def test_sampling_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(Refusal) as refusal:
        check_sampling(Sampling(**{field: value}), VOCAB)  # type: ignore[arg-type]
    assert refusal.value.field == field and refusal.value.value in str(value) and refusal.value.allowed


def test_very_many_stop_tokens_are_refused() -> None:
    check_sampling(Sampling(stop_token_ids=(5,) * 1024), VOCAB)
    with pytest.raises(Refusal, match="stop_token_ids is 1025 ids; allowed: at most 1024"):
        check_sampling(Sampling(stop_token_ids=(5,) * 1025), VOCAB)


def test_more_minimum_than_maximum_is_refused() -> None:
    with pytest.raises(Refusal, match="min_tokens is 5; allowed: 0 to 4"):
        check_sampling(Sampling(min_tokens=5, max_tokens=4), VOCAB)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-4, 2.0, 100.0])
def test_tiny_and_usual_temperatures_are_taken(temperature: float) -> None:
    check_sampling(Sampling(temperature=temperature, logprobs=20, seed=-1, top_k=0, min_p=1.0), VOCAB)


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ([], "empty"),
        ([VOCAB], f"token id {VOCAB}"),
        ([5, -1, 5], "token id -1"),
        ([200000], "token id 200000"),
        ([2**31], "token id 2147483648"),
        ([7, 2**40], "token id 1099511627776"),
        (array("I", [5, 2**32 - 1]), "token id 4294967295"),
        (array("I"), "empty"),
        ([1] * 160, "160 tokens, which need 11 blocks of 16 with one more token"),
        ([VOCAB] * 160, "160 tokens, which need 11 blocks of 16 with one more token"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_and_the_next_one_runs(prompt: Sequence[int], value: str) -> None:
    harness = Harness(num_gpu_blocks=10, max_model_len=512)
    with pytest.raises(Refusal) as refusal:
        harness.scheduler.add("bad", prompt, Sampling())
    assert (refusal.value.field, refusal.value.value) == ("prompt", value)
    harness.add("good", range(10))
    harness.run()


@pytest.mark.parametrize("prompt", [[1, 0, VOCAB - 1], (1, 0, VOCAB - 1), array("I", [1, 0, VOCAB - 1])])
def test_a_prompt_may_be_any_sequence_and_is_copied(prompt: Sequence[int]) -> None:
    harness = Harness()
    harness.add("id", prompt)
    assert harness.request("id").tokens == array("i", [1, 0, VOCAB - 1])
    harness.run()
    assert list(prompt) == [1, 0, VOCAB - 1]


def test_the_refusal_names_the_pool_and_the_model_length() -> None:
    harness = Harness(num_gpu_blocks=10, max_model_len=512)
    with pytest.raises(Refusal) as refusal:
        harness.scheduler.add("long", [1] * 200, Sampling())
    assert refusal.value.allowed == (
        "at most 159 tokens: max_model_len is 512, the KV pool has 10 blocks; "
        "with --allow-oversize a request can be larger and have blocks in the CPU tier"
    )
    harness = Harness(num_gpu_blocks=10, max_model_len=100)
    with pytest.raises(Refusal, match=r"max_model_len is 100, the KV pool has 10 blocks$"):
        harness.scheduler.add("long", [1] * 100, Sampling())


def test_with_oversize_a_prompt_that_both_tiers_cannot_hold_is_refused_with_their_numbers() -> None:
    for cpu, value in ((20, "480 tokens, which need 31 blocks of 16 with one more token"), (3, "")):
        harness = Harness(num_gpu_blocks=10, num_cpu_blocks=cpu, max_model_len=512, allow_oversize=True)
        with pytest.raises(Refusal) as refusal:
            harness.scheduler.add("long", [1] * 480, Sampling())
        assert refusal.value.value == value or not value
        assert refusal.value.allowed == (
            f"at most {max(10, 5 + cpu) * 16 - 1} tokens: max_model_len is 512, the KV pool has 10 blocks; "
            f"a larger request has 5 there and up to {cpu} in the CPU tier"
        )


def test_the_longest_prompt_runs_and_gets_its_one_token() -> None:
    harness = Harness(num_gpu_blocks=10, max_model_len=512)
    harness.add("full", [1] * 159, max_tokens=None)
    harness.run()
    assert len(harness.tokens["full"]) == 1


def test_a_live_request_id_cannot_be_taken_twice_but_a_finished_one_can() -> None:
    harness = Harness()
    harness.add("same", range(5))
    with pytest.raises(Refusal, match="request_id"):
        harness.scheduler.add("same", [1], Sampling())
    harness.run()
    assert harness.finished.pop("same").reason == "length"
    harness.tokens.clear()
    harness.add("same", range(9))
    harness.run()


@pytest.mark.parametrize("max_tokens", [None, 10**6, 2**31])
def test_max_tokens_is_cut_to_the_room_left(max_tokens: int | None) -> None:
    harness = Harness(num_gpu_blocks=10, max_model_len=100)
    harness.add("long", range(30), max_tokens)
    harness.run()
    assert len(harness.tokens["long"]) == 70 and harness.finished["long"].reason == "length"
