"""The demo's parts: two streams in whole lines, events told apart, stalls summed, HTTP read; not the models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from coldblock.tools import demo
from coldblock.tools.errors import ToolError
from coldblock.tools.terminal import Style, describe_swap
from fake_engine import swap_event


class Paper:
    """Stands for a stream that is no terminal."""

    def isatty(self) -> bool:
        return False


@pytest.fixture
def show() -> demo.Show:
    return demo.Show(Style(Paper()), 24)  # type: ignore[arg-type]


def test_streams_are_printed_in_whole_lines(show: demo.Show, capsys: pytest.CaptureFixture[str]) -> None:
    for piece in ("The quick ", "brown fox"):
        show.text("A", piece)
    show.text("B", "Hi\nthere")
    show.text("A", " jumps over it")
    show.end("B", "stop")
    show.end("A", "stop")
    assert capsys.readouterr().out.splitlines() == [
        "B │ Hi",
        "A │ The quick brown fox",
        "B │ there",
        "B │ ■ complete",
        "A │ jumps over it",
        "A │ ■ complete",
    ]


def test_a_word_longer_than_the_line_is_cut(show: demo.Show, capsys: pytest.CaptureFixture[str]) -> None:
    show.text("A", "x" * 45)
    show.end("A", "stop")
    assert [len(line) for line in capsys.readouterr().out.splitlines()[:3]] == [24, 24, 9]


def test_events_are_told_apart_and_stalls_summed(show: demo.Show, capsys: pytest.CaptureFixture[str]) -> None:
    show.request_ids["chatcmpl-1"] = "A"
    show.swap(swap_event("chatcmpl-1-0", "swapping_out", time=10.0))
    show.swap(swap_event("chatcmpl-1-0", "swapped", time=10.1))
    show.swap(swap_event("chatcmpl-2-0", "rejected", time=10.2, detail="budget 0"))  # no chunk yet: it must be B
    show.swap(swap_event("chatcmpl-1-0", "resumed", time=12.5))
    assert show.swaps.stalls() == {"A": 2.5}
    show.summary(1)
    shown = capsys.readouterr().out
    assert "B not swapped: budget 0" in shown
    assert "1/2 answers complete" in shown
    assert "1 swap: 3 blocks, 1.7 MiB, copied in 1.50 ms" in shown
    assert "1 resume: 3 blocks" in shown
    assert "A waited 2.5 s" in shown


def test_every_phase_has_its_line() -> None:
    lines = {
        phase: describe_swap(swap_event(phase=phase), "A") for phase in ("swapping_out", "swapping_in", "rejected")
    }
    assert "3 blocks, 1.7 MiB to CPU (growth)" in lines["swapping_out"]
    assert "back to GPU" in lines["swapping_in"]
    assert "no room in the CPU tier" in lines["rejected"]
    ahead = describe_swap(swap_event(phase="copied_out", reason="write_behind"), "A")
    assert ahead == "▽ 3 blocks, 1.7 MiB copied to CPU (write-behind) in 1.50 ms"


def test_a_swap_that_needs_no_copy_says_so(show: demo.Show, capsys: pytest.CaptureFixture[str]) -> None:
    """Not "0 blocks, 0 B in 0.00 ms": the copies were made before, or the blocks are still where they were."""
    for phase in ("swapping_out", "swapped", "swapping_in", "resumed"):
        show.swap(swap_event("x", phase, blocks=0, bytes=0, seconds=0.0))
    show.swap(swap_event("x", "copied_out", reason="write_behind"))
    show.summary(2)
    shown = capsys.readouterr().out
    assert shown.count("nothing to copy") == 6 and "0 blocks" not in shown and "0 B" not in shown
    assert "1 swap: nothing to copy" in shown
    assert "ahead of need, so that a swap has less to copy: 3 blocks, 1.7 MiB, copied in 1.50 ms" in shown


class Server(BaseHTTPRequestHandler):
    """Answers chat completions from `reply`: (status, body)."""

    reply = (200, b"")

    def do_POST(self) -> None:
        status, body = self.reply
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield "127.0.0.1", server.server_port
    server.shutdown()
    server.server_close()


async def test_chat_chunks_are_read(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [{"id": "x", "choices": []}, {"id": "x", "choices": [{"delta": {"content": "é"}, "finish_reason": None}]}]
    body = ": swap event\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    monkeypatch.setattr(Server, "reply", (200, body.encode()))
    assert [chunk async for chunk in demo.HttpChat(*address).stream("q")] == chunks


async def test_refusal_is_raised_with_the_reply(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "reply", (503, b"engine away"))
    with pytest.raises(ToolError, match=r"503.*engine away"):
        async for _ in demo.HttpChat(*address).stream("q"):
            pass


async def test_error_event_in_mid_stream_is_raised(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "reply", (200, b'data: {"error": {"message": "engine died"}}\n\n'))
    with pytest.raises(ToolError, match="engine died"):
        async for _ in demo.HttpChat(*address).stream("q"):
            pass


def test_a_pool_too_small_for_one_answer_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main(["--num-gpu-blocks", "1"])
    assert end.value.code == 2
    assert "--num-gpu-blocks" in capsys.readouterr().err
