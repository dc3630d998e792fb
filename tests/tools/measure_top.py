"""What `coldblock top` costs: its share of a core with 200 requests that all change twice a second, on a real terminal.

    python tests/tools/measure_top.py [--rows 200] [--seconds 20]

Owns: the measurement. The engine is a scripted one (fakes/busy_engine.py), so that no other work disturbs it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fakes"))

from busy_engine import BusyEngine
from terminals import Terminal

SIZES = ((80, 24), (160, 50), (240, 70))
SETTLE_S = 4.0  # imports and the first drawing are over


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure at each size and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    for columns, lines in SIZES:
        with BusyEngine(options.rows) as engine:
            terminal = Terminal(engine.endpoint, columns, lines)
            terminal.read_for(SETTLE_S)
            began, used, written = time.monotonic(), cpu_seconds(terminal.pid), len(terminal.written)
            terminal.read_for(options.seconds)
            seconds = time.monotonic() - began
            share = (cpu_seconds(terminal.pid) - used) / seconds
            rate = (len(terminal.written) - written) / seconds / 1024
            terminal.end(b"q")
        print(f"{options.rows} rows, {columns}x{lines}: {100 * share:.1f}% of a core, {rate:.0f} KiB/s to the terminal")


if __name__ == "__main__":
    main()
