"""What /metrics shows: this frontend's HTTP numbers and, beside them, the metrics of each engine that it exports.

Owns: the HTTP counters and the translation of `Stats.metrics` to Prometheus' text format.
Does not know: what the engine counts. A metric it cannot make sense of is left out and logged, never fatal.

A frontend is one thing to scrape: its workers, which share a port, count into files of one folder
(`PROMETHEUS_MULTIPROC_DIR`, prometheus_client's own way), and whichever is asked shows the sum.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ..protocol.messages import Metric, Stats

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # to be set before prometheus_client is imported
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

log = logging.getLogger("coldblock.frontend")


class HttpMetrics:
    """Counters of one frontend."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps beside every series are noise
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "coldblock_http_requests_total",
            "HTTP requests answered; status 499: the client left first.",
            ("path", "status"),
            registry=self._registry,
        )
        self._latency = Histogram(
            "coldblock_http_request_seconds",
            "Seconds from request to the end of the reply.",
            ("path",),
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self._open = Gauge(
            "coldblock_http_open_requests",
            "HTTP requests being answered.",
            ("path",),
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    def begin(self, path: str) -> None:
        """A request came in. `path` is a route, never what a client made up."""
        self._open.labels(path).inc()

    def end(self, path: str, status: int, seconds: float) -> None:
        """Its reply is complete."""
        self._open.labels(path).dec()
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)

    def text(self) -> bytes:
        """These of all workers, in Prometheus' text format."""
        registry = self._registry
        if SHARED_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def render(http: HttpMetrics, engines: Sequence[tuple[str, Stats | None]]) -> bytes:
    """Everything in Prometheus' text format. `engines`: endpoint and stats, None for an engine that does not answer."""
    elsewhere = [
        f"# The metrics of the engine at {endpoint} are exported by {stats.exporter!r}\n"
        for endpoint, stats in engines
        if stats is not None and stats.exporter and not stats.metrics
    ]
    return http.text() + generate_latest(_EngineMetrics(engines)) + "".join(elsewhere).encode()


class _EngineMetrics(Collector):
    """The engines' metrics; families of one name are merged, as the format demands."""

    def __init__(self, engines: Sequence[tuple[str, Stats | None]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Family]:
        up = GaugeMetricFamily("coldblock_engine_up", "Whether the engine answers.", labels=["endpoint"])
        for endpoint, stats in self._engines:
            up.add_metric([endpoint], float(stats is not None))
        yield up
        yield from _families(metric for _, stats in self._engines if stats is not None for metric in stats.metrics)


def _families(metrics: Iterable[Metric]) -> Iterable[Family]:
    families: dict[str, Family] = {}
    for metric in metrics:
        try:
            name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
            family = families.get(name) or Family(name, metric.help, metric.kind)
            _add_samples(family, metric)
        except ValueError as error:
            log.warning("metric %r of the engine is left out: %s", metric.name, error)
        else:
            families[name] = family
    return families.values()


def _add_samples(family: Family, metric: Metric) -> None:
    """Raises ValueError when name, labels or bucket counts make no sense; nothing is added then."""
    for sample in metric.samples:
        if metric.kind == "histogram" and len(sample.counts) != len(metric.buckets) + 1:
            raise ValueError(f"{len(sample.counts)} counts for {len(metric.buckets)} buckets")
    for sample in metric.samples:
        if metric.kind == "counter":
            family.add_sample(f"{family.name}_total", sample.labels, sample.value)
        elif metric.kind == "gauge":
            family.add_sample(family.name, sample.labels, sample.value)
        else:
            edges = [*(str(float(edge)) for edge in metric.buckets), "+Inf"]
            totals = list(accumulate(sample.counts))
            for edge, total in zip(edges, totals, strict=True):
                family.add_sample(f"{family.name}_bucket", {**sample.labels, "le": edge}, total)
            family.add_sample(f"{family.name}_count", sample.labels, totals[-1])
            family.add_sample(f"{family.name}_sum", sample.labels, sample.sum)
