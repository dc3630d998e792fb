"""`coldblock chat` against a scripted engine, as a script in a pipe uses it; and Ctrl-C in mid-answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from coldblock.protocol.codec import unpack_tokens
from coldblock.protocol.messages import Refused, Submit
from fake_engine import MODEL, FakeEngine
from tiny_tokenizer import write_tiny_tokenizer
from tokenizers import Tokenizer

TIMEOUT_S = 60


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return write_tiny_tokenizer(tmp_path / "model")


@pytest.fixture
def engine(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[FakeEngine]:
    """Answers each message with its last word and a swap in the middle of it."""

    def answer(prompt: list[int]) -> list[object]:
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        message = text.split("<s>u:")[-1].split("</s>")[0]
        if message == "too long":
            return [Refused("", "prompt", "9999 tokens", "at most 1024")]
        ids = tokenizer.encode(f"You said {message}.").ids
        return [*ids[:5], "swapping_out", "swapped", "resumed", *ids[5:]]

    model = msgspec.structs.replace(MODEL, path=str(tmp_path / "model"))
    with FakeEngine(answer, model=model) as fake:  # type: ignore[arg-type]
        yield fake


def chat(engine: FakeEngine, *lines: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "coldblock", "chat", "--endpoint", engine.endpoint, *flags]
    text = "".join(f"{line}\n" for line in lines)
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_pipe_gets_answers_alone_on_stdout_and_swaps_on_stderr(engine: FakeEngine) -> None:
    done = chat(engine, "héllo 🎉", "", "bye")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "You said héllo 🎉.\nYou said bye.\n"
    assert done.stderr.count("swapped out: 3 blocks, 1.7 MiB in 1.50 ms") == 2
    assert "resumed" in done.stderr
    assert "\x1b" not in done.stderr


def test_conversation_is_rendered_whole_until_reset(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    done = chat(engine, "one", "two", "/reset", "three", "/quit", "four", flags=("--system", "Be brief."))
    assert done.returncode == 0, done.stderr
    prompts = [
        tokenizer.decode(unpack_tokens(m.prompt), skip_special_tokens=False)
        for m in engine.received
        if isinstance(m, Submit)
    ]
    assert prompts == [
        "<s>s:Be brief.</s><s>u:one</s><s>a:",
        "<s>s:Be brief.</s><s>u:one</s><s>a:You said one.</s><s>u:two</s><s>a:",
        "<s>s:Be brief.</s><s>u:three</s><s>a:",
    ]


def test_sampling_flags_reach_the_engine(engine: FakeEngine) -> None:
    flags = ("--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--max-tokens", "4")
    done = chat(engine, "x", flags=flags)
    assert done.stdout == "You \n"
    assert "longest length" in done.stderr
    sampling = engine.wait_for(Submit)[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 7, 4)


def test_stats_and_unknown_commands(engine: FakeEngine) -> None:
    done = chat(engine, "/stats", "/what")
    assert "fake-model on cpu" in done.stderr
    assert "no command /what" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("line", "reason"), [("too long", "at most 1024"), ("refuse me", "not this")])
def test_failure_ends_a_pipe_with_the_reason(engine: FakeEngine, line: str, reason: str) -> None:
    done = chat(engine, line, "more")
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stdout == ""


def test_bytes_that_are_no_text_are_replaced(engine: FakeEngine) -> None:
    command = [sys.executable, "-m", "coldblock", "chat", "--endpoint", engine.endpoint, "--system", b"\xfe"]
    done = subprocess.run(
        command, input=b"\xff\n", capture_output=True, timeout=TIMEOUT_S, env={**os.environ, "PYTHONUTF8": "1"}
    )
    assert (done.returncode, done.stdout.decode()) == (0, "You said \ufffd.\n"), done.stderr.decode()


def test_missing_tokenizer_names_the_flag(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    done = chat(engine, "x")
    assert done.returncode == 1
    assert "--tokenizer" in done.stderr


def test_interrupt_stops_the_answer_and_not_the_chat(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def answer(prompt: list[int]) -> Iterator[int]:
        while True:
            yield from tokenizer.encode("on and on ").ids

    model = msgspec.structs.replace(MODEL, path=str(tmp_path / "model"))
    with FakeEngine(answer, model=model, delay_s=0.01) as engine:
        command = [sys.executable, "-m", "coldblock", "chat", "--endpoint", engine.endpoint]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("talk\n")
        process.stdin.flush()
        assert process.stdout.read(6) == "on and"
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + TIMEOUT_S
        while not engine.aborted and time.monotonic() < deadline:
            time.sleep(0.02)
        _, err = process.communicate("/stats\n/quit\n", timeout=TIMEOUT_S)
        assert process.returncode == 0, err
        assert "[stopped]" in err
        assert "fake-model on cpu" in err
        assert len(engine.aborted) == 1
