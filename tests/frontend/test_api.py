"""The API through the official client: answers, streams, choices, usage, logprobs, stop strings, swap events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from coldblock.protocol.codec import pack_tokens
from coldblock.protocol.messages import Finished, Submit, TokenLogprob, TokensOut
from fake_engine import usage
from frontend_kit import Server, byte_ids, fake_engine, scripted, serving, wait_until

USER: Any = [{"role": "user", "content": "hi"}]


def client(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20, **options)


def events(server: Server, path: str, body: dict[str, Any], **headers: str) -> list[str]:
    """The lines of a stream that are not empty."""
    with server.http() as http:
        reply = http.post(path, json={**body, "stream": True}, headers=headers)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return [line for line in reply.text.split("\n") if line]


def chunks(lines: list[str]) -> list[dict[str, Any]]:
    """The JSON of a complete stream."""
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]


def test_models(server: Server) -> None:
    assert [model.id for model in client(server).models.list()] == ["tiny"]
    assert client(server).models.retrieve("tiny").owned_by == "coldblock"
    with pytest.raises(openai.NotFoundError):
        client(server).models.retrieve("other/one")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version"])
def test_probes_may_ask_with_head(server: Server, path: str) -> None:
    with server.http() as http:
        reply = http.head(path)
        assert (reply.status_code, reply.content) == (200, b"")
        assert list(http.get("/openapi.json").json()["paths"][path]) == ["get"]


def test_completion(server: Server) -> None:
    reply = client(server).completions.create(model="tiny", prompt="say")
    assert reply.id.startswith("cmpl-") and reply.object == "text_completion" and reply.model == "tiny"
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("hello", "stop")
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 5, 8)
    assert reply._request_id


def test_chat_with_two_choices(server: Server) -> None:
    reply = client(server).chat.completions.create(model="tiny", messages=USER, n=2, max_tokens=3)
    assert [(c.index, c.message.role, c.message.content, c.finish_reason) for c in reply.choices] == [
        (0, "assistant", "hel", "length"),
        (1, "assistant", "hel", "length"),
    ]
    assert reply.usage is not None and reply.usage.completion_tokens == 6
    assert reply.usage.prompt_tokens == 21, "the prompt counts once"


def test_chat_stream_with_usage_and_two_choices(server: Server) -> None:
    stream = client(server).chat.completions.create(
        model="tiny", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
    )
    text, reasons, roles = {0: "", 1: ""}, {0: [], 1: []}, {0: [], 1: []}
    *parts, last = list(stream)
    for part in parts:
        assert part.usage is None and len(part.choices) == 1
        choice = part.choices[0]
        text[choice.index] += choice.delta.content or ""
        reasons[choice.index].append(choice.finish_reason)
        if choice.delta.role:
            roles[choice.index].append(choice.delta.role)
    assert text == {0: "hello", 1: "hello"}
    assert roles == {0: ["assistant"], 1: ["assistant"]}
    assert all(each[:-1] == [None] * (len(each) - 1) and each[-1] == "stop" for each in reasons.values())
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 10


async def test_the_asynchronous_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=20) as api:
        stream = await api.completions.create(model="tiny", prompt=["a", "b"], stream=True)
        text = {0: "", 1: ""}
        async for part in stream:
            text[part.choices[0].index] += part.choices[0].text
    assert text == {0: "hello", 1: "hello"}


def test_the_first_chat_chunk_carries_the_role_alone(server: Server) -> None:
    first, *rest = chunks(events(server, "/v1/chat/completions", {"messages": USER}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    assert rest[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert "usage" not in first


def test_continuous_usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = chunks(events(server, "/v1/completions", {"prompt": "hi", "stream_options": options}))
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == [1, 2, 3, 4, 5, 5, 5] and parts[-1]["choices"] == []


def test_text_is_escaped(model_folder: Path) -> None:
    said = 'quote " back \\ line\n tab\t null\0 é 😀 </script> \u2028'
    with scripted(model_folder, byte_ids(said)) as server:
        body = {"prompt": "x", "max_tokens": 100}
        parts = chunks(events(server, "/v1/completions", body))
        assert "".join(part["choices"][0]["text"] for part in parts) == said
        assert client(server).completions.create(model="tiny", **body).choices[0].text == said


def test_characters_are_never_halved(model_folder: Path) -> None:
    with scripted(model_folder, [*byte_ids("é"), 0xFF, 0xFE, *byte_ids("😀!"), 0xE2]) as server:
        parts = chunks(events(server, "/v1/completions", {"prompt": "x"}))
        assert [part["choices"][0]["text"] for part in parts if part["choices"][0]["text"]] == ["é", "��😀", "!", "�"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_across_tokens(model_folder: Path, path: str, stream: bool) -> None:
    with scripted(model_folder, byte_ids("ABCDEFGHIJKLMNOP" * 20), delay_s=0.001) as server:
        body = {"prompt": "x", "messages": USER, "stop": "DEFGHIJ", "max_tokens": 300}
        if stream:
            parts = [chunk["choices"][0] for chunk in chunks(events(server, path, body))]
            text = "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)
            reason = parts[-1]["finish_reason"]
        else:
            with server.http() as http:
                choice = http.post(path, json=body).json()["choices"][0]
            text, reason = choice.get("text") or choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == ("ABC", "stop")
        (submit,) = server.engine.wait_for(Submit)
        wait_until(lambda: submit.request_id in server.engine.aborted)


def test_a_long_stop_string_does_not_delay(model_folder: Path) -> None:
    with scripted(model_folder, byte_ids("hello")) as server:
        parts = chunks(events(server, "/v1/completions", {"prompt": "x", "stop": "y" * 200}))
        assert [part["choices"][0]["text"] for part in parts] == [*"hello", ""]


def test_stop_strings_wait_for_min_tokens_and_can_be_included(server: Server) -> None:
    api = client(server)
    options = {"min_tokens": 4, "include_stop_str_in_output": True}
    assert api.completions.create(model="tiny", prompt="x", stop="h", extra_body=options).choices[0].text == "hello"
    assert api.completions.create(model="tiny", prompt="x", stop="el", extra_body=options).choices[0].text == "hello"
    assert api.completions.create(model="tiny", prompt="x", stop=["el"]).choices[0].text == "h"


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_completions(model_folder: Path, stream: bool) -> None:
    entry = TokenLogprob(-0.25, ((104, -0.25), (105, float("-inf"))))
    with scripted(model_folder, byte_ids("hé"), logprobs=entry) as server:
        reply = client(server).completions.create(model="tiny", prompt="x", logprobs=2, stream=stream)
        found = [reply.choices[0].logprobs] if not stream else [part.choices[0].logprobs for part in reply]
    tokens = [token for part in found if part is not None for token in part.tokens]
    offsets = [offset for part in found if part is not None for offset in part.text_offset]
    tops = [top for part in found if part is not None for top in part.top_logprobs]
    assert tokens == ["h", "�", "�"] and offsets == [0, 1, 2]
    assert tops[0] == {"h": -0.25, "i": -9999.0}


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_chats(model_folder: Path, stream: bool) -> None:
    entry = TokenLogprob(-0.5, ((104, -0.5),))
    with scripted(model_folder, byte_ids("hé"), logprobs=entry) as server:
        reply = client(server).chat.completions.create(
            model="tiny", messages=USER, logprobs=True, top_logprobs=1, stream=stream
        )
        found = [reply.choices[0].logprobs] if not stream else [part.choices[0].logprobs for part in reply]
    content = [item for part in found if part is not None for item in part.content]
    assert bytes(byte for item in content for byte in item.bytes) == "hé".encode()
    assert [item.logprob for item in content] == [-0.5] * 3 and content[0].top_logprobs[0].token == "h"


def test_no_logprobs_unless_asked_for(server: Server) -> None:
    assert client(server).chat.completions.create(model="tiny", messages=USER).choices[0].logprobs is None


def test_cached_tokens_are_reported(model_folder: Path) -> None:
    end = Finished("stop", usage(2, 1, cached_tokens=1))
    with scripted(model_folder, [TokensOut("", pack_tokens([104]), None, end)]) as server:
        reply = client(server).completions.create(model="tiny", prompt="hi")
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert (reply.choices[0].text, reply.usage.prompt_tokens_details.cached_tokens) == ("h", 1)


def test_swap_events_are_comments_for_those_who_ask(model_folder: Path) -> None:
    with scripted(model_folder, ["swapping_out", 104, "resumed", 105]) as server:
        body = {"prompt": "x"}
        lines = events(server, "/v1/completions", body, **{"x-coldblock-events": "1"})
        comments = [line for line in lines if line.startswith(":")]
        assert [line.split()[2] for line in comments] == ["swapping_out", "resumed"]
        assert "blocks=3" in comments[0] and lines[0] == comments[0]
        plain = events(server, "/v1/completions", body)
        assert not [line for line in plain if line.startswith(":")]
        assert "".join(part["choices"][0]["text"] for part in chunks(plain)) == "hi"


def test_served_model_name(model_folder: Path) -> None:
    with fake_engine(model_folder) as engine, serving(engine, served_model_name="org/mine") as server:
        server.wait_for_health(200)
        assert client(server).models.retrieve("org/mine").id == "org/mine"
        assert client(server).completions.create(model="org/mine", prompt="x").model == "org/mine"
        with pytest.raises(openai.NotFoundError):
            client(server).completions.create(model="tiny", prompt="x")
