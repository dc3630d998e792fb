"""What a benchmark leaves behind: a table on the screen, JSON and a plot in a folder, with the machine described.

Owns: the files' names and shape, and the description of the machine. Does not know: what was measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...protocol.messages import ModelInfo
from ..errors import ToolError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PACKAGES = ("coldblock", "torch", "cupy-cuda12x", "cupy-cuda13x", "transformers", "numpy", "pyzmq", "msgspec")
_ROOT = Path(__file__).resolve().parents[2]
_PANEL_INCHES = (5.0, 3.6)

Panel = Callable[["Axes"], None]


def default_folder() -> Path:
    """docs/results of the folder we are in, if there is one, else that folder itself."""
    results = Path("docs/results")
    return results if results.is_dir() else Path()


def require_plotting() -> None:
    """Raise ToolError now, not after minutes of measuring, when no plot could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolError("matplotlib is not installed, so no plot can be drawn: pip install 'coldblock[tools]'")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, software versions, date and revision: what a number means nothing without."""
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


def require_folder(out: Path | None) -> None:
    """Make the folder that `--out` names before anything is measured. Raises ToolError when that cannot be."""
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"--out {out}: {error.strerror}") from error


def write(folder: Path, name: str, settings: Mapping[str, Any], model: ModelInfo | None, results: Any) -> Path:
    """Write bench-NAME.json; returns its path. Raises ToolError when the folder cannot be written."""
    content = {
        "benchmark": name,
        "machine": describe_machine(),
        "settings": settings,
        "model": _without_path(model) if model else None,
        "results": results,
    }
    path = folder / f"bench-{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ToolError(f"--out {folder}: {error.strerror}") from error
    return path


def _without_path(model: ModelInfo) -> dict[str, Any]:
    """Where the checkpoint lies is nobody else's business."""
    return {name: value for name, value in msgspec.to_builtins(model).items() if name != "path"}


def plot(folder: Path, name: str, title: str, panels: Sequence[Panel]) -> Path:
    """Draw the panels side by side into bench-NAME.png, the machine in small print below; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = _PANEL_INCHES
    figure, axes = pyplot.subplots(1, len(panels), figsize=(width * len(panels), height + 0.6), squeeze=False)
    for panel, place in zip(panels, axes[0], strict=True):
        panel(place)
    machine = describe_machine()
    hardware = "; ".join([*machine["gpus"], f"{machine['cpu']}, {machine['cores']} cores"])
    small = f"{hardware} · {machine['date']} · revision {machine['revision'] or 'unknown'}"
    figure.suptitle(title)
    figure.text(0.5, 0.01, small, ha="center", fontsize=7, color="gray")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    path = folder / f"bench-{name}.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Right-aligned columns; floats with three significant digits."""
    cells = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def cell(value: object) -> str:
    """A value as a table shows it."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


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
