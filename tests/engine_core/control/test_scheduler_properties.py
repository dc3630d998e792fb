"""A state machine that submits, aborts, fails and steps at random, with copies that last, end in any order, or fail.

Requests may be larger than the pool. The fake executor checks every page that it is given, slot by slot. After every
step both tiers are counted anew, and at the end everybody has finished with the text that its prompt and sampling alone
determine, and both tiers are empty.
"""

from __future__ import annotations

from coldblock.engine_core.control.policies import RESUME_ORDERS, SWAP_OR_RECOMPUTE, VICTIM_POLICIES
from coldblock.engine_core.control.request import State
from fake_executor import expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import VOCAB, Harness


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts share prefixes on purpose; the pools are too small for what is asked of them."""

    @initialize(
        steps_ahead=st.sampled_from([0, 1, 1]),
        gpu_blocks=st.integers(3, 18),
        cpu_blocks=st.sampled_from([0, 1, 3, 6, 30, 30, 30]),
        prefix_cache=st.sampled_from([True, True, False]),
        cpu_offload=st.sampled_from([True] * 6 + [False]),
        max_num_seqs=st.integers(1, 8),
        batched_tokens=st.integers(1, 60),
        chunk_tokens=st.integers(1, 24),
        policies=st.tuples(
            st.sampled_from(sorted(VICTIM_POLICIES)),
            st.sampled_from(sorted(RESUME_ORDERS)),
            st.sampled_from(["swap", *SWAP_OR_RECOMPUTE]),
        ),
        write_behind_above=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        crowd=st.integers(0, 8),
        oversize=st.sampled_from([False, True, True]),
    )
    def start(
        self,
        steps_ahead: int,
        gpu_blocks: int,
        cpu_blocks: int,
        prefix_cache: bool,
        cpu_offload: bool,
        max_num_seqs: int,
        batched_tokens: int,
        chunk_tokens: int,
        policies: tuple[str, str, str],
        write_behind_above: float,
        crowd: int,
        oversize: bool,
    ) -> None:
        self.delays: list[int] = []
        self.failures: list[bool] = []
        self.added = 0
        self.harness = Harness(
            steps_ahead=steps_ahead,
            delay=lambda move: self.delays.pop() if self.delays else 0,
            fails=lambda move: self.failures.pop() if self.failures else False,
            block_size=4,
            num_gpu_blocks=gpu_blocks,
            num_cpu_blocks=cpu_blocks,
            prefix_cache=prefix_cache,
            cpu_offload=cpu_offload,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            prefill_chunk_tokens=chunk_tokens,
            victim_policy=policies[0],
            resume_order=policies[1],
            swap_or_recompute=policies[2],
            write_behind_above=write_behind_above,
            allow_oversize=oversize,
        )
        for index in range(crowd):
            self.add(f"r{index}", [*range(4 * (index % 3)), 50 + index], 10 + 3 * index)
        self.added = crowd

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        stops_at=st.sampled_from([None, None, 0, 1, 3, 8]),
        penalized=st.sampled_from([False, False, True]),
        priority=st.sampled_from([0, 0, 0, 1, -1, 100]),
    )
    def arrive(
        self,
        shared: int,
        own: list[int],
        max_tokens: int,
        stops_at: int | None,
        penalized: bool,
        priority: int,
    ) -> None:
        self.add(f"r{self.added}", [*range(shared), *own], max_tokens, stops_at, penalized, priority)
        self.added += 1

    @rule(
        length=st.integers(10, 120),
        own=st.integers(0, 2),
        max_tokens=st.integers(1, 40),
        stops_at=st.sampled_from([None, None, 8]),
        penalized=st.sampled_from([False, False, True]),
        priority=st.sampled_from([0, 0, 1, -1]),
    )
    def arrive_large(
        self, length: int, own: int, max_tokens: int, stops_at: int | None, penalized: bool, priority: int
    ) -> None:
        """Larger than the pool, if the tiers can hold it. Some begin alike."""
        self.add(f"r{self.added}", [*range(length), own], max_tokens, stops_at, penalized, priority)
        self.added += 1

    @precondition(lambda self: self.added)
    @rule(data=st.data(), own=st.lists(st.integers(0, 3), min_size=1, max_size=12), max_tokens=st.integers(1, 8))
    def arrive_under_an_old_id(self, data: st.DataObject, own: list[int], max_tokens: int) -> None:
        """What the old request still has in flight, steps or copies, is nothing to the new one."""
        request_id = f"r{data.draw(st.integers(0, self.added - 1))}"
        if request_id in self.harness.finished:
            self.harness.forget(request_id)
            self.harness.executor.failing.discard(request_id)
            self.add(request_id, own, max_tokens)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        stops_at: int | None = None,
        penalized: bool = False,
        priority: int = 0,
    ) -> None:
        prompt = prompt[-(self.harness.config.max_request_tokens - 1) :]
        stops = () if stops_at is None else (expected_tokens(prompt, stops_at + 1, VOCAB)[-1],)
        penalty = 1.5 if penalized else 1.0
        self.harness.add(request_id, prompt, max_tokens, priority, stop_token_ids=stops, repetition_penalty=penalty)

    @rule(steps=st.integers(1, 20))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @rule(delays=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def copies_take_long(self, delays: list[int]) -> None:
        self.delays += delays

    @rule(failures=st.lists(st.booleans(), min_size=1, max_size=4))
    def copies_fail(self, failures: list[bool]) -> None:
        self.failures += failures

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(f"r{data.draw(st.integers(0, self.added - 1))}")

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.harness.executor.failing.add(f"r{data.draw(st.integers(0, self.added - 1))}")

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def recompute(self, data: st.DataObject) -> None:
        """Whoever runs may be recomputed at any time, its token in flight or not."""
        request = self.harness.scheduler._requests.get(f"r{data.draw(st.integers(0, self.added - 1))}")
        if request is not None and request.state in (State.PREFILL, State.DECODE):
            self.harness.scheduler._preempt(request, self.harness.clock())

    @invariant()
    def counts_hold(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    load=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=1, max_size=12),
    gpu_blocks=st.integers(16, 24),
    cpu_blocks=st.sampled_from([0, 6, 40]),
    delay=st.integers(0, 3),
    prefix_cache=st.booleans(),
)
def test_working_ahead_changes_no_answer(
    load: list[tuple[int, int, bool]], gpu_blocks: int, cpu_blocks: int, delay: int, prefix_cache: bool
) -> None:
    told = []
    for steps_ahead in (0, 1):
        harness = Harness(
            steps_ahead=steps_ahead,
            delay=lambda move: delay,
            block_size=4,
            num_gpu_blocks=gpu_blocks,
            num_cpu_blocks=cpu_blocks,
            prefix_cache=prefix_cache,
        )
        for index, (prompt, answer, stops) in enumerate(load):
            harness.add(f"r{index}", range(prompt), answer, stop_token_ids=tuple(range(0, VOCAB, 7)) if stops else ())
            harness.step()
        harness.run()
        ends = {name: (end.reason, end.stop_token, end.completion_tokens) for name, end in harness.finished.items()}
        told.append((harness.tokens, ends, harness.scheduler.counters.generation_tokens))
    assert told[0] == told[1]
