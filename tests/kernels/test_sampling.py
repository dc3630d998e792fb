"""Sampling on the GPU: against the reference, draw by draw, and the reference against the CPU's sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from coldblock.engine_core.control.plan import SampleSpec
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device import sampler
from coldblock.kernels import sampling
from coldblock.kernels.errors import KernelArgumentError
from coldblock.kernels.sampling import PARAMETERS, kept_tokens, parameter_row, sample_reference
from torch import Tensor

gpu = pytest.mark.gpu
GREEDY = parameter_row(0.0, 0, 0)
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 3000, "top_p": 0.999},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "min_p": 0.001},
]


def packed(rows: list[tuple[float | int, ...]]) -> np.ndarray:
    return np.array(rows, PARAMETERS)


def on_gpu(parameters: np.ndarray) -> Tensor:
    return torch.from_numpy(parameters.view(np.int32).reshape(len(parameters), -1)).cuda()


def sampled(logits: Tensor, vocab_size: int, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = len(logits)
    tokens, finite = (torch.full((rows,), -7, dtype=torch.int32, device="cuda") for _ in range(2))
    space = sampling.make_workspace(rows, vocab_size, "cuda").fill_(-1)
    sampling.sample(logits.cuda(), vocab_size, on_gpu(parameters), space, tokens, finite)
    return tokens.cpu().numpy(), finite.cpu().numpy()


def some_logits(rows: int, vocab_size: int, kind: str, stride: int | None = None) -> Tensor:
    """Logits [rows, stride] in which everything past the vocabulary is infinite."""
    stride = stride or -(-vocab_size // 4) * 4
    logits = torch.full((rows, stride), math.inf)
    values = torch.randn(rows, vocab_size)
    if kind == "flat":
        values *= 0.01
    elif kind == "model":  # a few likely tokens above many unlikely ones
        values = values * 2.5 + 12 * (torch.rand(rows, vocab_size) < 30 / vocab_size)
    elif kind == "tied":
        values = (values * 2).round() / 2
    elif kind == "equal":
        values = torch.zeros(rows, vocab_size)
    logits[:, :vocab_size] = values
    return logits


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean (Wilson and Hilferty's approximation)."""
    wanted = probabilities / probabilities.sum() * counts.sum()
    order = np.argsort(wanted)
    cut = max(1, int(np.searchsorted(np.cumsum(wanted[order]), 10)) + 1)  # the rarest count as one
    seen = np.append(counts[order[cut:]], counts[order[:cut]].sum())
    wanted = np.append(wanted[order[cut:]], wanted[order[:cut]].sum())
    freedom = len(seen) - 1
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def test_chi_square_can_fail() -> None:
    rng = np.random.default_rng(0)
    even, tilted = np.ones(50) / 50, np.linspace(0.8, 1.2, 50) / 50
    assert abs(chi_square(rng.multinomial(20000, even), even)) < 3.5
    assert chi_square(rng.multinomial(20000, tilted), even) > 8


