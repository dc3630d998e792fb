"""What SIGTERM and SIGINT do to an engine: they ask it to stop, and give up on it when it cannot.

Owns: both signals, and the thread that hears them. Does not know: how the engine stops, or what keeps it from that.

Python runs signal handlers in the main thread, between two of its instructions: not while that thread waits inside a
call for a GPU that never answers. So the handlers here do nothing. The interpreter also writes each signal's number
into a pipe at once, whatever the main thread does, and a thread of ours reads it there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_S = 4.0  # how long the end may take when no request may go on

Stop = Callable[[float], None]


@contextlib.contextmanager
def stopping(stop: Stop, drain_s: float, give_up: Callable[[], None]) -> Iterator[None]:
    """While the body runs, the first of the signals calls `stop(drain_s)` and a further one `stop(0.0)`, in a thread.

    The body ought to end after so many seconds. When it goes on for STOP_S more, the thread calls `give_up`.
    """
    heard, written = os.pipe()
    os.set_blocking(written, False)
    handlers = {number: signal.signal(number, _do_nothing) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(written)
    thread = threading.Thread(target=_obey, args=(heard, stop, drain_s, give_up), name="coldblock-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(written)
        thread.join()
        os.close(heard)


def _do_nothing(number: int, frame: object) -> None:
    """SIG_IGN would keep the signal from the pipe too."""


def _obey(heard: int, stop: Stop, drain_s: float, give_up: Callable[[], None]) -> None:
    """Until the pipe is closed, or the time is over."""
    deadline = None
    while _is_readable(heard, deadline):
        if not os.read(heard, 1):
            return
        stop(drain_s)
        latest = time.monotonic() + drain_s + STOP_S
        deadline = latest if deadline is None else min(deadline, latest)
        drain_s = 0.0
    give_up()


def _is_readable(pipe: int, deadline: float | None) -> bool:
    """Wait until it is; False when the deadline comes first."""
    wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    return bool(select.select([pipe], [], [], wait_s)[0])
