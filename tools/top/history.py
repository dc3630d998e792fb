"""What a monitor has seen of an engine: snapshots and swap events, put together into what no single one of them holds.

Owns: rates and their past, the course of each request, the event log; `Frame`, all of it at one moment.
Does not know: sockets, terminals, how anything is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...protocol.messages import RequestRow, Stats, SwapEvent, SwapPhase
from ..terminal import describe_swap, safe, shorten

PAST = 240  # values of a graph: two minutes
LOG_LINES = 500
MOMENTS = 200  # of one request
CHANGES = 1000  # of one request's state
RATE_SNAPSHOTS = 6  # a request's tokens/s are counted over so many, three seconds
ENDED_TRACKS = 200  # so many requests are remembered after their end
RUN_S = 1.0  # copies within this time are one line of the log
SAME_ARRIVAL_S = 1.0  # a request's arrival, counted back from its age, wavers less than this
ID_COLUMNS = 20  # of a request's id in the log

UNSEEN = "unseen"
"""A request's state at a time before the monitor watched, when its swaps leave no other answer."""

STATE_AFTER: dict[SwapPhase, str] = {
    "swapping_out": "swapping_out",
    "swapped": "swapped",
    "swapping_in": "swapping_in",
}

RequestKey = tuple[str, str]
"""Peer and request id: ids are unique within their peer only."""


def key_of(of: RequestRow | SwapEvent) -> RequestKey:
    """By what a request is known from one snapshot to the next, and in events."""
    return of.peer, of.request_id


class Moment(NamedTuple):
    """Something that happened to a request, or in the engine. `kind` is a swap phase or a word of ours."""

    time: float
    kind: str
    text: str
    key: RequestKey | None = None


class Change(NamedTuple):
    """From this time on a request was in this state."""

    time: float
    state: str


@dataclass(slots=True)
class Track:
    """One request's course, from `seen_at` on as it was seen. `ended_at`: when a snapshot first lacked it."""

    row: RequestRow
    seen_at: float
    arrived_at: float
    changes: deque[Change]
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=MOMENTS))
    counted: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_SNAPSHOTS))
    ended_at: float | None = None

    def change(self, time: float, state: str) -> None:
        """It is in `state` from `time` on, which is never before what is already known."""
        if state != self.changes[-1].state:
            self.changes.append(Change(max(time, self.changes[-1].time), state))

    @property
    def tokens_per_s(self) -> float | None:
        """Over the last few snapshots; None until there are two."""
        if len(self.counted) < 2:
            return None
        (began, first), (ended, last) = self.counted[0], self.counted[-1]
        return (last - first) / (ended - began) if ended > began else None


class Past(NamedTuple):
    """One value a snapshot, oldest first."""

    out_bytes_per_s: tuple[float, ...] = ()
    in_bytes_per_s: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    step_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """All there is to show at one moment. It stays as it is while the monitor goes on: a paused screen keeps its own.

    `away` says why nothing comes, when nothing comes.
    """

    stats: Stats | None
    away: str
    past: Past
    log: tuple[Moment, ...]
    rates: dict[RequestKey, float | None]


