"""Scheduler and executor run together until every request has its answer."""

from __future__ import annotations

import math
from typing import Any

from coldblock.engine_core.control.plan import SampledToken
from coldblock.engine_core.control.scheduler import Scheduler, SchedulerConfig
from coldblock.engine_core.control.updates import FinishedUpdate, TokenUpdate
from coldblock.engine_core.device.executor import Executor


def scheduler_for(executor: Executor, **settings: Any) -> Scheduler:
    """A scheduler of this executor's blocks, and else with these settings."""
    defaults: dict[str, Any] = {
        "block_size": 16,
        "num_gpu_blocks": executor.capacity.num_gpu_blocks,
        "num_cpu_blocks": executor.capacity.num_cpu_blocks,
        "block_bytes": executor.capacity.block_bytes,
        "max_model_len": 512,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "prefill_chunk_tokens": 64,
        "prefix_cache": True,
        "cpu_offload": True,
        "eos_token_ids": (),
        "vocab_size": 300,
        "seed": 0,
    }
    return Scheduler(SchedulerConfig(**{**defaults, **settings}))


def finish(scheduler: Scheduler, executor: Executor) -> list[list[SampledToken]]:
    """The answers of requests named "0", "1" and so on; nothing is left in use in either tier."""
    answers: list[list[SampledToken]] = [[] for _ in scheduler.requests()]
    in_flight = 0
    while scheduler.has_work():
        plan = scheduler.plan()
        if plan is not None:
            executor.begin_step(plan)
            in_flight += 1
        if in_flight > (0 if plan is None else executor.steps_ahead):
            scheduler.apply(executor.complete_step())
            in_flight -= 1
        for update in scheduler.drain():
            if isinstance(update, TokenUpdate):
                answers[int(update.request_id)].append(update.token)
            assert not isinstance(update, FinishedUpdate) or update.reason == "length", update
    gpu, cpu = scheduler.gpu_use(), scheduler.cpu_use()
    assert (gpu.used, gpu.in_flight, cpu.used, cpu.in_flight) == (0, 0, 0, 0)
    return answers


def agreement(answer: list[SampledToken], wanted: list[SampledToken], near_tie: float) -> int:
    """How many tokens of a greedy answer are those wanted. Where the two part, it must have been a near tie: the other
    token's logprob not so far below the best one's, by the alternatives that `wanted` names.
    """
    for place, (token, other) in enumerate(zip(answer, wanted, strict=True)):
        if token.token_id != other.token_id:
            best = dict(other.top)
            assert best[other.token_id] - best.get(token.token_id, -math.inf) < near_tie, (place, token, other)
            return place
    return len(wanted)
