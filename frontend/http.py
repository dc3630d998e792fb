"""The HTTP application: routes, and what every request passes through (request id, key, size limit, metrics).

Owns: `create_app`. Does not know: processes and sockets (`main`), or how a generation runs (`generation`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from msgspec.json import encode as json_bytes
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..protocol.client import AsyncClient
from ..protocol.errors import ColdblockError
from . import metrics
from .config import FrontendSettings
from .dashboard.feed import Feed
from .dashboard.pages import INDEX, LiveStream, load_files
from .engines import EnginePool, Target
from .errors import ApiError, engine_unavailable, from_engine, invalid
from .generation import ChoiceSpec, Delta, Job, Tally, run
from .openai_types import (
    BodyT,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizePromptBody,
    parse,
    read_json,
)
from .streams import ChatFormat, ClientLeft, CompletionFormat, DeltaStream, Format, while_connected

if TYPE_CHECKING:
    from .spans import Tracer

CLIENT_LEFT_STATUS = 499
EVENTS_HEADER = "x-coldblock-events"
_NEEDS_KEY = ("/v1/", "/tokenize", "/detokenize", "/dashboard/events")  # if there are keys
_SCHEMA_REF = "#/components/schemas/{model}"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger("coldblock.frontend")


def create_app(
    settings: FrontendSettings,
    clients: Sequence[AsyncClient],
    *,
    exporter: str | None = None,
    on_ready: Callable[[Target], None] | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The application over one client an engine (in the order of `settings.engine`), which it connects and closes.

    Its `state.end_streams` ends the replies that have no end of their own: for a server that stops and waits for them.
    `exporter` names this frontend to engines, which give their metrics to one frontend; its workers share the name.
    """
    pool = EnginePool(
        list(zip(settings.engine, clients, strict=True)),
        served_model_name=settings.served_model_name,
        tokenizer=settings.tokenizer,
        on_ready=on_ready,
    )
    http_metrics = metrics.HttpMetrics()
    feed = Feed(pool.engines, pool.name_of)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        try:
            yield
        finally:
            await pool.close()
            if tracer is not None:
                await tracer.close()

    app = FastAPI(title="Coldblock", version=__version__, lifespan=lifespan)
    app.state.end_streams = feed.close
    handlers = _Handlers(pool, http_metrics, feed, exporter or uuid.uuid4().hex, settings.log_prompts, tracer)
    for path, method, handler, body_type in handlers.routes():
        extra = _reference(body_type) if body_type is not None else None
        app.add_api_route(path, handler, methods=[method], openapi_extra=extra, response_model=None)
        if method == "GET":  # probes ask with HEAD; the server leaves the body out
            app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, response_model=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ColdblockError, _on_engine_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _describe_bodies(app, [body_type for *_, body_type in handlers.routes() if body_type is not None])
    paths = frozenset(path for path, *_ in handlers.routes())
    app.add_middleware(Gate, settings=settings, http_metrics=http_metrics, paths=paths)
    return app


