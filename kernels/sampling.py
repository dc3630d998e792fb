"""From logits to tokens on the GPU: greedy and filtered draws, penalties, log-probabilities.

Owns: the layout of a row's sampling parameters, the kernels' launches, and a reference in plain numpy.
Does not know: requests, steps, why a token is wanted.

A token depends on (seed, output_index, logits of its row) alone, not on the batch. A row's draw goes: min_p, then
top_k, then top_p of what is left, then the greatest log-weight + Gumbel noise, which is a draw from the softmax. Noise
is a hash of (seed, output_index, token). Equal logits are ordered by token, the lower one first. Under filters a token
less than e^-32 times as likely as the likeliest is never drawn.

R is rows, V the vocabulary, S >= V the logits of a row, of which those from V on belong to no token.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .checks import check_multiple, check_tensor
from .errors import KernelArgumentError
from .loader import load, variants

PARAMETERS = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("log_min_p", "<f4"),
        ("seed", "<u8"),
        ("output_index", "<u4"),
        ("unused", "<u4"),
    ]
)
"""A row's parameters: 32 bytes, which `sample` takes as int32 [R, 8]. `parameter_row` makes one."""

BANNED = -1
"""In place of a count: the token must not be drawn."""

LARGEST_VOCABULARY = 1 << 18
_GREEDY_BELOW = np.float32(1e-5)
_CHUNK = 4096  # logits of a block of the first kernel
_FARTHEST = 32.0
_MASK = 0xFFFFFFFFFFFFFFFF

VARIANTS = (
    *variants("sample_scan", CHUNK=(_CHUNK,)),
    *variants("sample_choose"),
    *variants("sample_penalize"),
)


