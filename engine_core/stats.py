"""What the engine says of itself: counters, gauges, latency histograms, and one row a request.

Owns: the metric names and buckets, and the histograms. Does not know: how they are shown or scraped; the counters are
the scheduler's, read when a snapshot is made.

Names that dashboards already know keep their `vllm:` prefix; what only Coldblock has is prefixed `coldblock_`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ..protocol.messages import CpuOffload, LinkUse, Metric, ModelInfo, RequestRow, Sample, Stats, TierUse
from .control.block_pool import PoolUse
from .control.scheduler import Scheduler
from .control.updates import Counters, FinishedUpdate, FinishReason, RequestView, SwapUpdate, TokenUpdate, Update
from .device.executor import LinkPeak
from .request_ids import split_id

# fmt: off
TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
COPY_BUCKETS = (.0001, .0003, .001, .003, .01, .03, .1, .3, 1, 3, 10)
# fmt: on
TOKENS_WINDOW_S = 2.0
LINK_WINDOW_S = 0.5  # as long as from one published snapshot to the next: bursts are to be seen
MAX_ROWS = 1000  # so many requests are listed: however long the queue, a snapshot stays quick to make and to send
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


@dataclass
class Histogram:
    """Counts of observations by upper bound (the last bucket has none), and their sum. Seconds throughout."""

    name: str
    help: str
    buckets: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.buckets) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was seen so many times."""
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times


@dataclass
class _Clocked:
    """When a live request arrived, and when its last token came."""

    arrived_at: float
    token_at: float | None = None