class _Handlers:
    """One method a route."""

    def __init__(
        self,
        pool: EnginePool,
        http_metrics: metrics.HttpMetrics,
        feed: Feed,
        exporter: str,
        log_prompts: bool,
        tracer: Tracer | None,
    ) -> None:
        self._pool = pool
        self._tracer = tracer
        self._http_metrics = http_metrics
        self._feed = feed
        self._page = load_files()
        self._exporter = exporter
        self._log_prompts = log_prompts

    def routes(self) -> list[tuple[str, str, Callable[..., Any], type[BaseModel] | None]]:
        """Path, method, handler, and the type of the body."""
        return [
            ("/v1/models", "GET", self.models, None),
            ("/v1/models/{name:path}", "GET", self.model, None),
            ("/v1/completions", "POST", self.completions, CompletionBody),
            ("/v1/chat/completions", "POST", self.chat_completions, ChatBody),
            ("/tokenize", "POST", self.tokenize, TokenizePromptBody),
            ("/detokenize", "POST", self.detokenize, DetokenizeBody),
            ("/health", "GET", self.health, None),
            ("/metrics", "GET", self.metrics, None),
            ("/version", "GET", self.version, None),
            ("/dashboard", "GET", self.dashboard, None),
            ("/dashboard/events", "GET", self.dashboard_events, None),
            ("/dashboard/{name}", "GET", self.dashboard_file, None),
        ]

    async def models(self) -> Response:
        """The models that can be asked for now."""
        models = self._model_list()
        return _json({"object": "list", "data": models})

    async def model(self, name: str) -> Response:
        """One model."""
        for model in self._model_list():
            if model["id"] == name:
                return _json(model)
        raise ApiError(404, f"no model {name!r}", param="model", code="model_not_found")

    def _model_list(self) -> list[dict[str, Any]]:
        models = self._pool.models()
        if not models:
            raise engine_unavailable(self._pool.problem() or "no engine answers")
        return [
            {
                "id": self._pool.name_of(model),
                "object": "model",
                "created": 0,
                "owned_by": "coldblock",
                "max_model_len": model.max_request_tokens,
            }
            for model in models
        ]

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        began_ns = time.time_ns()
        body = await _body(CompletionBody, request)
        target = await self._pool.choose(body.model)
        choices: list[ChoiceSpec] = []
        for prompt in body.prompts():
            ids = await _prompt_ids(target, prompt, answer=body.max_tokens > 0)
            echo = ""
            if body.echo:
                echo = prompt if isinstance(prompt, str) else await target.text.decode(ids)
            choices += _choices(body, target, ids, first=len(choices), echo=echo)
        job = self._job("cmpl-", body, target, choices, request)
        return await _respond(self._traced(job, "text_completion", request, began_ns), body, CompletionFormat, request)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        began_ns = time.time_ns()
        body = await _body(ChatBody, request)
        target = await self._pool.choose(body.model)
        text = await target.text.render(
            body.template_messages(),
            add_generation_prompt=body.add_generation_prompt,
            options=body.chat_template_kwargs,
        )
        ids = await _prompt_ids(target, text, param="messages")
        job = self._job("chatcmpl-", body, target, _choices(body, target, ids), request)
        return await _respond(self._traced(job, "chat", request, began_ns), body, ChatFormat, request)

    def _job(
        self, prefix: str, body: GenerationBody, target: Target, choices: list[ChoiceSpec], request: Request
    ) -> Job:
        return Job(
            id=prefix + uuid.uuid4().hex,
            target=target,
            choices=tuple(choices),
            n=body.n,
            stops=tuple(body.stops),
            include_stop=body.include_stop_str_in_output,
            priority=body.priority,
            log_prompts=self._log_prompts,
            events=body.stream and request.headers.get(EVENTS_HEADER) == "1",
        )

    def _traced(self, job: Job, operation: str, request: Request, began_ns: int) -> Job:
        """The job with a span of its own, when tracing is on."""
        if self._tracer is None:
            return job
        return replace(job, spans=self._tracer.begin(job, operation, request.headers, began_ns))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a chat's prompt."""
        data = read_json(await request.body())
        body: TokenizeChatBody | TokenizePromptBody
        if data.get("messages") is not None:
            body, param = parse(TokenizeChatBody, data), "messages"
            target = await self._pool.choose(body.model)
            text = await target.text.render(
                body.template_messages(),
                add_generation_prompt=body.add_generation_prompt,
                options=body.chat_template_kwargs,
            )
        else:
            body, param = parse(TokenizePromptBody, data), "prompt"
            target = await self._pool.choose(body.model)
            text = body.prompt
        ids = await target.text.encode(text, add_special_tokens=body.add_special_tokens, param=param)
        strings = [target.text.tokenizer.id_to_token(token_id) for token_id in ids] if body.return_token_strs else None
        limit = target.model.max_request_tokens
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await _body(DetokenizeBody, request)
        target = await self._pool.choose(body.model)
        _check_token_ids(target, body.tokens, "tokens")
        return _json({"prompt": await target.text.decode(body.tokens)})

    async def health(self) -> Response:
        """200 while requests can be served, else 503 with the reason."""
        problem = self._pool.problem()
        if problem is not None:
            raise engine_unavailable(problem)
        return Response(status_code=200)

    async def metrics(self) -> Response:
        """Prometheus metrics of this frontend, and of its engines unless another frontend exports them."""
        stats = await self._pool.stats(self._exporter)
        text = metrics.render(self._http_metrics, [(engine.endpoint, found) for engine, found in stats])
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def version(self) -> Response:
        """Coldblock's version."""
        return _json({"version": __version__})

    async def dashboard(self) -> Response:
        """The live page: tiers, requests and swaps of every engine."""
        return self._page[INDEX]

    async def dashboard_file(self, name: str) -> Response:
        """A file of the live page."""
        if name not in self._page:
            raise ApiError(404, f"no file {name!r} of the dashboard; it is at /dashboard")
        return self._page[name]

    async def dashboard_events(self) -> Response:
        """What the live page shows, as server-sent events: each engine's state twice a second, and its swaps."""
        return LiveStream(self._feed)


async def _body(body_type: type[BodyT], request: Request) -> BodyT:
    return parse(body_type, read_json(await request.body()))


def _check_token_ids(target: Target, ids: list[Any], param: str) -> None:
    """Raises a 400 unless all are ids of the model's vocabulary."""
    if set(map(type, ids)) - {int}:
        raise invalid(f"{param}: token ids must be integers", param, "invalid_type")
    size = target.model.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
        raise invalid(f"{param}: token id {wrong} is not in the vocabulary, 0..{size - 1}", param)