@pytest.mark.parametrize("filters", FILTERS)
def test_the_reference_keeps_what_the_cpu_sampler_draws_from(filters: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform numbers at the middle of each kept token's share make the CPU's sampler draw each of them once."""
    torch.manual_seed(3)
    row = torch.randn(3000) * 2
    scaled = ((row - row.max()) / 0.7).numpy()
    _, _, top_p, log_min_p, *_ = parameter_row(0.7, 0, 0, **filters)
    kept = kept_tokens(scaled, filters.get("top_k", 0), top_p, log_min_p)
    weights = np.exp(scaled.astype(np.float64))
    filtered = "top_k" in filters or "top_p" in filters
    order = kept[np.argsort(-scaled[kept], kind="stable")] if filtered else kept
    middles = (np.cumsum(weights[order]) - weights[order] / 2) / weights[order].sum()
    spec = SampleSpec(Sampling(temperature=0.7, **filters), 0, 0, 0)
    wide = weights[order] > 1e-5 * weights[order].sum()  # its middle is in its share after fp32 rounding, too
    for token, middle in list(zip(order[wide], middles[wide], strict=True))[:: max(1, len(order) // 200)]:
        monkeypatch.setattr(sampler, "_uniform", lambda *_, middle=middle: float(middle))
        assert sampler._choose(row, spec) == token


@pytest.mark.parametrize("filters", [{}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.05}])
def test_the_reference_draws_from_the_softmax_of_what_is_kept(filters: dict) -> None:
    torch.manual_seed(1)
    logits, draws = (torch.randn(1, 60) * 1.5).numpy(), 6000
    tokens, _ = sample_reference(
        np.broadcast_to(logits, (draws, 60)), 60, packed([parameter_row(0.8, 77, i, **filters) for i in range(draws)])
    )
    assert abs(chi_square(*histogram(tokens, logits[0], filters))) < 3.5


def histogram(tokens: np.ndarray, row: np.ndarray, filters: dict) -> tuple[np.ndarray, np.ndarray]:
    """Counts and probabilities of the kept tokens; fails when another was drawn."""
    scaled = (row - row.max()) / np.float32(0.8)
    _, top_k, top_p, log_min_p, *_ = parameter_row(0.8, 0, 0, **filters)
    kept = kept_tokens(scaled, top_k, top_p, log_min_p)
    counts = np.bincount(tokens, minlength=len(row))
    assert counts.sum() == counts[kept].sum()
    return counts[kept], np.exp(scaled[kept].astype(np.float64))


def test_the_reference_fails_rows_that_are_not_finite() -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[0, 3], logits[1, 3], logits[2, 3], logits[3, 6] = np.nan, np.inf, -np.inf, np.nan
    tokens, finite = sample_reference(logits, 6, packed([GREEDY] * 4))
    assert finite.tolist() == [0, 0, 1, 1]
    assert tokens.tolist() == [0, 0, 0, 0]


def test_arguments_that_do_not_fit_are_refused() -> None:
    tokens = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"logits is torch\.float16"):
        sampling.sample(torch.zeros(1, 8).half(), 8, tokens, tokens, tokens, tokens)


def test_a_seed_of_any_sign_fits() -> None:
    assert packed([parameter_row(1.0, -1, 3)])["seed"][0] == 2**64 - 1


@gpu
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (3, 5), (2, 4096), (5, 4097), (64, 5000), (2, 151936)])
@pytest.mark.parametrize("kind", ["normal", "tied"])
def test_greedy_takes_the_first_greatest(rows: int, vocab_size: int, kind: str) -> None:
    torch.manual_seed(vocab_size)
    logits = some_logits(rows, vocab_size, kind, stride=-(-vocab_size // 4) * 4 + 64)
    logits[0, : vocab_size // 2] = -math.inf
    tokens, finite = sampled(logits, vocab_size, packed([GREEDY] * rows))
    assert finite.all()
    assert (tokens == logits[:, :vocab_size].numpy().argmax(-1)).all()


@gpu
@pytest.mark.parametrize("request_of_row", [GREEDY, parameter_row(1.0, 5, 0), parameter_row(1.0, 5, 0, top_k=3)])
def test_a_row_that_is_not_finite_fails_alone(request_of_row: tuple) -> None:
    logits = some_logits(7, 9001, "normal")
    logits[0, 8000], logits[1, 0], logits[2, 5], logits[3, :9001] = math.nan, -math.nan, math.inf, -math.inf
    logits[4, 9000] = -math.inf
    logits[5, 17], logits[5, 18] = math.nan, math.inf
    tokens, finite = sampled(logits, 9001, packed([request_of_row] * 7))
    assert finite.tolist() == [0, 0, 0, 0, 1, 0, 1]
    assert (tokens[finite == 0] == 0).all()
    wanted, _ = sample_reference(logits.numpy(), 9001, packed([request_of_row] * 7))
    assert (tokens == wanted).all()


@gpu
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.003, 0.7, 2.0])
@pytest.mark.parametrize(
    ("rows", "vocab_size", "kind"),
    [(3, 1, "normal"), (40, 6, "tied"), (60, 1000, "model"), (40, 5003, "tied"), (40, 5003, "flat"),
     (8, 5003, "equal"), (20, 151936, "model"), (3, 151936, "normal"), (2, 151936, "flat"), (1, 262144, "tied")],
)  # fmt: skip
def test_every_draw_is_the_references(rows: int, vocab_size: int, kind: str, temperature: float, filters: dict) -> None:
    torch.manual_seed(vocab_size)
    logits = some_logits(rows, vocab_size, kind)
    seeds = np.random.default_rng(rows).integers(0, 2**64, rows, np.uint64)
    requests = packed([parameter_row(temperature, int(seed), i, **filters) for i, seed in enumerate(seeds)])
    tokens, finite = sampled(logits, vocab_size, requests)
    assert finite.all()
    wanted, _ = sample_reference(logits.numpy(), vocab_size, requests)
    assert (tokens == wanted).all()


@gpu
def test_a_row_does_not_depend_on_its_company() -> None:
    torch.manual_seed(0)
    logits = some_logits(33, 20001, "model")
    requests = [GREEDY] + [parameter_row(0.9, seed, 4, **FILTERS[seed % len(FILTERS)]) for seed in range(32)]
    together, _ = sampled(logits, 20001, packed(requests))
    for i in range(33):
        alone, _ = sampled(logits[i : i + 1], 20001, packed(requests[i : i + 1]))
        assert alone[0] == together[i]


@gpu
@pytest.mark.parametrize("filters", [{}, {"top_k": 200, "top_p": 0.9}, {"min_p": 0.05}])
def test_draws_follow_the_softmax_of_what_is_kept(filters: dict) -> None:
    torch.manual_seed(2)
    row = torch.randn(1000) * 1.5
    draws = 200_000
    requests = packed([parameter_row(0.8, 3 + i % 7, i // 7, **filters) for i in range(draws)])
    tokens = np.concatenate(
        [sampled(row.expand(len(part), -1).contiguous(), 1000, part)[0] for part in np.array_split(requests, 10)]
    )
    assert abs(chi_square(*histogram(tokens, row.numpy(), filters))) < 3.5


@gpu
def test_a_graph_replays_with_other_parameters() -> None:
    torch.manual_seed(0)
    logits = some_logits(16, 3001, "model").cuda()
    requests = packed([parameter_row(1.0, i, 0, top_p=0.9) if i % 2 else GREEDY for i in range(16)])
    parameters, space = on_gpu(requests), sampling.make_workspace(32, 3001, "cuda")
    tokens, finite = (torch.zeros(16, dtype=torch.int32, device="cuda") for _ in range(2))
    sampling.sample(logits, 3001, parameters, space, tokens, finite)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampling.sample(logits, 3001, parameters, space, tokens, finite)
    for index in range(5):
        requests["output_index"] = index
        parameters.copy_(on_gpu(requests))
        logits[:, :3001] += torch.randn(16, 3001, device="cuda")
        graph.replay()
        assert (tokens.cpu().numpy() == sample_reference(logits.cpu().numpy(), 3001, requests)[0]).all()


@gpu
def test_penalties_are_the_cpu_samplers() -> None:
    torch.manual_seed(4)
    vocab_size = 500
    logits = some_logits(3, vocab_size, "normal", stride=512)
    rows = [Sampling(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3),
            Sampling(repetition_penalty=0.8), Sampling(frequency_penalty=-1.1)]  # fmt: skip
    wanted, entries = logits.clone(), []
    for i, request in enumerate(rows):
        history = torch.randint(0, vocab_size + 5, (100,)).tolist() + torch.randint(0, vocab_size, (200,)).tolist()
        spec = SampleSpec(request, 0, 0, 100, history, (7, 11 + i))
        wanted[i, :vocab_size] = sampler._adjusted(logits[i, :vocab_size], spec)
        made = history[100:]
        entries += [(i, t, made.count(t)) for t in set(history) - set(spec.banned)]
        entries += [(i, t, sampling.BANNED) for t in spec.banned]
    penalties = torch.tensor([(r.repetition_penalty, r.frequency_penalty, r.presence_penalty) for r in rows])
    out = logits.cuda()
    sampling.penalize(out, vocab_size, torch.tensor(entries, dtype=torch.int32).cuda(), penalties.cuda())
    assert torch.equal(out.cpu(), wanted)
    sampling.penalize(out, vocab_size, torch.zeros(0, 3, dtype=torch.int32).cuda(), penalties.cuda())
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_log_probabilities_are_the_cpu_samplers(device: str) -> None:
    torch.manual_seed(6)
    logits = some_logits(5, 301, "normal").to(device)
    rows, tokens = torch.tensor([4, 0, 2], device=device), torch.tensor([9, 300, 17], dtype=torch.int32, device=device)
    logprobs = sampling.log_probabilities(logits, rows, 301)
    chosen, ids, values = sampling.top_log_probabilities(logprobs, tokens, 20)
    for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        wanted = sampler._with_logprobs(token, logits[row, :301].cpu(), 20)
        assert wanted.logprob == pytest.approx(float(chosen[i]), abs=1e-5)
        assert [token for token, _ in wanted.top] == ids[i].tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in wanted.top]), values[i].cpu())
