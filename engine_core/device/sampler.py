"""From logits to tokens.

Owns: penalties, filters, the random draw, log-probabilities. Does not know: the model, steps, why a token is wanted.

A token depends on (seed, output_index, logits) alone. The order is: penalties, banned ids, temperature, min_p, top_k,
top_p, draw. Log-probabilities are the model's own, before all of these. Repetition penalty counts prompt and output,
presence and frequency penalties count the output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..control.plan import Chunk, SampledToken, SampleSpec

GREEDY_BELOW = 1e-5
_LIKELY = 1024  # so many candidates nearly always hold the top_p mass; a full sort is the exact fallback
_TILE = 256


class Sampler:
    """`vocab_size`: ids from there on are padding rows of the model and are never sampled."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, chunks: Sequence[Chunk], logits: Tensor) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Tokens and failures by request id; `logits` is fp32 [len(chunks), >= vocab_size], one row per chunk."""
        tokens: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        if not chunks:
            return tokens, failed
        logits = logits[:, : self._vocab_size]
        best, largest = _largest(logits)
        for chunk, row, token, value in zip(chunks, logits, best, largest, strict=True):
            spec = chunk.sample
            assert spec is not None
            if not math.isfinite(value):
                failed[chunk.request_id] = "the model's output is not finite"
                continue
            if not _is_plain_greedy(spec):
                token = _choose(row, spec)
            tokens[chunk.request_id] = _with_logprobs(token, row, spec.sampling.logprobs)
        return tokens, failed


def _largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """Index and value of each row's maximum; NaN wins. In tiles: torch's argmax over a long row is slow."""
    rows, size = logits.shape
    if size % _TILE:
        logits = torch.nn.functional.pad(logits, (0, -size % _TILE), value=-math.inf)
    tiles = logits.view(rows, -1, _TILE)
    tile = tiles.amax(-1).argmax(-1)
    values, offset = tiles[torch.arange(rows), tile].max(-1)
    return (tile * _TILE + offset).tolist(), values.tolist()


def _is_plain_greedy(spec: SampleSpec) -> bool:
    return spec.sampling.temperature < GREEDY_BELOW and spec.history is None and not spec.banned


def _choose(row: Tensor, spec: SampleSpec) -> int:
    """The token of one request, from its raw logits [V]."""
    sampling = spec.sampling
    if spec.history is not None or spec.banned:
        row = _adjusted(row, spec)
    if sampling.temperature < GREEDY_BELOW:
        return _largest(row[None])[0][0]
    scaled = (row - row.amax()) / sampling.temperature
    if sampling.min_p > 0:
        scaled = scaled.masked_fill(scaled < math.log(sampling.min_p), -math.inf)
    uniform = _uniform(spec.seed, spec.output_index)
    if 0 < sampling.top_k < len(row) or sampling.top_p < 1:
        return _draw_filtered(scaled, sampling.top_k, sampling.top_p, uniform)
    return _draw(scaled.exp(), uniform)


def _adjusted(row: Tensor, spec: SampleSpec) -> Tensor:
    """Logits [V] after bans and penalties."""
    row, sampling = row.clone(), spec.sampling
    if spec.history is not None:
        # A prompt may hold the model's padding ids, which have no place in the row.
        seen = torch.tensor(sorted(token for token in set(spec.history) if token < len(row)), dtype=torch.int64)
        values = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        counted = Counter(spec.history[spec.prompt_length :])
        made = torch.tensor(list(counted), dtype=torch.int64)
        counts = torch.tensor(list(counted.values()))
        row[made] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    if spec.banned:
        row[list(spec.bans(len(row)))] = -math.inf
    return row


def _draw_filtered(scaled: Tensor, top_k: int, top_p: float, uniform: float) -> int:
    """Draw among the top_k most likely, cut to the smallest set that holds top_p of their mass."""
    size = len(scaled)
    wanted = top_k if 0 < top_k < size else size
    values, ids = scaled.topk(min(wanted, _LIKELY))
    weights = values.double().exp()
    total = float(weights.sum()) if wanted <= _LIKELY else float(scaled.exp().sum(dtype=torch.float64))
    if len(weights) < wanted and float(weights.sum()) < top_p * total:
        values, ids = scaled.sort(descending=True, stable=True)
        values, ids = values[:wanted], ids[:wanted]
        weights = values.double().exp()
        total = float(weights.sum())
    if top_p < 1:
        before = weights.cumsum(0) - weights
        weights = weights * (before < max(top_p * total, 1e-300))
    return int(ids[_draw(weights, uniform)])


def _draw(weights: Tensor, uniform: float) -> int:
    """Index i with probability weights[i] / sum, for a uniform number in [0, 1)."""
    sums = weights.cumsum(0, dtype=torch.float64)
    return min(int(torch.searchsorted(sums, uniform * sums[-1], right=True)), int(weights.nonzero()[-1]))


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from (seed, index): SplitMix64's finalizer, applied twice."""
    state = _mix((seed * 0x9E3779B97F4A7C15 + index) & 0xFFFFFFFFFFFFFFFF)
    return (_mix(state ^ 0xD1B54A32D192ED03) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def _with_logprobs(token: int, row: Tensor, wanted: int | None) -> SampledToken:
    """The token, with its log-probability and the `wanted` best alternatives when logprobs were asked for."""
    if wanted is None:
        return SampledToken(token)
    logprobs = row.log_softmax(-1)
    values, ids = logprobs.topk(min(wanted, len(row)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)
