"""Which tokens a step runs: the running requests' next chunks within the step's token budget.

Owns: `Step`, and how far a request is once it is planned. Does not know: who runs and why, or how blocks are found; a
request whose blocks do not suffice yet is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .config import SchedulerConfig
from .oversize import chunk_tokens
from .plan import NO_BLOCKS, NO_TOKENS, Chunk, SampleSpec
from .request import Event, Request, State
from .swap import Block


class Step(NamedTuple):
    """A step that is not applied yet: what it runs, and how many tokens of that are prefill at the usual speed.

    `read_cold`: blocks of requests that have gone meanwhile, which this step or one before it reads in the CPU tier.
    """

    chunks: list[tuple[Request, Chunk]]
    prefill_tokens: int
    read_cold: list[Block]


def choose_chunks(running: Iterable[Request], step: int, config: SchedulerConfig, now: float) -> Step:
    """The chunks of step number `step`: decodes, then prefills in the order they were admitted."""
    budget, size = config.max_num_batched_tokens, config.block_size
    prefill = State.PREFILL
    stepping, prefilling = [], []
    for request in running:
        if request.state is prefill:
            prefilling.append(request)
        elif (
            budget > 0
            and request.num_tokens <= size * len(request.blocks)
            and request.num_tokens < request.limit
            and not (request.penalized and request.awaits_token)
        ):
            stepping.append((request, _plan_chunk(request, 1, step, config, now)))
            budget -= 1
    left_for_prefill = budget
    for request in prefilling:
        count = min(chunk_tokens(request, config), budget)
        if count > 0 and request.computed_tokens + count <= size * len(request.blocks):
            stepping.append((request, _plan_chunk(request, count, step, config, now)))
            budget -= count
    streams = any(request.cold for request, _ in stepping)
    return Step(stepping, 0 if streams else left_for_prefill - budget, [])


def _plan_chunk(request: Request, count: int, step: int, config: SchedulerConfig, now: float) -> Chunk:
    """The next `count` tokens of a request: from now on they count as computed, and one that they sample exists."""
    start = request.computed_tokens
    end = start + count
    from_previous = start == len(request.tokens)
    sample = None
    if end == request.num_tokens:
        sample = _sample_spec(request)
        request.num_tokens += 1
        if request.state is State.PREFILL:
            request.on(Event.PREFILL_DONE)
    request.computed_tokens = end
    request.last_step = step
    request.last_active_time = now
    tokens = NO_TOKENS if from_previous else request.tokens[start:end]
    table = request.block_table[: config.blocks_for(end) - request.cold]
    cold = request.cold_table[:] if request.cold else NO_BLOCKS
    return Chunk(request.request_id, tokens, start, table, sample, from_previous, cold)


def _sample_spec(request: Request) -> SampleSpec:
    sampling, outputs = request.sampling, request.num_tokens - request.prompt_length
    return SampleSpec(
        sampling,
        request.seed,
        outputs,
        request.prompt_length,
        request.tokens[:] if request.penalized else None,
        request.end_tokens if outputs < sampling.min_tokens else (),
    )
