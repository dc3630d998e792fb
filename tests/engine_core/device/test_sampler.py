"""Sampling: filters, penalties, draws, log-probabilities, and hostile values."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from coldblock.engine_core.control.plan import SampledToken
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.sampler import Sampler
from tiny_models import chunk
from torch import Tensor

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def sample(logits: Tensor, vocab_size: int | None = None, **spec: Any) -> SampledToken:
    """One token; keyword arguments are fields of Sampling or of SampleSpec."""
    fields = Sampling.__dataclass_fields__
    sampling = Sampling(**{key: spec.pop(key) for key in list(spec) if key in fields and key != "seed"})
    tokens, failed = Sampler(vocab_size or len(logits)).sample(
        [chunk("a", [0], 0, [0], sampling, **spec)], logits[None]
    )
    assert not failed
    return tokens["a"]


def frequencies(logits: Tensor, draws: int = 3000, **spec: Any) -> Tensor:
    counts = Counter(sample(logits, output_index=i, **spec).token_id for i in range(draws))
    return torch.tensor([counts[token] / draws for token in range(len(logits))])


def allowed(logits: Tensor, draws: int = 300, **spec: Any) -> set[int]:
    return {sample(logits, output_index=i, **spec).token_id for i in range(draws)}


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 9e-6])
@pytest.mark.parametrize("size", [5, 256, 1000, 4096])
def test_greedy_takes_the_first_largest(temperature: float, size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert sample(logits, temperature=temperature).token_id == int(logits.argmax())
    logits[[size // 2, size - 1]] = 9.0
    assert sample(logits, temperature=temperature).token_id == size // 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    wanted = (LOGITS / temperature).softmax(-1)
    assert (frequencies(LOGITS, temperature=temperature) - wanted).abs().max() < 0.03


def test_filtered_draws_follow_the_renormalized_distribution() -> None:
    wanted = torch.cat([LOGITS[:3].softmax(-1), torch.zeros(2)])
    for spec in ({"top_k": 3}, {"top_p": 0.93}, {"min_p": 0.2}):
        assert (frequencies(LOGITS, **spec) - wanted).abs().max() < 0.03, spec


def test_a_token_depends_on_seed_and_index_alone() -> None:
    logits = torch.randn(4, 500)
    chunks = [chunk(str(i), [0], 0, [0], Sampling(), seed=i, output_index=i * 7) for i in range(4)]
    together, _ = Sampler(500).sample(chunks, logits)
    backwards, _ = Sampler(500).sample(chunks[::-1], logits.flip(0))
    assert together == backwards
    for i in range(4):
        assert sample(logits[i], seed=i, output_index=i * 7) == together[str(i)]
    assert len({sample(torch.zeros(500), seed=seed).token_id for seed in range(50)}) > 30
    assert len({sample(torch.zeros(500), output_index=index).token_id for index in range(50)}) > 30


def test_any_integer_is_a_seed() -> None:
    for seed in (-1, 0, 2**63, 2**80):
        assert 0 <= sample(LOGITS, seed=seed).token_id < 5


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(3000)
    assert allowed(logits, 20, top_k=1, temperature=5.0) == {int(logits.argmax())}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert allowed(logits, top_p=0.5) == {0}
    assert allowed(logits, top_p=0.51) == {0, 1}
    assert allowed(logits, top_p=0.81) == {0, 1, 2}
    assert allowed(logits, top_p=1e-9) == {0}


def test_top_p_over_more_candidates_than_the_short_list() -> None:
    logits = torch.linspace(0, 1e-3, 5000)
    tokens = allowed(logits, 600, top_p=0.5)
    assert min(tokens) >= 2490
    assert len(tokens) > 400
    assert allowed(logits, 300, top_k=2000, top_p=0.5) <= set(range(3990, 5000))


def test_top_k_over_more_candidates_than_the_short_list() -> None:
    assert min(allowed(torch.linspace(0, 1e-3, 5000), 600, top_k=2000)) >= 3000


def test_min_p_is_relative_to_the_best() -> None:
    assert allowed(torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), min_p=0.2) == {0, 1, 2}


def test_repetition_penalty_counts_the_prompt_too() -> None:
    spec = {"temperature": 0.0, "history": [0, 4, 1], "prompt_length": 2}
    assert sample(torch.tensor([2.0, 1.9, 1.1, 0.0, -1.0]), repetition_penalty=2.0, **spec).token_id == 2
    assert sample(torch.tensor([-1.0, -1.1, -1.9, -3.0, -0.96]), repetition_penalty=2.0, **spec).token_id == 0 + 2


@pytest.mark.parametrize("history", [[310, 0], [319, 300]])
def test_penalties_pass_over_padding_ids_in_the_prompt(history: list[int]) -> None:
    logits = torch.linspace(1, 0, 320)
    spec = {"temperature": 0.0, "history": history, "prompt_length": 2, "repetition_penalty": 1.5}
    assert sample(logits, 300, **spec).token_id == history.count(0)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    spec = {"temperature": 0.0, "history": [0, 0, 0, 1, 1, 2], "prompt_length": 3}
    assert sample(torch.tensor([0.9, 1.0, 0.95]), presence_penalty=0.5, **spec).token_id == 0
    assert sample(torch.tensor([0.1, 1.0, 0.9]), frequency_penalty=0.2, **spec).token_id == 2
    assert sample(torch.tensor([0.1, 1.0, 0.9]), frequency_penalty=-0.2, **spec).token_id == 1


def test_banned_tokens_never_come() -> None:
    assert sample(LOGITS, temperature=0.0, banned=(0, 2)).token_id == 1
    assert allowed(LOGITS, banned=(0, 1, 99)) == {2, 3, 4}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_ban_of_every_token_bans_none(sampling: dict[str, Any]) -> None:
    for index in range(20):
        spec = {"output_index": index, **sampling}
        assert sample(LOGITS, banned=tuple(range(7)), **spec) == sample(LOGITS, **spec)


@pytest.mark.parametrize("spec", [{}, {"top_p": 0.999}, {"top_k": 310}, {"temperature": 0.0}])
def test_padding_rows_never_come(spec: dict[str, Any]) -> None:
    logits = torch.zeros(320)
    logits[300:] = 50.0
    tokens = {sample(logits, 300, output_index=i, **{"temperature": 1e6, **spec}).token_id for i in range(200)}
    assert max(tokens) < 300


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e6, 999999.0])
@pytest.mark.parametrize("spec", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}, {"top_p": 1e-30, "top_k": 2}])
def test_wild_values_give_a_token(temperature: float, spec: dict[str, Any]) -> None:
    for scale in (1e-30, 1.0, 1e30):
        token = sample(LOGITS * scale, temperature=temperature, **spec).token_id
        assert 0 <= token < 5
        if temperature <= 1e-4 and scale >= 1:
            assert token == 0


def test_logprobs_are_the_models_own() -> None:
    token = sample(LOGITS, temperature=0.0, logprobs=2, banned=(0,), history=[1, 1], repetition_penalty=1.1)
    logprobs = LOGITS.log_softmax(-1).tolist()
    assert token.token_id == 1
    assert token.logprob == pytest.approx(logprobs[1])
    assert [pair[0] for pair in token.top] == [0, 1]
    assert [pair[1] for pair in token.top] == pytest.approx(logprobs[:2])


def test_logprobs_none_zero_and_too_many() -> None:
    assert sample(LOGITS, temperature=0.0).logprob is None
    assert sample(LOGITS, temperature=0.0, logprobs=0).top == ()
    assert sample(LOGITS, temperature=0.0, logprobs=0).logprob is not None
    assert len(sample(LOGITS, temperature=0.0, logprobs=20).top) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_request_alone(bad: float, temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    chunks = [chunk(name, [0], 0, [0], Sampling(temperature=temperature)) for name in "abc"]
    tokens, failed = Sampler(5).sample(chunks, logits)
    assert set(tokens) == {"a", "c"}
    assert set(failed) == {"b"}
    assert "not finite" in failed["b"]


def test_nothing_to_sample() -> None:
    assert Sampler(5).sample([], torch.empty(0, 0)) == ({}, {})
