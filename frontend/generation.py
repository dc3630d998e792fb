"""One API request as generations on an engine: several choices, detokenized, ended by stop strings, counted.

Owns: submitting, merging and aborting the generations of one request; usage totals.
Does not know: HTTP, JSON, or what a chunk looks like (`streams`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..protocol.client import Generation, TokenChunk
from ..protocol.errors import ColdblockError
from ..protocol.messages import Finished, SamplingParams, SwapEvent, TokenLogprob
from .detokenizer import Detokenizer, StopStrings
from .engines import Target
from .errors import ApiError, engine_unavailable

if TYPE_CHECKING:
    from .spans import ChoiceSpans, RequestSpans

Logprob = tuple[int, TokenLogprob]

log = logging.getLogger("coldblock.frontend")


@dataclass(frozen=True)
class ChoiceSpec:
    """One sequence to generate. `echo` is text that goes before the answer; `sampling` None: the echo is all."""

    index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams | None
    echo: str = ""


@dataclass(frozen=True)
class Job:
    """One API request, validated. `choices[i].index == i`; `n` neighbouring choices share a prompt."""

    id: str
    target: Target
    choices: tuple[ChoiceSpec, ...]
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    events: bool = False
    log_prompts: bool = False
    spans: RequestSpans | None = None


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `finish_reason` is set on its last one; `event`: a swap event and nothing else."""

    index: int
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    event: SwapEvent | None = None


class Tally:
    """Token counts of a job, as the API's `usage` reports them."""

    def __init__(self, job: Job) -> None:
        self._n = job.n
        self._prompt_tokens = sum(len(choice.prompt_ids) for choice in job.choices[:: job.n])
        self._completion = [0] * len(job.choices)
        self._cached: dict[int, int] = {}

    def count(self, index: int, tokens: int, finished: Finished | None) -> None:
        """Note new tokens of a choice; the engine's own totals replace the count when it ends."""
        self._completion[index] += tokens
        if finished is not None:
            self._completion[index] = finished.usage.completion_tokens
            self._cached[index] = finished.usage.cached_tokens

    def usage(self) -> dict[str, object]:
        """OpenAI's usage object. Cached tokens are those of each prompt's first choice; null until they are known."""
        completion = sum(self._completion)
        cached = [self._cached[index] for index in range(0, len(self._completion), self._n) if index in self._cached]
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
        }


async def run(job: Job, tally: Tally) -> AsyncGenerator[Delta]:
    """The deltas of all choices as they come. Leaving early aborts what still runs.

    Raises `ColdblockError` from the client library and `ApiError`.
    """
    sources = [_Choice(job, spec, tally).deltas() for spec in job.choices]
    merged = sources[0] if len(sources) == 1 else _interleave(sources)
    job.target.engine.open += len(sources)
    error: BaseException | None = None
    try:
        async with aclosing(merged):
            async for delta in merged:
                yield delta
    except BaseException as caught:
        error = caught
        raise
    finally:
        job.target.engine.open -= len(sources)
        if job.spans is not None:
            job.spans.end(error)


class _Choice:
    """One generation on its way from tokens to deltas."""

    def __init__(self, job: Job, spec: ChoiceSpec, tally: Tally) -> None:
        self._job = job
        self._spec = spec
        self._tally = tally
        self._min_tokens = spec.sampling.min_tokens if spec.sampling else 0
        self._tokens = 0
        self._detokenizer = Detokenizer(job.target.text.tokenizer, spec.prompt_ids)
        self._stops = StopStrings(job.stops, job.include_stop)
        self._logprobs: list[Logprob] = []
        self._id = f"{job.id}-{spec.index}"
        self._spans: ChoiceSpans | None = None
        self._answer: list[str] = []  # kept for the log alone, where it is asked for

    async def deltas(self) -> AsyncGenerator[Delta]:
        spec, job = self._spec, self._job
        if spec.sampling is None:
            yield Delta(spec.index, spec.echo, finish_reason="length")
            return
        if job.log_prompts:
            prompt = job.target.text.tokenizer.decode(list(spec.prompt_ids), skip_special_tokens=False)
            log.info("request %s has the prompt %s", self._id, prompt)
        generation = await job.target.engine.client.submit(
            spec.prompt_ids,
            spec.sampling,
            request_id=self._id,
            priority=job.priority,
            trace=job.spans.context if job.spans is not None else None,
        )
        if job.spans is not None:
            self._spans = job.spans.choice(spec.index, generation)
        try:
            if spec.echo:
                yield Delta(spec.index, spec.echo)
            async for item in generation:
                if isinstance(item, SwapEvent):
                    if self._spans is not None:
                        self._spans.swap(item)
                    if job.events:
                        yield Delta(spec.index, event=item)
                    continue
                delta = self._absorb(item)
                if delta is None:
                    continue
                if self._spans is not None:
                    self._spans.chunk(delta.finish_reason)
                if delta.finish_reason is not None:
                    await _abort(generation)  # a stop string ended it; before the last delta, whose reader may be slow
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if job.log_prompts:
                log.info("request %s was answered with %s", self._id, "".join(self._answer))
            await _abort(generation)

    def _absorb(self, chunk: TokenChunk) -> Delta | None:
        """The delta a chunk makes, or None while its text is held back."""
        self._tokens += len(chunk.token_ids)
        self._tally.count(self._spec.index, len(chunk.token_ids), chunk.finished)
        if chunk.logprobs is not None:
            self._logprobs.extend(zip(chunk.token_ids, chunk.logprobs, strict=True))
        text = self._detokenizer.push(chunk.token_ids)
        if chunk.finished is not None:
            text += self._detokenizer.flush()
        if self._tokens >= self._min_tokens or chunk.finished is not None:
            text = self._stops.push(text)
        reason = self._reason(chunk.finished)
        if reason is not None and self._stops.matched is None:
            text += self._stops.flush()
        if not text and reason is None:
            return None
        if self._job.log_prompts:
            self._answer.append(text)
        logprobs, self._logprobs = self._logprobs, []
        return Delta(self._spec.index, text, logprobs, reason)

    def _reason(self, finished: Finished | None) -> str | None:
        if self._stops.matched is not None:
            return "stop"
        if finished is None:
            return None
        if finished.reason in ("stop", "length"):
            return finished.reason
        if finished.reason == "abort":
            raise engine_unavailable("the engine ended this request before it was complete")
        raise ApiError(500, finished.error or "the engine could not finish this request", code="generation_failed")


async def _abort(generation: Generation) -> None:
    """Harmless for a generation that has ended."""
    with suppress(ColdblockError):  # an engine that is gone has nothing left to abort
        await generation.abort()


async def _interleave(sources: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Items of all sources as they come. The first error ends it; leaving early closes every source."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=2 * len(sources))

    async def pump(source: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(source):
                async for delta in source:
                    await queue.put(delta)
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
