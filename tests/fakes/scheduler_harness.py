"""A scheduler and a fake executor, run step by step, with the block counts of both tiers checked after every one."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence

from coldblock.engine_core.control.plan import BlockMove, StepPlan
from coldblock.engine_core.control.prefix_index import PrefixIndex
from coldblock.engine_core.control.request import USES_BLOCKS, Request, State
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.control.scheduler import Scheduler, SchedulerConfig
from coldblock.engine_core.control.swap import NO_SLOT, Block, Move, Residency
from coldblock.engine_core.control.tier_log import Tier, TierChange
from coldblock.engine_core.control.tiers import Tiers
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
        "swap_or_recompute": "swap",
        "write_behind_above": 1.0,
        "kv_events": True,
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
        self.told = ToldTiers()

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
        self.check()
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
        self.check()

    def check(self) -> None:
        """Hold the scheduler against itself, and what was told of its tiers against its index."""
        check_invariants(self.scheduler)
        self.told.take(self.scheduler.drain_tier_changes())
        self.told.check(self.scheduler._tiers.index)

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
        assert (cpu.used, cpu.in_flight, cpu.free + cpu.cached) == (0, 0, cpu.total)
        assert self.scheduler.requests() == [] and self.finished.keys() == self.asked.keys()
        for request_id in self.finished:
            self.check_end(request_id)
        counters, ended = self.scheduler.counters, ("swapped", "resumed", "copied_out", "copied_in")
        told = sum(swap.blocks for swap in self.swaps if swap.phase in ended)
        assert told == counters.offload_blocks + counters.reload_blocks, "a copy was told of never, or twice"

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


class ToldTiers:
    """What each tier holds by the changes told."""

    def __init__(self) -> None:
        self._held: dict[Tier, set[bytes]] = {"GPU": set(), "CPU": set()}
        self._known: set[bytes] = set()

    def take(self, changes: Sequence[TierChange]) -> None:
        for change in changes:
            held = self._held[change.tier]
            assert (change.digest in held) is not change.stored, f"told twice: {change}"
            assert not change.stored or change.content or change.digest in self._known, f"of what tokens: {change}"
            held ^= {change.digest}
            self._known.add(change.digest)
            if not change.stored and not any(change.digest in other for other in self._held.values()):
                self._known.remove(change.digest)

    def check(self, index: PrefixIndex) -> None:
        named = index._block_of.items()
        assert self._held["GPU"] == {digest for digest, block in named if block.readable}
        assert self._held["CPU"] == {digest for digest, block in named if block.copied}


def check_invariants(scheduler: Scheduler) -> None:
    """Count both tiers anew from the requests' blocks and the copies, and compare with what the tiers say."""
    tiers, live = scheduler._tiers, list(scheduler._requests.values())
    owners = Counter(block for request in live for block in request.blocks)
    users = Counter(block for request in live if request.state in USES_BLOCKS for block in request.hot)
    readers = Counter(block for request in live for block in request.blocks[: request.cold])
    readers.update(block for step in scheduler._in_flight for block in step.read_cold)
    moving = {block: move for move in tiers.moves.values() for block in move.blocks}
    assert sum(len(move.blocks) for move in tiers.moves.values()) == len(moving), "a block is in two copies"
    shelves = [shelf for shelf in vars(tiers).values() if isinstance(shelf, OrderedDict)]
    failed = {block for request in live if request.copied.error for block in request.blocks}
    blocks = {
        *owners,
        *readers,
        *moving,
        *tiers.index._block_of.values(),
        *(block for shelf in shelves for block in shelf),
    }
    for block in blocks:
        check_block(tiers, block, owners[block], users[block], readers[block], moving.get(block))
        away = users[block] and block.residency is Residency.CPU
        assert not away or block in failed, "who runs, or is to run, has a block that is away"
    for pool, slots in ((tiers._gpu, [b.gpu for b in blocks]), (tiers._cpu, [b.cpu for b in blocks])):
        taken = [slot for slot in slots if slot != NO_SLOT]
        assert sorted(taken + pool._free) == list(range(pool.total)), "slots are lost, or held twice"
    for use in (tiers.gpu_use(), tiers.cpu_use()):
        assert use.used + use.cached + use.in_flight + use.free == use.total
        assert min(use.used, use.cached, use.in_flight, use.free) >= 0 and use.in_flight == len(moving)
    assert tiers.shared() == shared_blocks(blocks, owners)
    for request in live:
        check_request(scheduler, request)
    for move in tiers.moves.values():
        assert all(move in request.awaits for request in move.waiting)
    seats = [*scheduler._running.values(), *scheduler._swapped.values(), *scheduler._loading.values()]
    assert len(seats) <= scheduler.config.max_num_seqs
    assert sorted(r.request_id for r in [*scheduler._waiting, *seats]) == sorted(scheduler._requests)
    check_steps_in_flight(scheduler)