class History:
    """Takes in what the feed brings, and makes frames of it."""

    def __init__(self) -> None:
        self._stats: Stats | None = None
        self._away = ""
        self._past: deque[tuple[float, float, float, float]] = deque(maxlen=PAST)
        self._log: deque[Moment] = deque(maxlen=LOG_LINES)
        self._tracks: dict[RequestKey, Track] = {}
        self._ended: deque[Track] = deque()
        self._run: CopyRun | None = None

    # ------------------------------------------------------------ what comes in

    def snapshot(self, stats: Stats) -> None:
        """A snapshot came. One of another engine ends all that was known of the requests of the one before."""
        if self._stats is not None and self._stats.engine_id != stats.engine_id:
            self._end_all(self._tracks.values(), self._stats.time)
            self._past.clear()
            self.say(
                stats.time,
                "restarted",
                f"the engine was restarted: {safe(stats.model.name)}, {safe(stats.engine_id[:8])}",
            )
        elif self._away or self._stats is None:
            self.say(stats.time, "connected", f"connected to {safe(stats.model.name)} on {safe(stats.model.device)}")
        self._stats, self._away = stats, ""
        link = stats.link
        self._past.append((link.out_bytes_per_s, link.in_bytes_per_s, stats.tokens_per_s, stats.step_ms))
        for row in stats.requests:
            self._see(row, stats.time)
        present = {key_of(row) for row in stats.requests}
        self._end_all([track for key, track in self._tracks.items() if key not in present], stats.time)

    def swap(self, event: SwapEvent) -> None:
        """A swap event came. One of a request that no snapshot has had yet enters the log alone."""
        self._log_swap(event)
        track = self._tracks.get(key_of(event))
        if track is None:
            return
        track.moments.append(_moment(event, ""))
        if event.phase == "resumed":
            before = [change.state for change in track.changes if change.state in ("prefill", "decode")]
            track.change(event.time, before[-1] if before else "decode")
        elif event.phase in STATE_AFTER:
            track.change(event.time, STATE_AFTER[event.phase])

    def lost(self, time: float, why: str) -> None:
        """Nothing comes any more, for this reason; said once."""
        if why != self._away:
            self._away = why
            self.say(time, "gone", why)

    def say(self, time: float, kind: str, text: str) -> None:
        """A line for the log."""
        self._run = None
        self._log.append(Moment(time, kind, text))

    # ------------------------------------------------------------ what can be shown

    def frame(self) -> Frame:
        """All of it now."""
        rates = {key: track.tokens_per_s for key, track in self._tracks.items()}
        return Frame(self._stats, self._away, Past(*zip(*self._past, strict=True)), tuple(self._log), rates)

    def track(self, key: RequestKey) -> Track | None:
        """The course of a request that is there, or was not long ago."""
        live = self._tracks.get(key)
        return live or next((track for track in reversed(self._ended) if key_of(track.row) == key), None)

    # ------------------------------------------------------------ inside

    def _see(self, row: RequestRow, now: float) -> None:
        track = self._tracks.get(key_of(row))
        if track is not None and now - row.age_s > track.arrived_at + SAME_ARRIVAL_S:
            self._end_all([track], now)  # another request by its id, which came between two snapshots
            track = None
        if track is None:
            track = self._tracks[key_of(row)] = Track(row, now, now - row.age_s, course_until_seen(row, now))
        if row.recomputes > track.row.recomputes:
            track.moments.append(Moment(now, "recomputed", "its KV was dropped, to be computed again", key_of(row)))
        track.row = row
        track.change(now, row.state)
        track.counted.append((now, row.generated_tokens))

    def _end_all(self, tracks: Iterable[Track], now: float) -> None:
        for track in list(tracks):
            del self._tracks[key_of(track.row)]
            track.ended_at = now
            self._ended.append(track)
        while len(self._ended) > ENDED_TRACKS:
            self._ended.popleft()

    def _log_swap(self, event: SwapEvent) -> None:
        """Copies in the background come in crowds: those of a kind within a second are one line that counts them."""
        who = shorten(safe(event.request_id), ID_COLUMNS)
        run, self._run = self._run, None
        if event.phase not in ("copied_out", "copied_in"):
            self._log.append(_moment(event, who))
            return
        if run is not None and run.takes(event):
            self._log.pop()
            run.add(event)
        else:
            run = CopyRun(event)
        self._run = run
        self._log.append(run.moment())


@dataclass(slots=True)
class CopyRun:
    """Copies in the background that one line of the log stands for. `total` is their sum, with the first one's time."""

    total: SwapEvent
    copies: int = 1

    def takes(self, event: SwapEvent) -> bool:
        """Whether `event` is one more of them."""
        kind = (self.total.phase, self.total.reason)
        return kind == (event.phase, event.reason) and event.time - self.total.time < RUN_S

    def add(self, event: SwapEvent) -> None:
        """Count `event` in."""
        total, self.copies = self.total, self.copies + 1
        sums = {name: getattr(total, name) + getattr(event, name) for name in ("blocks", "bytes", "seconds")}
        self.total = msgspec.structs.replace(event, time=total.time, **sums)

    def moment(self) -> Moment:
        """Their line."""
        line = _moment(self.total, "")
        return line if self.copies == 1 else line._replace(text=f"{line.text}, {self.copies} copies", key=None)


def _moment(event: SwapEvent, who: str) -> Moment:
    text = " ".join(safe(describe_swap(event, who)).split())
    return Moment(event.time, event.phase, text, key_of(event) if event.request_id else None)


def course_until_seen(row: RequestRow, now: float) -> deque[Change]:
    """What the first sight of a request tells of its time before: when it waited, computed its prompt, answered."""
    arrived = now - row.age_s
    changes = deque([Change(arrived, "waiting")], maxlen=CHANGES)
    admitted = min(now, arrived + row.queue_s)
    if row.swaps:
        changes.append(Change(admitted, UNSEEN))
    elif row.state != "waiting":
        changes.append(Change(admitted, "prefill"))
        if row.ttft_s is not None:
            changes.append(Change(max(admitted, arrived + row.ttft_s), "decode"))
    return changes
