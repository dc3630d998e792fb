"""How much memory this process may still take.

Owns: reading the system's and the control group's figures. Does not know: what the memory is for.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be taken now without swapping: the system's free memory, or the control group's rest if less."""
    return max(0, min(_system_available(), _cgroup_available()))


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_available() -> int:
    """The rest of the nearest limit (version 2, else version 1); a very large number where there is none."""
    rest = 1 << 62
    for limit_file, used_file in _cgroup_files():
        try:
            limit, used = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            rest = min(rest, int(limit) - int(used))
    return rest


def _cgroup_files() -> list[tuple[Path, Path]]:
    files = [(_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes")]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return files
    for line in lines:
        if line.startswith("0::"):
            own = _CGROUP / line[3:].lstrip("/")
            files += [(folder / "memory.max", folder / "memory.current") for folder in (own, *own.parents)]
    return files
