"""Spans of requests for OpenTelemetry: one a request, in it queue → prefill → decode, and each swap.

Owns: the spans, made when a request has ended, from the engine's own times. Does not know: whether tracing is on
(`tracing`), or HTTP beyond the two headers of W3C Trace Context. Texts of users and models are in no span.

Attributes follow OpenTelemetry's conventions for generative AI; these are still in development, so the names are
written here rather than imported from a package that renames them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from .. import __version__
from ..protocol.client import Generation
from ..protocol.messages import MAX_TRACESTATE, SwapEvent, TraceContext, Usage

if TYPE_CHECKING:
    from .generation import Job

LAST_WORD_S = 5.0  # how long a request that ended here early waits for what the engine has to say of it
CLIENT_LEFT = "client_left"
_NS = 1_000_000_000
_W3C = TraceContextTextMapPropagator()

Attributes = dict[str, AttributeValue]


class Tracer:
    """Makes the spans of a frontend's requests and hands them to `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("coldblock", __version__)
        self._ending: set[asyncio.Task[None]] = set()

    @classmethod
    def to_otlp(cls) -> Tracer:
        """Exports by OTLP over HTTP, from a thread of its own; OTEL_* variables say where to, and what is sampled."""
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "coldblock"}))
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def begin(self, job: Job, operation: str, headers: Headers, began_ns: int) -> RequestSpans:
        """The span of a request, continuing the trace that its headers name, if they do so validly."""
        span = self._tracer.start_span(
            f"{operation} {job.target.name}",
            context=_caller(headers),
            kind=SpanKind.SERVER,
            attributes=_request_attributes(job, operation),
            start_time=began_ns,
        )
        return RequestSpans(self, span, sum(choice.sampling is not None for choice in job.choices))

    def phase(self, name: str, parent: Span, start_ns: int, end_ns: int, attributes: Attributes) -> Span:
        """A span within a request's, whose end is known."""
        span = self._tracer.start_span(
            name, context=set_span_in_context(parent), attributes=attributes, start_time=start_ns
        )
        span.end(max(start_ns, end_ns))
        return span

    def when_told(self, spans: RequestSpans) -> None:
        """End these spans when the engine has told what it knows, without making anyone wait."""
        task = asyncio.create_task(spans.complete())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Export what is there. Engines are to be closed before: then nothing waits for their word."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await asyncio.to_thread(self._provider.shutdown)


class RequestSpans:
    """One request's span. `context` goes to the engine with its generations."""

    def __init__(self, tracer: Tracer, span: Span, generations: int) -> None:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, context=set_span_in_context(span))
        state = carrier.get("tracestate", "")
        self.context = TraceContext(carrier.get("traceparent", ""), state if len(state) <= MAX_TRACESTATE else "")
        self._tracer = tracer
        self._span = span
        self._expected = generations
        self._choices: list[ChoiceSpans] = []
        self._first_ns = 0
        self._ended_ns = 0

    def choice(self, index: int, generation: Generation) -> ChoiceSpans:
        """One of its generations has been submitted."""
        choice = ChoiceSpans(self, index, generation)
        self._choices.append(choice)
        return choice

    def first_chunk(self) -> None:
        """Something of the answer came."""
        self._first_ns = self._first_ns or time.time_ns()

    def end(self, error: BaseException | None) -> None:
        """No more of it is read: it is complete, has failed, or its client left."""
        self._ended_ns = time.time_ns()
        left = isinstance(error, GeneratorExit | asyncio.CancelledError)
        complete = sum(choice.reason is not None for choice in self._choices) == self._expected
        if error is not None and not (left and complete):
            kind = CLIENT_LEFT if left else getattr(error, "code", None) or type(error).__name__
            self._span.set_attribute("error.type", kind)
            self._span.set_status(StatusCode.ERROR)
        self._tracer.when_told(self)

    async def complete(self) -> None:
        """Write what is inside, then end the span as of when it ended."""
        usages = await asyncio.gather(*(choice.usage() for choice in self._choices))
        for choice, usage in zip(self._choices, usages, strict=True):
            choice.write(self._tracer, self._span, usage, self._ended_ns)
        told = [usage for usage in usages if usage is not None]
        self._span.set_attributes(_usage_attributes(told))
        if reasons := [choice.reason for choice in self._choices if choice.reason is not None]:
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if self._first_ns:
            began_ns = min(choice.submitted_ns for choice in self._choices)
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", (self._first_ns - began_ns) / _NS)
        self._span.end(self._ended_ns)


