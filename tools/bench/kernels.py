"""Every kernel alone on this GPU: time, bandwidth and arithmetic against ceilings that are measured in the same run.

Owns: the ceilings, the table. Does not know: which kernels there are (`kernel_cases`), the engine, the protocol.

A case's calls, enough of them to outgrow the GPU's caches, are captured in one CUDA graph, as the engine runs them; the
median of its replays counts. Bytes are those that must be moved: each input and output once, KV as it is stored.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...settings import EXIT_OK, Settings, UsageError, load
from ..errors import ToolError
from ..errors import report as show_error
from . import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .kernel_cases import Case

PROG = "coldblock bench kernels"
REPLAYS = 9
_CEILING_BYTES = 2 << 30  # or less, where a quarter of the free memory is
_CEILING_SIZE = 8192


class KernelsSettings(Settings):
    """Settings of `coldblock bench kernels`."""

    only: str = Field("", description="measure the cases whose name contains this")
    out: Path | None = Field(None, description="folder for the results; docs/results or the current one if absent")


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does at best: reading and copying (bytes read plus written) in TB/s, fp16 products in TFLOP/s."""

    read: float
    copy: float
    matmul: float


@dataclass(frozen=True)
class Measured:
    """One case: microseconds of a call; TB/s and TFLOP/s achieved, and the larger share of a ceiling they are."""

    name: str
    us: float
    tb_per_s: float
    tflop_per_s: float
    of_ceiling: float


def main(argv: list[str]) -> int:
    """Run the command."""
    settings = load(KernelsSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        report.require_plotting()
        report.require_folder(settings.out)
        from ..gpu import explained

        with explained():
            return run(settings)
    except (ToolError, UsageError) as error:
        return show_error(PROG, error)


def run(settings: KernelsSettings) -> int:
    """Measure the cases, then print and write."""
    from ..gpu import require_gpu
    from .kernel_cases import all_cases

    gpu = require_gpu()
    chosen = [(name, make) for name, make in all_cases() if settings.only in name]
    if not chosen:
        raise UsageError(f"--only: {settings.only!r} is not allowed: no case has that in its name")
    ceilings = measure_ceilings()
    print(f"{gpu}: read {ceilings.read:.2f} TB/s, copy {ceilings.copy:.2f} TB/s, fp16 {ceilings.matmul:.0f} TFLOP/s")
    rows = []
    for name, make in chosen:
        print(f"{PROG}: {name}", file=sys.stderr, flush=True)
        rows.append(measure(name, make(), ceilings))
    print(render(rows))
    folder = settings.out or report.default_folder()
    results = {"gpu": gpu, "ceilings": asdict(ceilings), "cases": [asdict(row) for row in rows]}
    written = report.write(folder, "kernels", settings.model_dump(), None, results)
    plotted = report.plot(folder, "kernels", gpu, [lambda axes: _plot(axes, rows)])
    print(f"written: {written}, {plotted}")
    return EXIT_OK


def measure_ceilings() -> Ceilings:
    """By a maximum over up to 2 GiB, an inversion of their bits, and a product of random 8192 x 8192 fp16 matrices.

    Not by a plain copy: in a graph that is done by the copy engine, which is slower than a kernel.
    """
    import torch

    size = min(_CEILING_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.randint(0, 1 << 30, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    read = milliseconds([lambda: torch.amax(source)])
    copy = milliseconds([lambda: torch.bitwise_not(source, out=target)])
    a, b = (torch.randn(_CEILING_SIZE, _CEILING_SIZE, dtype=torch.float16, device="cuda") for _ in range(2))
    product = milliseconds([lambda: torch.mm(a, b)] * 8)
    return Ceilings(read=size / read / 1e9, copy=2 * size / copy / 1e9, matmul=2e-9 * _CEILING_SIZE**3 / product)


def measure(name: str, case: Case, ceilings: Ceilings) -> Measured:
    """Run one case."""
    ms = milliseconds(case.calls)
    tb, tflop = case.bytes_moved / ms / 1e9, case.flops / ms / 1e9
    return Measured(name, 1e3 * ms, tb, tflop, max(tb / ceilings.read, tflop / ceilings.matmul))


def milliseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Time of one call: the calls in one graph, the median of its replays."""
    import torch

    for call in calls[:2]:  # compiles, and makes the handles of libraries
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times) / len(calls)


def render(rows: list[Measured]) -> str:
    """The table."""
    columns = ("case", "us", "TB/s", "TFLOP/s", "% of ceiling")
    return report.table(columns, [(r.name, r.us, r.tb_per_s, r.tflop_per_s, 100 * r.of_ceiling) for r in rows])


def _plot(axes: Axes, rows: list[Measured]) -> None:
    axes.barh([row.name for row in rows], [100 * row.of_ceiling for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=5)
    axes.set_xlabel("% of the measured ceiling (bandwidth or arithmetic)")
