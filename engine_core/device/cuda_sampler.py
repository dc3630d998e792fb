"""From a pass's logits to tokens on the GPU, and from there to the host without anybody waiting.

Owns: each request's sampling parameters as the kernels want them, the memory of sampled tokens on both sides.
Does not know: the model, how a token is drawn (`kernels.sampling`).

The tokens of two steps lie on the GPU: those of the step before stay, for tokens that are fed from there, while the
step's own are made.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_not, ne

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels import sampling, small_copy
from ..control.plan import SampledToken, SampleSpec
from ..control.sampling import Sampling
from . import host_memory
from .cuda_batch import IntArray
from .cuda_runner import PassLogits

_HOST_BUFFERS = 3  # steps whose tokens may be on their way
_LOGPROB_ROWS = 8  # rows of the vocabulary's width that log-probabilities are made for at once
_NOT_FINITE = "the model's output is not finite"


@dataclass(slots=True)
class Picks:
    """Requests to sample for: `names`, how (`specs`), their block `tables`, and their `rows` of logits, ascending."""

    names: list[str]
    specs: list[SampleSpec]
    tables: list[int]
    rows: IntArray

    def part(self, first: int, last: int) -> Picks:
        """Those with rows from first up to last, their rows counted from there."""
        a, b = np.searchsorted(self.rows, (first, last))
        return Picks(self.names[a:b], self.specs[a:b], self.tables[a:b], self.rows[a:b] - np.int32(first))


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of the requests `names`: the sampled token's, and ids and values of the most likely; on the host, once done."""

    names: list[str]
    counts: list[int]
    sampled: Tensor
    ids: Tensor
    values: Tensor


@dataclass(slots=True)
class StepTokens:
    """What one step samples. `places`: where in the step's memory each request's token lies; `finite` likewise."""

    begin: int
    host: Tensor
    names: list[str] = field(default_factory=list)
    places: list[IntArray] = field(default_factory=list)
    finite: list[IntArray] = field(default_factory=list)
    logprobs: list[_Logprobs] = field(default_factory=list)
    used: int = 0

    def sources(self) -> dict[str, int]:
        """Where, among all sampled tokens on the GPU, each request's is."""
        if not self.names:
            return {}
        return dict(zip(self.names, (np.concatenate(self.places) + self.begin).tolist(), strict=True))

    def read(self) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Tokens and failures by request; once the copy to the host has ended."""
        if not self.names:
            return {}, {}
        memory = self.host.numpy()
        sampled = zip(memory[np.concatenate(self.places)].tolist(), repeat(None), repeat(()))
        tokens = dict(zip(self.names, map(SampledToken._make, sampled), strict=True))
        for group in self.logprobs:
            _add_logprobs(tokens, group)
        finite = memory[np.concatenate(self.finite)]
        failed = {} if finite.all() else {self.names[i]: _NOT_FINITE for i in np.flatnonzero(finite == 0)}
        for name in failed:
            del tokens[name]
        return tokens, failed


def _add_logprobs(tokens: dict[str, SampledToken], group: _Logprobs) -> None:
    rows = zip(
        group.names, group.counts, group.sampled.tolist(), group.ids.tolist(), group.values.tolist(), strict=True
    )
    for name, count, logprob, ids, values in rows:
        top = tuple(zip(ids[:count], values[:count], strict=True))
        tokens[name] = SampledToken(tokens[name].token_id, logprob, top)


class CudaSampler:
    """`vocab_size`: ids from there on are padding rows of the model and are never sampled.

    For up to `max_rows` logits of a pass, `max_tokens` rows in all passes of a step, `tables` block tables.
    """

    def __init__(self, vocab_size: int, max_rows: int, max_tokens: int, tables: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._size = 2 * (max_tokens + max_rows)  # a token and a flag for each row
        self.memory = torch.zeros(2 * self._size, dtype=torch.int32, device=device)
        self._host = [host_memory.pinned(self._size, torch.int32) for _ in range(_HOST_BUFFERS)]
        self._workspace = sampling.make_workspace(max_rows, vocab_size, device)
        self._asked: list[Sampling | None] = [None] * tables
        self._seeds = [0] * tables
        self._parameters = np.zeros(tables, sampling.PARAMETERS)
        self._steps = 0

    def begin_step(self) -> StepTokens:
        """The memory of a new step. The step before the last is forgotten."""
        self._steps += 1
        return StepTokens(self._steps % 2 * self._size, self._host[self._steps % _HOST_BUFFERS])

    def parameters(self, picks: Picks, rows: int) -> NDArray[np.void]:
        """PARAMETERS [rows] of a pass; greedy where no pick is. A request's are made once, but for its output index."""
        parameters = np.zeros(rows, sampling.PARAMETERS)
        if not picks.names:
            return parameters
        asked, seeds, indices, *_ = zip(*picks.specs, strict=True)
        known = map(self._asked.__getitem__, picks.tables), map(self._seeds.__getitem__, picks.tables)
        if any(map(is_not, known[0], asked)) or any(map(ne, known[1], seeds)):
            for table, one, seed in zip(picks.tables, asked, seeds, strict=True):
                self._learn(table, one, seed)
        chosen = self._parameters[picks.tables]
        chosen["output_index"] = indices
        parameters[picks.rows] = chosen
        return parameters

    def _learn(self, table: int, asked: Sampling, seed: int) -> None:
        self._asked[table], self._seeds[table] = asked, seed
        row = sampling.parameter_row(asked.temperature, seed, 0, asked.top_k, asked.top_p, asked.min_p)
        self._parameters[table] = row

    def sample(self, result: PassLogits, picks: Picks, step: StepTokens) -> None:
        """Sample all rows of a pass's logits; remember those of the picks. Changes the logits of penalized rows."""
        logits = result.logits
        rows, first = len(logits), step.begin + step.used
        tokens, finite = self.memory[first : first + rows], self.memory[first + rows : first + 2 * rows]
        penalties = _Penalties(picks, self._vocab_size)
        penalties.apply(logits)
        parameters = result.parameters.view(rows, -1)
        sampling.sample(logits, self._vocab_size, parameters, self._workspace, tokens, finite)
        step.names += picks.names
        step.places.append(picks.rows + step.used)
        step.finite.append(picks.rows + (step.used + rows))
        step.used += 2 * rows
        wanted = [i for i, spec in enumerate(picks.specs) if spec.sampling.logprobs is not None]
        if wanted:
            penalties.undo(logits)
        for start in range(0, len(wanted), _LOGPROB_ROWS):
            step.logprobs.append(self._logprobs(logits, tokens, picks, wanted[start : start + _LOGPROB_ROWS]))

    def end_step(self, step: StepTokens) -> None:
        """Queue the copy of the step's tokens to the host."""
        if step.used:
            small_copy.to_host(self.memory[step.begin : step.begin + step.used], step.host[: step.used])

    def _logprobs(self, logits: Tensor, tokens: Tensor, picks: Picks, wanted: list[int]) -> _Logprobs:
        counts = [picks.specs[i].sampling.logprobs or 0 for i in wanted]
        rows = torch.from_numpy(picks.rows[wanted].astype(np.int64)).to(logits.device)
        every = sampling.log_probabilities(logits, rows, self._vocab_size)
        found = sampling.top_log_probabilities(every, tokens[rows], max(counts))
        sampled, ids, values = (host_memory.to_host(part) for part in found)
        return _Logprobs([picks.names[i] for i in wanted], counts, sampled, ids, values)


