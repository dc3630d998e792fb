"""Tokenizing and incremental decoding: whole characters, nothing lost, through every odd byte."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from coldblock import AsyncClient
from coldblock.protocol.errors import ColdblockError
from coldblock.protocol.messages import Submit
from coldblock.protocol.text import TextStream, load_tokenizer
from fake_engine import MODEL, FakeEngine
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

WORDS = {"Ġhello": 300, "Ġworld": 301, "hello": 302}


def byte_level_tokenizer(template: bool = False) -> Tokenizer:
    """Ids 0..255 are the bytes, then a few words and the special token <end> (400)."""
    alphabet = byte_alphabet()
    vocab = {alphabet[b]: b for b in range(256)} | WORDS
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    if template:
        end = tokenizer.token_to_id("<end>")
        tokenizer.post_processor = processors.TemplateProcessing("<end> $A", special_tokens=[("<end>", end)])
    return tokenizer


def byte_alphabet() -> dict[int, str]:
    """GPT-2's table of printable characters that stand for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def metaspace_tokenizer() -> Tokenizer:
    """Words with a leading space, and byte fallback, as sentencepiece models have them."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁the": 256, "▁cat": 257, "s": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push([i]) for i in ids), stream.finish()]


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 text", "🙂👩‍👩‍👧 ok", "a�b", ""])
def test_each_character_comes_when_it_is_whole(text: str) -> None:
    got = pieces(byte_level_tokenizer(), list(text.encode()))
    assert "".join(got) == text
    if "�" not in text:
        assert all("�" not in piece for piece in got)
        assert got[-1] == "", "nothing is held back once a character is whole"


def test_an_invalid_run_then_valid_text_loses_nothing() -> None:
    ids = [*b"ok ", 0x80, 0xFF, 0xE3, 0x81, *b"then ", 0xF0, 0x9F, *"日".encode(), 0xC3]
    got = pieces(byte_level_tokenizer(), ids)
    assert "".join(got) == bytes(ids).decode(errors="replace")
    assert got[-1] == "�", "an unfinished character is shown at the end"


def test_random_bytes_are_what_decoding_at_once_gives() -> None:
    tokenizer = byte_level_tokenizer()
    rng = random.Random(7)
    for _ in range(200):
        ids = [rng.choice([rng.randrange(256), rng.randrange(300, 303), 0xE3, 0x81, 0x82, 400]) for _ in range(30)]
        ids = [i if i != 400 else tokenizer.token_to_id("<end>") for i in ids]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_sentencepiece_spaces_and_byte_runs() -> None:
    tokenizer = metaspace_tokenizer()
    ids = [256, 257, 258, *"é".encode(), 256, 0x80, 257]
    got = pieces(tokenizer, ids)
    assert "".join(got) == tokenizer.decode(ids) == "the catsé the� cat"
    assert got[:5] == ["the", " cat", "s", "", "é"]


def test_several_tokens_at_once_and_none() -> None:
    stream = TextStream(byte_level_tokenizer())
    assert stream.push([]) == ""
    assert stream.push([302, 301, 0xC3]) == ""
    assert stream.push([0xA9]) == "hello worldé"
    assert stream.push([]) == ""


def test_special_tokens_show_nothing_and_keep_the_context() -> None:
    tokenizer = metaspace_tokenizer()
    tokenizer.add_special_tokens(["<end>"])
    assert "".join(pieces(tokenizer, [256, tokenizer.token_to_id("<end>"), 257])) == "the cat"


def test_a_tokenizer_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ColdblockError, match=r"no tokenizer at .*tokenizer\.json: give tokenizer_path"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ColdblockError, match=r"tokenizer\.json is not a tokenizer: .*: give tokenizer_path"):
        load_tokenizer(str(tmp_path))


def test_texts_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    """Whatever the file says: that was for training."""
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text in ("long enough", "x"):
        assert load_tokenizer(str(tmp_path)).encode(text).ids == list(text.encode())


# ---------------------------------------------------------------- through the client


async def test_text_in_text_out_with_the_models_own_tokenizer(tmp_path: Path) -> None:
    byte_level_tokenizer(template=True).save(str(tmp_path / "tokenizer.json"))
    reply = [*"né".encode(), "swapped", *b"e", 0xC3]
    with FakeEngine(lambda prompt: reply, model=replace(MODEL, path=str(tmp_path))) as engine:
        async with asyncio.timeout(30), AsyncClient(engine.endpoint) as client:
            await client.ready()
            assert (await (await client.submit([1])).result()).text is None
            generation = await client.submit("hé")
            end = byte_level_tokenizer().token_to_id("<end>")
            assert generation.prompt_token_ids == [end, *"hé".encode()], (
                "special tokens as the post-processor adds them"
            )
            assert (await generation.result()).text == "née�"
            assert (await (await client.submit([1])).result()).text == "née�"
    assert len(engine.messages(Submit)) == 3


async def test_text_that_the_tokenizer_has_nothing_for_is_refused(tmp_path: Path) -> None:
    """It costs no other request anything."""
    tokenizer = Tokenizer(models.WordLevel({"known": 5}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with FakeEngine(lambda prompt: prompt) as engine:
        async with asyncio.timeout(30), AsyncClient(engine.endpoint, tokenizer_path=str(tmp_path)) as client:
            await client.ready()
            for text in ("known zz", "\ud800"):
                with pytest.raises(ValueError, match="tokenizer cannot encode the text"):
                    await client.submit(text)
            assert (await (await client.submit("known")).result()).token_ids == [5]


async def test_a_tokenizer_that_was_named_also_decodes_token_prompts(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with FakeEngine(lambda prompt: [300, 301]) as engine:
        async with asyncio.timeout(30), AsyncClient(engine.endpoint, tokenizer_path=str(tmp_path)) as client:
            await client.ready()
            chunks = [item async for item in await client.submit([1])]
    assert [getattr(c, "text", None) for c in chunks] == [" hello", " world", ""]


async def test_text_without_a_tokenizer_is_a_clear_error() -> None:
    with FakeEngine() as engine:
        async with asyncio.timeout(30), AsyncClient(engine.endpoint) as client:
            await client.ready()
            with pytest.raises(ColdblockError, match=r"/nonexistent/tokenizer\.json"):
                await client.submit("hello")
            assert (await (await client.submit([1])).result()).token_ids == [10, 11, 12]
