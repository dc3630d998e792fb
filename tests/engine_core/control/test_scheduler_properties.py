"""A state machine that submits, aborts, fails and steps at random, with copies that last, end in any order, or fail.

The fake executor checks every page that it is given, slot by slot. After every step both tiers are counted anew, and
at the end everybody has finished with the text that its prompt alone determines, and both tiers are empty.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduler_harness import Harness


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts share prefixes on purpose; the pools are too small for what is asked of them."""

    @initialize(
        gpu_blocks=st.integers(3, 14),
        cpu_blocks=st.sampled_from([0, 1, 3, 6, 30]),
        prefix_cache=st.booleans(),
        cpu_offload=st.sampled_from([True, True, True, False]),
        max_num_seqs=st.integers(1, 8),
        batched_tokens=st.integers(1, 40),
        chunk_tokens=st.integers(1, 24),
    )
    def start(
        self,
        gpu_blocks: int,
        cpu_blocks: int,
        prefix_cache: bool,
        cpu_offload: bool,
        max_num_seqs: int,
        batched_tokens: int,
        chunk_tokens: int,
    ) -> None:
        self.delays: list[int] = []
        self.failures: list[bool] = []
        self.added = 0
        self.harness = Harness(
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
        )

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def arrive(self, shared: int, own: list[int], max_tokens: int, priority: int) -> None:
        prompt = [*range(shared), *own][-(self.harness.config.max_request_tokens - 1) :]
        self.harness.add(f"r{self.added}", prompt, max_tokens, priority)
        self.added += 1

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            worked = self.harness.step() is not None
            assert worked or not self.harness.scheduler.has_work(), "work, but no plan"

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

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
