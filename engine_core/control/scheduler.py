"""Decides what every step does: who runs, who is admitted, who is swapped out and who comes back.

Owns: the requests, their queues and the tiers; it alone changes them.
Does not know: tensors, copies, sockets, text. It speaks in block ids through `StepPlan` and `StepResult`.

One step of `plan` asks, in this order:
  1. growth: has every running request blocks for its next tokens? If not, victims leave (or, when the CPU tier will
     not take their blocks or copying costs more, are recomputed later), and nobody else gets blocks until all have.
  2. a newcomer that others gave way to; then swapped requests; then the waiting ones. While anybody is swapped out,
     nobody else is admitted.
  3. a newcomer without room: when nobody is swapped out, running requests give way to it.
  4. copies ahead of need, while the link has nothing else to do.

Who leaves only stops to run: its blocks stay where they are until their slots are needed, a few at a time. What has
a CPU copy then gives up its slot at once, what has none is copied out first. Who comes back loads what is missing.

Why everybody finishes, for any finite number of requests and whatever the policies pick. A request gives way to a
newcomer once in its life, so rule 3 acts finitely often. Apart from it, the most senior running request (by priority
and age, an order that never changes) is never a victim; the blocks of all others are there for it, by copying or, when
the CPU tier is full, by recomputing their owners, and no request is larger than the pool: it runs until it ends or
somebody more senior comes back. While somebody is swapped out, nobody new is admitted, so the running ones end one by
one; when none runs, whoever is to come back has all blocks there for it in the same way.

Why nobody ping-pongs: who comes back must find room for itself and for a further block of every other, counts as just
active, and after MAX_TIMES_LEFT is passed over. Failing copies end in a recomputation. Why nobody starves: a step of
priority is worth AGING_S seconds of waiting and no more.

A step may be planned while the one before it is in flight (begun, and its result not applied). Then:
  * `computed_tokens` and `num_tokens` move when a step is planned; tokens are known, and blocks offered to the prefix
    index, when its result is applied.
  * Who ends by length with the step in flight takes no part in the next one, and its blocks count as leaving. Whose
    sampling needs the tokens themselves (penalties) waits for them.
  * An end that was not foreseen (stop token, failure, abort) frees the blocks at once, and the result of what is still
    in flight is dropped. This is safe, as are preemptions and swaps of requests in flight, because the executor works
    in order: whoever gets the blocks next, a chunk or a copy, begins after the work of the step in flight.
  * A recomputed or swapped request does not run again before its step in flight has been applied. So a request that
    runs when a result is applied still has the blocks that the step was planned with.
"""

from __future__ import annotations

import random
import time
from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from .block_pool import PoolUse
from .costs import Speeds
from .plan import NO_TOKENS, BlockMove, Chunk, Direction, MoveDone, SampledToken, SampleSpec, StepPlan, StepResult
from .policies import RESUME_ORDERS, SWAP_OR_RECOMPUTE, VICTIM_POLICIES, Work
from .request import Copied, Event, Request, State
from .sampling import Sampling
from .swap import Block, Move, Residency
from .tiers import Tiers
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

MAX_TIMES_LEFT = 8  # after so many, a request leaves for the growth of others only when no other is left
MAX_COPY_FAILURES = 3  # after so many in a row, a request's KV is recomputed instead of copied
AGING_S = 10.0  # so long must a request wait to pass one that has a priority of 1 more
WRITE_BEHIND_BYTES = 32 << 20  # about so much is copied ahead of need at a time: a copy that is needed waits for it
WRITE_BEHIND_MOVES = 4  # at a time
WRITE_BEHIND_LEAST = 16  # blocks of running requests, as a copy costs the step that begins it as much whatever its size
YOUNGEST = 16  # of so many running requests blocks are copied ahead of need
WRITE_BEHIND_PAUSE_S = 1.0  # after a copy ahead of need has failed

USES_BLOCKS = frozenset({State.PREFILL, State.DECODE, State.LOADING, State.SWAPPING_IN})


@dataclass(frozen=True)
class SchedulerConfig:
    """The sizes and switches of scheduling. Blocks hold `block_size` tokens and `block_bytes` bytes.

    Full blocks are copied out ahead of need while more than the share `write_behind_above` of the GPU pool is taken.
    """

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
    victim_policy: str = "least_recently_active"
    resume_order: str = "most_urgent"
    swap_or_recompute: str = "cheaper"
    write_behind_above: float = 0.5

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request can hold."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)


class _Step(NamedTuple):
    """A step that is not applied yet: what it runs, and how many tokens of that are prefill."""

    chunks: list[tuple[Request, Chunk]]
    prefill_tokens: int


