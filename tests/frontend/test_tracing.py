"""Spans of requests: queue, prefill, swap and decode at the engine's times, in the caller's trace, exported by OTLP."""

from __future__ import annotations

import contextlib
import gzip
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from coldblock.frontend.spans import Tracer
from coldblock.frontend.tracing import tracer_from
from coldblock.protocol.messages import Finished, Refused, Submit
from fake_engine import swap_event, usage
from frontend_kit import byte_ids, fake_engine, serving, wait_until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from processes import running_frontend

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
USAGE = usage(
    1, 5, swaps=1, cached_tokens=1, stall_s=1.5, queue_s=0.25, prefill_s=0.5, decode_s=2.0, moved_bytes=7, recomputes=1
)


def answer(prompt: list[int]) -> Iterator[object]:
    """Five tokens with a swap among them, then the end with all its times. "s": no end, "e": an error, "r": refused."""
    text = bytes(token for token in prompt if token < 256).decode()
    if text == "r":
        yield Refused("", "prompt", "r", "another")
    yield from byte_ids("he")
    yield swap_event(phase="swapping_out", time=1000.0, reason="growth")
    yield swap_event(phase="swapped", time=1000.1, blocks=3, bytes=300, seconds=0.05, queued_s=0.01)
    yield swap_event(phase="swapping_in", time=1001.0)
    yield swap_event(phase="resumed", time=1001.5, blocks=2, bytes=200, seconds=0.04)
    yield from byte_ids("llo")
    if text == "s":
        yield from byte_ids("!" * 400)
    yield Finished("error", USAGE, error="step failed") if text == "e" else Finished("length", USAGE)


class Traced:
    """A traced frontend, and the spans of what was asked of it."""

    def __init__(self, url: str, exporter: InMemorySpanExporter, engine: Any) -> None:
        self.url = url
        self.engine = engine
        self._exporter = exporter

    def ask(self, path: str = "/v1/completions", headers: Any = None, **body: Any) -> list[ReadableSpan]:
        self._exporter.clear()
        body = {"max_tokens": 500, **({} if "messages" in body else {"prompt": "x"}), **body}
        httpx.post(self.url + path, json=body, headers=headers, timeout=20)
        return self.spans()

    def spans(self) -> list[ReadableSpan]:
        """All of one request, once it is complete: the request's own comes last."""
        wait_until(lambda: any(span.kind is SpanKind.SERVER for span in self._exporter.get_finished_spans()))
        return list(self._exporter.get_finished_spans())


@pytest.fixture(scope="module")
def traced(model_folder: Path) -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with fake_engine(model_folder, answer) as engine, serving(engine, tracer=Tracer(provider)) as server:
        server.wait_for_health(200)
        yield Traced(server.url, exporter, engine)


def seconds(span: ReadableSpan) -> Any:
    assert span.start_time is not None and span.end_time is not None
    return pytest.approx((span.end_time - span.start_time) / 1e9)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_the_phases_of_a_request(traced: Traced, stream: bool) -> None:
    before_ns = time.time_ns()
    *inner, request = traced.ask(temperature=0.5, seed=7, stream=stream)
    assert [span.name for span in inner] == ["queue", "prefill", "decode", "swap"]
    assert [seconds(span) for span in inner] == [0.25, 0.5, 2.0, 1.5]
    queue, prefill, decode, swap = inner
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert request.start_time and queue.start_time and before_ns < request.start_time <= queue.start_time
    assert swap.start_time == 1_000_000_000_000
    assert request.context is not None
    assert all(span.parent is not None and span.parent.span_id == request.context.span_id for span in inner)
    assert attributes(swap) == {
        "coldblock.choice": 0,
        "coldblock.request_id": attributes(queue)["coldblock.request_id"],
        "coldblock.swap.reason": "growth",
        "coldblock.swap.out.blocks": 3,
        "coldblock.swap.out.bytes": 300,
        "coldblock.swap.out.copy_s": 0.05,
        "coldblock.swap.out.queued_s": 0.01,
        "coldblock.swap.in.blocks": 2,
        "coldblock.swap.in.bytes": 200,
        "coldblock.swap.in.copy_s": 0.04,
        "coldblock.swap.in.queued_s": 0.0,
    }


