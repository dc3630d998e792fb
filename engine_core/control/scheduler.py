"""Decides what every step does: who runs, who is admitted, who is swapped out and who comes back.

Owns: the requests, their queues, both tiers' pools, the prefix index and the swap manager; it alone changes them.
Does not know: tensors, copies, sockets, text. It speaks in block ids through `StepPlan` and `StepResult`.

One step of `plan` asks, in this order:
  1. growth: has every running request blocks for its next tokens? If not, victims are swapped out (or, when the CPU
     tier will not take them, recomputed later), and nobody else gets blocks until all have.
  2. a newcomer that others gave way to; then swapped requests, first swapped first; then the waiting ones. While
     anybody is swapped out, nobody else is admitted.
  3. a newcomer without room: when nobody is swapped out, running requests give way to it.

Why everybody finishes, for any finite number of requests. A request gives way to a newcomer once in its life, so rule 3
acts finitely often. Apart from it, the eldest running request is never a victim; the blocks of all others are there
for it, and no request is larger than the pool: it runs until it ends or an elder comes back. While somebody is swapped
out, nobody new is admitted, so the running ones end one by one and the swapped come back in the order they left; the
oldest of all, once back, is the eldest and stays. Whoever is recomputed keeps its tokens and waits in front.

Why nobody ping-pongs: who comes back must find room for itself and for the next token of all others, counts as just
active and so leaves last, and after MAX_GROWTH_SWAPS is passed over. Failing copies end in a recomputation.

A step may be planned while the one before it is in flight (begun, and its result not applied). Then:
  * `computed_tokens` and `num_tokens` move when a step is planned; tokens are known, and blocks offered to the prefix
    index, when its result is applied.
  * Who ends by length with the step in flight takes no part in the next one, and its blocks count as leaving. Whose
    sampling needs the tokens themselves (penalties) waits for them.
  * An end that was not foreseen (stop token, failure, abort) frees the blocks at once, and the result of what is still
    in flight is dropped. This is safe, as are preemptions and swaps of requests in flight, because the executor works
    in order: whoever gets the blocks next, a chunk or a copy, begins after the work of the step in flight.
  * A recomputed request is not admitted before its step in flight has been applied. So a request that runs when a
    result is applied still has the blocks that the step was planned with, and a swap's end finds no token pending.
"""

from __future__ import annotations

import random
import time
from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from .block_pool import BlockPool, PoolUse
from .plan import NO_TOKENS, BlockMove, Chunk, MoveDone, SampledToken, SampleSpec, StepPlan, StepResult
from .policies import RESUME_ORDERS, VICTIM_POLICIES
from .prefix_index import PrefixIndex
from .request import Event, Request, State
from .sampling import Sampling
from .swap import Residency, Swap, SwapManager
from .updates import (
    Counters,
    FinishedUpdate,
    FinishReason,
    RequestView,
    SwapPhase,
    SwapReason,
    SwapUpdate,
    TokenUpdate,
    Update,
)
from .validation import Refusal, check_prompt, check_sampling

__all__ = ["Refusal", "Scheduler", "SchedulerConfig"]

MAX_GROWTH_SWAPS = 8  # after so many, a request is swapped out for growth only when no other is left
MAX_COPY_FAILURES = 3  # after so many in a row, a request's KV is recomputed instead of copied


@dataclass(frozen=True)
class SchedulerConfig:
    """The sizes and switches of scheduling. Blocks hold `block_size` tokens and `block_bytes` bytes."""

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    block_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    prefix_cache: bool
    cpu_offload: bool
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    seed: int

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request can hold."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)


