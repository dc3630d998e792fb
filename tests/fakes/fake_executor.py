"""An executor without tensors: it writes a fingerprint into every slot and checks every page that it is given.

A slot holds (token, fingerprint of the whole prefix up to it). The next token is a function of the prefix alone, so
`expected_tokens` knows a request's text without any scheduler, and one lost, doubled or foreign token changes all that
follows. Copies may take any number of steps, end in any order, and fail; content moves when a copy ends, so whoever
touches its blocks too early is caught. Cold blocks may be read at any time until their step is completed: no copy to
them may begin before. With `steps_ahead` 1 a step's result is withheld until the next one has begun,
and a chunk may run the token that only the executor knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from coldblock.engine_core.control.plan import (
    BlockMove,
    Chunk,
    Direction,
    MoveDone,
    SampledToken,
    StepPlan,
    StepResult,
)
from coldblock.engine_core.device.executor import Capacity

COPY_SECONDS = 0.001
QUEUED_SECONDS = 0.0005
Slot = tuple[int, int] | None
Block = list[Slot]


def next_token(prefix_fingerprint: int, vocab_size: int, banned: Collection[int] = ()) -> int:
    token = prefix_fingerprint % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def expected_tokens(
    prompt: Sequence[int], count: int, vocab_size: int, end_tokens: Collection[int] = (), min_tokens: int = 0
) -> list[int]:
    """The answer to `prompt`: at most `count` tokens, up to the first end token after `min_tokens` others."""
    fingerprint = fingerprint_of(prompt)
    answer: list[int] = []
    while len(answer) < count:
        token = next_token(fingerprint, vocab_size, end_tokens if len(answer) < min_tokens else ())
        if token in end_tokens:
            break
        answer.append(token)
        fingerprint = hash((fingerprint, token))
    return answer


def fingerprint_of(tokens: Iterable[int]) -> int:
    fingerprint = 0
    for token in tokens:
        fingerprint = hash((fingerprint, token))
    return fingerprint


@dataclass
class Copy:
    move: BlockMove
    steps_left: int
    fails: bool


class FakeExecutor:
    """`delay(move)`: steps a copy outlives the one that began it. `fails(move)`: it ends with an error.

    `failing` requests get no token but an error, as if their logits were not finite. `plans` keeps every plan.
    """

    def __init__(
        self,
        capacity: Capacity,
        block_size: int,
        vocab_size: int,
        *,
        steps_ahead: int = 0,
        delay: Callable[[BlockMove], int] = lambda move: 0,
        fails: Callable[[BlockMove], bool] = lambda move: False,
    ) -> None:
        self.capacity = capacity
        self.steps_ahead = steps_ahead
        self.failing: set[str] = set()
        self.plans: list[StepPlan] = []
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._delay = delay
        self._fails = fails
        self._gpu: list[Block] = [[None] * block_size for _ in range(capacity.num_gpu_blocks)]
        self._cpu: list[Block] = [[None] * block_size for _ in range(capacity.num_cpu_blocks)]
        self._copies: dict[int, Copy] = {}
        self._results: deque[StepResult] = deque()
        self._read_cold: deque[set[int]] = deque()  # CPU blocks that the steps not completed yet read
        self._previous: dict[str, int] = {}  # what the last step sampled, failed requests included

    def begin_step(self, plan: StepPlan) -> None:
        assert len(self._results) <= self.steps_ahead, "the step before has not been completed"
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks), "two chunks of one request"
        self.plans.append(plan)
        self._read_cold.append({block for chunk in plan.chunks for block in chunk.cold_blocks})
        for move in plan.moves:
            self._begin_copy(move)
        # All of a step's chunks may run at once: nobody may read what another one writes.
        written = [block for chunk in plan.chunks for block in self._written_blocks(chunk)]
        read = {block for chunk in plan.chunks for block in chunk.block_table[: self._first_written(chunk)]}
        assert len(set(written)) == len(written) and not read & set(written), "a block is written and shared"
        sampled = {chunk.request_id: self._run(chunk) for chunk in plan.chunks}
        self._previous = {request_id: token for request_id, token in sampled.items() if token is not None}
        failed = {request_id: "logits are not finite" for request_id in sampled if request_id in self.failing}
        tokens = {request_id: SampledToken(token) for request_id, token in self._previous.items()}
        for request_id in failed:
            tokens.pop(request_id, None)
        self._results.append(StepResult(plan.step, tokens, failed, (), COPY_SECONDS))

    def complete_step(self) -> StepResult:
        assert self._results, "no step has begun"
        self._read_cold.popleft()
        return replace(self._results.popleft(), moves_done=self._end_copies())

    def close(self) -> None:
        self._copies.clear()

    def _written_blocks(self, chunk: Chunk) -> Sequence[int]:
        return chunk.block_table[self._first_written(chunk) :]

    def _first_written(self, chunk: Chunk) -> int:
        return chunk.start // self._block_size - len(chunk.cold_blocks)

    def _run(self, chunk: Chunk) -> int | None:
        """Check that the pages hold one unbroken prefix, write the chunk's slots, and sample when asked to."""
        size = self._block_size
        end = chunk.start + chunk.num_tokens
        cold = len(chunk.cold_blocks)
        assert cold * size <= chunk.start, f"{chunk} writes cold blocks"
        assert len(chunk.block_table) + cold == -(-end // size), f"{chunk} covers {len(chunk.block_table)} blocks"
        assert len(set(chunk.cold_blocks)) == cold, f"{chunk} names a cold block twice"
        assert not self._arriving_cold() & set(chunk.cold_blocks), f"{chunk} reads blocks that are being copied out"
        assert len(set(chunk.block_table)) == len(chunk.block_table), f"{chunk} names a block twice"
        arriving = self._blocks_of(Direction.IN)
        leaving = self._blocks_of(Direction.OUT)
        assert not arriving & set(chunk.block_table), f"{chunk} reads blocks that are still being copied in"
        assert not leaving & set(self._written_blocks(chunk)), f"{chunk} writes blocks that are still being copied out"
        fingerprint = 0
        for position in range(chunk.start):
            slot = self._page(chunk, position)[position % size]
            assert slot is not None and slot[1] == hash((fingerprint, slot[0])), f"{chunk}: foreign KV at {position}"
            fingerprint = slot[1]
        for position, token in enumerate(self._tokens(chunk), start=chunk.start):
            fingerprint = hash((fingerprint, token))
            self._page(chunk, position)[position % size] = (token, fingerprint)
        if chunk.sample is None:
            return None
        history = chunk.sample.history
        assert history is None or fingerprint_of(history) == fingerprint, f"{chunk} knows another history"
        return next_token(fingerprint, self._vocab_size, chunk.sample.banned)

    def _page(self, chunk: Chunk, position: int) -> Block:
        index, cold = position // self._block_size, len(chunk.cold_blocks)
        return self._cpu[chunk.cold_blocks[index]] if index < cold else self._gpu[chunk.block_table[index - cold]]

    def _arriving_cold(self) -> set[int]:
        copies = self._copies.values()
        return {block for copy in copies if copy.move.direction is Direction.OUT for block in copy.move.cpu_blocks}

    def _tokens(self, chunk: Chunk) -> Sequence[int]:
        """The chunk's tokens; one that the step before sampled is asked for only while nobody else can know it."""
        if not chunk.from_previous:
            assert chunk.token_ids, f"{chunk} is empty"
            return chunk.token_ids
        assert self._results, f"{chunk}: the result of the step before is known"
        assert not chunk.token_ids and chunk.request_id in self._previous, f"{chunk} has no token in the step before"
        assert chunk.sample is not None and chunk.sample.history is None, f"{chunk} does not know its history"
        return [self._previous[chunk.request_id]]

    def _blocks_of(self, direction: Direction) -> set[int]:
        copies = self._copies.values()
        return {block for copy in copies if copy.move.direction is direction for block in copy.move.gpu_blocks}

    def _begin_copy(self, move: BlockMove) -> None:
        assert move.move_id not in self._copies and len(move.gpu_blocks) == len(move.cpu_blocks) > 0
        busy_cpu = {block for copy in self._copies.values() for block in copy.move.cpu_blocks}
        assert not busy_cpu & set(move.cpu_blocks), f"{move} takes CPU blocks of another copy"
        assert not self._blocks_of(Direction.IN) & set(move.gpu_blocks), f"{move} takes blocks being copied in"
        if move.direction is Direction.OUT:
            assert not set().union(*self._read_cold) & set(move.cpu_blocks), f"{move} overwrites cold blocks being read"
        else:
            assert not self._blocks_of(Direction.OUT) & set(move.gpu_blocks), f"{move} overwrites a block being read"
        self._copies[move.move_id] = Copy(move, self._delay(move), self._fails(move))

    def _end_copies(self) -> tuple[MoveDone, ...]:
        done = []
        for copy in list(self._copies.values()):
            if copy.steps_left > 0:
                copy.steps_left -= 1
                continue
            del self._copies[copy.move.move_id]
            self._copy_content(copy)
            error = "injected" if copy.fails else None
            done.append(MoveDone(copy.move.move_id, COPY_SECONDS, error, QUEUED_SECONDS))
        return tuple(done)

    def _copy_content(self, copy: Copy) -> None:
        for gpu, cpu in zip(copy.move.gpu_blocks, copy.move.cpu_blocks, strict=True):
            out = copy.move.direction is Direction.OUT
            source, target = (self._gpu[gpu], self._cpu[cpu]) if out else (self._cpu[cpu], self._gpu[gpu])
            target[:] = [None] * self._block_size if copy.fails else source
