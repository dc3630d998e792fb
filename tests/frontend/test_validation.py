"""Every wrong body is a 400 that names the field, and never reaches the engine; odd but legal ones work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coldblock.protocol.messages import Submit
from frontend_kit import EOS, Server, byte_ids, fake_engine, serving, write_model
from tokenizers import Tokenizer, models

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def post(server: Server, path: str, body: Any, status: int = 200) -> Any:
    with server.http() as http:
        options = {"content": body} if isinstance(body, str | bytes) else {"json": body}
        reply = http.post(path, **options)
    assert reply.status_code == status, reply.text
    return reply.json()


def error_of(server: Server, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    before = len(server.engine.received)
    error = post(server, path, body, status)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not [m for m in server.engine.received[before:] if isinstance(m, Submit)], "it reached the engine"
    return dict(error)


def submitted(server: Server, path: str, body: dict[str, Any]) -> Submit:
    """What the engine gets for a body."""
    post(server, path, body)
    return [message for message in server.engine.received if isinstance(message, Submit)][-1]


WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("temperature", {"temperature": value}) for value in (-1, -1e-9, 999999, "hot")),
    *(("top_p", {"top_p": value}) for value in (0, -1, 1.01)),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 2}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 0.001}),
    ("repetition_penalty", {"repetition_penalty": 10.1}),
    ("presence_penalty", {"presence_penalty": 3}),
    *(("max_tokens", {"max_tokens": value}) for value in (-1, 0, 1.5, "many")),
    *(("n", {"n": value}) for value in (0, -1, 10**6, True)),
    ("best_of", {"best_of": 4}),
    ("seed", {"seed": 2**80}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": 5}),
    ("stop_token_ids", {"stop_token_ids": [258]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 3}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("guided_regex", {"guided_regex": "(("}),
    ("prompt_logprobs", {"prompt_logprobs": 100000}),
    ("model", {"model": 7}),
]
ONLY_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("prompt", {"prompt": value})
        for value in ("", [""], [], [[]], None, 5, [1.5], ["a", [1]], [[1], "a"], [[True]])
    ),
    *(("prompt", {"prompt": value}) for value in ([200000], [-1], [[1], [258]], [2**70])),
    ("prompt", {"prompt": ["x"] * 129}),
    ("prompt", {"prompt": ["x"] * 65, "n": 2}),
    ("prompt", {"prompt": "x" * 512}),
    ("prompt", {"prompt": "x" * 10**6}),
    ("suffix", {"suffix": "end"}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": 1, "echo": True}),
]
ONLY_CHAT: list[tuple[str, dict[str, Any]]] = [
    *(("messages", {"messages": value}) for value in ([], None, "hi", [5], [{"content": "x"}], [{"role": ""}])),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("messages", {"messages": [{"role": "system", "content": "no"}]}),
    ("messages", {"messages": [{"role": "user", "content": "x" * 600}]}),
    ("messages", {"messages": USER * 5000}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 20000}]}),
    ("messages", {"messages": [{"role": "user", **{f"field{index}": 1 for index in range(20000)}}]}),
    ("chat_template_kwargs", {"chat_template_kwargs": {f"key{index}": 1 for index in range(300)}}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
]


@pytest.mark.parametrize(("param", "fields"), [*WRONG, *ONLY_COMPLETIONS])
def test_completions_refuse(server: Server, param: str, fields: dict[str, Any]) -> None:
    assert error_of(server, COMPLETIONS, {"prompt": "hi", **fields})["param"] == param


@pytest.mark.parametrize(("param", "fields"), [*WRONG, *ONLY_CHAT])
def test_chat_refuses(server: Server, param: str, fields: dict[str, Any]) -> None:
    assert error_of(server, CHAT, {"messages": USER, **fields})["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[1]",
        b"\xff",
        '{"prompt": "hi", "temperature": NaN}',
        '{"prompt": "hi", "top_p": Infinity}',
        '{"prompt": "hi", "temperature": 1e999}',
        '{"prompt": ' + "[" * 50_000 + "]" * 50_000 + "}",
        "{" + ", ".join(f'"key{index}": 1' for index in range(300)) + "}",
    ],
)
def test_what_is_no_json_is_refused(server: Server, body: str | bytes) -> None:
    assert error_of(server, COMPLETIONS, body)["code"] == "invalid_json"


def test_messages_say_the_numbers(server: Server) -> None:
    too_long = error_of(server, COMPLETIONS, {"prompt": "x" * 512})
    assert too_long["code"] == "context_length_exceeded"
    assert "512 tokens" in too_long["message"] and "1024" in too_long["message"]
    assert "--allow-oversize" in too_long["message"], "the KV room is what limits"
    assert "0..257" in error_of(server, COMPLETIONS, {"prompt": [200000]})["message"]
    assert (
        "System role not supported"
        in error_of(server, CHAT, {"messages": [{"role": "system", "content": "no"}]})["message"]
    )


def test_an_unknown_model_is_a_404(server: Server) -> None:
    error = error_of(server, COMPLETIONS, {"prompt": "hi", "model": "nope"}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/"])
def test_unknown_paths_and_methods_get_the_error_body(server: Server, path: str) -> None:
    with server.http() as http:
        for reply, status in ((http.get(path), 404), (http.delete(COMPLETIONS), 405)):
            assert reply.status_code == status and reply.json()["error"]["message"] and reply.headers["x-request-id"]


@pytest.mark.parametrize("value", [10**6, 2**31, 1e6])
def test_max_tokens_is_clamped_to_the_room(server: Server, value: float) -> None:
    assert submitted(server, COMPLETIONS, {"prompt": "hi", "max_tokens": value}).sampling.max_tokens == 510


def test_default_lengths(server: Server) -> None:
    assert submitted(server, COMPLETIONS, {"prompt": "hi"}).sampling.max_tokens == 16
    chat = submitted(server, CHAT, {"messages": USER})
    assert chat.sampling.max_tokens == 512 - len(chat.prompt) // 4
    assert (
        submitted(server, CHAT, {"messages": USER, "max_tokens": 9, "max_completion_tokens": 7}).sampling.max_tokens
        == 7
    )


@pytest.mark.parametrize(("given", "sent"), [(0, 0.0), (1e-12, 0.0), (1e-4, 1e-4), (1.5, 1.5)])
def test_a_tiny_temperature_is_greedy(server: Server, given: float, sent: float) -> None:
    assert submitted(server, COMPLETIONS, {"prompt": "hi", "temperature": given}).sampling.temperature == sent


def test_what_load_tools_send(server: Server) -> None:
    body = {
        "model": "tiny",
        "messages": USER,
        "stop": None,
        "n": None,
        "temperature": None,
        "seed": None,
        "ignore_eos": True,
        "min_tokens": 4,
        "max_tokens": 8,
        "stream_options": None,
        "user": "someone",
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "metadata": {"a": "b"},
    }
    sampling = submitted(server, CHAT, body).sampling
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.max_tokens) == (True, 4, 8)


def test_all_sampling_fields_reach_the_engine(server: Server) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "stop_token_ids": [EOS],
        "logprobs": 2,
        "priority": 3,
    }
    submit = submitted(server, COMPLETIONS, {"prompt": "hi", **fields})
    assert submit.priority == fields.pop("priority")
    for name, value in fields.items():
        assert getattr(submit.sampling, name) == (tuple(value) if isinstance(value, list) else value)


def test_seeds_differ_between_choices_and_fit_64_bits(server: Server) -> None:
    before = len(server.engine.received)
    post(server, COMPLETIONS, {"prompt": "hi", "n": 3, "seed": 2**63 - 2})
    seeds = {m.sampling.seed for m in server.engine.received[before:] if isinstance(m, Submit)}
    assert len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds if seed is not None)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("hi", 1), (["hi", "ho"], 2), (byte_ids("hi"), 1), ([byte_ids("hi"), byte_ids("ho")], 2)],
)
def test_forms_of_prompts(server: Server, prompt: Any, count: int) -> None:
    reply = post(server, COMPLETIONS, {"prompt": prompt})
    assert [choice["index"] for choice in reply["choices"]] == list(range(count))
    assert reply["usage"]["prompt_tokens"] == 2 * count


def test_echo(server: Server) -> None:
    assert post(server, COMPLETIONS, {"prompt": "hi ", "echo": True})["choices"][0]["text"] == "hi hello"
    assert post(server, COMPLETIONS, {"prompt": byte_ids("hé "), "echo": True})["choices"][0]["text"] == "hé hello"


def test_echo_alone_needs_no_engine(server: Server) -> None:
    before = len([m for m in server.engine.received if isinstance(m, Submit)])
    reply = post(server, COMPLETIONS, {"prompt": "x" * 512, "echo": True, "max_tokens": 0})
    assert reply["choices"][0] == {"index": 0, "text": "x" * 512, "logprobs": None, "finish_reason": "length"}
    assert reply["usage"]["completion_tokens"] == 0
    assert len([m for m in server.engine.received if isinstance(m, Submit)]) == before


def test_text_parts_are_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    submit = submitted(server, CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert bytes(submit.prompt[::4]).find(b"one\ntwo") > 0


def test_tokenize_and_detokenize(server: Server) -> None:
    plain = post(server, "/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert plain == {"count": 3, "max_model_len": 512, "tokens": byte_ids("hé"), "token_strs": ["h", "Ã", "©"]}
    chat = post(server, "/tokenize", {"model": "tiny", "messages": USER, "add_generation_prompt": False})
    assert post(server, "/detokenize", {"tokens": chat["tokens"]})["prompt"] == "<|im_start|>user\nhi<|im_end|>\n"
    assert error_of(server, "/detokenize", {"tokens": [258]})["param"] == "tokens"
    assert error_of(server, "/tokenize", {})["param"] == "prompt"


def test_text_that_the_tokenizer_has_nothing_for_names_its_field(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"known": 5}, unk_token="?"))
    words.save(str(write_model(tmp_path) / "tokenizer.json"))
    with fake_engine(tmp_path) as engine, serving(engine) as server:
        server.wait_for_health(200)
        for path, body, field in (
            (COMPLETIONS, {"prompt": "unknown"}, "prompt"),
            (COMPLETIONS, {"prompt": ["known", "unknown"]}, "prompt"),
            (CHAT, {"messages": USER}, "messages"),
            ("/tokenize", {"prompt": "unknown"}, "prompt"),
            ("/tokenize", {"messages": USER}, "messages"),
        ):
            error = error_of(server, path, {"model": "tiny", **body})
            assert error["param"] == field
            assert "tokenizer cannot encode the text" in error["message"]
