"""Incremental text: nothing halved, nothing lost, stops never shown and unrelated text never delayed."""

from __future__ import annotations

import pytest
from coldblock.frontend.detokenizer import Detokenizer, StopStrings
from frontend_kit import BOS, EOS, byte_ids, byte_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

TOKENIZER = byte_tokenizer()


def fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models are converted: "▁" is a space, the first one is dropped, unknown bytes are <0xXX>."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + index for index, piece in enumerate(["▁hello", "▁world", "ok", "a"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, byte_ids("é€😀k")) == ["", "é", "", "", "€", "", "", "", "😀", "k", ""]


@given(st.text(max_size=40), st.integers(1, 7))
def test_any_text_comes_back(text: str, step: int) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = byte_ids(text.replace("\N{REPLACEMENT CHARACTER}", ""))
    got = "".join(detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step))
    assert got + detokenizer.flush() == bytes(ids).decode()


@given(st.lists(st.binary(max_size=5) | st.text(max_size=5).map(str.encode), max_size=6).map(b"".join))
def test_any_bytes_come_back_as_a_whole_decode_gives_them(data: bytes) -> None:
    whole = TOKENIZER.decode(list(data))
    got = "".join(pieces(TOKENIZER, list(data)))
    assert got.replace("\N{REPLACEMENT CHARACTER}", "") == whole.replace("\N{REPLACEMENT CHARACTER}", "")


def test_an_invalid_run_then_valid_text(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, byte_ids(b"\xff\xfe") + byte_ids("then é"))) == "��then é"


def test_an_endless_invalid_run_is_given_out_and_keeps_the_character_after_it(tokenizer: Tokenizer) -> None:
    got = pieces(tokenizer, byte_ids(b"\xff" * 1000) + byte_ids("😀 ok"))
    assert "".join(got[:500]).count("�") > 450, "a run of invalid bytes must not be held back for ever"
    assert "".join(got).endswith("�😀 ok")


def test_an_unfinished_character_at_the_end_is_told(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, byte_ids(b"ab\xe2\x82")) == ["a", "b", "", "", "�"]


def test_special_tokens_are_silent(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, [BOS, *byte_ids("a"), EOS, *byte_ids("b"), *[EOS] * 40, *byte_ids("c")])) == "abc"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0xE4, 0xBD, 0xA0, 0xE5, 0xA5, 0xBD, 259], "你好a"),
        ([0xE4, 0xBD, 0xA0, 0xE5, 259, 256], "你�a hello"),  # here the library's stream throws: "你" becomes "���"
        ([259, 0xFF, 0xFE, 258, 257], "a��ok world"),
    ],
)
def test_byte_fallback_recovers(ids: list[int], text: str) -> None:
    assert "".join(pieces(fallback_tokenizer(), ids)) == text


def test_recovery_delays_nothing() -> None:
    assert pieces(fallback_tokenizer(), [0xE4, 0xBD, 0xA0, 0xE5, 259, 256]) == ["", "", "你", "", "�a", " hello", ""]


def test_a_continuation_keeps_its_leading_space() -> None:
    assert "".join(pieces(fallback_tokenizer(), [257, 256], prompt=(256,))) == " world hello"


def test_a_prompt_that_ends_in_half_a_character_is_not_repeated(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, byte_ids("ok"), prompt=tuple(byte_ids(b"prompt\xe2\x82")))) == "ok"


# ---------------------------------------------------------------- stop strings


def shown(stops: list[str], text: str, *, include: bool = False) -> tuple[list[str], str | None]:
    """What is shown after each character, and the stop that matched."""
    matcher = StopStrings(stops, include)
    out = []
    for char in text:
        out.append(matcher.push(char))
        if matcher.matched is not None:
            return out, matcher.matched
    return [*out, matcher.flush()], None


def test_no_part_of_a_stop_is_shown() -> None:
    assert shown(["DEFGHIJ"], "ABCDEFGHIJKL") == (["A", "B", "C", *[""] * 7], "DEFGHIJ")


def test_a_false_start_is_shown_as_soon_as_it_is_one() -> None:
    assert shown(["DEFG"], "ADEXB") == (["A", "", "", "DEX", "B", ""], None)


def test_a_long_stop_does_not_delay_other_text() -> None:
    assert shown(["x" * 200], "hello") == ([*"hello", ""], None)


def test_the_held_tail_comes_at_the_end() -> None:
    assert shown(["END"], "the EN") == (["t", "h", "e", " ", "", "", "EN"], None)


def test_the_stop_that_is_complete_first_wins() -> None:
    assert shown(["abcde", "bcd"], "xabcdef") == (["x", "", "", "", "a"], "bcd")


def test_the_stop_can_be_included() -> None:
    assert "".join(shown(["bc"], "abcd", include=True)[0]) == "abc"


def test_a_stop_amid_one_push_cuts_there() -> None:
    matcher = StopStrings(["\n\n"])
    assert (matcher.push("one\n"), matcher.push("\ntwo\n\n"), matcher.push("more"), matcher.flush()) == (
        "one",
        "",
        "",
        "",
    )


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), st.integers(1, 12))
@example("abab", ["abab", "ba"], 4)
def test_streaming_equals_searching_the_whole(text: str, stops: list[str], step: int) -> None:
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    matcher = StopStrings(stops)
    got = "".join(matcher.push(text[start : start + step]) for start in range(0, len(text), step)) + matcher.flush()
    assert got == (text[: min(ends)[1]] if ends else text)
    assert (matcher.matched is not None) == bool(ends)