class EngineStats:
    """Meets every step (`StepMeter`) and makes `Stats` snapshots. Lives on the engine's thread."""

    def __init__(
        self,
        model: ModelInfo,
        engine_id: str,
        endpoint: str,
        link_peak: LinkPeak,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._link_peak = link_peak
        self._engine_id = engine_id
        self._labels = {"model_name": model.name, "engine": endpoint}
        self._clock = clock
        self._started_at = clock()
        self._started_at_time = time.time()
        self._live: dict[str, _Clocked] = {}
        self._step_s = 0.0
        self._tokens = _Rate(clock(), TOKENS_WINDOW_S)
        self._bytes_out, self._bytes_in = _Rate(clock(), LINK_WINDOW_S), _Rate(clock(), LINK_WINDOW_S)
        self.ttft = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.itl = Histogram("vllm:inter_token_latency_seconds", "Between two tokens of one request.", ITL_BUCKETS)
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Arrival to first scheduling.", REQUEST_BUCKETS)
        self.prefill = Histogram("vllm:request_prefill_time_seconds", "Scheduling to first token.", REQUEST_BUCKETS)
        self.decode = Histogram("vllm:request_decode_time_seconds", "First token to end.", REQUEST_BUCKETS)
        self.tpot = Histogram(
            "coldblock_request_inter_token_seconds", "Mean gap between a request's tokens.", ITL_BUCKETS
        )
        self.stall = Histogram("coldblock_request_stall_seconds", "Time a swapped request spent out.", REQUEST_BUCKETS)
        self.offload = Histogram("coldblock_cpu_offload_seconds", "One copy to the CPU tier.", COPY_BUCKETS)
        self.reload = Histogram("coldblock_cpu_reload_seconds", "One copy to the GPU pool.", COPY_BUCKETS)
        self.queued = Histogram("coldblock_copy_queue_seconds", "A copy's wait before it began.", COPY_BUCKETS)
        self.step = Histogram("coldblock_step_seconds", "One engine step.", COPY_BUCKETS)
        self.bookkeeping = Histogram(
            "coldblock_step_bookkeeping_seconds", "A step less its executor, waits included.", COPY_BUCKETS
        )
        latencies = (self.ttft, self.itl, self.e2e, self.queue, self.prefill, self.decode)
        copies = (self.stall, self.offload, self.reload, self.queued)
        self.histograms = (*latencies, self.tpot, *copies, self.step, self.bookkeeping)

    def arrived(self, request_id: str, now: float) -> None:
        """A request was taken."""
        self._live[request_id] = _Clocked(now)

    def stepped(self, seconds: float, executor_s: float) -> None:
        """A step was completed in a turn of `seconds`. The executor spent `executor_s` on it, maybe since before."""
        self.step.observe(seconds)
        self.bookkeeping.observe(max(0.0, seconds - executor_s))
        self._step_s = seconds if not self._step_s else 0.9 * self._step_s + 0.1 * seconds

    def updated(self, updates: list[Update], now: float) -> None:
        """These updates went out. Most tokens of a step have the time of the token before in common."""
        times_before: list[float | None] = []
        for update in updates:
            if isinstance(update, TokenUpdate):
                clocked = self._live[update.request_id]
                times_before.append(clocked.token_at)
                if clocked.token_at is None:
                    self.ttft.observe(now - clocked.arrived_at)
                clocked.token_at = now
            elif isinstance(update, FinishedUpdate):
                self._finished(update, now)
            else:
                self._swapped(update, now)
        self._tokens.count(now, len(times_before))
        for before, tokens in Counter(times_before).items():
            if before is not None:
                self.itl.observe(now - before, tokens)

    def _finished(self, update: FinishedUpdate, now: float) -> None:
        clocked = self._live.pop(update.request_id)
        self.e2e.observe(now - clocked.arrived_at)
        self.queue.observe(update.queue_s)
        self.prefill.observe(update.prefill_s)
        self.decode.observe(update.decode_s)
        if update.completion_tokens > 1:
            self.tpot.observe(update.decode_s / (update.completion_tokens - 1))
        if update.swaps:
            self.stall.observe(update.stall_s)

    def _swapped(self, update: SwapUpdate, now: float) -> None:
        if update.phase in ("swapped", "copied_out") and update.blocks:
            self.offload.observe(update.seconds)
            self.queued.observe(update.queued_s)
            self._bytes_out.count(now, update.bytes)
        elif update.phase in ("resumed", "copied_in") and update.blocks:
            self.reload.observe(update.seconds)
            self.queued.observe(update.queued_s)
            self._bytes_in.count(now, update.bytes)

    def snapshot(self, scheduler: Scheduler, peers: int) -> Callable[[Callable[[str], str]], Stats]:
        """The state at this moment. What needs time for each request is left for the call of what is returned, which
        may come on any thread: steps wait for this method. That call takes what tells the name of a request's peer.
        """
        views = scheduler.requests(MAX_ROWS)
        stats = self._state(scheduler, peers)
        return lambda name_of: msgspec.structs.replace(
            stats, requests=tuple([self._row(view, name_of(view.request_id)) for view in views])
        )

    def _state(self, scheduler: Scheduler, peers: int) -> Stats:
        """All but the requests' rows."""
        now = self._clock()
        gpu_shared, cpu_shared = scheduler.shared_blocks()
        gpu, cpu = _tier(scheduler.gpu_use(), gpu_shared), _tier(scheduler.cpu_use(), cpu_shared)
        return Stats(
            engine_id=self._engine_id,
            time=time.time(),
            uptime_s=now - self._started_at,
            model=self._model,
            peers=peers,
            running=scheduler.running,
            waiting=scheduler.waiting,
            swapped=scheduler.swapped,
            gpu=gpu,
            cpu_offload=CpuOffload(
                enabled=self._model.num_cpu_blocks > 0,
                payload_bytes=scheduler.cpu_blocks_used * self._model.kv_block_bytes,
                budget_bytes=self._model.num_cpu_blocks * self._model.kv_block_bytes,
                max_swapped_requests=scheduler.counters.max_swapped_requests,
                blocks=scheduler.cpu_blocks_used,
                cached_blocks=cpu.cached,
            ),
            step_ms=1000 * self._step_s,
            tokens_per_s=self._tokens.per_second(now),
            requests=(),
            metrics=tuple(self._metrics(scheduler, peers, gpu, cpu)),
            cpu=cpu,
            link=LinkUse(
                out_bytes=scheduler.counters.offload_bytes,
                in_bytes=scheduler.counters.reload_blocks * self._model.kv_block_bytes,
                out_bytes_per_s=self._bytes_out.per_second(now),
                in_bytes_per_s=self._bytes_in.per_second(now),
                peak_out_bytes_per_s=self._link_peak.out_bytes_per_s,
                peak_in_bytes_per_s=self._link_peak.in_bytes_per_s,
            ),
        )

    def _row(self, view: RequestView, peer_name: str) -> RequestRow:
        peer, own_id = split_id(view.request_id)
        return RequestRow(
            request_id=own_id,
            peer=peer,
            state=view.state,
            prompt_tokens=view.prompt_tokens,
            generated_tokens=view.generated_tokens,
            gpu_blocks=view.gpu_blocks,
            cpu_blocks=view.cpu_blocks,
            swaps=view.swaps,
            stall_s=view.stall_s,
            age_s=view.age_s,
            priority=view.priority,
            moved_bytes=view.moved_blocks * self._model.kv_block_bytes,
            stalled_s=view.stalled_s,
            queue_s=view.queue_s,
            ttft_s=view.ttft_s,
            tpot_s=view.tpot_s,
            cached_tokens=view.cached_tokens,
            recomputes=view.recomputes,
            peer_name=peer_name,
        )

    def _metrics(self, scheduler: Scheduler, peers: int, gpu: TierUse, cpu: TierUse) -> list[Metric]:
        info = {"block_size": str(self._model.block_size), "num_gpu_blocks": str(self._model.num_gpu_blocks)}
        counters = scheduler.counters
        finished = [self._sample(counters.finished[reason], finished_reason=reason) for reason in FINISH_REASONS]
        return [
            *(Metric(name, "counter", help, (self._sample(value),)) for name, help, value in self._counts(counters)),
            *(
                Metric(name, "gauge", help, (self._sample(value),))
                for name, help, value in self._gauges(scheduler, peers, gpu)
            ),
            *self._tiers(gpu, cpu),
            Metric("vllm:request_success_total", "counter", "Requests that ended, by reason.", tuple(finished)),
            Metric("vllm:cache_config_info", "gauge", "Sizes of the KV pool.", (self._sample(1, **info),)),
            *(self._histogram(histogram) for histogram in self.histograms),
        ]

    def _counts(self, counters: Counters) -> tuple[tuple[str, str, float], ...]:
        own = "coldblock_"
        reload_bytes = counters.reload_blocks * self._model.kv_block_bytes
        cpu_hits = counters.prefix_reload_blocks * self._model.block_size
        return (
            (own + "requests_swapped_total", "Swap-outs of a request.", counters.requests_swapped),
            (own + "requests_resumed_total", "Swap-ins of a request.", counters.requests_resumed),
            (own + "kv_cpu_offload_blocks_total", "KV blocks copied to the CPU tier.", counters.offload_blocks),
            (own + "kv_cpu_offload_bytes_total", "Payload bytes copied to the CPU tier.", counters.offload_bytes),
            (own + "kv_write_behind_blocks_total", "Of these, ahead of need.", counters.write_behind_blocks),
            (own + "kv_cpu_offload_failed_total", "Copies to the CPU tier that failed.", counters.offload_failed),
            (own + "kv_cpu_offload_rejected_total", "Swaps the CPU budget forbade.", counters.offload_rejected),
            (own + "kv_cpu_reload_blocks_total", "KV blocks copied back to the GPU pool.", counters.reload_blocks),
            (own + "kv_cpu_reload_bytes_total", "Payload bytes copied back to the GPU pool.", reload_bytes),
            (own + "kv_prefetch_blocks_total", "Of these, before their request's turn.", counters.prefetch_blocks),
            (own + "kv_prefix_reload_blocks_total", "Of these, for a known prefix.", counters.prefix_reload_blocks),
            (own + "prefix_cache_cpu_hits_total", "Prompt tokens found in the CPU tier.", cpu_hits),
            (own + "kv_cpu_reload_failed_total", "Copies to the GPU pool that failed.", counters.reload_failed),
            ("vllm:num_preemptions_total", "Requests whose KV was dropped for recomputation.", counters.preemptions),
            ("vllm:prompt_tokens_total", "Prompt tokens prefilled.", counters.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens generated.", counters.generation_tokens),
            ("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", counters.prefix_queries_tokens),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", counters.prefix_hits_tokens),
        )

    def _gauges(self, scheduler: Scheduler, peers: int, gpu: TierUse) -> tuple[tuple[str, str, float], ...]:
        own = "coldblock_"
        most_swapped = scheduler.counters.max_swapped_requests
        payload = scheduler.cpu_blocks_used * self._model.kv_block_bytes
        budget = self._model.num_cpu_blocks * self._model.kv_block_bytes
        return (
            (own + "engine_start_time_seconds", "When the engine was started, Unix time.", self._started_at_time),
            (own + "peers", "Connected frontends, clients and tools.", peers),
            (own + "swapped_requests", "Requests in the CPU tier, or on their way.", scheduler.swapped),
            (own + "cpu_offload_bytes", "Payload bytes in the CPU tier.", payload),
            (own + "cpu_offload_budget_bytes", "Most payload bytes the CPU tier may hold.", budget),
            (own + "cpu_offload_enabled", "1 when there is a CPU tier.", float(budget > 0)),
            (own + "max_swapped_requests", "Most requests swapped at once so far.", most_swapped),
            ("vllm:num_requests_running", "Requests in the step batch.", scheduler.running),
            ("vllm:num_requests_waiting", "Requests not yet started.", scheduler.waiting),
            ("vllm:kv_cache_usage_perc", "Share of GPU blocks in use, 0 to 1.", (gpu.used + gpu.in_flight) / gpu.total),
        )

    def _tiers(self, gpu: TierUse, cpu: TierUse) -> tuple[Metric, ...]:
        """Both tiers by state, and the link between them."""
        uses = (("gpu", gpu), ("cpu", cpu))
        states = ("used", "cached", "in_flight", "free")
        blocks = [self._sample(getattr(use, state), tier=tier, state=state) for tier, use in uses for state in states]
        shared = [self._sample(use.shared, tier=tier) for tier, use in uses]
        peaks = (("out", self._link_peak.out_bytes_per_s), ("in", self._link_peak.in_bytes_per_s))
        peak = [self._sample(value, direction=direction) for direction, value in peaks]
        return (
            Metric("coldblock_kv_blocks", "gauge", "KV blocks by tier and state.", tuple(blocks)),
            Metric("coldblock_kv_shared_blocks", "gauge", "Used ones that several requests share.", tuple(shared)),
            Metric(
                "coldblock_kv_link_peak_bytes_per_second",
                "gauge",
                "Most bytes a second that copies between the tiers did at start; 0 without a CPU tier.",
                tuple(peak),
            ),
        )

    def _sample(self, value: float, **labels: str) -> Sample:
        return Sample(value=float(value), labels={**self._labels, **labels})

    def _histogram(self, histogram: Histogram) -> Metric:
        sample = Sample(labels=self._labels, counts=tuple(histogram.counts), sum=histogram.sum)
        return Metric(histogram.name, "histogram", histogram.help, (sample,), histogram.buckets)


def _tier(use: PoolUse, shared: int) -> TierUse:
    return TierUse(use.total, use.used, use.cached, use.in_flight, use.free, shared)


class _Rate:
    """How many a second, over the last whole window: of `window_s`, and what passed until it was looked at."""

    def __init__(self, now: float, window_s: float) -> None:
        self._window_s = window_s
        self._since = now
        self._count = 0
        self._last = 0.0

    def count(self, now: float, more: int) -> None:
        self._turn(now)
        self._count += more

    def per_second(self, now: float) -> float:
        self._turn(now)
        return self._last

    def _turn(self, now: float) -> None:
        elapsed = now - self._since
        if elapsed >= self._window_s:
            self._last = self._count / elapsed
            self._since, self._count = now, 0
