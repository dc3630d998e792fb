"""`coldblock top` on a pseudo-terminal, as a person's terminal emulator would run it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time


class Terminal:
    """The running command: `pid`, and in `written` every byte that it sent to the terminal."""

    def __init__(self, endpoint: str, columns: int = 100, lines: int = 30, **environment: str) -> None:
        self.written = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
            arguments = [sys.executable, "-m", "coldblock", "top", "--endpoint", endpoint]
            os.execve(
                sys.executable, arguments, {**kept, "TERM": "xterm-256color", "COLORTERM": "truecolor", **environment}
            )
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, text: str, timeout_s: float = 30.0) -> None:
        """Read until it has sent this."""
        end = time.monotonic() + timeout_s
        while text.encode() not in self.written:
            assert time.monotonic() < end, self.written[-2000:]
            self._read()

    def read_for(self, seconds: float) -> None:
        """Read for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._read()

    def end(self, by: bytes | int, timeout_s: float = 30.0) -> int:
        """Press keys (bytes) or send a signal (int), and return the exit code. Killed when it does not end."""
        if isinstance(by, bytes):
            os.write(self._fd, by)
        else:
            os.kill(self.pid, by)
        end = time.monotonic() + timeout_s
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        while not ended:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"it did not end after {by!r}")
            self._read()  # it may wait for its output to be read
            ended, status = os.waitpid(self.pid, os.WNOHANG)
        self._read()
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # its end of the line is closed
            if select.select([self._fd], [], [], 0.1)[0]:
                self.written += os.read(self._fd, 1 << 16)