class _Penalties:
    """What the requests' history and bans do to a pass's logits, for as long as these are sampled."""

    def __init__(self, picks: Picks, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._entries: list[tuple[int, int, int]] = []
        self._factors: dict[int, tuple[float, float, float]] = {}
        _, _, _, _, histories, bans = zip(*picks.specs, strict=True)
        changed = [i for i, (history, banned) in enumerate(zip(histories, bans, strict=True)) if banned or history]
        for i in changed:
            spec, row = picks.specs[i], int(picks.rows[i])
            asked = spec.sampling
            self._entries += [(row, token, count) for token, count in _counts(spec, vocab_size).items()]
            self._factors[row] = (asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty)

    def apply(self, logits: Tensor) -> None:
        """Penalize in place."""
        if not self._entries:
            return
        factors = torch.tensor([1.0, 0.0, 0.0]).repeat(len(logits), 1)
        for row, values in self._factors.items():
            factors[row] = torch.tensor(values)
        self._there = torch.tensor(self._entries, dtype=torch.int32).to(logits.device)
        self._before = logits[self._there[:, 0], self._there[:, 1]]
        sampling.penalize(logits, self._vocab_size, self._there, factors.to(logits.device))

    def undo(self, logits: Tensor) -> None:
        """Put the logits back as the model made them."""
        if self._entries:
            logits[self._there[:, 0], self._there[:, 1]] = self._before


def _counts(spec: SampleSpec, vocab_size: int) -> dict[int, int]:
    """How often each token is in the output, 0 for those of the prompt alone; BANNED for those not to be drawn."""
    counts: dict[int, int] = {}
    if spec.history is not None:
        counts = {**dict.fromkeys(spec.history, 0), **Counter(spec.history[spec.prompt_length :])}
    counts.update(dict.fromkeys(spec.bans(vocab_size), sampling.BANNED))
    return {token: count for token, count in counts.items() if 0 <= token < vocab_size}