async def _prompt_ids(
    target: Target, prompt: str | list[int], *, param: str = "prompt", answer: bool = True
) -> tuple[int, ...]:
    """A prompt's token ids, checked: not empty, in the vocabulary, and short enough to leave room for an answer."""
    limit = target.model.max_request_tokens
    ids = await target.text.encode(prompt, room=limit, param=param) if isinstance(prompt, str) else prompt
    if len(ids) + answer > limit:
        room = (
            "; the engine's KV room is what limits: see its --allow-oversize"
            if limit < target.model.max_model_len
            else ""
        )
        raise invalid(
            f"the prompt has {len(ids)} tokens; prompt and answer together can have {limit} "
            f"(the model's context is {target.model.max_model_len}{room})",
            param,
            "context_length_exceeded",
        )
    if not ids:
        raise invalid("the prompt has no tokens: none of its characters is in the vocabulary", param)
    _check_token_ids(target, ids, param)
    return tuple(ids)


def _choices(
    body: GenerationBody, target: Target, ids: tuple[int, ...], *, first: int = 0, echo: str = ""
) -> list[ChoiceSpec]:
    """The n choices of one prompt, numbered from `first`."""
    room = target.model.max_request_tokens - len(ids)
    size = target.model.vocab_size
    samplings = [
        None if body.token_limit == 0 else body.sampling(room=room, vocab_size=size, choice=choice)
        for choice in range(body.n)
    ]
    return [ChoiceSpec(first + index, ids, sampling, echo) for index, sampling in enumerate(samplings)]


async def _respond(job: Job, body: GenerationBody, format_type: type[Format], request: Request) -> Response:
    """Run the job and reply, at once or as a stream. What fails before the first delta becomes an HTTP status."""
    tally = Tally(job)
    deltas = run(job, tally)
    options = body.stream_options
    chunks = format_type(
        job,
        tally,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
    )

    async def collect() -> list[Delta]:
        return [delta async for delta in deltas]

    try:
        if body.stream:
            first = await while_connected(request.receive, anext(deltas))
            return DeltaStream(first, deltas, chunks)
        return Response(chunks.whole(await while_connected(request.receive, collect())), media_type="application/json")
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT_STATUS)


class Gate:
    """What every request passes: request id, key, size limit, metrics, and a reply when a handler breaks.

    Plain ASGI: wrapping each message of a stream in a framework's response would halve the streaming rate.
    """

    def __init__(
        self, app: ASGIApp, *, settings: FrontendSettings, http_metrics: metrics.HttpMetrics, paths: frozenset[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in settings.api_key]
        self._max_body = settings.max_body_mb * 2**20
        self._metrics = http_metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        path = self._metric_path(scope["path"])
        began = time.monotonic()
        status = CLIENT_LEFT_STATUS

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        self._metrics.begin(path)
        try:
            self._admit(scope["path"], headers)
            await self._app(scope, self._limited(receive), send_with_id)
        except ApiError as error:
            await _error_response(error)(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server stops, and has waited for this reply as long as it may
            if status != CLIENT_LEFT_STATUS:  # the reply has begun; the server closes the connection
                raise
            late = ApiError(503, "the server stops, and the answer was not complete in time", code="shutting_down")
            await _error_response(late)(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # it left while it was sending its body; nobody is there to be told
        except Exception:
            log.exception("request %s failed", request_id)
            if status != CLIENT_LEFT_STATUS:  # the reply has begun; the server closes the connection
                raise
            broken = ApiError(500, f"internal error; request id {request_id}", code="internal_error")
            await _error_response(broken)(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - began
            self._metrics.end(path, status, seconds)
            if log.isEnabledFor(logging.DEBUG):
                self._log(scope["method"], path, status, seconds, request_id)

    def _log(self, method: str, path: str, status: int, seconds: float, request_id: str) -> None:
        """The access log. `path` is a route: what clients make up, queries too, may hold a prompt."""
        fields = {"method": method, "path": path, "status": status, "seconds": seconds, "request_id": request_id}
        log.debug("%s %s %d in %.3f s, request %s", *fields.values(), extra={"fields": fields})

    def _metric_path(self, path: str) -> str:
        if path in self._paths:
            return path
        for prefix in ("/v1/models/", "/dashboard/"):
            if path.startswith(prefix):
                return prefix + "{name}"
        return "other"

    def _admit(self, path: str, headers: Headers) -> None:
        """Raises a 401 or 413 `ApiError`."""
        if self._keys and path.startswith(_NEEDS_KEY):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            sent = key.strip().encode("latin-1")  # the bytes as they came
            matches = [hmac.compare_digest(sent, known) for known in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(401, "send a valid key: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, ending in a 413 when a body without a declared length outgrows the limit."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body // 2**20} MiB", code="body_too_large")


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(content), status, headers, media_type="application/json")


def _error_response(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_engine_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ColdblockError)
    return _error_response(from_engine(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = _error_response(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


def _reference(body_type: type[BaseModel]) -> dict[str, Any]:
    """Names the body in the API description; bodies are parsed by hand, faster and with OpenAI's errors."""
    schema = {"$ref": _SCHEMA_REF.format(model=body_type.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(app: FastAPI, body_types: Sequence[type[BaseModel]]) -> None:
    """Put the bodies' schemas where the references point."""
    _, definitions = models_json_schema([(body, "validation") for body in body_types], ref_template=_SCHEMA_REF)
    components = app.openapi().setdefault("components", {}).setdefault("schemas", {})
    components.update(definitions["$defs"])