def test_the_request_has_the_conventions_attributes(traced: Traced) -> None:
    request = traced.ask(temperature=0.5, seed=7, n=2, stop=["SECRET"])[-1]
    assert request.name == "text_completion tiny" and request.kind is SpanKind.SERVER
    assert request.parent is None and request.status.status_code is StatusCode.UNSET
    told = attributes(request)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told.pop("gen_ai.response.id").startswith("cmpl-")
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "coldblock",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.max_tokens": 500,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "coldblock.engine": traced.engine.endpoint,
        "coldblock.priority": 0,
        "coldblock.swaps": 2,
        "coldblock.stall_s": 3.0,
        "coldblock.moved_bytes": 14,
        "coldblock.recomputes": 2,
    }


def test_choices_are_told_apart(traced: Traced) -> None:
    *inner, _ = traced.ask(n=2)
    assert [attributes(span)["coldblock.choice"] for span in inner] == [0] * 4 + [1] * 4


def test_a_chat_says_so(traced: Traced) -> None:
    request = traced.ask("/v1/chat/completions", messages=[{"role": "user", "content": "SECRET"}])[-1]
    assert request.name == "chat tiny" and attributes(request)["gen_ai.operation.name"] == "chat"
    assert "SECRET" not in str(request.to_json())


def test_the_callers_trace_is_continued_and_goes_to_the_engine(traced: Traced) -> None:
    request = traced.ask(headers={"traceparent": PARENT, "tracestate": "a=1,b=2"})[-1]
    assert request.context is not None and request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == CALLER
    sent = traced.engine.messages(Submit)[-1].trace
    assert sent.traceparent == f"00-{TRACE}-{request.context.span_id:016x}-01" and sent.tracestate == "a=1,b=2"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": "rubbish"},
        {"traceparent": f"00-{'0' * 32}-{CALLER}-01"},
        {"traceparent": f"00-{TRACE}-{'0' * 16}-01"},
        {"traceparent": f"ff-{TRACE}-{CALLER}-01"},
        {"traceparent": f"00-{TRACE.upper()}-{CALLER}-01"},
        {"traceparent": f"00-{TRACE}-{CALLER}-01-more"},
        {"traceparent": f"00-{TRACE}-{CALLER}"},
        {"tracestate": "a=1"},
        [("traceparent", PARENT), ("traceparent", PARENT)],
    ],
)
def test_a_bad_traceparent_is_ignored(traced: Traced, headers: Any) -> None:
    request = traced.ask(headers=headers)[-1]
    assert request.parent is None and request.context is not None
    assert f"{request.context.trace_id:032x}" != TRACE.lower() and not request.context.trace_state


def test_a_tracestate_too_long_for_the_protocol_is_dropped(traced: Traced) -> None:
    long = ",".join(f"k{i}={'v' * 40}" for i in range(20))
    spans = traced.ask(headers={"traceparent": PARENT, "tracestate": long})
    assert spans[-1].status.status_code is StatusCode.UNSET
    assert traced.engine.messages(Submit)[-1].trace.tracestate == ""


def test_what_the_caller_does_not_sample_is_not_recorded_but_passed_on(traced: Traced) -> None:
    traced._exporter.clear()
    headers = {"traceparent": PARENT[:-1] + "0"}
    httpx.post(f"{traced.url}/v1/completions", json={"prompt": "x"}, headers=headers, timeout=20)
    assert traced.engine.messages(Submit)[-1].trace.traceparent.startswith(f"00-{TRACE}-")
    assert [span.parent for span in traced.ask()][-1] is None, "the next one's are the only ones"


def test_a_stop_string_ends_a_request_well_with_the_engines_times(traced: Traced) -> None:
    *inner, request = traced.ask(prompt="s", stop=["o!"])
    assert request.status.status_code is StatusCode.UNSET
    assert attributes(request)["gen_ai.response.finish_reasons"] == ("stop",)
    assert [span.name for span in inner] == ["queue", "prefill", "decode", "swap"]


@pytest.mark.parametrize(("prompt", "kind"), [("e", "RequestFailed"), ("r", "RequestRefused")])
def test_what_failed_is_an_error(traced: Traced, prompt: str, kind: str) -> None:
    request = traced.ask(prompt=prompt)[-1]
    assert request.status.status_code is StatusCode.ERROR and attributes(request)["error.type"] == kind


