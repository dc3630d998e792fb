"""What is told of the scheduler's work: updates of requests and copies, totals, and views of live requests.

Owns: the updates not yet fetched, and the counters of copies and tokens. Does not know: why anything happens; it reads
requests and tiers, and changes neither.
"""

from __future__ import annotations

from .config import SchedulerConfig
from .plan import Direction, MoveDone, SampledToken
from .request import Copied, Request
from .swap import READABLE, Move
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


class Journal:
    """Everything that happened since the last `drain`, in order."""

    def __init__(self, config: SchedulerConfig, tiers: Tiers) -> None:
        self.counters = Counters()
        self._block_bytes = config.block_bytes
        self._prefix_cache = config.prefix_cache
        self._tiers = tiers
        self._updates: list[Update] = []

    def drain(self) -> list[Update]:
        """What happened since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    # ------------------------------------------------------------ a request's life

    def admitted(self, request: Request) -> None:
        """It runs for the first time, beginning behind its cached prefix."""
        self.counters.prompt_tokens += request.prompt_length
        if self._prefix_cache:
            self.counters.prefix_queries_tokens += request.prompt_length
            self.counters.prefix_hits_tokens += request.cached_tokens

    def token(self, request: Request, token: SampledToken) -> None:
        """One more token of its answer."""
        self.counters.generation_tokens += 1
        self._updates.append(TokenUpdate(request.request_id, token))

    def finished(
        self, request: Request, reason: FinishReason, now: float, stop_token: int | None, error: str | None
    ) -> None:
        """Its end, with what it took."""
        self.counters.finished[reason] += 1
        admitted_at = now if request.admitted_at is None else request.admitted_at
        first_token_at = now if request.first_token_at is None else request.first_token_at
        self._updates.append(
            FinishedUpdate(
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
                moved_bytes=request.moved_blocks * self._block_bytes,
                recomputes=request.recomputes,
            )
        )

    # ------------------------------------------------------------ swaps and copies

    def swapped_out(self, request: Request, swapped_now: int) -> None:
        """It is out, one of `swapped_now` requests."""
        counters = self.counters
        counters.requests_swapped += 1
        counters.max_swapped_requests = max(counters.max_swapped_requests, swapped_now)
        self.swap(request, "swapped")

    def resumed(self, request: Request) -> None:
        """It is back and runs."""
        self.counters.requests_resumed += 1
        self.swap(request, "resumed")

    def swap(self, request: Request, phase: SwapPhase) -> None:
        """A step of the request's way out or back."""
        ended = phase in ("swapped", "resumed")
        copied = request.copied if ended else Copied()
        self._report(request, phase, request.swap_reason, request.copied.blocks, copied.seconds, copied.queued_s)

    def swap_rejected(self, request: Request, reason: SwapReason, detail: str) -> None:
        """The budget did not allow to copy its blocks out."""
        self.counters.offload_rejected += 1
        self._report(request, "rejected", reason, detail=detail)

    def copied(self, move: Move) -> None:
        """Count a copy that has ended well."""
        counters, blocks = self.counters, len(move.blocks)
        if move.request is not None:
            move.request.moved_blocks += blocks
        if move.direction is Direction.OUT:
            counters.offload_blocks += blocks
            counters.offload_bytes += blocks * self._block_bytes
            counters.write_behind_blocks += blocks * (move.reason == "write_behind")
        else:
            counters.reload_blocks += blocks
            counters.prefetch_blocks += blocks * (move.reason == "prefetch")
            counters.prefix_reload_blocks += blocks * (move.reason == "prefix_hit")

    def copied_aside(self, move: Move, done: MoveDone) -> None:
        """A copy that left its request where it is."""
        phase: SwapPhase = "copied_out" if move.direction is Direction.OUT else "copied_in"
        self._report(move.request, phase, move.reason, len(move.blocks), done.seconds, done.queued_s)

    def copy_failed(self, move: Move, error: str) -> None:
        """Count and tell a copy that failed."""
        if move.direction is Direction.OUT:
            self.counters.offload_failed += 1
        else:
            self.counters.reload_failed += 1
        self._report(move.request, "rejected", move.reason, detail=f"copy failed: {error}")

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
        gpu, cpu = self._tiers.gpu_use(), self._tiers.cpu_use()
        self._updates.append(
            SwapUpdate(
                request_id="" if request is None else request.request_id,
                phase=phase,
                reason=reason,
                blocks=blocks,
                bytes=blocks * self._block_bytes,
                seconds=seconds,
                gpu_used_blocks=gpu.used + gpu.in_flight,
                cpu_used_bytes=(cpu.used + cpu.in_flight) * self._block_bytes,
                detail=detail,
                queued_s=queued_s,
            )
        )


def view(request: Request, now: float) -> RequestView:
    """A live request as a monitor shows it."""
    gpu_blocks = len(request.block_table)
    if not gpu_blocks and request.blocks:  # who runs has all but the cold ones on the GPU, so that nobody counts them
        gpu_blocks = sum([block.residency in READABLE for block in request.hot])
    stalled_s = 0.0 if request.swapped_since is None else now - request.swapped_since
    first, gaps = request.first_token_at, request.num_outputs - 1
    return RequestView(
        request_id=request.request_id,
        state=request.state.value,
        prompt_tokens=request.prompt_length,
        generated_tokens=request.num_outputs,
        gpu_blocks=gpu_blocks,
        cpu_blocks=len(request.blocks) - gpu_blocks,
        swaps=request.swaps,
        stall_s=request.stall_s + stalled_s,
        age_s=now - request.arrived_at,
        priority=request.priority,
        moved_blocks=request.moved_blocks,
        stalled_s=stalled_s,
        queue_s=(now if request.admitted_at is None else request.admitted_at) - request.arrived_at,
        ttft_s=None if first is None else first - request.arrived_at,
        tpot_s=None if first is None or gaps < 1 else (request.last_token_at - first) / gaps,
        cached_tokens=request.cached_tokens,
        recomputes=request.recomputes,
    )
