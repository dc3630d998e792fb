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
the CPU tier is full, by recomputing their owners, and no request wants more blocks than the pool has: it runs until it
ends or somebody more senior comes back. While somebody is swapped out, nobody new is admitted, so the running ones end
one by one; when none runs, whoever is to come back has all blocks there for it in the same way.

Why nobody ping-pongs: who comes back must find room for itself and for a further block of every other, counts as just
active, and after MAX_TIMES_LEFT is passed over. Failing copies end in a recomputation. Why nobody starves: a step of
priority is worth AGING_S seconds of waiting and no more.

A request is oversize once its tokens so far and one more need more blocks than the GPU pool has (`allow_oversize`).
Then it has a window of the pool and no more; what comes before is cold: read from the CPU tier by every chunk, never
loaded. It runs a chunk when the blocks that this one needs cold have been copied; until then it is in PREFILL or DECODE
and gets no chunk. Swaps concern its window. One that was swapped out when it became oversize is recomputed, as it may
not load what it has. Why it finishes: the whole window is kept free for it when others come in, and if it is the most
senior, both the blocks and the CPU slots of all others are there for it, by recomputing them in the end. Any full block
of its window can become cold, and both tiers hold it: `add` takes no other. Two are admitted beside one another only if
the CPU tier holds both in full; else the later one waits. Without copies it cannot go on: when MAX_COPY_FAILURES in
a row fail, it ends with an error.

A step may be planned while the one before it is in flight (begun, and its result not applied). Then:
  * `computed_tokens` and `num_tokens` move when a step is planned; tokens are known, and blocks offered to the prefix
    index, when its result is applied.
  * Who ends by length with the step in flight takes no part in the next one, and its blocks count as leaving. Whose
    sampling needs the tokens themselves (penalties) waits for them.
  * An end that was not foreseen (stop token, failure, abort) frees the blocks at once, and the result of what is still
    in flight is dropped. This is safe, as are preemptions and swaps of requests in flight, because the executor works
    in order: whoever gets the blocks next, a chunk or a copy, begins after the work of the step in flight.
  * CPU slots have no such order: a copy to them does not wait for a step that reads them. Whoever leaves holds its cold
    blocks until the steps that were in flight have been applied.
  * A recomputed or swapped request does not run again before its step in flight has been applied. So a request that
    runs when a result is applied still has the blocks that the step was planned with.
