"""What the engines publish, read once and handed to every browser that looks.

Owns: one subscription an engine while somebody looks and none otherwise; for each viewer what it has not taken yet.
Does not know: HTTP, or what the bytes say.

A viewer that is slow gets the newest state of each engine and never an older one. Of the moves it gets the newest
`MAX_MOVES`, and how many it missed: so it costs the same memory however long it sleeps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import monotonic
from typing import cast

from ...protocol.errors import ColdblockError
from ...protocol.messages import ModelInfo, Stats, SwapEvent
from ..engines import Engine
from . import view

MAX_MOVES = 1000
TICK_S = 0.5  # as often as engines publish: a page hears something of every engine that often
QUIET_S = 5.0  # an engine that answers and has published nothing for so long is said to do so


class Viewer:
    """One browser: what it has not been sent yet."""

    def __init__(self) -> None:
        self._states: dict[int, bytes] = {}
        self._moves: dict[int, deque[bytes]] = {}
        self._missed: dict[int, int] = {}
        self._ready = asyncio.Event()
        self._closed = False

    def put_state(self, engine: int, state: bytes) -> None:
        """The engine is like this now. Moves that came before go out with it."""
        self._states[engine] = state
        self._ready.set()

    def put_move(self, engine: int, move: bytes) -> None:
        """The engine moved blocks."""
        moves = self._moves.setdefault(engine, deque(maxlen=MAX_MOVES))
        if len(moves) == MAX_MOVES:
            self._missed[engine] = self._missed.get(engine, 0) + 1
        moves.append(move)

    def close(self) -> None:
        """Nothing follows: `take` ends."""
        self._closed = True
        self._ready.set()

    async def take(self) -> bytes | None:
        """All that is new, as soon as there is a new state; None once closed."""
        await self._ready.wait()
        if self._closed:
            return None
        self._ready.clear()
        moves, missed, states = self._moves, self._missed, self._states
        self._moves, self._missed, self._states = {}, {}, {}
        chunks = [view.moves(engine, found, missed.get(engine, 0)) for engine, found in moves.items()]
        return b"".join([*chunks, *states.values()])


class Feed:
    """The engines' publications for any number of viewers. `name_of`: what the API calls a model."""

    def __init__(self, engines: Sequence[Engine], name_of: Callable[[ModelInfo], str]) -> None:
        self._engines = engines
        self._name_of = name_of
        self._viewers: set[Viewer] = set()
        self._states: dict[int, bytes] = {}
        self._heard_at: dict[int, float] = {}
        self._followers: list[asyncio.Task[None]] = []
        self._closed = False

    @contextmanager
    def watch(self) -> Iterator[Viewer]:
        """A viewer for as long as the block lasts. The first one makes us subscribe, the last one unsubscribe."""
        viewer = Viewer()
        if self._closed:
            viewer.close()
        if not self._viewers:
            self._states.clear()
            self._followers = [asyncio.create_task(self._follow(*pair)) for pair in enumerate(self._engines)]
        self._viewers.add(viewer)
        for engine, state in self._states.items():
            viewer.put_state(engine, state)
        try:
            yield viewer
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                for follower in self._followers:
                    follower.cancel()

    def close(self) -> None:
        """End every viewer's stream, also of those to come: the frontend stops."""
        self._closed = True
        for viewer in self._viewers:
            viewer.close()

    async def _follow(self, index: int, engine: Engine) -> None:
        """Listen to the engine, anew when it was restarted, and say so while none answers."""
        listener: asyncio.Task[None] | None = None
        heard_of = None
        self._heard_at[index] = monotonic()
        try:
            while True:
                engine_id = engine.client.engine_id
                if engine_id is not None and (listener is None or listener.done() or engine_id != heard_of):
                    if listener is not None:
                        listener.cancel()
                    listener, heard_of = asyncio.create_task(self._listen(index, engine)), engine_id
                    self._heard_at[index] = monotonic()
                problem = self._problem(index, engine)
                if problem is not None:
                    self._put_state(index, view.lost_state(index, engine.endpoint, problem))
                await asyncio.sleep(TICK_S)
        finally:
            if listener is not None:
                listener.cancel()

    def _problem(self, index: int, engine: Engine) -> str | None:
        if engine.client.engine_id is None:
            return "No engine answers here. The page shows it as soon as one does."
        if not engine.client.alive:
            return "The engine answers, but its step loop stands still."
        if monotonic() - self._heard_at[index] > QUIET_S:
            return "The engine answers, but publishes nothing. Can its events endpoint be reached from the frontend?"
        return None

    async def _listen(self, index: int, engine: Engine) -> None:
        events = cast("AsyncGenerator[SwapEvent | Stats]", engine.client.events())
        try:
            async with aclosing(events) as messages:
                async for message in messages:
                    self._heard_at[index] = monotonic()
                    self._publish(index, engine, message)
        except ColdblockError as error:
            self._put_state(index, view.lost_state(index, engine.endpoint, str(error)))

    def _publish(self, index: int, engine: Engine, message: SwapEvent | Stats) -> None:
        if isinstance(message, Stats):
            name = self._name_of(message.model)
            self._put_state(index, view.live_state(index, engine.endpoint, name, message))
        else:
            move = view.move(message)
            for viewer in self._viewers:
                viewer.put_move(index, move)

    def _put_state(self, index: int, state: bytes) -> None:
        self._states[index] = state
        for viewer in self._viewers:
            viewer.put_state(index, state)