def parameter_row(
    temperature: float, seed: int, output_index: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[float | int, ...]:
    """A row of PARAMETERS. temperature < 1e-5 is greedy; top_k 0 (or >= V), top_p 1 and min_p 0 filter nothing."""
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    return (temperature, min(top_k, LARGEST_VOCABULARY), top_p, log_min_p, seed & _MASK, output_index, 0)


def make_workspace(rows: int, vocab_size: int, device: torch.device | str) -> Tensor:
    """What `sample` needs for up to so many rows: int64 [rows, chunks, 2]."""
    return torch.empty(rows, -(-vocab_size // _CHUNK), 2, dtype=torch.int64, device=device)


def sample(
    logits: Tensor, vocab_size: int, parameters: Tensor, workspace: Tensor, tokens: Tensor, finite: Tensor
) -> None:
    """tokens int32 [R], one of 0..V-1 for each row of logits fp32 [R, S].

    parameters is int32 [R, 8] (see PARAMETERS). finite int32 [R] is 0 where the row's greatest logit is infinite or any
    of its logits is NaN, and then the token is 0; else 1. S is a multiple of 4. Raises KernelArgumentError.
    """
    rows, stride = _check_logits(logits, vocab_size)
    check_tensor("parameters", parameters, torch.int32, [("R", rows), ("words", PARAMETERS.itemsize // 4)])
    chunks = -(-vocab_size // _CHUNK)
    check_tensor("workspace", workspace, torch.int64, [("most rows", None), ("chunks", chunks), ("ranks", 2)])
    if workspace.shape[0] < rows:
        raise KernelArgumentError(f"workspace is for {workspace.shape[0]} rows; logits have {rows}")
    check_tensor("tokens", tokens, torch.int32, [("R", rows)], alignment=4)
    check_tensor("finite", finite, torch.int32, [("R", rows)], alignment=4)
    scan, choose = load("sample_scan", CHUNK=_CHUNK), load("sample_choose")
    scan.launch([chunks, rows], 256, [logits, parameters, workspace, vocab_size, stride])
    choose.launch([rows], 1024, [logits, parameters, workspace, tokens, finite, chunks, vocab_size, stride])


def penalize(logits: Tensor, vocab_size: int, entries: Tensor, penalties: Tensor) -> None:
    """Apply penalties and bans to logits fp32 [R, S], in place.

    entries int32 [E, 3]: (row, token, count), each pair of row and token at most once: count > 0 for a token that is so
    often in the row's output, 0 for one that is in its prompt only, BANNED for one that must not be drawn. penalties
    fp32 [R, 3]: repetition (on prompt and output), frequency and presence (on output). Tokens outside 0..V-1 are
    passed over. Raises KernelArgumentError.
    """
    rows, stride = _check_logits(logits, vocab_size)
    check_tensor("entries", entries, torch.int32, [("E", None), ("row, token, count", 3)], alignment=4)
    check_tensor("penalties", penalties, torch.float32, [("R", rows), ("kinds", 3)], alignment=4)
    count = entries.shape[0]
    if count:
        arguments = [logits, entries, penalties, count, vocab_size, stride]
        load("sample_penalize").launch([-(-count // 256)], 256, arguments)


def log_probabilities(logits: Tensor, rows: Tensor, vocab_size: int) -> Tensor:
    """The model's own log-probabilities fp32 [Q, V] of some rows (int64 [Q]): to be taken before `penalize`."""
    return logits.index_select(0, rows)[:, :vocab_size].log_softmax(-1)


def top_log_probabilities(logprobs: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of logprobs [Q, V]: those of tokens [Q], then ids and values [Q, count] of the greatest, in descending order."""
    values, ids = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return logprobs.gather(1, tokens.long().unsqueeze(1)).squeeze(1), ids, values


def _check_logits(logits: Tensor, vocab_size: int) -> tuple[int, int]:
    check_tensor("logits", logits, torch.float32, [("R", None), ("S", None)])
    rows, stride = logits.shape
    check_multiple("S", stride, 4)
    if not 0 < vocab_size <= min(stride, LARGEST_VOCABULARY):
        raise KernelArgumentError(f"vocab_size is {vocab_size}; allowed: 1 to {min(stride, LARGEST_VOCABULARY)}")
    return rows, stride


def sample_reference(
    logits: NDArray[np.float32], vocab_size: int, parameters: NDArray[np.void]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """What `sample` writes to tokens and finite, for logits [R, S] and parameters [R] of dtype PARAMETERS."""
    finite = np.isfinite(logits[:, :vocab_size].max(-1))
    tokens = np.zeros(len(logits), np.int32)
    for i in np.flatnonzero(finite):
        tokens[i] = _sample_row(logits[i, :vocab_size], parameters[i])
    return tokens, finite.astype(np.int32)


def _sample_row(row: NDArray[np.float32], request: np.void) -> int:
    if request["temperature"] < _GREEDY_BELOW:
        return int(row.argmax())
    scaled = ((row - row.max()) / request["temperature"]).astype(np.float32)
    kept = kept_tokens(scaled, int(request["top_k"]), float(request["top_p"]), float(request["log_min_p"]))
    return int(kept[(scaled[kept] + _gumbel(int(request["seed"]), int(request["output_index"]), kept)).argmax()])


def kept_tokens(scaled: NDArray[np.float32], top_k: int, top_p: float, log_min_p: float) -> NDArray[np.int64]:
    """The tokens that the filters keep, in ascending order; `scaled` [V] is (logits - greatest) / temperature."""
    filters = top_p < 1 or log_min_p > -math.inf or 0 < top_k < len(scaled)
    tokens = np.flatnonzero((scaled >= log_min_p) & (scaled > -_FARTHEST if filters else True))
    order = tokens[np.argsort(-scaled[tokens], kind="stable")]
    if 0 < top_k < len(scaled):
        order = order[:top_k]
    if top_p < 1:
        masses = np.exp(scaled[order].astype(np.float64))
        order = order[np.cumsum(masses) - masses < max(top_p * masses.sum(), 1e-300)]
    return np.sort(order)


def _gumbel(seed: int, output_index: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        stream = _mix(np.array([seed], np.uint64) * golden + np.uint64(output_index))
        bits = _mix(stream + (tokens.astype(np.uint64) + np.uint64(1)) * golden) >> np.uint64(32)
        uniform = bits.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    with np.errstate(divide="ignore"):
        return -np.log(-np.log1p(-uniform.astype(np.float64)))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
