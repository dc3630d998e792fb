"""What a request may ask for. Refuses at once, with the numbers, what is out of range or can never fit.

Owns: the ranges, and `Refusal`. Does not know: the requests that are already there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from .config import SchedulerConfig
from .sampling import Sampling

MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0  # less would make logits infinite
MAX_ADDITIVE_PENALTY = 2.0
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024  # every step looks through them
SEED_LIMIT = 2**63


class Refusal(Exception):
    """A request that is not taken: which field, what it was, what is allowed."""

    def __init__(self, field: str, value: str, allowed: str) -> None:
        super().__init__(f"{field} is {value}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


def checked_prompt(prompt: Sequence[int], config: SchedulerConfig) -> array[int]:
    """The prompt's token ids, in an `array("i")` of their own. Raises Refusal for a prompt that is empty, has unknown
    token ids, or leaves no room for one answer token. Quickest for an `array("I")`.
    """
    if not prompt:
        raise Refusal("prompt", "empty", "at least 1 token")
    if len(prompt) >= config.max_request_tokens:
        needed = config.blocks_for(len(prompt) + 1)
        raise Refusal(
            "prompt",
            f"{len(prompt)} tokens, which need {needed} blocks of {config.block_size} with one more token",
            f"at most {config.max_request_tokens - 1} tokens: max_model_len is {config.max_model_len}, {_room(config)}",
        )
    # Only now: looking through the millions of ids that fit into one message would hold up a step.
    try:
        tokens = array("I", prompt)
        known = max(tokens) < config.vocab_size
    except OverflowError:
        known = False
    if not known:
        unknown = next(token for token in prompt if not 0 <= token < config.vocab_size)
        raise Refusal("prompt", f"token id {unknown}", f"token ids 0 to {config.vocab_size - 1}")
    return array("i", tokens.tobytes())


def _room(config: SchedulerConfig) -> str:
    """How many blocks a request can have, and what would give it more."""
    pool = f"the KV pool has {config.num_gpu_blocks} blocks"
    if config.allow_oversize:
        return f"{pool}; a larger request has {config.window} there and up to {config.cpu_blocks} in the CPU tier"
    if config.max_model_len > config.num_gpu_blocks * config.block_size:
        return f"{pool}; with --allow-oversize a request can be larger and have blocks in the CPU tier"
    return pool


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raise Refusal for the first sampling value that is out of its range; a NaN is out of every range."""
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise Refusal("max_tokens", str(sampling.max_tokens), "at least 1")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise Refusal("stop_token_ids", f"{len(sampling.stop_token_ids)} ids", f"at most {MAX_STOP_TOKENS}")
    most = math.inf if sampling.max_tokens is None else sampling.max_tokens
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("min_tokens", sampling.min_tokens, 0, most),
        ("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("seed", sampling.seed, -SEED_LIMIT, SEED_LIMIT - 1),
        ("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        ("presence_penalty", sampling.presence_penalty, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY),
        ("frequency_penalty", sampling.frequency_penalty, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY),
        ("logprobs", sampling.logprobs, 0, MAX_LOGPROBS),
        *(("stop_token_ids", token, 0, vocab_size - 1) for token in sampling.stop_token_ids),
    )
    for name, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            raise Refusal(name, str(value), f"at least {low}" if high == math.inf else f"{low} to {high}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise Refusal("top_p", str(sampling.top_p), "above 0, at most 1.0")