class Scheduler:
    """See the module's text. Every plan's result is applied, in order; at most one plan is made before the result of
    the one before it. `add` and `abort` may come at any time between.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.counters = Counters()
        self._clock = clock
        num_cpu_blocks = config.num_cpu_blocks if config.cpu_offload else 0
        self._tiers = Tiers(config.num_gpu_blocks, num_cpu_blocks, config.block_size)
        self._speeds = Speeds(config.block_bytes)
        self._victims = VICTIM_POLICIES[config.victim_policy]()
        self._resume_order = RESUME_ORDERS[config.resume_order]()
        self._swap_or_recompute = SWAP_OR_RECOMPUTE[config.swap_or_recompute]()
        self._seeds = random.Random(config.seed)

        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._loading: dict[str, Request] = {}
        self._running: dict[str, Request] = {}  # in PREFILL or DECODE, in the order they came in
        self._swapped: dict[str, Request] = {}  # in one of the three swap states
        self._favoured: Request | None = None  # the newcomer that running requests gave way to

        self._arrivals = 0
        self._steps = 0
        self._moves: list[BlockMove] = []  # of the plan being made
        self._leaving: list[Request] = []  # swapped out by the plan being made
        self._in_flight: deque[_Step] = deque()
        self._updates: list[Update] = []
        self._write_behind_from = 0.0  # not before this time
        self._write_behind_blocks = max(1, WRITE_BEHIND_BYTES // config.block_bytes)
        self._write_behind_least = min(WRITE_BEHIND_LEAST, config.num_gpu_blocks // WRITE_BEHIND_LEAST)

    # ------------------------------------------------------------ requests come and go

    def add(self, request_id: str, prompt: Sequence[int], sampling: Sampling, priority: int = 0) -> None:
        """Take a request. Raises Refusal when it can never run or is out of range; `max_tokens` is cut to the room."""
        config, limit, now = self.config, self.config.max_request_tokens, self._clock()
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
            arrived_at=now,
            due=now - priority * AGING_S,
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
        return bool(self._requests or self._tiers.moves or self._in_flight)

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
                self._admit_favoured(self._favoured, now)
            if self._favoured is None:
                self._resume(now)
                self._admit_waiting(now)
        self._settle_leaving()
        self._write_behind(now)
        step = self._choose_chunks(now)
        if not step.chunks and not self._moves and (self._in_flight or not self._tiers.moves):
            return None
        self._steps += 1
        self._in_flight.append(step)
        return StepPlan(self._steps, tuple([chunk for _, chunk in step.chunks]), tuple(self._moves))

    # ------------------------------------------------------------ growth: who leaves

    def _grow(self, now: float) -> bool:
        """Give every running request the blocks of its next tokens, the most senior first. False: some must wait."""
        size = self.config.block_size
        short = [
            request
            for request in self._running.values()
            if request.num_tokens > size * len(request.block_table) and request.num_tokens < request.limit
        ]
        short.sort(key=_seniority)
        awaited = 0
        for request in short:
            if request.request_id in self._running:  # else it had to leave for another
                awaited += self._find_blocks(request, awaited, now)
        return not awaited

    def _find_blocks(self, request: Request, awaited: int, now: float) -> int:
        """Let victims leave until `request` has its blocks beside the `awaited` ones of others, or has itself left.

        Returns how many blocks it now awaits: those on their way out are for it.
        """
        missing = self._blocks_for(request.num_tokens) - len(request.blocks)
        needed = awaited + missing
        while self._tiers.available < needed:
            ending = self._freed_by(self._ending())
            if self._reclaim(needed - ending, "growth", now):
                if self._tiers.available < needed:
                    return missing
                continue
            victim = self._growth_victim()
            if victim is None:
                return missing
            self._make_leave(victim, now)
            if victim is request:
                return 0
        new = self._tiers.allocate(missing)
        request.blocks += new
        request.block_table.extend([block.gpu for block in new])
        return 0

    def _growth_victim(self) -> Request | None:
        """Anybody but the most senior running request, so that one always gets on."""
        senior = min(self._running.values(), key=_seniority)
        candidates = [request for request in self._running.values() if request is not senior]
        unspent = [request for request in candidates if request.times_left < MAX_TIMES_LEFT]
        return self._victims.choose(unspent or candidates) if candidates else None

    def _make_leave(self, victim: Request, now: float) -> None:
        """Swap the victim out, or recompute it later: when it has nothing to copy, or copying fails or costs more."""
        victim.times_left += 1
        shortage = self._shortage(1)
        if victim.computed_tokens == 0 or victim.copy_failures >= MAX_COPY_FAILURES or self._recomputes(victim):
            self._preempt(victim, now)
        elif shortage is not None and all(block.residency is not Residency.BOTH for block in victim.blocks):
            self._reject_swap(victim, "growth", shortage)
            self._preempt(victim, now)
        else:
            self._begin_swap_out(victim, "growth", now)

    def _recomputes(self, victim: Request) -> bool:
        """Whether to compute the victim's KV again rather than to copy it."""
        content = self._blocks_for(victim.computed_tokens)
        out = sum(block.residency is Residency.GPU for block in victim.blocks[:content])
        work = Work(out, content, victim.computed_tokens, len(self._running) - 1)
        return self._swap_or_recompute.recompute(work, self._speeds)

    def _shortage(self, blocks: int, kept: int = 0) -> str | None:
        """Why `blocks` blocks cannot be copied out beside `kept` copies, with the numbers; None when they can."""
        if not self.config.cpu_offload:
            return "CPU offload is off"
        room, total = self._tiers.cpu_available - kept, self.config.num_cpu_blocks
        return None if blocks <= room else f"{blocks} blocks to offload, {room} of {total} CPU blocks can be had"

    def _reclaim(
        self, needed: int, reason: SwapReason, now: float, spared: Request | None = None, force: bool = True
    ) -> bool:
        """Copy out what swapped requests still have on the GPU, as much as lacks for `needed` available slots.

        Those come last that come back first, and `spared` not at all. When the CPU tier is full they are recomputed,
        if `force` allows it. False: that many slots will not come from copies.
        """
        tiers = self._tiers
        while (lacking := needed - tiers.available - tiers.leaving()) > 0:
            owner, blocks = self._parked_blocks(lacking, spared)
            if owner is None:
                return False
            shortage = self._shortage(1)
            if shortage is None:
                self._copy_out(blocks[: tiers.cpu_available], reason, owner)
            elif force:
                self._reject_swap(owner, reason, shortage)
                self._preempt(owner, now)
            else:
                return False
        return True

    def _parked_blocks(
        self, most: int, spared: Request | None = None, full_only: bool = False
    ) -> tuple[Request | None, list[Block]]:
        """Blocks that a swapped request has on the GPU alone, and whose it is: the last one that left and has any.

        Full blocks first, from the end, as their copies stay valid; at last the one that is not full.
        """
        if self._tiers.parked:
            for request in reversed(self._swapped.values()):
                if request is spared or request.state is State.SWAPPING_IN:
                    continue
                full = request.computed_tokens // self.config.block_size
                ordered = list(reversed(request.blocks[:full])) + ([] if full_only else request.blocks[full:])
                parked = [block for block in ordered if block.residency is Residency.GPU and not block.users]
                if parked:
                    return request, parked[:most]
        return None, []

    # ------------------------------------------------------------ who comes back

    def _resume(self, now: float) -> None:
        """Bring swapped requests back, as long as the next has room; load some of its blocks if it has not.

        They need no seat: while somebody is swapped out nobody new comes in but the one newcomer whose seat was free
        before, so that running and swapped requests together never exceed `max_num_seqs`.
        """
        while ready := [request for request in self._swapped.values() if request.state is State.SWAPPED]:
            if not self._bring_back(self._resume_order.choose(ready), now):
                return

    def _bring_back(self, request: Request, now: float) -> bool:
        """Begin to load what is missing of a request, if there is room for that, its next token and the others."""
        assert not self._in_step(request), "who was swapped out by this plan comes back in the next one at the soonest"
        tiers, last = self._tiers, request.blocks[-1]
        if last.residency is Residency.COPYING_OUT and request.computed_tokens % self.config.block_size:
            return False  # it is to be written, once it has been read
        self._rematch(request)
        missing = [block for block in request.blocks if block.residency is Residency.CPU]
        new = self._blocks_for(request.num_tokens + 1) - len(request.blocks)
        kept = sum([block.gpu_shelf is not None and tiers.gives_way(block) for block in request.blocks])
        margin = self._growth(further=self.config.block_size)
        needed = len(missing) + new + kept + margin
        if needed > tiers.available:
            alone = not self._running and not self._loading
            if not self._reclaim(needed, "resume", now, request, force=alone) or needed > tiers.available:
                self._prefetch(request, missing, margin)
                return False
        tiers.unpark(request.blocks)
        if missing:
            self._plan_move(tiers.begin_in(missing, "resume", request))
        self._await_loads(request)
        request.blocks += tiers.allocate(new)
        request.on(Event.SWAP_IN)
        request.swap_reason = "resume"
        self._report_swap(request, "swapping_in", request.copied.blocks)
        if not request.awaits:
            self._resumed(request, now)
        return True

    def _rematch(self, request: Request) -> None:
        """Blocks that are away and that others have computed as well need not be copied: share theirs.

        A block that the index does not name is not offered to it anew: it may hold what a failed request computed.
        """
        if not self.config.prefix_cache:
            return
        index, full = self._tiers.index, min(len(request.digests), request.computed_tokens // self.config.block_size)
        private = [i for i, b in enumerate(request.blocks[:full]) if b.digest is None and b.residency is Residency.CPU]
        for position in private:
            block, holder = request.blocks[position], index.holder(request.digests[position])
            if holder is not None:
                self._tiers.own(holder)
                request.blocks[position] = holder
                self._tiers.release([block], used=False)

    def _prefetch(self, request: Request, missing: list[Block], margin: int) -> None:
        """Load what fits into free slots already; they can be given up again for the growth of others."""
        spare = self._tiers.free - margin
        if spare > 0 and missing and self._tiers.idle(Direction.IN):
            self._plan_move(self._tiers.begin_in(missing[:spare], "prefetch", request))

    def _await_loads(self, request: Request) -> None:
        """Let the request wait for all copies that bring its blocks in, whoever began them."""
        arriving = [block.move for block in request.blocks if block.residency is Residency.COPYING_IN]
        request.copied = Copied(sum(move is not None and move.request is request for move in arriving))
        for move in dict.fromkeys(arriving):
            if move is not None:
                self._await(request, move)

    # ------------------------------------------------------------ who is admitted

    def _admit_waiting(self, now: float) -> None:
        """Admit waiting requests in order, while no one is swapped out and the step has tokens left for one more."""
        seats, budget = self.config.max_num_seqs, self.config.max_num_batched_tokens
        if not self._waiting or self._swapped or len(self._running) + len(self._loading) >= seats:
            return
        wanted = sum(self._chunk_tokens(request) for request in self._running.values())
        while self._waiting and len(self._running) + len(self._loading) < seats and wanted < budget:
            request = self._waiting[0]
            if not self._admit(request, now):
                self._give_way(request, now)
                return
            wanted += self._chunk_tokens(request)

    def _admit(self, request: Request, now: float) -> bool:
        """Run a waiting request if its tokens so far and one more fit beside the running ones; it gets those blocks.

        What of its prefix is in the CPU tier is loaded first.
        """
        if self._in_step(request):
            return False
        tiers, hits = self._tiers, self._cached_prefix(request)
        away = [block for block in hits if block.residency is Residency.CPU]
        needed = self._blocks_for(request.num_tokens + 1) - len(hits)
        if needed + len(away) > self._room(hits):
            return False
        tiers.share(hits)
        request.blocks = hits
        if away:
            self._plan_move(tiers.begin_in(away, "prefix_hit", request))
        self._await_loads(request)
        request.blocks = hits + tiers.allocate(needed)
        request.indexed_blocks = request.written_blocks = len(hits)
        request.computed_tokens = request.tokens_at_admission = len(hits) * self.config.block_size
        self._waiting.remove(request)
        if request is self._favoured:
            self._favoured = None
        if request.awaits:
            request.on(Event.LOAD)
            self._loading[request.request_id] = request
        else:
            request.on(Event.ADMIT)
            self._start(request, now)
        return True

    def _start(self, request: Request, now: float) -> None:
        """An admitted request has its blocks and begins to run."""
        self._run(request, now)
        if request.admitted_at is None:
            request.admitted_at = now
            request.cached_tokens = request.computed_tokens
            self.counters.prompt_tokens += request.prompt_length
            if self.config.prefix_cache:
                self.counters.prefix_queries_tokens += request.prompt_length
                self.counters.prefix_hits_tokens += request.cached_tokens

    def _admit_favoured(self, newcomer: Request, now: float) -> None:
        """Admit the newcomer that others gave way to, or go on making room for it."""
        if not self._admit(newcomer, now):
            alone = not self._running and not self._loading
            if self._reclaim(self._wanted(newcomer), "admission", now, force=alone):
                self._admit(newcomer, now)

    def _give_way(self, newcomer: Request, now: float) -> None:
        """Swap out running requests for one that was never admitted, if its prompt then fits and the budget allows.

        Called only while no one is swapped out. Whoever leaves has got on since its admission, and does so only once.
        """
        if newcomer.admitted_at is not None or newcomer.denied_room:
            return
        victims = self._victims_for(newcomer)
        if not victims or any(self._recomputes(victim) for victim in victims):
            return
        shortage = self._shortage_of(victims, self._wanted(newcomer) - self._tiers.available)
        if shortage is not None:
            newcomer.denied_room = True
            self._reject_swap(victims[0], "admission", shortage)
            return
        for victim in victims:
            victim.gave_way = True
            self._begin_swap_out(victim, "admission", now)
        self._favoured = newcomer
        self._admit_favoured(newcomer, now)

    def _shortage_of(self, victims: Collection[Request], lacking: int) -> str | None:
        """Why the victims' leaving cannot make `lacking` slots available; None when it can."""
        users = Counter(block for victim in victims for block in victim.blocks)
        leaving = [block for block, count in users.items() if block.users == count]
        written = sum(block.residency is Residency.BOTH for block in leaving)
        copies = min(lacking - written, sum(block.residency is Residency.GPU for block in leaving))
        # What they have in both tiers already is among what the CPU tier could give up, but will be needed.
        return self._shortage(copies, kept=written) if copies > 0 else None

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
        away = sum(block.residency is Residency.CPU for block in hits)
        needed = self._blocks_for(newcomer.num_tokens + 1) - len(hits) + away
        if needed <= self._room(hits, ending):
            return []
        most = sum(len(request.blocks) + 1 for request in candidates)  # its blocks, and what it would grow by
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

    # ------------------------------------------------------------ copies ahead of need

    def _write_behind(self, now: float) -> None:
        """Copy the coldest full blocks that have no copy, while the pool fills up and the link has nothing to do."""
        tiers, config = self._tiers, self.config
        taken = config.num_gpu_blocks - tiers.free
        if taken <= config.write_behind_above * config.num_gpu_blocks or now < self._write_behind_from:
            return
        if not tiers.idle(Direction.OUT):
            return
        begun = 0
        for request, blocks in islice(self._coldest(), WRITE_BEHIND_MOVES):
            self._copy_out(blocks, "write_behind", request, ahead=True)
            begun += len(blocks)
            if begun >= self._write_behind_blocks:
                return

    def _coldest(self) -> Iterator[tuple[Request | None, list[Block]]]:
        """Blocks to copy ahead of need, and whose: of swapped requests, then cached, then of who would leave next.

        Who takes one part copies it before taking the next: a copy takes a block off its shelf.
        """
        size, running = self.config.block_size, reversed(self._running.values())
        while (most := self._write_behind_room()) and (parked := self._parked_blocks(most, full_only=True))[1]:
            yield parked
        while (most := self._write_behind_room()) and (cached := list(islice(self._tiers.unwritten(), most))):
            yield None, cached
        # The young leave first, by most policies: no need to look at all.
        behind = list(islice((r for r in running if r.computed_tokens // size > r.written_blocks), YOUNGEST))
        if sum(r.computed_tokens // size - r.written_blocks for r in behind) < self._write_behind_least:
            return
        while behind and (most := self._write_behind_room()):
            request = self._victims.choose(behind)
            behind.remove(request)
            first, full = request.written_blocks, request.computed_tokens // size
            request.written_blocks = min(full, first + most)
            blocks = [b for b in request.blocks[first : request.written_blocks] if b.residency is Residency.GPU]
            if blocks:
                yield request, blocks

    def _write_behind_room(self) -> int:
        return min(self._tiers.cpu_spare, self._write_behind_blocks)

    # ------------------------------------------------------------ what the step runs

    def _choose_chunks(self, now: float) -> _Step:
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
        left_for_prefill = budget
        for request in prefilling:
            count = min(self._chunk_tokens(request), budget)
            if count > 0 and request.computed_tokens + count <= size * len(request.block_table):
                stepping.append((request, self._plan_chunk(request, count, now)))
                budget -= count
        return _Step(stepping, left_for_prefill - budget)

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
        step = self._in_flight.popleft()
        for request, chunk in step.chunks:
            if request.state is not State.FINISHED:
                self._apply_chunk(request, chunk, result, now)
        if step.chunks:
            self._speeds.stepped(step.prefill_tokens, len(step.chunks), result.seconds)
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
        if self.config.prefix_cache and request.indexed_blocks < full_blocks <= len(request.blocks):
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
        index = self._tiers.index
        index.extend_chain(request.digests, request.tokens, full)
        for position in range(request.indexed_blocks, full):
            index.insert(request.digests[position], request.blocks[position])
        request.indexed_blocks = full

    def _forget_prefix(self, request: Request) -> None:
        """Nobody may find what a failed request computed, nor what it was computed from, wherever that is by now."""
        for digest in request.digests:
            block = self._tiers.index.holder(digest)
            if block is not None:
                self._tiers.forget(block)

    # ------------------------------------------------------------ copies begin and end

    def _plan_move(self, move: Move) -> None:
        self._moves.append(move.as_plan())

    def _copy_out(self, blocks: list[Block], reason: SwapReason, request: Request | None, ahead: bool = False) -> None:
        move = self._tiers.begin_out(blocks, reason, request, ahead)
        self._plan_move(move)
        if request is not None and request.state is State.SWAPPING_OUT and not ahead:
            request.copied.blocks += len(blocks)
            self._await(request, move)

    def _await(self, request: Request, move: Move) -> None:
        request.awaits.append(move)
        move.waiting.append(request)

    def _apply_move(self, done: MoveDone, now: float) -> None:
        """The blocks settle where they are now; who waited for the last of its copies goes on from there."""
        tiers, request = self._tiers, self._tiers.moves[done.move_id].request
        if done.error is None:
            move = tiers.complete(done.move_id)
            self._count_move(move, done)
        else:
            move = tiers.fail(done.move_id)
            self._count_failure(move, done.error, now)
        own = request is not None and request in move.waiting
        if done.error is None and own and request is not None and request.request_id in self._swapped:
            request.copied.ended.append((move, done))  # part of a way out or back, which is reported as a whole
        elif done.error is None:
            self._report_move(move, done)
        while move.waiting:
            waiting = move.waiting.pop()
            waiting.awaits.remove(move)
            if waiting is request:  # else it is told of, and counted, as the other's
                waiting.copied.seconds += done.seconds
                waiting.copied.queued_s = max(waiting.copied.queued_s, done.queued_s)
            waiting.copied.error = waiting.copied.error or done.error
            if not waiting.awaits:
                self._copies_ended(waiting, now)
        if done.error is not None and not own and request is not None and move.reason != "write_behind":
            self._fail_copy(request, now)

    def _copies_ended(self, request: Request, now: float) -> None:
        """All copies that the request waited for have ended."""
        if request.copied.error is not None:
            self._copies_failed(request, request.copied.error, now)
        elif request.state is State.SWAPPING_OUT:
            self._swapped_out(request)
        elif request.state is State.SWAPPING_IN:
            self._resumed(request, now)
        else:
            request.on(Event.IN_DONE)
            request.copy_failures = 0
            del self._loading[request.request_id]
            self._start(request, now)

    def _copies_failed(self, request: Request, error: str, now: float) -> None:
        """Out: the request goes on where it was, if it still has all its blocks. In: it is tried again, a few times."""
        state = request.state
        self._report_ended(request)
        if state is State.SWAPPING_OUT and all(block.readable for block in request.blocks):
            request.copy_failures += 1
            request.on(Event.OUT_FAILED)
            self._tiers.unpark(request.blocks)
            del self._swapped[request.request_id]
            self._run(request, now)
            return
        if state is State.SWAPPING_OUT:
            self._swapped_out(request)
        elif state is State.SWAPPING_IN:
            self._park(request)
            request.on(Event.IN_FAILED)
        else:
            self._take_blocks(request)
            request.on(Event.IN_FAILED)
            request.computed_tokens = 0
            insort(self._waiting, request, key=_queue_key)
        self._fail_copy(request, now)

    def _fail_copy(self, request: Request, now: float) -> None:
        """A copy of this request's blocks failed: after a few, its KV is computed again."""
        request.copy_failures += 1
        if request.state is State.SWAPPED and request.copy_failures >= MAX_COPY_FAILURES:
            self._preempt(request, now)

    def _count_move(self, move: Move, done: MoveDone) -> None:
        counters, blocks = self.counters, len(move.blocks)
        self._speeds.copied(move.direction, blocks, done.seconds, done.queued_s)
        if move.request is not None:
            move.request.moved_blocks += blocks
        if move.direction is Direction.OUT:
            counters.offload_blocks += blocks
            counters.offload_bytes += blocks * self.config.block_bytes
            counters.write_behind_blocks += blocks * (move.reason == "write_behind")
        else:
            counters.reload_blocks += blocks
            counters.prefetch_blocks += blocks * (move.reason == "prefetch")
            counters.prefix_reload_blocks += blocks * (move.reason == "prefix_hit")

    def _count_failure(self, move: Move, error: str, now: float) -> None:
        if move.direction is Direction.OUT:
            self.counters.offload_failed += 1
        else:
            self.counters.reload_failed += 1
        if move.reason == "write_behind":
            self._write_behind_from = now + WRITE_BEHIND_PAUSE_S
        self._report(move.request, "rejected", move.reason, detail=f"copy failed: {error}")

    # ------------------------------------------------------------ what happens to a request

    def _begin_swap_out(self, request: Request, reason: SwapReason, now: float) -> None:
        """The request stops to run. Its blocks stay on the GPU, without copies, until somebody needs their slots."""
        self._park(request)
        request.on(Event.SWAP_OUT)
        request.block_table = array("i")
        request.swap_reason, request.swapped_since, request.copied = reason, now, Copied()
        self._swapped[request.request_id] = self._running.pop(request.request_id)
        self._leaving.append(request)

    def _park(self, request: Request) -> None:
        content = self._blocks_for(request.computed_tokens)
        self._tiers.release(reversed(request.blocks[content:]), used=True)
        del request.blocks[content:]
        self._tiers.park(request.blocks)

    def _settle_leaving(self) -> None:
        """Report who was swapped out by this plan; who had nothing to copy has left already."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            if request.state is State.SWAPPING_OUT:
                self._report_swap(request, "swapping_out", request.copied.blocks)
                if not request.awaits:
                    self._swapped_out(request)

    def _swapped_out(self, request: Request) -> None:
        request.on(Event.OUT_DONE)
        request.copy_failures = 0
        request.swaps += 1
        counters = self.counters
        counters.requests_swapped += 1
        swapped_now = sum(request.state is not State.SWAPPING_OUT for request in self._swapped.values())
        counters.max_swapped_requests = max(counters.max_swapped_requests, swapped_now)
        self._report_swap(request, "swapped", request.copied.blocks)

    def _resumed(self, request: Request, now: float) -> None:
        request.on(Event.IN_DONE)
        request.copy_failures = 0
        self.counters.requests_resumed += 1
        del self._swapped[request.request_id]
        self._run(request, now)
        self._report_swap(request, "resumed", request.copied.blocks)

    def _run(self, request: Request, now: float) -> None:
        """The request has all its blocks on the GPU. One just back counts as active, lest it leave at once."""
        last, partial = divmod(request.computed_tokens, self.config.block_size)
        if partial:
            self._tiers.write(request.blocks[last])
        request.block_table = array("i", [block.gpu for block in request.blocks])
        request.last_active_time = now
        request.end_stall(now)
        self._running[request.request_id] = request

    def _preempt(self, request: Request, now: float) -> None:
        """Drop the KV and wait in front; admission will compute prompt and answer so far again, as one prefill."""
        self._take_blocks(request)
        request.on(Event.PREEMPT)
        request.end_stall(now)
        request.computed_tokens = 0
        request.recomputes += 1
        insort(self._waiting, request, key=_queue_key)
        self.counters.preemptions += 1

    def _take_blocks(self, request: Request) -> None:
        """Take all that a request has in either tier, and take it out of its set."""
        for requests in (self._running, self._swapped, self._loading):
            requests.pop(request.request_id, None)
        if request.awaits:
            self._report_ended(request)
        for move in request.awaits:
            move.waiting.remove(request)
        request.awaits = []
        # Last block first, so that the caches' LRU gives up the end of a prefix before its beginning.
        self._tiers.release(reversed(request.blocks), used=request.state in USES_BLOCKS)
        request.blocks, request.block_table = [], array("i")
        request.indexed_blocks = request.written_blocks = 0

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
        for move in self._tiers.moves.values():
            if move.request is request:
                move.request = None  # its usage is told now: what is still being copied is nobody's
        request.on(Event.FINISH)
        request.end_stall(now)
        if request is self._favoured:
            self._favoured = None
        del self._requests[request.request_id]
        self.counters.finished[reason] += 1
        moved = request.moved_blocks * self.config.block_bytes
        self._updates.append(_finished_update(request, reason, now, stop_token, error, moved))

    # ------------------------------------------------------------ reports

    def _reject_swap(self, request: Request, reason: SwapReason, detail: str) -> None:
        self.counters.offload_rejected += 1
        self._report(request, "rejected", reason, detail=detail)

    def _report_swap(self, request: Request, phase: SwapPhase, blocks: int) -> None:
        """A step of the request's way out or back."""
        ended = phase in ("swapped", "resumed")
        copied = request.copied if ended else Copied()
        self._report(request, phase, request.swap_reason, blocks, copied.seconds, copied.queued_s)

    def _report_move(self, move: Move, done: MoveDone) -> None:
        """A copy that left its request where it is."""
        phase: SwapPhase = "copied_out" if move.direction is Direction.OUT else "copied_in"
        self._report(move.request, phase, move.reason, len(move.blocks), done.seconds, done.queued_s)

    def _report_ended(self, request: Request) -> None:
        """The copies of a way out or back that is not reported as a whole: others of it failed, or it was cut short."""
        for move, done in request.copied.ended:
            self._report_move(move, done)
        request.copied = Copied()

    def _report(
        self,
        request: Request | None,
        phase: SwapPhase,
        reason: SwapReason,
        blocks: int = 0,
        seconds: float = 0.0,
        queued_s: float = 0.0,
        detail: str = "",
    ) -> None:
        gpu = self._tiers.gpu_use()
        self._updates.append(
            SwapUpdate(
                request_id="" if request is None else request.request_id,
                phase=phase,
                reason=reason,
                blocks=blocks,
                bytes=blocks * self.config.block_bytes,
                seconds=seconds,
                gpu_used_blocks=gpu.used + gpu.in_flight,
                cpu_used_bytes=self.cpu_blocks_used * self.config.block_bytes,
                detail=detail,
                queued_s=queued_s,
            )
        )

    # ------------------------------------------------------------ block arithmetic

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _chunk_tokens(self, request: Request) -> int:
        return min(request.remaining, self.config.prefill_chunk_tokens)

    def _in_step(self, request: Request) -> bool:
        """Whether a step in flight runs tokens of it."""
        return request.last_step > self._steps - len(self._in_flight)

    def _cached_prefix(self, request: Request) -> list[Block]:
        """The indexed blocks of the request's prefix, less the one that holds its last token: that one is computed.

        From the first one on that is away: only if loading them is worth it, and has not failed yet.
        """
        if not self.config.prefix_cache:
            return []
        full = (len(request.tokens) - 1) // self.config.block_size
        self._tiers.index.extend_chain(request.digests, request.tokens, full)
        hits = self._tiers.index.match(request.digests[:full])
        away = [i for i, block in enumerate(hits) if not block.readable]
        if away:
            work = Work(0, len(away), (len(hits) - away[0]) * self.config.block_size, len(self._running))
            if request.copy_failures or self._swap_or_recompute.recompute(work, self._speeds):
                del hits[away[0] :]
        return hits

    def _wanted(self, newcomer: Request) -> int:
        """Available blocks that would let a waiting request in, less those of requests that end."""
        hits = self._cached_prefix(newcomer)
        away = sum(block.residency is Residency.CPU for block in hits)
        needed = self._blocks_for(newcomer.num_tokens + 1) - len(hits) + away
        return needed + self._tiers.available - self._room(hits, self._ending())

    def _room(self, hits: Collection[Block] = (), leaving: Collection[Request] = ()) -> int:
        """Blocks that somebody coming in may take beside its cached prefix `hits`, once `leaving` have left.

        What the next token of every request that stays will need is left to it.
        """
        reused = sum(self._tiers.gives_way(block) for block in hits)
        return self._tiers.available + self._freed_by(leaving, hits) - reused - self._growth(leaving)

    def _growth(self, leaving: Collection[Request] = (), further: int = 0) -> int:
        """Blocks that the running requests lack for their next token and `further` ones."""
        size = self.config.block_size
        return sum(
            max(0, -(-min(request.num_tokens + 1 + further, request.limit) // size) - len(request.blocks))
            for request in self._running.values()
            if request not in leaving and not request.ends_in_flight
        )

    def _freed_by(self, leaving: Collection[Request], hits: Collection[Block] = ()) -> int:
        """Blocks that can be had when these running requests have left; `hits` will go on being used."""
        users = Counter(block for request in leaving for block in request.blocks)
        return sum(block.users == count and block not in hits for block, count in users.items())

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
        """Requests waiting for admission, or for their prefix from the CPU tier."""
        return len(self._waiting) + len(self._loading)

    @property
    def swapped(self) -> int:
        """Requests swapped out, or on the way out or in."""
        return len(self._swapped)

    @property
    def cpu_blocks_used(self) -> int:
        """CPU blocks that somebody needs: content of swapped requests, and ends of running copies."""
        use = self._tiers.cpu_use()
        return use.used + use.in_flight

    def gpu_use(self) -> PoolUse:
        """The GPU tier's blocks by state."""
        return self._tiers.gpu_use()

    def cpu_use(self) -> PoolUse:
        """The CPU tier's blocks by state."""
        return self._tiers.cpu_use()

    def requests(self, most: int | None = None) -> list[RequestView]:
        """Every live request, or the first `most`, in order of arrival."""
        now = self._clock()
        return [_view(request, now) for request in islice(self._requests.values(), most)]


def _view(request: Request, now: float) -> RequestView:
    running = bool(request.block_table)  # then all its blocks are on the GPU, and nobody counts them
    gpu_blocks = len(request.blocks) if running else sum(block.readable for block in request.blocks)
    return RequestView(
        request_id=request.request_id,
        state=request.state.value,
        prompt_tokens=request.prompt_length,
        generated_tokens=request.num_outputs,
        gpu_blocks=gpu_blocks,
        cpu_blocks=len(request.blocks) - gpu_blocks,
        swaps=request.swaps,
        stall_s=request.stall_s + (0.0 if request.swapped_since is None else now - request.swapped_since),
        age_s=now - request.arrived_at,
        priority=request.priority,
        moved_blocks=request.moved_blocks,
    )


def _seniority(request: Request) -> tuple[float, int]:
    """By priority and age: who is small is served first. It never changes."""
    return request.due, request.arrival


def _queue_key(request: Request) -> tuple[bool, float, int]:
    """Recomputed requests first, then by priority and age."""
    return (not request.recomputes, *_seniority(request))


def _finished_update(
    request: Request, reason: FinishReason, now: float, stop_token: int | None, error: str | None, moved_bytes: int
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
        moved_bytes=moved_bytes,
        recomputes=request.recomputes,
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
