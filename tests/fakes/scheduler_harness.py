"""A scheduler and a fake executor, run step by step, with the block counts of both tiers checked after every one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from coldblock.engine_core.control.plan import BlockMove, StepPlan
from coldblock.engine_core.control.request import Request, State
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.scheduler import Scheduler, SchedulerConfig
from coldblock.engine_core.control.updates import FinishedUpdate, SwapUpdate, TokenUpdate, Update
from coldblock.engine_core.device.executor import Capacity
from fake_executor import FakeExecutor, expected_tokens

VOCAB = 997
EOS = 996


def config(**changes: object) -> SchedulerConfig:
    """Sizes for tests: 16-token blocks, roomy tiers; `changes` replaces any of them."""
    values: dict[str, object] = {
        "block_size": 16,
        "num_gpu_blocks": 64,
        "num_cpu_blocks": 64,
        "block_bytes": 1000,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "prefill_chunk_tokens": 64,
        "prefix_cache": False,
        "cpu_offload": True,
        "eos_token_ids": (EOS,),
        "vocab_size": VOCAB,
        "seed": 0,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


class Clock:
    """Time that passes only between steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """Runs a scheduler against a `FakeExecutor`, keeps its updates by request, and knows what each text must be.

    `steps_ahead` is the executor's: with 1, what a step brings is seen one `step` later.
    """

    steps_ahead = 0

    def __init__(
        self,
        *,
        steps_ahead: int | None = None,
        delay: Callable[[BlockMove], int] = lambda move: 0,
        fails: Callable[[BlockMove], bool] = lambda move: False,
        **changes: object,
    ) -> None:
        if steps_ahead is not None:
            self.steps_ahead = steps_ahead
        self.config = config(**changes)
        self.clock = Clock()
        self.scheduler = Scheduler(self.config, self.clock)
        capacity = Capacity(self.config.num_gpu_blocks, self.config.num_cpu_blocks, self.config.block_bytes)
        self.executor = FakeExecutor(
            capacity, self.config.block_size, VOCAB, steps_ahead=self.steps_ahead, delay=delay, fails=fails
        )
        self.in_flight = 0
        self.asked: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, FinishedUpdate] = {}
        self.swaps: list[SwapUpdate] = []

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int | None = 8, priority: int = 0, **sampling: object
    ) -> None:
        asked = Sampling(**{"max_tokens": max_tokens, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        self.scheduler.add(request_id, prompt, asked, priority)
        self.asked[request_id] = self.request(request_id)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.collect(self.scheduler.drain())

    def step(self) -> StepPlan | None:
        """One turn of the step loop. None when the scheduler planned nothing; then nothing is left in flight."""
        plan = self.begin()
        if self.in_flight > (self.steps_ahead if plan is not None else 0):
            self.complete()
        self.collect(self.scheduler.drain())
        return plan

    def begin(self) -> StepPlan | None:
        """The first half of a turn: plan, and begin what was planned."""
        self.clock.now += 0.01
        plan = self.scheduler.plan()
        check_invariants(self.scheduler)
        if plan is not None:
            self.executor.begin_step(plan)
            self.in_flight += 1
        elif not self.in_flight:
            assert not self.scheduler.has_work(), f"work, but no plan: {self.scheduler.requests()}"
        return plan

    def complete(self) -> None:
        """The second half: complete and apply the oldest step in flight."""
        self.scheduler.apply(self.executor.complete_step())
        self.in_flight -= 1
        self.collect(self.scheduler.drain())
        check_invariants(self.scheduler)

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is left, then check that nothing is left behind and every text is right."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), f"not finished after {max_steps} steps: {self.scheduler.requests()}"
        self.check_drained()

    def run_until(self, condition: Callable[[], bool], max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not reached in {max_steps} steps: {self.scheduler.requests()}")

    def collect(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if isinstance(update, SwapUpdate):
                self.swaps.append(update)
                continue
            assert update.request_id not in self.finished, f"{update} after the end"
            if isinstance(update, TokenUpdate):
                self.tokens[update.request_id].append(update.token.token_id)
            else:
                self.finished[update.request_id] = update

    def check_drained(self) -> None:
        gpu, cpu = self.scheduler.gpu_use(), self.scheduler.cpu_use()
        assert (gpu.used, gpu.in_flight, gpu.free + gpu.cached) == (0, 0, gpu.total)
        assert (cpu.used, cpu.in_flight, cpu.free) == (0, 0, cpu.total)
        assert self.scheduler.requests() == [] and self.finished.keys() == self.asked.keys()
        for request_id in self.finished:
            self.check_end(request_id)

    def check_end(self, request_id: str) -> None:
        """Compare a finished request with what its prompt and sampling alone determine."""
        tokens, end, asked = self.tokens[request_id], self.finished[request_id], self.asked[request_id]
        prompt, ends = asked.tokens[: asked.prompt_length], asked.end_tokens
        most = asked.limit - asked.prompt_length
        answer = expected_tokens(prompt, most, VOCAB, ends, asked.sampling.min_tokens)
        assert tokens == answer[: len(tokens)] and end.completion_tokens == len(tokens)
        if end.reason in ("stop", "length"):
            assert tokens == answer and end.reason == ("length" if len(answer) == most else "stop")

    def forget(self, request_id: str) -> None:
        """Check a finished request, and let its id be used anew."""
        self.check_end(request_id)
        del self.asked[request_id], self.finished[request_id]
        self.tokens.pop(request_id, None)

    def request(self, request_id: str) -> Request:
        return self.scheduler._requests[request_id]

    def state(self, request_id: str) -> State:
        return self.request(request_id).state

    def phases(self, phase: str) -> list[str]:
        return [swap.request_id for swap in self.swaps if swap.phase == phase]


def check_invariants(scheduler: Scheduler) -> None:
    """Count both tiers anew from the requests' tables and the swaps, and compare with what the pools say."""
    live = list(scheduler._requests.values())
    swaps = set(scheduler._swaps._copying.values()) | {r.swap for r in live if r.swap is not None}
    gpu = Counter(block for request in live for block in request.block_table)
    gpu.update(block for swap in swaps for block in (*swap.gpu_blocks, *swap.room))
    cpu = Counter(block for swap in swaps for block in swap.cpu_blocks)
    for pool, refs, ends in (
        (scheduler._gpu, gpu, [swap.gpu_blocks for swap in swaps if swap.move_id is not None]),
        (scheduler._cpu, cpu, [swap.cpu_blocks for swap in swaps if swap.move_id is not None]),
    ):
        assert {block: pool.refs(block) for block in range(pool.total) if pool.refs(block)} == refs
        assert pool._held == Counter(block for blocks in ends for block in blocks)
        free, cached = pool._free, set(pool._cached)
        assert len(set(free)) == len(free), "a block is free twice"
        assert not set(free) & refs.keys() and not cached & refs.keys() and not set(free) & cached
        assert len(free) + len(cached) + len(refs) == pool.total, "blocks are lost"
        use = pool.use()
        assert use.used + use.cached + use.in_flight + use.free == use.total == pool.total
        assert use.in_flight == len(pool._held) and use.cached == len(cached)
    assert set(scheduler._index._digest_of) == scheduler._gpu._kept
    assert len(scheduler._running) + len(scheduler._swapped) <= scheduler.config.max_num_seqs
    assert all((request.swap is not None) == (request.request_id in scheduler._swapped) for request in live)
    in_sets = [*scheduler._waiting, *scheduler._running.values(), *scheduler._swapped.values()]
    assert sorted(r.request_id for r in in_sets) == sorted(scheduler._requests)
    check_steps_in_flight(scheduler)


def check_steps_in_flight(scheduler: Scheduler) -> None:
    """What a request is ahead of its known tokens is what the steps in flight do for it, and no more."""
    size = scheduler.config.block_size
    for request in scheduler._requests.values():
        chunks = [chunk for step in scheduler._in_flight for r, chunk in step if r is request]
        assert request.num_tokens - len(request.tokens) == sum(chunk.sample is not None for chunk in chunks)
        assert request.num_tokens <= request.limit, "it goes on behind its end"
        assert not chunks or request.state not in (State.SWAPPED, State.SWAPPING_IN)
        if request.request_id in scheduler._running:
            applied = request.computed_tokens - sum(chunk.num_tokens for chunk in chunks)
            assert 0 <= request.indexed_blocks * size <= applied, "blocks are offered before they are computed"
            assert request.remaining == 1 or request.state is State.PREFILL