class ChoiceSpans:
    """What happened to one generation. `reason` is how it ended, None when it did not end well."""

    def __init__(self, request: RequestSpans, index: int, generation: Generation) -> None:
        self.submitted_ns = time.time_ns()
        self.reason: str | None = None
        self._request = request
        self._index = index
        self._generation = generation
        self._swaps: list[SwapEvent] = []

    def swap(self, event: SwapEvent) -> None:
        """Its KV moved."""
        self._swaps.append(event)

    def chunk(self, reason: str | None) -> None:
        """Some of its answer came; `reason` is set on the last."""
        self._request.first_chunk()
        self.reason = reason

    async def usage(self) -> Usage | None:
        """The engine's totals; None when it says nothing any more."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._generation.usage(), LAST_WORD_S)
        return None

    def write(self, tracer: Tracer, parent: Span, usage: Usage | None, ended_ns: int) -> None:
        """Its phases, one after the other from when it was submitted, and its swaps, at the engine's times."""
        base: Attributes = {"coldblock.request_id": self._generation.request_id, "coldblock.choice": self._index}
        if usage is not None:
            at = self.submitted_ns
            for name, seconds, told in _phases(usage):
                tracer.phase(name, parent, at, at + int(seconds * _NS), {**base, **told})
                at += int(seconds * _NS)
        for events in _swaps(self._swaps):
            last = events[-1]
            start_ns = int(events[0].time * _NS)
            end_ns = int(last.time * _NS) if last.phase in ("resumed", "rejected") else ended_ns
            tracer.phase("swap", parent, start_ns, end_ns, {**base, **_swap_attributes(events)})


def _caller(headers: Headers) -> Context:
    """The trace that the caller named. As the specification says, what is malformed, or there twice, is ignored."""
    parents = headers.getlist("traceparent")
    if len(parents) != 1:
        return Context()
    carrier = {"traceparent": parents[0], "tracestate": ",".join(headers.getlist("tracestate"))}
    return _W3C.extract(carrier, context=Context())


def _phases(usage: Usage) -> Iterator[tuple[str, float, Attributes]]:
    """Name, seconds and attributes of those that the request came to."""
    yield "queue", usage.queue_s, {}
    if usage.prefill_s or usage.completion_tokens:
        cached = {"gen_ai.usage.cache_read.input_tokens": usage.cached_tokens}
        yield "prefill", usage.prefill_s, {"gen_ai.usage.input_tokens": usage.prompt_tokens, **cached}
    if usage.completion_tokens:
        yield "decode", usage.decode_s, {"gen_ai.usage.output_tokens": usage.completion_tokens}


def _swaps(events: list[SwapEvent]) -> Iterator[list[SwapEvent]]:
    """The events of each swap: from `swapping_out` on until it is back, or was not made."""
    swap: list[SwapEvent] = []
    for event in events:
        if event.phase == "swapping_out" and swap:  # recomputed meanwhile: nothing came back
            yield swap
            swap = []
        swap.append(event)
        if event.phase in ("resumed", "rejected"):
            yield swap
            swap = []
    if swap:
        yield swap


def _swap_attributes(events: list[SwapEvent]) -> Attributes:
    attributes: Attributes = {"coldblock.swap.reason": events[0].reason}
    for event in events:
        if event.phase in ("swapped", "resumed"):
            way = "out" if event.phase == "swapped" else "in"
            attributes[f"coldblock.swap.{way}.blocks"] = event.blocks
            attributes[f"coldblock.swap.{way}.bytes"] = event.bytes
            attributes[f"coldblock.swap.{way}.copy_s"] = event.seconds
            attributes[f"coldblock.swap.{way}.queued_s"] = event.queued_s
        elif event.phase == "rejected":
            attributes["coldblock.swap.rejected"] = event.detail
    return attributes


def _request_attributes(job: Job, operation: str) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "coldblock",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": job.target.name,
        "gen_ai.request.choice.count": len(job.choices),
        "gen_ai.response.id": job.id,
        "gen_ai.response.model": job.target.model.name,
        "coldblock.engine": job.target.engine.endpoint,
        "coldblock.priority": job.priority,
    }
    sampling = job.choices[0].sampling
    if sampling is not None:
        for name in ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "max_tokens"):
            if (value := getattr(sampling, name)) is not None:
                attributes[f"gen_ai.request.{name}"] = value
    return attributes


def _usage_attributes(usages: list[Usage]) -> Attributes:
    """Of all choices together."""
    return {
        "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
        "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
        "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in usages),
        "coldblock.swaps": sum(usage.swaps for usage in usages),
        "coldblock.stall_s": sum(usage.stall_s for usage in usages),
        "coldblock.moved_bytes": sum(usage.moved_bytes for usage in usages),
        "coldblock.recomputes": sum(usage.recomputes for usage in usages),
    }