def test_a_client_that_leaves_is_told(model_folder: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    script = [*byte_ids("a" * 400)]
    with (
        fake_engine(model_folder, lambda prompt: iter(script), delay_s=0.02) as engine,
        serving(engine, tracer=Tracer(provider)) as server,
    ):
        server.wait_for_health(200)
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
            next(stream.iter_lines())
        *inner, request = Traced(server.url, exporter, engine).spans()
    assert attributes(request)["error.type"] == "client_left"
    assert [span.name for span in inner] == ["queue", "prefill", "decode"], "the engine's last word is waited for"


def test_an_echo_alone_has_no_phases_and_no_error(traced: Traced) -> None:
    (request,) = traced.ask(echo=True, max_tokens=0)
    assert request.status.status_code is StatusCode.UNSET


# ---------------------------------------------------------------- on and off


OTLP = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**OTLP, "OTEL_SDK_DISABLED": "True"},
        {**OTLP, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_it_is_off_unless_asked_for(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert tracer_from(environment) is None and not caplog.messages


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, ["OTEL_TRACES_EXPORTER", "'zipkin'", "otlp, none"]),
        ({**OTLP, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["OTEL_EXPORTER_OTLP_PROTOCOL", "'grpc'", "http/protobuf"]),
    ],
)
def test_what_cannot_be_met_is_one_line(
    environment: dict[str, str], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert tracer_from(environment) is None
    (message,) = caplog.messages
    assert all(word in message for word in words)


@pytest.mark.parametrize("variable", ["OTEL_BSP_SCHEDULE_DELAY", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
def test_a_value_that_opentelemetry_refuses_is_one_line(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "-1")
    assert tracer_from(OTLP) is None
    (message,) = caplog.messages
    assert "no traces" in message and "OTEL_*" in message


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(sys.modules, "coldblock.frontend.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert tracer_from(OTLP) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and not record.exc_info
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in record.message and "pip install 'coldblock[otel]'" in record.message


def test_nothing_is_imported_when_it_is_off() -> None:
    code = (
        "import sys; from coldblock.frontend import main, http; from coldblock.frontend.tracing import tracer_from\n"
        "tracer_from({})\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'requests', 'google.protobuf')\n"
        "sys.exit(' '.join(name for name in sys.modules if name.startswith(heavy)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stderr.strip() == ""


@contextlib.contextmanager
def otlp_receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector of OTLP over HTTP: its endpoint, and what it got."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join(10)


def test_spans_reach_a_collector_before_the_frontend_ends(model_folder: Path) -> None:
    with otlp_receiver() as (endpoint, received), fake_engine(model_folder, answer) as engine:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_RESOURCE_ATTRIBUTES": "deployment=test"}
        with running_frontend(engine.endpoint, env=environment) as frontend:
            wait_until(lambda: httpx.get(f"{frontend.url}/health").status_code == 200)
            body = {"prompt": "x", "max_tokens": 9}
            httpx.post(f"{frontend.url}/v1/completions", json=body, headers={"traceparent": PARENT})
            (ready,) = frontend.stop()
            assert ready.startswith("coldblock frontend: ")
    (export,) = received
    (resource,) = export.resource_spans
    told = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (told["service.name"], told["deployment"]) == ("coldblock", "test")
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert [span.name for span in spans] == ["queue", "prefill", "decode", "swap", "text_completion tiny"]
    assert {span.trace_id.hex() for span in spans} == {TRACE} and spans[-1].parent_span_id.hex() == CALLER


def test_a_collector_that_is_not_there_costs_no_request(model_folder: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with fake_engine(model_folder, answer) as engine, running_frontend(engine.endpoint, env=environment) as frontend:
        wait_until(lambda: httpx.get(f"{frontend.url}/health").status_code == 200)
        reply = httpx.post(f"{frontend.url}/v1/completions", json={"prompt": "x", "max_tokens": 9})
        assert reply.json()["choices"][0]["text"] == "hello"
        log = frontend.stop()[1:]  # behind the ready line
    assert len(log) in (1, 2) and all("export" in line.lower() for line in log)
