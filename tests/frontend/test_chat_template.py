"""Templates: rendering, refusals, limits; and the text side of a model: BOS once, special tokens, long inputs."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from coldblock.frontend import chat_template
from coldblock.frontend.chat_template import ChatTemplate, find_template
from coldblock.frontend.errors import ApiError
from coldblock.frontend.tokenization import ModelText
from frontend_kit import BOS, CHATML, byte_ids, write_model
from tokenizers import Tokenizer, models, pre_tokenizers

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, str]] = USER, **options: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, options=options)


def refusal(source: str, messages: list[dict[str, str]] = USER) -> ApiError:
    with pytest.raises(ApiError) as caught:
        render(source, messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    return caught.value


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_block_lines_leave_no_blank_lines() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}") == "hi\n"


def test_helpers() -> None:
    assert render('{{ {"a": "<é>"} | tojson }}') == '{"a": "<é>"}'
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert render("{{ strftime_now('%Y') }}").startswith("2")
    assert render("{{ bos_token }}{{ tools is none }}{{ thinking }}", thinking=False) == "<s>TrueFalse"


def test_a_refusal_is_a_400_with_its_reason() -> None:
    assert "no system role" in refusal("{{ raise_exception('no system role') }}").message


@pytest.mark.parametrize(
    "source", ["{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ messages.foo.bar }}", "{{ 'a' + 1 }}", "{{ nope() }}"]
)
def test_a_template_that_breaks_is_a_400(source: str) -> None:
    assert "cannot render" in refusal(source).message


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os }}"]
)
def test_the_sandbox_holds(source: str) -> None:
    refusal(source)


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    assert "longer than 1000" in refusal("{% for i in range(2000) %}x{% endfor %}").message


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.0)
    assert "took longer" in refusal("{% for i in range(9) %}x{% endfor %}").message


@pytest.mark.parametrize("source", ["{{ 'a' * 10**12 }}", "{{ [0] * 999999999 }}", "{{ 9 ** 9 ** 9 }}"])
def test_giant_values_are_refused(source: str) -> None:
    assert "too large" in refusal(source).message


def test_ordinary_arithmetic_works() -> None:
    assert render("{{ 3 * 4 }} {{ 2 ** 5 }} {{ 'ab' * 2 }} {{ 2.5 * 2 }}") == "12 32 abab 5.0"


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, {"chat_template": "one"}) == "one"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert find_template(tmp_path, {"chat_template": several}) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path, {"chat_template": "one"}) == "file"


# ---------------------------------------------------------------- the model's text side


async def test_bos_comes_exactly_once_on_every_way(tmp_path: Path) -> None:
    text = ModelText.load(write_model(tmp_path, add_bos=True))
    rendered = await text.render(USER)
    chat = await text.encode(rendered)
    assert chat == [BOS, *(await text.encode("user\nhi"))[1:], *chat[8:]]
    assert chat[:2] == [BOS, ord("u")], "a rendered chat that begins with BOS must not get another"
    assert await text.encode("hi") == [BOS, *byte_ids("hi")], "a raw prompt gets the BOS the tokenizer adds"
    assert await text.encode("hi", add_special_tokens=False) == byte_ids("hi")


async def test_text_that_the_tokenizer_has_nothing_for_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    words = Tokenizer(models.WordLevel({"known": 5}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    text = ModelText.load(tmp_path)
    assert await text.encode("known known") == [5, 5]
    for odd in ("known zz", "zz " * 5000):
        with pytest.raises(ApiError, match="tokenizer cannot encode the text") as caught:
            await text.encode(odd)
        assert (caught.value.status, caught.value.param) == (400, "prompt")


async def test_no_bos_where_the_tokenizer_adds_none(model_text: ModelText) -> None:
    assert await model_text.encode("hi") == byte_ids("hi")


async def test_a_long_text_is_tokenized_beside_the_event_loop(
    model_text: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    original = ModelText._encode

    def recording(self: ModelText, text: str, special: bool) -> list[int]:
        threads.add(threading.current_thread())
        return original(self, text, special)

    monkeypatch.setattr(ModelText, "_encode", recording)
    assert len(await model_text.encode("word " * 10_000)) == 50_000
    assert threads and threading.current_thread() not in threads


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model_text: ModelText) -> None:
    with pytest.raises(ApiError) as caught:
        await asyncio.wait_for(model_text.encode("x" * 30_000_000, room=512), 5)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_token_bytes(model_text: ModelText) -> None:
    assert [model_text.token_bytes(token_id) for token_id in (0, 65, 0xE2, BOS, 9999)] == [
        b"\x00",
        b"A",
        b"\xe2",
        b"<|im_start|>",
        b"",
    ]


async def test_no_template_means_no_chat(tmp_path: Path) -> None:
    text = ModelText.load(write_model(tmp_path, template=None))
    with pytest.raises(ApiError, match="no chat template"):
        await text.render(USER)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(ValueError, match=name):
        ModelText.load(folder)


def test_special_tokens_by_text_or_by_id(tmp_path: Path) -> None:
    folder = write_model(tmp_path, template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [257, 256]}))
    assert asyncio.run(ModelText.load(folder).render(USER)) == "<|im_start|>|<|im_end|>|"