def shared_blocks(blocks: Iterable[Block], owners: Counter[Block]) -> tuple[int, int]:
    """Of the used blocks in either tier, how many have several owners."""
    several = [block for block in blocks if owners[block] > 1 and block.move is None]
    both = [block for block in several if block.residency is Residency.BOTH]
    on_gpu = [block for block in several if block.residency is Residency.GPU or (block in both and block.users)]
    on_cpu = [block for block in several if block.residency is Residency.CPU]
    needed_there = [block for block in both if block.readers or not block.users]
    return len(on_gpu), len(on_cpu) + len(needed_there)


def check_block(tiers: Tiers, block: Block, owners: int, users: int, readers: int, move: Move | None) -> None:
    """Its counts, its slots by residency, its shelves, and its place in the index."""
    assert (block.owners, block.users, block.readers, block.move) == (owners, users, readers, move)
    assert not readers or block.copied, "a cold block without content"
    residency = block.residency
    on_gpu = residency in (Residency.GPU, Residency.BOTH, Residency.COPYING_OUT, Residency.COPYING_IN)
    on_cpu = residency in (Residency.CPU, Residency.BOTH, Residency.COPYING_OUT, Residency.COPYING_IN)
    assert (block.gpu != NO_SLOT, block.cpu != NO_SLOT) == (on_gpu, on_cpu), "a slot without content, or the reverse"
    assert (move is not None) == (residency in (Residency.COPYING_OUT, Residency.COPYING_IN))
    assert owners or readers or block.digest is not None or move is not None, "nobody wants this block"
    assert block.digest is None or tiers.index._block_of[block.digest] is block
    gives_gpu = move is None and on_gpu and not users
    unread = move is None and on_cpu and not readers
    gives_cpu = unread and (not owners or (residency is Residency.BOTH and users > 0))
    assert (block.gpu_shelf is not None, block.cpu_shelf is not None) == (gives_gpu, gives_cpu)
    assert block.gpu_shelf is None or block in block.gpu_shelf
    assert tiers.giving_way([block]) == (gives_gpu and (residency is Residency.BOTH or not owners))


def check_request(scheduler: Scheduler, request: Request) -> None:
    """Its state, its set, its blocks and its table go together."""
    state, size = request.state, scheduler.config.block_size
    running = state in (State.PREFILL, State.DECODE)
    assert (request.request_id in scheduler._running) == running
    assert (request.request_id in scheduler._loading) == (state is State.LOADING)
    swapping = state in (State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN)
    assert (request.request_id in scheduler._swapped) == swapping
    assert list(request.block_table) == ([block.gpu for block in request.hot] if running else [])
    assert list(request.cold_table) == [block.cpu for block in request.blocks[: request.cold]]
    assert request.cold * size <= request.computed_tokens
    assert len(request.hot) <= scheduler.config.num_gpu_blocks
    assert (request.blocks == []) == (state is State.WAITING)
    assert bool(request.awaits) == (state in (State.LOADING, State.SWAPPING_OUT, State.SWAPPING_IN))
    assert all(request in move.waiting for move in request.awaits)
    if running:
        assert all(block.readable for block in request.hot), "who runs has a block that is away"
        written = request.blocks[request.computed_tokens // size :]
        assert all(block.residency is Residency.GPU and block.owners == 1 for block in written), "not to be written"
    content = -(-request.computed_tokens // size)
    assert len(request.blocks) >= content and (running or len(request.blocks) == content or state in USES_BLOCKS)


def check_steps_in_flight(scheduler: Scheduler) -> None:
    """What a request is ahead of its known tokens is what the steps in flight do for it, and no more."""
    size = scheduler.config.block_size
    for request in scheduler._requests.values():
        chunks = [chunk for step in scheduler._in_flight for r, chunk in step.chunks if r is request]
        assert request.num_tokens - len(request.tokens) == sum(chunk.sample is not None for chunk in chunks)
        window = scheduler.config.window
        assert all(len(chunk.block_table) <= window for chunk in chunks if chunk.cold_blocks), "no room for others"
        assert request.num_tokens <= request.limit, "it goes on behind its end"
        assert not chunks or request.state not in (State.SWAPPING_IN, State.LOADING)
        if request.request_id in scheduler._running:
            applied = request.computed_tokens - sum(chunk.num_tokens for chunk in chunks)
            assert 0 <= request.indexed_blocks * size <= applied, "blocks are offered before they are computed"
            assert request.remaining == 1 or request.state is State.PREFILL
