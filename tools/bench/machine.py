"""The machine that something was measured on: what a number means nothing without.

Owns: how processor, memory, GPUs, versions and revision are found out. Does not know: what was measured, or who asks.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("coldblock", "torch", "cupy-cuda12x", "cupy-cuda13x", "transformers", "numpy", "pyzmq", "msgspec")
_ROOT = Path(__file__).resolve().parents[2]


def describe_machine() -> dict[str, Any]:
    """Processor, memory, software versions, date and revision."""
    return {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cpu_features": _cpu_features(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _revision(),
    }


def _first_value(path: Path, key: str) -> str:
    """The value of the first `key : value` line of a file in /proc; "" when there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _cpu_features() -> list[str]:
    """Those instructions of the CPU on which the speed of 4-, 8- and 16-bit arithmetic depends."""
    flags = set(_first_value(Path("/proc/cpuinfo"), "flags").split())
    return sorted(flags & {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"})


def _memory_gib() -> float | None:
    kilobytes = _first_value(Path("/proc/meminfo"), "MemTotal").removesuffix(" kB")
    return round(int(kilobytes) / 2**20, 1) if kilobytes.isdigit() else None


def _gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, as the driver's own tool tells them; none without that tool."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.splitlines() if line.strip()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The checkout's revision, "+" appended when files differ from it; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
