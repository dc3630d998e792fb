"""Two chat answers, one KV pool too small for both: watch the blocks swap and both answers complete.

Owns: the show: an engine and a frontend of its own, two requests over HTTP, each swap event as it happens, a summary.
Does not know: how swapping works; it sees what any HTTP client and any subscriber of the events sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from ..protocol.client import AsyncClient
from ..protocol.errors import ColdblockError
from ..protocol.messages import ModelInfo, SwapEvent
from ..settings import EXIT_FAILED, EXIT_OK, Settings, UsageError, load
from .children import run_until_signal
from .daemons import running_engine, running_frontend
from .errors import ToolError, report
from .fetch_model import resolve_model
from .terminal import Style, count_of, describe_swap, human_bytes, human_seconds

PROG = "coldblock demo"
MODEL = "smollm2-135m"
POOL_BLOCKS = 10  # of 16 tokens: either conversation fits alone; both need 14 even when the answers are short
MIN_TOKENS = 72  # a prompt is about 40 tokens, so a conversation holds 7 blocks at least
MAX_TOKENS = 112
QUESTIONS = {
    "A": "Explain what a hash table is and what it is good for.",
    "B": "Why is the sky blue, and why is the sunset red?",
}
_COLOURS = {"A": "cyan", "B": "magenta"}
_WIDTH = 88
_SOCKET_TIMEOUT_S = 120.0

Chunk = dict[str, Any]


class DemoSettings(Settings):
    """Settings of `coldblock demo`."""

    num_gpu_blocks: int = Field(
        POOL_BLOCKS, ge=POOL_BLOCKS, description="KV blocks in the pool; with many more, nothing needs to swap"
    )


def main(argv: list[str]) -> int:
    """Run the demo; 0 only if both answers completed and a swap happened."""
    settings = load(DemoSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        resolve_model(MODEL)
        return run_until_signal(lambda: run_demo(settings.num_gpu_blocks))
    except (ColdblockError, UsageError) as error:
        return report(PROG, error)


async def run_demo(blocks: int) -> int:
    """Start both daemons, show the two answers, stop both."""
    show = Show(Style(sys.stdout), min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))
    show.title(f"Coldblock: two chats, and a KV pool of {count_of(blocks, 'block')} that cannot hold both")
    began = time.monotonic()
    async with (
        running_engine(MODEL, "--num-gpu-blocks", str(blocks)) as endpoint,
        running_frontend(endpoint, "--shutdown-timeout", "1") as (host, port),
        AsyncClient(endpoint, name="demo") as client,
    ):
        show.ready(await client.ready(), f"http://{host}:{port}/v1", time.monotonic() - began)
        completed = await watch_both(client, HttpChat(host, port), show)
    show.summary(completed)
    return EXIT_OK if completed == len(QUESTIONS) and show.swaps.of("swapped") else EXIT_FAILED


async def watch_both(client: AsyncClient, chat: HttpChat, show: Show) -> int:
    """Ask A; at its first token ask B. Shows both answers and all swap events; returns how many answers completed."""
    events = client.events()
    await anext(events)  # the first stats: from here on no event is missed
    watching = asyncio.create_task(_show_events(events, show))
    first_token = asyncio.Event()
    answers = [asyncio.create_task(_show_answer("A", chat, show, first_token))]
    try:
        await first_token.wait()
        answers.append(asyncio.create_task(_show_answer("B", chat, show, asyncio.Event())))
        return sum(await asyncio.gather(*answers))
    finally:
        for task in (*answers, watching):
            task.cancel()
        await asyncio.gather(*answers, watching, return_exceptions=True)


async def _show_events(events: AsyncIterator[object], show: Show) -> None:
    async for event in events:
        if isinstance(event, SwapEvent):
            show.swap(event)


async def _show_answer(label: str, chat: HttpChat, show: Show, first_token: asyncio.Event) -> bool:
    """Stream one answer; True if it came to its end. `first_token` is set at its first chunk, or when it fails."""
    show.question(label, QUESTIONS[label])
    finish = None
    try:
        async for chunk in chat.stream(QUESTIONS[label]):
            first_token.set()
            show.request_ids[chunk["id"]] = label
            for choice in chunk["choices"]:
                show.text(label, choice["delta"].get("content") or "")
                finish = choice["finish_reason"] or finish
    finally:
        first_token.set()
    show.end(label, finish)
    return finish in ("stop", "length")


class HttpChat:
    """Streams /v1/chat/completions with the standard library, each request on a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)

    async def stream(self, question: str) -> AsyncIterator[Chunk]:
        """The chunks of one answer. Raises ToolError when the server refuses or the stream breaks."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()

        def put(item: Chunk | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits for more
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        threading.Thread(target=self._read, args=(question, put), name="demo-http", daemon=True).start()
        while (item := await arrived.get()) is not None:
            if isinstance(item, Exception):
                raise ToolError(f"the answer broke off: {item}") from item
            if "error" in item:
                raise ToolError(f"the answer broke off: {item['error']['message']}")
            yield item

    def _read(self, question: str, put: Callable[[Chunk | Exception | None], None]) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "min_tokens": MIN_TOKENS,
            "max_tokens": MAX_TOKENS,
            "stream": True,
        }
        connection = http.client.HTTPConnection(*self._address, timeout=_SOCKET_TIMEOUT_S)
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), headers={"content-type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise ToolError(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
            for line in response:
                if line.startswith(b"data: {"):
                    put(json.loads(line[len(b"data: ") :]))
            put(None)
        except (OSError, http.client.HTTPException, ToolError) as error:
            put(error)
        finally:
            connection.close()


@dataclass
class SwapLog:
    """All swap events so far, by the label of their request."""

    events: list[tuple[str, SwapEvent]] = field(default_factory=list)

    def of(self, phase: str) -> list[SwapEvent]:
        """The events of one phase."""
        return [event for _, event in self.events if event.phase == phase]

    def stalls(self) -> dict[str, float]:
        """Seconds each request was away from the GPU: from the start of its swap-out to its resume."""
        left: dict[str, float] = {}
        total: dict[str, float] = defaultdict(float)
        for label, event in self.events:
            if event.phase == "swapping_out":
                left[label] = event.time
            elif event.phase == "resumed" and label in left:
                total[label] += event.time - left.pop(label)
        return dict(total)


def _moved(events: Sequence[SwapEvent]) -> str:
    """What the copies of these events came to."""
    blocks, size = sum(event.blocks for event in events), sum(event.bytes for event in events)
    copy = human_seconds(sum(event.seconds for event in events))
    return f"{count_of(blocks, 'block')}, {human_bytes(size)}, copied in {copy}" if blocks else "nothing to copy"


class Show:
    """What the reader sees: whole lines only, so that two streams stay readable side by side."""

    def __init__(self, style: Style, width: int) -> None:
        self.swaps = SwapLog()
        self.request_ids: dict[str, str] = {}
        self._style = style
        self._width = width
        self._pending: dict[str, str] = defaultdict(str)
        self._began = time.monotonic()

    def title(self, text: str) -> None:
        """The first line."""
        self._print(self._style.paint(text, "bold"))
        self._print("starting the engine and the HTTP frontend ...")

    def ready(self, model: ModelInfo, url: str, seconds: float) -> None:
        """Both daemons answer."""
        pool = f"{count_of(model.num_gpu_blocks, 'block')} of {model.block_size} tokens"
        size = human_bytes(model.num_gpu_blocks * model.kv_block_bytes)
        self._print(f"ready after {human_seconds(seconds)}: {model.name} on {model.device} at {url}")
        self._print(f"KV pool: {pool}, {model.kv_cache_dtype}, {size}")
        self._began = time.monotonic()

    def question(self, label: str, text: str) -> None:
        """A chat begins."""
        self._print("")
        self._print(self._bar(label) + self._style.paint(text, "bold"))

    def text(self, label: str, text: str) -> None:
        """More of an answer; printed once it fills a line."""
        pending = self._pending[label] + text
        room = self._width - 4
        while "\n" in pending or len(pending) > room:
            line, newline, rest = pending.partition("\n")
            if not newline or len(line) > room:
                cut = pending.rfind(" ", 0, room + 1)
                cut = cut if cut > 0 else room
                line, rest = pending[:cut], pending[cut:].removeprefix(" ")
            self._print(self._bar(label) + line)
            pending = rest
        self._pending[label] = pending

    def end(self, label: str, finish: str | None) -> None:
        """An answer is complete, or as long as it was allowed to be."""
        if last := self._pending.pop(label, ""):
            self._print(self._bar(label) + last)
        end = f"… ■ complete at the {MAX_TOKENS} tokens asked for" if finish == "length" else "■ complete"
        self._print(self._bar(label) + self._style.paint(end, "dim"))

    def swap(self, event: SwapEvent) -> None:
        """A swap event."""
        label = self._label(event)
        self.swaps.events.append((label, event))
        names = ("red",) if event.phase == "rejected" else ("yellow",) if event.seconds else ("yellow", "dim")
        self._print("    " + self._style.paint(describe_swap(event, label), *names))

    def summary(self, completed: int) -> None:
        """What happened, in numbers."""
        seconds = time.monotonic() - self._began
        self._print("")
        done = f"{completed}/{len(QUESTIONS)} answers complete in {human_seconds(seconds)}"
        self._print(self._style.paint(done, "bold", "green" if completed == len(QUESTIONS) else "red"))
        for phase, noun in (("swapped", "swap"), ("resumed", "resume")):
            events = self.swaps.of(phase)
            moved = f": {_moved(events)}" if events else ""
            self._print(f"  {count_of(len(events), noun)}{moved}")
        if ahead := self.swaps.of("copied_out"):
            self._print(f"  ahead of need, so that a swap has less to copy: {_moved(ahead)}")
        for label, stall in sorted(self.swaps.stalls().items()):
            self._print(f"  {label} waited {human_seconds(stall)} in CPU memory, then went on where it had stopped")
        if not self.swaps.of("swapped"):
            self._print("  nothing had to move: the pool was large enough for both")
        self._print(self._style.paint(f"next: coldblock serve {MODEL}, then coldblock chat and coldblock top", "dim"))

    def _label(self, event: SwapEvent) -> str:
        """Which chat an event is about; one that has no chunk yet is the one whose id is not known."""
        for chunk_id, label in self.request_ids.items():
            if event.request_id.startswith(chunk_id):
                return label
        return next((label for label in QUESTIONS if label not in self.request_ids.values()), "?")

    def _bar(self, label: str) -> str:
        return self._style.paint(f"{label} │ ", _COLOURS[label])

    def _print(self, line: str) -> None:
        print(line, flush=True)
