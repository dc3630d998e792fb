"""The engines behind a frontend: which are alive, which takes the next request, what text their models speak.

Owns: the clients, the choice among them, the loaded `ModelText`s, and what /health says.
Does not know: HTTP routes or how a generation is streamed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..protocol.client import AsyncClient
from ..protocol.errors import ColdblockError
from ..protocol.messages import ModelInfo, Stats
from .errors import ApiError, engine_unavailable
from .tokenization import ModelText

_WATCH_INTERVAL_S = 0.25
_STATS_TIMEOUT_S = 1.0

log = logging.getLogger("coldblock.frontend")


@dataclass(eq=False)
class Engine:
    """One engine as seen from here. `open`: generations this frontend has running on it."""

    endpoint: str
    client: AsyncClient
    open: int = 0


@dataclass(frozen=True)
class Target:
    """Where a request goes: an engine, its model, the model's text side, and the name the API gives it."""

    engine: Engine
    model: ModelInfo
    text: ModelText
    name: str


class EnginePool:
    """Engines that serve the same API. `on_ready` is called once, when the first one can take requests."""

    def __init__(
        self,
        clients: Sequence[tuple[str, AsyncClient]],
        *,
        served_model_name: str | None = None,
        tokenizer: Path | None = None,
        on_ready: Callable[[Target], None] | None = None,
    ) -> None:
        self.engines = tuple(Engine(endpoint, client) for endpoint, client in clients)
        self._served_model_name = served_model_name
        self._tokenizer = tokenizer
        self._on_ready = on_ready
        self._texts: dict[Path, ModelText] = {}
        self._problems: dict[Path, str] = {}
        self._loading = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and keep models' text sides loaded in the background. Does not wait for an engine."""
        for engine in self.engines:
            await engine.client.connect()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop watching and leave the engines; open generations end with an error."""
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        for engine in self.engines:
            await engine.client.close()

    async def choose(self, name: str | None) -> Target:
        """The least loaded living engine that serves model `name` (any, for None). Raises a 404 or 503 `ApiError`."""
        living = self._living()
        if not living:
            raise engine_unavailable(self._no_engine())
        fitting = [pair for pair in living if name is None or self.name_of(pair[1]) == name]
        if not fitting:
            known = ", ".join(sorted({self.name_of(model) for _, model in living}))
            raise ApiError(404, f"no model {name!r}; served: {known}", param="model", code="model_not_found")
        engine, model = min(fitting, key=lambda pair: pair[0].open)
        return Target(engine, model, await self._text_of(model), self.name_of(model))

    def name_of(self, model: ModelInfo) -> str:
        """What the API calls a model."""
        return self._served_model_name or model.name

    def models(self) -> list[ModelInfo]:
        """The models of the living engines, one for each name."""
        return list({self.name_of(model): model for _, model in self._living()}.values())

    def problem(self) -> str | None:
        """Why no request can be served now, or None when one can."""
        living = self._living()
        if not living:
            return self._no_engine()
        folders = [self._folder(model) for _, model in living]
        if any(folder in self._texts for folder in folders):
            return None
        return self._problems.get(folders[0], "the tokenizer is being loaded")

    async def stats(self, exporter: str = "") -> list[tuple[Engine, Stats | None]]:
        """Each engine's stats; None for those that do not answer in time. See `AsyncClient.stats` for `exporter`."""
        answers = await asyncio.gather(*(_stats_of(engine, exporter) for engine in self.engines))
        return list(zip(self.engines, answers, strict=True))

    def _living(self) -> list[tuple[Engine, ModelInfo]]:
        return [(e, e.client.model) for e in self.engines if e.client.alive and e.client.model is not None]

    def _no_engine(self) -> str:
        return f"no engine answers at {', '.join(engine.endpoint for engine in self.engines)}, or it is stuck"

    def _folder(self, model: ModelInfo) -> Path:
        return self._tokenizer or Path(model.path)

    async def _text_of(self, model: ModelInfo) -> ModelText:
        """The model's text side, loaded when it is not yet. Raises a 503 that says what is missing."""
        folder = self._folder(model)
        if folder not in self._texts:
            async with self._loading:
                if folder not in self._texts:
                    await self._load(folder)
        return self._texts[folder]

    async def _load(self, folder: Path) -> None:
        try:
            self._texts[folder] = await asyncio.to_thread(ModelText.load, folder)
        except (OSError, ValueError) as error:
            reason = f"{error}; name a folder that has it with --tokenizer"
            if self._problems.get(folder) != reason:
                log.error("%s", reason)
            self._problems[folder] = reason
            raise engine_unavailable(reason) from error

    async def _watch(self) -> None:
        """Load what living engines need before a request asks for it, and tell once that requests can come."""
        while True:
            for engine, model in self._living():
                with suppress(ApiError):  # logged, and told by /health
                    target = Target(engine, model, await self._text_of(model), self.name_of(model))
                    if self._on_ready is not None:
                        self._on_ready(target)
                        self._on_ready = None
            await asyncio.sleep(_WATCH_INTERVAL_S)


async def _stats_of(engine: Engine, exporter: str) -> Stats | None:
    if not engine.client.alive:
        return None
    try:
        return await engine.client.stats(_STATS_TIMEOUT_S, exporter=exporter)
    except ColdblockError:
        return None