class Scheduler:
    """See the module's text. Every plan's result is applied, in order; at most one plan is made before the result of
    the one before it. `add` and `abort` may come at any time between.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.counters = Counters()
        self._clock = clock
        self._index = PrefixIndex(config.block_size)
        self._gpu = BlockPool(config.num_gpu_blocks, on_evict=self._index.drop)
        self._cpu = BlockPool(config.num_cpu_blocks)
        self._swaps = SwapManager(self._gpu, self._cpu, config.cpu_offload)
        self._victims = VICTIM_POLICIES["least_recently_active"]()
        self._resume_order = RESUME_ORDERS["first_swapped_first"]()
        self._seeds = random.Random(config.seed)

        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: dict[str, Request] = {}  # in PREFILL or DECODE, in the order they came in
        self._swapped: dict[str, Request] = {}  # in one of the three swap states
        self._favoured: Request | None = None  # the newcomer that running requests gave way to
        self._copying: dict[int, Request] = {}  # running copies by move id; their request may have ended

        self._arrivals = 0
        self._steps = 0
        self._moves: list[BlockMove] = []
        self._in_flight: deque[list[tuple[Request, Chunk]]] = deque()  # what each step not yet applied runs
        self._updates: list[Update] = []

    # ------------------------------------------------------------ requests come and go

    def add(self, request_id: str, prompt: Sequence[int], sampling: Sampling, priority: int = 0) -> None:
        """Take a request. Raises Refusal when it can never run or is out of range; `max_tokens` is cut to the room."""
        config, limit = self.config, self.config.max_request_tokens
        if request_id in self._requests:
            raise Refusal("request_id", request_id, "an id that no live request has")
        check_prompt(prompt, config.vocab_size, config.max_model_len, config.num_gpu_blocks, config.block_size)
        check_sampling(sampling, config.vocab_size)
        self._arrivals += 1
        request = Request(
            request_id=request_id,
            tokens=array("i", prompt),
            prompt_length=len(prompt),
            sampling=sampling,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            limit=min(limit, len(prompt) + sampling.max_tokens) if sampling.max_tokens is not None else limit,
            end_tokens=sampling.stop_token_ids + (() if sampling.ignore_eos else config.eos_token_ids),
            priority=priority,
            arrival=self._arrivals,
            arrived_at=self._clock(),
        )
        self._requests[request_id] = request
        insort(self._waiting, request, key=_queue_key)

    def abort(self, request_id: str) -> None:
        """End a request in any state with reason "abort"; blocks in a running copy are freed when it ends."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "abort", self._clock())

    def has_work(self) -> bool:
        """True while a request lives, a copy runs or a step is in flight."""
        return bool(self._requests or self._copying or self._in_flight)

    def drain(self) -> list[Update]:
        """What happened since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do, or nothing before the step in flight is applied.

        Without chunks it only begins or awaits copies.
        """
        now = self._clock()
        self._moves = []
        if self._grow(now):
            if self._favoured is not None:
                self._admit(self._favoured, now)
            if self._favoured is None:
                self._resume()
                self._admit_waiting(now)
        stepping = self._choose_chunks(now)
        if not stepping and not self._moves and (self._in_flight or not self._copying):
            return None
        self._steps += 1
        self._in_flight.append(stepping)
        return StepPlan(self._steps, tuple([chunk for _, chunk in stepping]), tuple(self._moves))

    def _grow(self, now: float) -> bool:
        """Give every running request the blocks of its next tokens, eldest first. False: some must wait for copies."""
        size = self.config.block_size
        short = [
            request
            for request in self._running.values()
            if request.num_tokens > size * len(request.block_table) and request.num_tokens < request.limit
        ]
        short.sort(key=lambda request: request.arrival)
        # One that had to leave for an elder is not running any more.
        return all(self._find_blocks(request, now) for request in short if request.request_id in self._running)

    def _find_blocks(self, request: Request, now: float) -> bool:
        """Let victims leave until `request` has its blocks, or has itself left. False: wait for those on their way."""
        missing = self._blocks_for(request.num_tokens) - len(request.block_table)
        while self._gpu.available < missing:
            leaving = self._swaps.releasing() + self._freed_by(self._ending())
            if self._gpu.available + leaving >= missing:
                return False
            victim = self._growth_victim()
            if victim is None:
                return False
            self._make_leave(victim, now)
            if victim is request:
                return True
        request.block_table.extend(self._gpu.allocate(missing))
        return True

    def _growth_victim(self) -> Request | None:
        """Anybody but the eldest running request, so that one always gets on."""
        eldest = min(self._running.values(), key=lambda request: request.arrival)
        candidates = [request for request in self._running.values() if request is not eldest]
        unspent = [request for request in candidates if request.growth_swaps < MAX_GROWTH_SWAPS]
        return self._victims.choose(unspent or candidates) if candidates else None

    def _make_leave(self, victim: Request, now: float) -> None:
        """Swap the victim out; when it has nothing to copy, or the CPU tier will not have it, recompute it later."""
        blocks = self._blocks_for(victim.computed_tokens)
        shortage = self._swaps.shortage(blocks)
        if blocks == 0 or victim.copy_failures >= MAX_COPY_FAILURES:
            self._preempt(victim, now)
        elif shortage is not None:
            self._reject_swap(victim, "growth", shortage)
            self._preempt(victim, now)
        else:
            victim.growth_swaps += 1
            self._begin_swap_out(victim, "growth", now)

    def _resume(self) -> None:
        """Bring swapped requests back, as long as the next has room for its content and its next token.

        They need no seat: while somebody is swapped out nobody new comes in but the one newcomer whose seat was free
        before, so that running and swapped requests together never exceed `max_num_seqs`.
        """
        while ready := [request for request in self._swapped.values() if request.state is State.SWAPPED]:
            request = self._resume_order.choose(ready)
            assert request.swap is not None
            needed = self._blocks_for(request.num_tokens + 1)
            if needed > self._room():
                return
            move = self._swaps.begin_swap_in(request.swap, needed - len(request.swap.cpu_blocks))
            request.on(Event.SWAP_IN)
            request.swap_reason = "resume"
            self._begin_copy(request, move, "swapping_in")

    def _admit_waiting(self, now: float) -> None:
        """Admit waiting requests in order, while no one is swapped out and the step has tokens left for one more."""
        seats, budget = self.config.max_num_seqs, self.config.max_num_batched_tokens
        if not self._waiting or self._swapped or len(self._running) >= seats:
            return
        wanted = sum(self._chunk_tokens(request) for request in self._running.values())
        while self._waiting and len(self._running) < seats and wanted < budget:
            request = self._waiting[0]
            if not self._admit(request, now):
                self._give_way(request, now)
                return
            wanted += self._chunk_tokens(request)

    def _admit(self, request: Request, now: float) -> bool:
        """Run a waiting request if its tokens so far and one more fit beside the running ones; it gets those blocks."""
        if request.last_step > self._steps - len(self._in_flight):
            return False
        hits = self._cached_prefix(request)
        needed = self._blocks_for(request.num_tokens + 1) - len(hits)
        if needed > self._room(hits):
            return False
        self._gpu.share(hits)
        request.block_table = array("i", hits + self._gpu.allocate(needed))
        request.indexed_blocks = len(hits)
        request.computed_tokens = request.tokens_at_admission = len(hits) * self.config.block_size
        request.last_active_time = now
        request.on(Event.ADMIT)
        self._waiting.remove(request)
        self._running[request.request_id] = request
        if request is self._favoured:
            self._favoured = None
        if request.admitted_at is None:
            request.admitted_at = now
            request.cached_tokens = request.computed_tokens
            self.counters.prompt_tokens += request.prompt_length
            if self.config.prefix_cache:
                self.counters.prefix_queries_tokens += request.prompt_length
                self.counters.prefix_hits_tokens += request.cached_tokens
        return True

    def _give_way(self, newcomer: Request, now: float) -> None:
        """Swap out running requests for one that was never admitted, if its prompt then fits and the budget allows.

        Called only while no one is swapped out. Whoever leaves has got on since its admission, and does so only once.
        """
        if newcomer.admitted_at is not None or newcomer.denied_room:
            return
        victims = self._victims_for(newcomer)
        if not victims:
            return
        shortage = self._swaps.shortage(sum(self._blocks_for(victim.computed_tokens) for victim in victims))
        if shortage is not None:
            newcomer.denied_room = True
            self._reject_swap(victims[0], "admission", shortage)
            return
        for victim in victims:
            victim.gave_way = True
            self._begin_swap_out(victim, "admission", now)
        self._favoured = newcomer

    def _victims_for(self, newcomer: Request) -> list[Request]:
        """The requests whose leaving makes room for the newcomer; empty when no choice does."""
        candidates = [
            request
            for request in self._running.values()
            if request.computed_tokens > request.tokens_at_admission
            and not request.gave_way
            and not request.ends_in_flight
            and request.priority <= newcomer.priority
        ]
        hits, ending = self._cached_prefix(newcomer), self._ending()
        needed = self._blocks_for(newcomer.num_tokens + 1) - len(hits)
        if needed <= self._room(hits, ending):
            return []
        most = sum(len(request.block_table) + 1 for request in candidates)  # its blocks, and what it would grow by
        if needed > self._room(hits, ending) + most:
            return []
        victims: list[Request] = []
        while candidates:
            victim = self._victims.choose(candidates)
            candidates.remove(victim)
            victims.append(victim)
            if needed <= self._room(hits, ending + victims):
                return victims
        return []

    def _choose_chunks(self, now: float) -> list[tuple[Request, Chunk]]:
        """The step's chunks within its token budget: decodes, then prefills in the order they were admitted."""
        budget, size = self.config.max_num_batched_tokens, self.config.block_size
        prefill = State.PREFILL
        stepping, prefilling = [], []
        for request in self._running.values():
            if request.state is prefill:
                prefilling.append(request)
            elif (
                budget > 0
                and request.num_tokens <= size * len(request.block_table)
                and request.num_tokens < request.limit
                and not (request.penalized and request.awaits_token)
            ):
                stepping.append((request, self._plan_chunk(request, 1, now)))
                budget -= 1
        for request in prefilling:
            count = min(self._chunk_tokens(request), budget)
            if count > 0 and request.computed_tokens + count <= size * len(request.block_table):
                stepping.append((request, self._plan_chunk(request, count, now)))
                budget -= count
        return stepping

    def _plan_chunk(self, request: Request, count: int, now: float) -> Chunk:
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
        request.last_step = self._steps + 1
        request.last_active_time = now
        tokens = NO_TOKENS if from_previous else request.tokens[start:end]
        table = request.block_table[: self._blocks_for(end)]
        return Chunk(request.request_id, tokens, start, table, sample, from_previous)

    # ------------------------------------------------------------ apply

    def apply(self, result: StepResult) -> None:
        """Take in what the oldest step in flight produced, and the copies that have ended."""
        now = self._clock()
        for request, chunk in self._in_flight.popleft():
            if request.state is not State.FINISHED:
                self._apply_chunk(request, chunk, result, now)
        for done in result.moves_done:
            self._apply_move(done, now)

    def _apply_chunk(self, request: Request, chunk: Chunk, result: StepResult, now: float) -> None:
        token = result.tokens.get(chunk.request_id)
        if token is None:
            error = result.failed.get(chunk.request_id)
            if error is None and chunk.sample is not None:
                error = "the executor returned no token"
            if error is not None:
                self._forget_prefix(request)
                self._finish(request, "error", now, error=error)
                return
        full_blocks = (chunk.start + chunk.num_tokens) // self.config.block_size
        if self.config.prefix_cache and full_blocks > request.indexed_blocks and request.request_id in self._running:
            self._index_computed(request, full_blocks)
        if token is not None:
            self._take_token(request, token, now)

    def _take_token(self, request: Request, token: SampledToken, now: float) -> None:
        if request.first_token_at is None:
            request.first_token_at = now
        token_id = token.token_id
        if token_id in request.end_tokens:
            self._finish(request, "stop", now, stop_token=token_id)
            return
        request.tokens.append(token_id)
        self.counters.generation_tokens += 1
        self._updates.append(TokenUpdate(request.request_id, token))
        if len(request.tokens) >= request.limit:
            self._finish(request, "length", now)

    def _index_computed(self, request: Request, full: int) -> None:
        """Offer the first `full` blocks, whose KV has been computed, to other requests."""
        self._index.extend_chain(request.digests, request.tokens, full)
        for position in range(request.indexed_blocks, full):
            block = request.block_table[position]
            if self._index.insert(request.digests[position], block):
                self._gpu.keep(block)
        request.indexed_blocks = full

    def _forget_prefix(self, request: Request) -> None:
        """Nobody may find what a failed request computed, nor what it was computed from, wherever that is by now."""
        for digest in request.digests:
            block = self._index.holder(digest)
            if block is not None:
                self._gpu.forget(block)

    def _apply_move(self, done: MoveDone, now: float) -> None:
        """Hand the ended copy to the swap manager, then let the request go on from there, unless it has ended."""
        request = self._copying.pop(done.move_id)
        swap = request.swap
        assert swap is not None
        out = swap.residency is Residency.COPYING_OUT
        if done.error is not None:
            self._swaps.fail(swap)
        elif out:
            self._swaps.complete_swap_out(swap)
        else:
            self._swaps.complete_swap_in(swap)
        if swap.abandoned:
            return
        if done.error is not None:
            self._copy_failed(request, swap, done.error, now)
        elif out:
            self._swapped_out(request, swap, done.seconds)
        else:
            self._resumed(request, swap, done.seconds, now)

    # ------------------------------------------------------------ what happens to a request

    def _begin_swap_out(self, request: Request, reason: SwapReason, now: float) -> None:
        content = self._blocks_for(request.computed_tokens)
        self._gpu.release(reversed(request.block_table[content:]))
        request.swap, move = self._swaps.begin_swap_out(request.block_table[:content])
        request.on(Event.SWAP_OUT)
        request.block_table, request.indexed_blocks = array("i"), 0
        request.swap_reason, request.swapped_since = reason, now
        self._swapped[request.request_id] = self._running.pop(request.request_id)
        self._begin_copy(request, move, "swapping_out")

    def _begin_copy(self, request: Request, move: BlockMove, phase: SwapPhase) -> None:
        self._moves.append(move)
        self._copying[move.move_id] = request
        self._report_swap(request, phase, len(move.gpu_blocks))

    def _swapped_out(self, request: Request, swap: Swap, seconds: float) -> None:
        request.on(Event.OUT_DONE)
        request.copy_failures = 0
        request.swaps += 1
        blocks = len(swap.cpu_blocks)
        counters = self.counters
        counters.requests_swapped += 1
        counters.offload_blocks += blocks
        counters.offload_bytes += blocks * self.config.block_bytes
        swapped_now = sum(request.state is not State.SWAPPING_OUT for request in self._swapped.values())
        counters.max_swapped_requests = max(counters.max_swapped_requests, swapped_now)
        self._report_swap(request, "swapped", blocks, seconds)

    def _resumed(self, request: Request, swap: Swap, seconds: float, now: float) -> None:
        request.on(Event.IN_DONE)
        request.copy_failures = 0
        self.counters.requests_resumed += 1
        self.counters.reload_blocks += len(swap.gpu_blocks)
        self._run_again(request, swap, now)
        self._report_swap(request, "resumed", len(swap.gpu_blocks), seconds)

    def _copy_failed(self, request: Request, swap: Swap, error: str, now: float) -> None:
        """Out: the request goes on where it was. In: it stays swapped and is tried again, a few times."""
        request.copy_failures += 1
        self._report_swap(request, "rejected", 0, detail=f"copy failed: {error}")
        if request.state is State.SWAPPING_OUT:
            self.counters.offload_failed += 1
            request.on(Event.OUT_FAILED)
            self._run_again(request, swap, now)
        else:
            self.counters.reload_failed += 1
            request.on(Event.IN_FAILED)
            if request.copy_failures >= MAX_COPY_FAILURES:
                self._preempt(request, now)

    def _run_again(self, request: Request, swap: Swap, now: float) -> None:
        """Take the table back from the swap manager; a request just back counts as active, lest it leave at once."""
        request.block_table, request.swap = array("i", swap.gpu_blocks + swap.room), None
        request.last_active_time = now
        request.end_stall(now)
        self._running[request.request_id] = self._swapped.pop(request.request_id)

    def _preempt(self, request: Request, now: float) -> None:
        """Drop the KV and wait in front; admission will compute prompt and answer so far again, as one prefill."""
        self._take_blocks(request)
        request.swap = None
        request.on(Event.PREEMPT)
        request.end_stall(now)
        request.computed_tokens = 0
        request.preempted = True
        insort(self._waiting, request, key=_queue_key)
        self.counters.preemptions += 1

    def _take_blocks(self, request: Request) -> None:
        """Free all that a running or swapped request has, in either tier, and take it out of its set."""
        self._running.pop(request.request_id, None)
        self._swapped.pop(request.request_id, None)
        # Last block first, so that the cache's LRU gives up the end of a prefix before its beginning.
        self._gpu.release(reversed(request.block_table))
        request.block_table = array("i")
        if request.swap is not None:
            self._swaps.discard(request.swap)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        if request.state is State.WAITING:
            self._waiting.remove(request)
        self._take_blocks(request)
        request.on(Event.FINISH)
        request.end_stall(now)
        if request is self._favoured:
            self._favoured = None
        del self._requests[request.request_id]
        self.counters.finished[reason] += 1
        self._updates.append(_finished_update(request, reason, now, stop_token, error))

    def _reject_swap(self, request: Request, reason: SwapReason, detail: str) -> None:
        self.counters.offload_rejected += 1
        request.swap_reason = reason
        self._report_swap(request, "rejected", 0, detail=detail)

    def _report_swap(
        self, request: Request, phase: SwapPhase, blocks: int, seconds: float = 0.0, detail: str = ""
    ) -> None:
        gpu = self._gpu.use()
        self._updates.append(
            SwapUpdate(
                request_id=request.request_id,
                phase=phase,
                reason=request.swap_reason,
                blocks=blocks,
                bytes=blocks * self.config.block_bytes,
                seconds=seconds,
                gpu_used_blocks=gpu.used + gpu.in_flight,
                cpu_used_bytes=self.cpu_blocks_used * self.config.block_bytes,
                detail=detail,
            )
        )

    # ------------------------------------------------------------ block arithmetic

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _chunk_tokens(self, request: Request) -> int:
        return min(request.remaining, self.config.prefill_chunk_tokens)

    def _cached_prefix(self, request: Request) -> list[int]:
        """The indexed blocks of the request's prefix, less the one that holds its last token: that one is computed."""
        if not self.config.prefix_cache:
            return []
        full = (len(request.tokens) - 1) // self.config.block_size
        self._index.extend_chain(request.digests, request.tokens, full)
        return self._index.match(request.digests[:full])

    def _room(self, hits: Collection[int] = (), leaving: Collection[Request] = ()) -> int:
        """Blocks that somebody coming in may take beside its cached prefix `hits`, once `leaving` have left.

        What the next token of every request that stays will need is left to it.
        """
        reused = sum(self._gpu.refs(block) == 0 for block in hits)
        growth = sum(
            max(0, self._blocks_for(request.num_tokens + 1) - len(request.block_table))
            for request in self._running.values()
            if request not in leaving and not request.ends_in_flight
        )
        return self._gpu.available + self._freed_by(leaving, hits) - reused - growth

    def _freed_by(self, leaving: Collection[Request], hits: Collection[int] = ()) -> int:
        """Blocks that become available when these running requests leave; `hits` will go on being used."""
        tables = Counter(block for request in leaving for block in request.block_table)
        return sum(self._gpu.refs(block) == users and block not in hits for block, users in tables.items())

    def _ending(self) -> list[Request]:
        """Running requests that leave when the step in flight is applied."""
        return [request for request in self._running.values() if request.ends_in_flight]

    # ------------------------------------------------------------ views

    @property
    def running(self) -> int:
        """Requests in PREFILL or DECODE."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests waiting for admission."""
        return len(self._waiting)

    @property
    def swapped(self) -> int:
        """Requests swapped out, or on the way out or in."""
        return len(self._swapped)

    @property
    def cpu_blocks_used(self) -> int:
        """CPU blocks that are not free: content of swapped requests, and targets of running copies."""
        return self._cpu.total - self._cpu.available

    def gpu_use(self) -> PoolUse:
        """The GPU tier's blocks by state."""
        return self._gpu.use()

    def cpu_use(self) -> PoolUse:
        """The CPU tier's blocks by state."""
        return self._cpu.use()

    def requests(self, most: int | None = None) -> list[RequestView]:
        """Every live request, or the first `most`, in order of arrival."""
        now = self._clock()
        return [
            RequestView(
                request_id=request.request_id,
                state=request.state.value,
                prompt_tokens=request.prompt_length,
                generated_tokens=request.num_outputs,
                gpu_blocks=len(request.block_table) if request.swap is None else len(request.swap.gpu_blocks),
                cpu_blocks=0 if request.swap is None else len(request.swap.cpu_blocks),
                swaps=request.swaps,
                stall_s=request.stall_s + (0.0 if request.swapped_since is None else now - request.swapped_since),
                age_s=now - request.arrived_at,
                priority=request.priority,
            )
            for request in islice(self._requests.values(), most)
        ]


def _queue_key(request: Request) -> tuple[bool, int, int]:
    """Recomputed requests first, then by priority, then as they arrived."""
    return (not request.preempted, -request.priority, request.arrival)


def _finished_update(
    request: Request, reason: FinishReason, now: float, stop_token: int | None, error: str | None
) -> FinishedUpdate:
    admitted_at = now if request.admitted_at is None else request.admitted_at
    first_token_at = now if request.first_token_at is None else request.first_token_at
    return FinishedUpdate(
        request_id=request.request_id,
        reason=reason,
        stop_token=stop_token,
        error=error,
        prompt_tokens=request.prompt_length,
        completion_tokens=request.num_outputs,
        cached_tokens=request.cached_tokens,
        swaps=request.swaps,
        stall_s=request.stall_s,
        queue_s=admitted_at - request.arrived_at,
        prefill_s=first_token_at - admitted_at,
        decode_s=now - first_token_at,
    )


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
