"""One job without HTTP or sockets: when generations are aborted, and what is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from coldblock.frontend.engines import Engine, Target
from coldblock.frontend.errors import ApiError
from coldblock.frontend.generation import ChoiceSpec, Job, Tally, run
from coldblock.frontend.tokenization import ModelText
from coldblock.protocol.client import TokenChunk
from coldblock.protocol.errors import EngineDied
from coldblock.protocol.messages import Finished, SamplingParams
from fake_engine import MODEL, usage
from frontend_kit import byte_ids


class StubGeneration:
    """Plays a script, then never ends."""

    def __init__(self, script: Sequence[TokenChunk | Exception]) -> None:
        self._script = iter(script)
        self.aborted = False

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self

    async def __anext__(self) -> TokenChunk:
        item = next(self._script)
        if isinstance(item, Exception):
            raise item
        return item

    async def abort(self) -> None:
        self.aborted = True


class StubClient:
    """Keeps its generations alive, so that no garbage collection aborts them."""

    def __init__(self, *scripts: Sequence[TokenChunk | Exception]) -> None:
        self._scripts = iter(scripts)
        self.generations: list[StubGeneration] = []

    async def submit(self, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> StubGeneration:
        self.generations.append(StubGeneration(next(self._scripts)))
        return self.generations[-1]


def text(said: str) -> list[TokenChunk]:
    return [TokenChunk((token,)) for token in byte_ids(said)]


def end(**totals: int) -> TokenChunk:
    return TokenChunk((), finished=Finished("stop", usage(**totals)))


def job(client: Any, model_text: ModelText, choices: int = 1, n: int = 1, **options: Any) -> Job:
    target = Target(Engine("stub", client), MODEL, model_text, "stub")
    specs = tuple(ChoiceSpec(index, (1, 2, 3), SamplingParams()) for index in range(choices))
    return Job("id", target, specs, n=n, **options)


async def test_a_stop_string_aborts_before_its_last_delta_is_read(model_text: ModelText) -> None:
    client = StubClient(text("one STOP two"))
    work = job(client, model_text, stops=("STOP",))
    async for delta in run(work, Tally(work)):
        assert client.generations[0].aborted == (delta.finish_reason is not None)
    assert delta.finish_reason == "stop"


@pytest.mark.parametrize("choices", [1, 2])
async def test_leaving_early_aborts_and_frees_the_engine(model_text: ModelText, choices: int) -> None:
    client = StubClient(*[text("some text")] * choices)
    work = job(client, model_text, choices)
    deltas = run(work, Tally(work))
    await anext(deltas)
    assert work.target.engine.open == choices
    await deltas.aclose()
    assert client.generations and all(generation.aborted for generation in client.generations)
    assert work.target.engine.open == 0


async def test_an_error_of_one_choice_aborts_the_others(model_text: ModelText) -> None:
    client = StubClient([EngineDied("gone")], text("x" * 100))
    work = job(client, model_text, 2)
    with pytest.raises(EngineDied):
        [delta async for delta in run(work, Tally(work))]
    assert client.generations[-1].aborted


async def test_an_abort_by_the_engine_is_an_error_not_an_answer(model_text: ModelText) -> None:
    work = job(StubClient([TokenChunk((), finished=Finished("abort", usage()))]), model_text)
    with pytest.raises(ApiError, match="before it was complete"):
        [delta async for delta in run(work, Tally(work))]


async def test_usage_counts_prompts_once_and_takes_the_engines_totals(model_text: ModelText) -> None:
    ends = [end(completion_tokens=7, cached_tokens=cached) for cached in (1, 3, 0, 3)]
    work = job(StubClient(*[[*text("ab"), last] for last in ends]), model_text, choices=4, n=2)
    tally = Tally(work)
    assert tally.usage()["prompt_tokens_details"] is None
    [delta async for delta in run(work, tally)]
    assert tally.usage() == {
        "prompt_tokens": 6,
        "completion_tokens": 28,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
