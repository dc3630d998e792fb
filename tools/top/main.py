"""Watch a running engine: KV tiers, copies, every live request and every swap.

Owns: the settings of `coldblock top`, and whether it draws on the terminal or prints. Does not know: how either looks.
"""

from __future__ import annotations

import os
import sys

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from ...protocol.client import AsyncClient
from ...protocol.errors import ColdblockError
from ...settings import EXIT_OK, Settings, load
from ..children import run_until_signal
from ..endpoints import usable_endpoint
from ..errors import ToolError, report
from . import plain

PROG = "coldblock top"
CONNECT_TIMEOUT_S = 5.0


class TopSettings(Settings):
    """Settings of `coldblock top`."""

    model_config = SettingsConfigDict(populate_by_name=False)  # "json" is a method's name, the flag's all the same

    endpoint: str | None = Field(None, description="the engine's endpoint; the default one if absent")
    once: bool = Field(False, description="print one snapshot and end")
    batch: int | None = Field(None, ge=1, description="print this many snapshots and end")
    json_lines: bool = Field(False, alias="json", description="print snapshots as JSON, one line each")
    interval: float = Field(
        0.5, gt=0, description="seconds between two snapshots; the live screen shows two a second at the most"
    )

    _usable_endpoint = field_validator("endpoint")(usable_endpoint)

    @model_validator(mode="after")
    def _one_length(self) -> TopSettings:
        if self.once and self.batch is not None:
            raise ValueError(f"--once and --batch {self.batch}: give one of them; --once is --batch 1")
        return self

    @property
    def snapshots(self) -> int | None:
        """How many to print; None: no end."""
        return 1 if self.once else self.batch

    @property
    def prints(self) -> bool:
        """Whether it prints, instead of drawing on the terminal."""
        draws = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") != "dumb"
        return self.json_lines or self.snapshots is not None or not draws


def main(argv: list[str]) -> int:
    """Run the command: live on a terminal; in a pipe, or where a flag asks for it, one snapshot after another."""
    settings = load(TopSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        return run_until_signal(lambda: watch(settings))
    except ColdblockError as error:
        return report(PROG, error)


async def watch(settings: TopSettings) -> int:
    """Show an engine that is there. Raises EngineUnreachable when none is, ToolError when there is no textual."""
    if not settings.prints:
        require_textual()
    async with AsyncClient(settings.endpoint, name="top") as client:
        await client.ready(CONNECT_TIMEOUT_S)
        if settings.prints:
            return await plain.watch(
                client, snapshots=settings.snapshots, interval_s=settings.interval, json_lines=settings.json_lines
            )
        from .app import TopApp  # it needs textual

        app = TopApp(client, settings.interval)
        await app.run_async()
        return app.return_code or EXIT_OK


def require_textual() -> None:
    """Raise ToolError where the live screen cannot be drawn."""
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise ToolError(
            "the live screen needs textual: pip install 'coldblock[tools]'; --once, --batch and --json work without it"
        ) from error
