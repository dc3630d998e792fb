"""Watch a running engine: model, KV tiers, throughput and every live request.

Owns: how `Stats` looks as text. Does not know: how the engine counts; it only asks and shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sys
from collections.abc import Iterator

import msgspec
from pydantic import Field, field_validator

from ..protocol.client import AsyncClient
from ..protocol.errors import ColdblockError, EngineDied, EngineUnreachable
from ..protocol.messages import RequestRow, Stats, TierUse
from ..settings import EXIT_OK, Settings, load
from .children import run_until_signal
from .endpoints import usable_endpoint
from .errors import report
from .terminal import Style, clip, count_of, human_bytes, human_seconds

PROG = "coldblock top"
BAR_WIDTH = 20  # so that the header fits 80 columns
CONNECT_TIMEOUT_S = 5.0
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


class TopSettings(Settings):
    """Settings of `coldblock top`."""

    endpoint: str | None = Field(None, description="the engine's endpoint; the default one if absent")
    once: bool = Field(False, description="print the state once and end")
    json_lines: bool = Field(False, alias="json", description="print the state as JSON, one line a time")
    interval: float = Field(1.0, gt=0, description="seconds between two looks")

    _usable_endpoint = field_validator("endpoint")(usable_endpoint)


def main(argv: list[str]) -> int:
    """Run the command: redraws on a terminal, else prints a block (or a JSON line) an interval."""
    settings = load(TopSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        return run_until_signal(lambda: watch(settings))
    except ColdblockError as error:
        return report(PROG, error)


async def watch(settings: TopSettings) -> int:
    """Ask and show until told to stop. An engine that goes away is waited for; one that was never there is an error."""
    style = Style(sys.stdout)
    redraw = sys.stdout.isatty() and not (settings.once or settings.json_lines)
    async with AsyncClient(settings.endpoint, name="top") as client:
        await client.ready(CONNECT_TIMEOUT_S)
        with _screen(redraw):
            gone = False
            while True:
                try:
                    stats = await client.stats()
                    text = msgspec.json.encode(stats).decode() if settings.json_lines else render(stats, style)
                    gone = False
                except (EngineUnreachable, EngineDied) as error:
                    if settings.once:
                        raise
                    text = "" if gone else f"engine gone: {error}; waiting for it"
                    gone = True
                if text:
                    _show(text, redraw)
                if settings.once:
                    return EXIT_OK
                await asyncio.sleep(settings.interval)


@contextlib.contextmanager
def _screen(redraw: bool) -> Iterator[None]:
    """The terminal's second screen, given back at the end however that comes."""
    if redraw:
        sys.stdout.write(_ENTER_SCREEN)
    try:
        yield
    finally:
        if redraw:
            sys.stdout.write(_LEAVE_SCREEN)
            sys.stdout.flush()


def _show(text: str, redraw: bool) -> None:
    if not redraw:
        print(text, flush=True)
        return
    size = shutil.get_terminal_size()
    lines = [clip(line, size.columns) + _CLEAR_LINE for line in text.splitlines()[: size.lines - 1]]
    sys.stdout.write(_HOME + "".join(f"{line}\n" for line in lines) + _CLEAR_REST)
    sys.stdout.flush()


def render(stats: Stats, style: Style) -> str:
    """The whole state as text: a header of four lines, then one line a request."""
    return "\n".join([*render_header(stats, style), "", *render_requests(stats.requests, style), ""])


def render_header(stats: Stats, style: Style) -> list[str]:
    """Model, GPU tier, CPU tier, load: one line each."""
    model, offload = stats.model, stats.cpu_offload
    filled = round(BAR_WIDTH * min(1.0, offload.payload_bytes / max(1, offload.budget_bytes)))
    cpu_bar = style.paint("█" * filled, "yellow") + style.paint("·" * (BAR_WIDTH - filled), "dim")
    cpu = (
        f"CPU {cpu_bar} {count_of(offload.blocks, 'block')}, {human_bytes(offload.payload_bytes)} of "
        f"{human_bytes(offload.budget_bytes)}, most at once {count_of(offload.max_swapped_requests, 'request')}"
    )
    return [
        f"{style.paint(model.name, 'bold')} on {model.device} · KV {model.kv_cache_dtype}, {model.block_size} tokens "
        f"and {human_bytes(model.kv_block_bytes)} a block · up {human_seconds(stats.uptime_s)}",
        f"GPU {gpu_bar(stats.gpu, style)} {stats.gpu.used} used, {stats.gpu.cached} cached, {stats.gpu.in_flight} in "
        f"flight, {stats.gpu.free} free of {count_of(stats.gpu.total, 'block')}",
        cpu if offload.enabled else "CPU offload is off",
        f"{stats.running} running · {stats.waiting} waiting · {stats.swapped} swapped · "
        f"{stats.tokens_per_s:.1f} tok/s · step {stats.step_ms:.1f} ms · {count_of(stats.peers, 'peer')}",
    ]


def gpu_bar(use: TierUse, style: Style) -> str:
    """The pool by state in `BAR_WIDTH` cells; a state that holds blocks shows at least where its share rounds to."""
    edges, counted = [0], 0
    for blocks in (use.used, use.cached, use.in_flight):
        counted += blocks
        edges.append(round(BAR_WIDTH * counted / max(1, use.total)))
    used, cached, in_flight = (right - left for left, right in itertools.pairwise(edges))
    return (
        style.paint("█" * used, "green")
        + style.paint("▒" * cached, "cyan")
        + style.paint("▚" * in_flight, "yellow")
        + style.paint("·" * (BAR_WIDTH - edges[-1]), "dim")
    )


_COLUMNS = ("REQUEST", "PEER", "STATE", "PROMPT", "NEW", "GPU", "CPU", "SWAPS", "STALL", "AGE", "PRIO")
_LEFT_ALIGNED = 3


def render_requests(rows: tuple[RequestRow, ...], style: Style) -> list[str]:
    """A table of the live requests, as wide as its contents."""
    if not rows:
        return [style.paint("no requests", "dim")]
    table = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < _LEFT_ALIGNED else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    return [style.paint(lines[0], "bold"), *lines[1:]]


def _cells(row: RequestRow) -> tuple[str, ...]:
    numbers = (row.prompt_tokens, row.generated_tokens, row.gpu_blocks, row.cpu_blocks, row.swaps)
    times = (f"{row.stall_s:.2f} s", f"{row.age_s:.1f} s")
    return (row.request_id[:24], row.peer[:16], row.state, *map(str, numbers), *times, str(row.priority))