"""

from __future__ import annotations

import random
import time
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from .block_pool import PoolUse
from .chunks import Step, choose_chunks
from .config import SchedulerConfig
from .copies import Copies
from .costs import Speeds
from .journal import Journal, view
from .oversize import ColdBlocks, blocks_for_next, chunk_tokens, is_oversize
from .plan import Chunk, Direction, MoveDone, SampledToken, StepPlan, StepResult
from .policies import RESUME_ORDERS, SWAP_OR_RECOMPUTE, VICTIM_POLICIES, Work
from .prefixes import Prefixes
from .request import RUNS, USES_BLOCKS, Copied, Event, Request, State
from .room import Entry, Room
from .sampling import Sampling
from .swap import NO_SLOT, Block, Residency, residing
from .tier_log import TierChange, TierLog
from .tiers import Tiers
from .updates import Counters, FinishReason, RequestView, SwapReason, Update
from .validation import Refusal, check_sampling, checked_prompt
from .write_behind import WriteBehind

__all__ = ["Refusal", "Scheduler", "SchedulerConfig"]

MAX_TIMES_LEFT = 8  # after so many, a request leaves for the growth of others only when no other is left
MAX_COPY_FAILURES = 3  # after so many in a row, a request's KV is recomputed instead of copied
MOST_RESUMES = 16  # of one plan: what room they need is summed up anew for each, and steps wait for the plan
AGING_S = 10.0  # so long must a request wait to pass one that has a priority of 1 more


class Scheduler:
    """See the module's text. Every plan's result is applied, in order; at most one plan is made before the result of
    the one before it. `add` and `abort` may come at any time between.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._victims = VICTIM_POLICIES[config.victim_policy]()
        self._resume_order = RESUME_ORDERS[config.resume_order]()
        self._swap_or_recompute = SWAP_OR_RECOMPUTE[config.swap_or_recompute]()

        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._loading: dict[str, Request] = {}
        self._running: dict[str, Request] = {}  # in PREFILL or DECODE, in the order they came in
        self._swapped: dict[str, Request] = {}  # in one of the three swap states
        self._favoured: Request | None = None  # the newcomer that running requests gave way to

        self._speeds = Speeds(config.block_bytes)
        self._tier_log = TierLog(config.block_size) if config.kv_events else None
        self._tiers = Tiers(config.num_gpu_blocks, config.cpu_blocks, self._tier_log)
        self._journal = Journal(config, self._tiers)
        self._copies = Copies(self._tiers, self._journal, self._speeds)
        self._cold = ColdBlocks(config, self._tiers, self._copies)
        self._prefixes = Prefixes(config, self._tiers, self._recompute_is_better)
        self._room = Room(config, self._tiers, self._prefixes, self._running, self._swapped)
        self._write_behind = WriteBehind(config, self._tiers, self._copies, self._room, self._victims, self._running)

        self._arrivals = 0
        self._steps = 0
        self._in_flight: deque[Step] = deque()
        self._leaving: list[Request] = []  # swapped out by the plan being made

    # ------------------------------------------------------------ requests come and go

    def add(self, request_id: str, prompt: Sequence[int], sampling: Sampling, priority: int = 0) -> None:
        """Take a request. Raises Refusal when it can never run or is out of range; `max_tokens` is cut to the room."""
        config, limit, now = self.config, self.config.max_request_tokens, self._clock()
        if request_id in self._requests:
            raise Refusal("request_id", request_id, "an id that no live request has")
        tokens = checked_prompt(prompt, config)
        check_sampling(sampling, config.vocab_size)
        self._arrivals += 1
        request = Request(
            request_id=request_id,
            tokens=tokens,
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
        return self._journal.drain()

    def drain_tier_changes(self) -> list[TierChange]:
        """Which indexed blocks came to a tier or left it since the last call, in order; nothing without `kv_events`."""
        return [] if self._tier_log is None else self._tier_log.drain()

    # ------------------------------------------------------------ plan

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do, or nothing before the step in flight is applied.

        Without chunks it only begins or awaits copies.
        """
        now = self._clock()
        if self._grow(now):
            if self._favoured is not None:
                self._admit_favoured(self._favoured, now)
            if self._favoured is None:
                self._resume(now)
                self._admit_waiting(now)
        self._settle_leaving()
        self._write_behind.begin(now)
        step = choose_chunks(self._running.values(), self._steps + 1, self.config, now)
        moves = self._copies.take_planned()
        if not step.chunks and not moves and (self._in_flight or not self._tiers.moves):
            return None
        self._steps += 1
        self._in_flight.append(step)
        return StepPlan(self._steps, tuple([chunk for _, chunk in step.chunks]), moves)

    # ------------------------------------------------------------ growth: who leaves

    def _grow(self, now: float) -> bool:
        """Give every running request the blocks of its next tokens, the most senior first. False: some must wait.

        One that only waits for its own blocks to become cold lets others have theirs.
        """
        size = self.config.block_size
        short = [
            request
            for request in self._running.values()
            if (request.num_tokens > size * len(request.blocks) or request.cold) and request.num_tokens < request.limit
        ]
        short.sort(key=_seniority)
        awaited = 0
        for request in short:
            # Who does not run any more had to leave for another.
            if request.request_id in self._running and self._cool(request, now):
                awaited += self._find_blocks(request, awaited, now)
        return not awaited

    def _find_blocks(self, request: Request, awaited: int, now: float) -> int:
        """Let victims leave until `request` has its blocks beside the `awaited` ones of others, or has itself left.

        Returns how many blocks it now awaits: those on their way out are for it.
        """
        missing = blocks_for_next(request, self.config) - len(request.blocks)
        if missing <= 0:
            return 0
        needed = awaited + missing
        while self._tiers.available < needed:
            ending = self._room.freed_by(self._room.ending())
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
        senior = self._most_senior()
        candidates = [request for request in self._running.values() if request is not senior]
        unspent = [request for request in candidates if request.times_left < MAX_TIMES_LEFT]
        return self._victims.choose(unspent or candidates) if candidates else None

    def _most_senior(self) -> Request:
        return min(self._running.values(), key=_seniority)

    def _make_leave(self, victim: Request, now: float) -> None:
        """Swap the victim out, or recompute it later: when it has nothing to copy, or copying fails or costs more."""
        victim.times_left += 1
        shortage = self._room.cpu_shortage(1)
        if victim.computed_tokens == 0 or victim.copy_failures >= MAX_COPY_FAILURES or self._recomputes(victim):
            self._preempt(victim, now)
        elif shortage is not None and not residing(victim.hot, Residency.BOTH):
            self._journal.swap_rejected(victim, "growth", shortage)
            self._preempt(victim, now)
        else:
            self._begin_swap_out(victim, "growth", now)

    def _recomputes(self, victim: Request) -> bool:
        """Whether to compute the victim's KV again rather than to copy it."""
        content = self.config.blocks_for(victim.computed_tokens) - victim.cold
        out = len(residing(victim.hot[:content], Residency.GPU))
        work = Work(out, content, victim.computed_tokens, len(self._running) - 1)
        return self._recompute_is_better(work)

    def _recompute_is_better(self, work: Work) -> bool:
        return self._swap_or_recompute.recompute(work, self._speeds)

    def _reclaim(
        self, needed: int, reason: SwapReason, now: float, spared: Request | None = None, force: bool = True
    ) -> bool:
        """Copy out what swapped requests still have on the GPU, as much as lacks for `needed` available slots.

        Those come last that come back first, and `spared` not at all. When the CPU tier is full they are recomputed,
        if `force` allows it. False: that many slots will not come from copies.
        """
        tiers = self._tiers
        while (lacking := needed - tiers.available - tiers.leaving()) > 0:
            owner, blocks = self._room.parked(lacking, spared)
            if owner is None:
                return False
            shortage = self._room.cpu_shortage(1)
            if shortage is None:
                self._copy_out(owner, blocks[: tiers.cpu_available], reason)
            elif force:
                self._journal.swap_rejected(owner, reason, shortage)
                self._preempt(owner, now)
            else:
                return False
        return True

    def _copy_out(self, owner: Request, blocks: list[Block], reason: SwapReason) -> None:
        move = self._copies.begin_out(blocks, reason, owner)
        if owner.state is State.SWAPPING_OUT:
            owner.copied.blocks += len(blocks)
            self._copies.wait_for(owner, move)

    # ------------------------------------------------------------ blocks become cold

    def _cool(self, request: Request, now: float) -> bool:
        """Let an oversize request read so many blocks from the CPU tier that its next chunk fits into its window.

        What it will need there in the chunk after is copied while this one runs. False: copies are awaited.
        """
        if not is_oversize(request, self.config):
            return True
        self._cold.advance(request)
        if lacking := self._cold.lacking(request):
            self._claim_cpu(len(lacking), request, now)
            self._cold.copy(request, lacking)
        if not self._cold.ready(request):
            return False
        self._cold.copy_ahead(request)
        return True

    def _claim_cpu(self, needed: int, request: Request, now: float) -> None:
        """Let others whose KV is in the CPU tier be recomputed until `needed` slots are there, or will be.

        First swapped ones, those that come back last before others. If `request` is the most senior running one, then
        oversize ones that run: it alone must always get on.
        """
        tiers = self._tiers
        while tiers.cpu_available + tiers.cpu_leaving() < needed:
            if any(step.read_cold for step in self._in_flight):
                return  # slots that will be there
            owners = [o for o in self._swapped.values() if o.state is not State.SWAPPING_IN and _in_cpu(o)]
            if not owners and request is self._most_senior():
                owners = [o for o in self._running.values() if o.cold and o is not request]
            if not owners:
                return
            self._journal.swap_rejected(owners[-1], "oversize", f"its CPU blocks are needed by {request.request_id!r}")
            self._preempt(owners[-1], now)

    # ------------------------------------------------------------ who comes back

    def _resume(self, now: float) -> None:
        """Bring swapped requests back, as long as the next has room; load some of its blocks if it has not.

        They need no seat: while somebody is swapped out nobody new comes in but the one newcomer whose seat was free
        before, so that running and swapped requests together never exceed `max_num_seqs`.
        """
        for _ in range(MOST_RESUMES):
            ready = [request for request in self._swapped.values() if request.state is State.SWAPPED]
            if not ready or not self._bring_back(self._resume_order.choose(ready), now):
                return

    def _bring_back(self, request: Request, now: float) -> bool:
        """Begin to load what is missing of a request, if there is room for that, its next token and the others."""
        assert not self._in_step(request), "who was swapped out by this plan comes back in the next one at the soonest"
        tiers, last = self._tiers, request.blocks[-1]
        if last.residency is Residency.COPYING_OUT and request.computed_tokens % self.config.block_size:
            return False  # it is to be written, once it has been read
        self._prefixes.rematch(request)
        hot, new = request.hot, self._room.lacking(request)
        if new < 0:  # it has become oversize since it ran, and has more than a window to load
            self._preempt(request, now)
            return True
        missing, kept = residing(hot, Residency.CPU), tiers.giving_way(hot)
        margin = self._room.growth(further=self.config.block_size)
        needed = len(missing) + new + kept + margin
        if needed > tiers.available:
            alone = not self._running and not self._loading
            if not self._reclaim(needed, "resume", now, request, force=alone) or needed > tiers.available:
                self._prefetch(request, missing, margin)
                return False
        tiers.unpark(hot)
        if missing:
            self._copies.begin_in(missing, "resume", request)
        self._copies.wait_for_loads(request)
        request.blocks += tiers.allocate(new)
        request.on(Event.SWAP_IN)
        request.swap_reason = "resume"
        self._journal.swap(request, "swapping_in")
        if not request.awaits:
            self._resumed(request, now)
            if self._cool(request, now):  # its window may be full
                self._find_blocks(request, 0, now)
        return True

    def _prefetch(self, request: Request, missing: list[Block], margin: int) -> None:
        """Load what fits into free slots already; they can be given up again for the growth of others."""
        spare = self._tiers.free - margin
        if spare > 0 and missing and self._tiers.idle(Direction.IN):
            self._copies.begin_in(missing[:spare], "prefetch", request)

    # ------------------------------------------------------------ who is admitted

    def _admit_waiting(self, now: float) -> None:
        """Admit waiting requests in order, while no one is swapped out and the step has tokens left for one more."""
        seats, budget = self.config.max_num_seqs, self.config.max_num_batched_tokens
        if not self._waiting or self._swapped or len(self._running) + len(self._loading) >= seats:
            return
        wanted = sum(chunk_tokens(request, self.config) for request in self._running.values())
        while self._waiting and len(self._running) + len(self._loading) < seats and wanted < budget:
            request = self._waiting[0]
            if self._in_step(request) or not self._room.cpu_holds(request):
                return
            entry = self._room.entry(request)
            if not self._room.fits(entry):
                self._give_way(request, entry, now)
                return
            self._admit(request, entry, now)
            wanted += chunk_tokens(request, self.config)

    def _admit(self, request: Request, entry: Entry, now: float) -> None:
        """Run a waiting request, whose `entry` fits: its tokens so far and one more get their blocks.

        What of its prefix is in the CPU tier is loaded first, or read there if the request is oversize.
        """
        tiers, hits = self._tiers, entry.hits
        tiers.share(hits)
        request.blocks = hits
        if entry.away:
            self._copies.begin_in(entry.away, "prefix_hit", request)
        self._copies.wait_for_loads(request)
        self._cold.found(request, entry.cold)
        request.blocks = entry.cold + hits + tiers.allocate(entry.new)
        found = len(entry.cold) + len(hits)
        request.indexed_blocks = request.written_blocks = found
        request.computed_tokens = request.tokens_at_admission = found * self.config.block_size
        self._waiting.remove(request)
        if request is self._favoured:
            self._favoured = None
        if request.awaits:
            request.on(Event.LOAD)
            self._loading[request.request_id] = request
        else:
            request.on(Event.ADMIT)
            self._start(request, now)

    def _start(self, request: Request, now: float) -> None:
        """An admitted request has its blocks and begins to run."""
        self._run(request, now)
        if request.admitted_at is None:
            request.admitted_at = now
            request.cached_tokens = request.computed_tokens
            self._journal.admitted(request)

    def _admit_favoured(self, newcomer: Request, now: float) -> None:
        """Admit the newcomer that others gave way to, or go on making room for it."""
        if not self._room.cpu_holds(newcomer):
            self._favoured = None  # another has become oversize meanwhile
            return
        entry = self._room.entry(newcomer)
        if not self._room.fits(entry):
            alone = not self._running and not self._loading
            if not self._reclaim(self._room.wanted(entry), "admission", now, force=alone):
                return
            entry = self._room.entry(newcomer)
        if self._room.fits(entry):
            self._admit(newcomer, entry, now)

    def _give_way(self, newcomer: Request, entry: Entry, now: float) -> None:
        """Swap out running requests for one that was never admitted, if its prompt then fits and the budget allows.

        Called only while no one is swapped out. Whoever leaves has got on since its admission, and does so only once.
        """
        if newcomer.admitted_at is not None or newcomer.denied_room:
            return
        victims = self._victims_for(newcomer, entry)
        if not victims or any(self._recomputes(victim) for victim in victims):
            return
        shortage = self._room.leaving_shortage(victims, self._room.wanted(entry) - self._tiers.available)
        if shortage is not None:
            newcomer.denied_room = True
            self._journal.swap_rejected(victims[0], "admission", shortage)
            return
        for victim in victims:
            victim.gave_way = True
            self._begin_swap_out(victim, "admission", now)
        self._favoured = newcomer
        self._admit_favoured(newcomer, now)

    def _victims_for(self, newcomer: Request, entry: Entry) -> list[Request]:
        """The requests whose leaving makes room for the newcomer; empty when no choice does."""
        candidates = [
            request
            for request in self._running.values()
            if request.computed_tokens > request.tokens_at_admission
            and not request.gave_way
            and not request.ends_in_flight
            and request.priority <= newcomer.priority
        ]
        ending = self._room.ending()
        if self._room.fits(entry, ending) or not self._room.fits(entry, ending + candidates):
            return []
        victims: list[Request] = []
        while not self._room.fits(entry, ending + victims):
            victim = self._victims.choose(candidates)
            candidates.remove(victim)
            victims.append(victim)
        return victims

    def _in_step(self, request: Request) -> bool:
        """Whether a step in flight runs tokens of it."""
        return request.last_step > self._steps - len(self._in_flight)

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
        self._tiers.stop_reading(step.read_cold)
        for done in result.moves_done:
            self._apply_move(done, now)

    def _apply_chunk(self, request: Request, chunk: Chunk, result: StepResult, now: float) -> None:
        token = result.tokens.get(chunk.request_id)
        if token is None:
            error = result.failed.get(chunk.request_id)
            if error is None and chunk.sample is not None:
                error = "the executor returned no token"
            if error is not None:
                self._prefixes.forget(request, self._requests.values())
                self._finish(request, "error", now, error=error)
                return
        self._prefixes.offer(request, (chunk.start + chunk.num_tokens) // self.config.block_size)
        if token is not None:
            self._take_token(request, token, now)

    def _take_token(self, request: Request, token: SampledToken, now: float) -> None:
        if request.first_token_at is None:
            request.first_token_at = now
        request.last_token_at = now
        token_id = token.token_id
        if token_id in request.end_tokens:
            self._finish(request, "stop", now, stop_token=token_id)
            return
        request.tokens.append(token_id)
        self._journal.token(request, token)
        if len(request.tokens) >= request.limit:
            self._finish(request, "length", now)

    # ------------------------------------------------------------ copies end

    def _apply_move(self, done: MoveDone, now: float) -> None:
        """Who waited for the last of its copies goes on from there."""
        ended = self._copies.end(done)
        for request in ended.ready:
            self._copies_ended(request, now)
        owner, reason = ended.move.request, ended.move.reason
        if reason == "write_behind":
            self._write_behind.ended(done.error is None, now)
        elif done.error is None:
            if owner is not None and reason == "oversize":
                owner.copy_failures = 0
        elif owner is not None and not ended.awaited:
            self._fail_copy(owner, now)
            if reason == "oversize" and owner.copy_failures >= MAX_COPY_FAILURES and owner.state in RUNS:
                self._finish(owner, "error", now, error=f"larger than the GPU pool, and copies out fail: {done.error}")

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
        self._copies.tell_ended(request)
        if state is State.SWAPPING_OUT and all(block.readable for block in request.hot):
            request.copy_failures += 1
            request.on(Event.OUT_FAILED)
            self._tiers.unpark(request.hot)
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
        content = self.config.blocks_for(request.computed_tokens)
        self._tiers.release(request.blocks[content:][::-1], used=True)
        del request.blocks[content:]
        self._tiers.park(request.hot)

    def _settle_leaving(self) -> None:
        """Report who was swapped out by this plan; who had nothing to copy has left already."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            if request.state is State.SWAPPING_OUT:
                self._journal.swap(request, "swapping_out")
                if not request.awaits:
                    self._swapped_out(request)

    def _swapped_out(self, request: Request) -> None:
        request.on(Event.OUT_DONE)
        request.copy_failures = 0
        request.swaps += 1
        out = sum(request.state is not State.SWAPPING_OUT for request in self._swapped.values())
        self._journal.swapped_out(request, out)

    def _resumed(self, request: Request, now: float) -> None:
        request.on(Event.IN_DONE)
        request.copy_failures = 0
        del self._swapped[request.request_id]
        self._run(request, now)
        self._journal.resumed(request)

    def _run(self, request: Request, now: float) -> None:
        """The request has all its blocks on the GPU. One just back counts as active, lest it leave at once."""
        last, partial = divmod(request.computed_tokens, self.config.block_size)
        if partial:
            self._tiers.write(request.blocks[last])
        request.block_table = array("i", [block.gpu for block in request.hot])
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
        self._copies.stop_waiting(request)
        # Last block first, so that the caches' LRU gives up the end of a prefix before its beginning.
        self._tiers.release(request.hot[::-1], used=request.state in USES_BLOCKS)
        # A copy to their CPU slots would not wait for a step in flight that reads them, so they are held for it.
        self._cold.give_up(request, self._in_flight[-1].read_cold if self._in_step(request) else None)
        request.blocks, request.block_table = [], array("i")
        request.indexed_blocks = request.written_blocks = 0
        request.spoiled = False

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
        self._copies.disown(request)
        request.on(Event.FINISH)
        request.end_stall(now)
        if request is self._favoured:
            self._favoured = None
        del self._requests[request.request_id]
        self._journal.finished(request, reason, now, stop_token, error)

    # ------------------------------------------------------------ views

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self._journal.counters

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

    def shared_blocks(self) -> tuple[int, int]:
        """Of the used blocks of the GPU tier, and of the CPU tier, those that more than one request owns."""
        return self._tiers.shared()

    def requests(self, most: int | None = None) -> list[RequestView]:
        """Every live request, or the first `most`, in order of arrival."""
        now = self._clock()
        return [view(request, now) for request in islice(self._requests.values(), most)]


def _seniority(request: Request) -> tuple[float, int]:
    """By priority and age: who is small is served first. It never changes."""
    return request.due, request.arrival


def _queue_key(request: Request) -> tuple[bool, float, int]:
    """Recomputed requests first, then by priority and age."""
    return (not request.recomputes, *_seniority(request))


def _in_cpu(request: Request) -> bool:
    """Whether it keeps slots in the CPU tier from others."""
    return any(block.cpu != NO_SLOT for block in request.blocks)
