"""Every kernel alone on this GPU: time, bandwidth and arithmetic against ceilings that are measured in the same run.

Owns: the ceilings, the table. Does not know: which kernels there are (`kernel_cases`), the engine, the protocol.

A case's calls, enough of them to outgrow the GPU's caches, are captured in one CUDA graph, as the engine runs them; the
median of its replays counts. Bytes are those that must be moved: each input and output once, KV as it is stored.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...progress import track
from ...settings import UsageError
from .command import ReportSettings, conclude, run_command
from .figures import Bars, Figure
from .report import Column, Table, table

if TYPE_CHECKING:
    from .kernel_cases import Case

PROG = "coldblock bench kernels"
REPLAYS = 9
_CEILING_BYTES = 2 << 30  # or less, where a quarter of the free memory is
_CEILING_SIZE = 8192


class KernelsSettings(ReportSettings):
    """Settings of `coldblock bench kernels`."""

    only: str = Field("", description="measure the cases whose name contains this")


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does at best: reading and copying (bytes read plus written) in TB/s, fp16 products in TFLOP/s."""

    read: float
    copy: float
    matmul: float


@dataclass(frozen=True)
class Measured:
    """One case: microseconds of a call (median, least and most); TB/s and TFLOP/s achieved, and the larger share of a
    ceiling they are.
    """

    name: str
    us: float
    us_range: tuple[float, float]
    tb_per_s: float
    tflop_per_s: float
    of_ceiling: float


def main(argv: list[str]) -> int:
    """Run the command."""
    return run_command(KernelsSettings, argv, PROG, __doc__, run)


def run(settings: KernelsSettings) -> int:
    """Measure the cases, then report."""
    from ..gpu import explained, require_gpu

    with explained():
        gpu = require_gpu()
        results = {"gpu": gpu, **measure_cases(settings)}
    return conclude(settings, PROG, f"Kernels alone on {gpu}", None, results, tables(results), figures(results))


def measure_cases(settings: KernelsSettings) -> dict[str, Any]:
    """The chosen cases, after the ceilings."""
    from .kernel_cases import all_cases

    chosen = [(name, make) for name, make in all_cases() if settings.only in name]
    if not chosen:
        raise UsageError(f"--only: {settings.only!r} is not allowed: no case has that in its name")
    ceilings = measure_ceilings()
    rows = [measure(name, make(), ceilings) for name, make in track(chosen, PROG, "kernel")]
    return {"ceilings": asdict(ceilings), "cases": [asdict(row) for row in rows]}


def measure_ceilings() -> Ceilings:
    """By a maximum over up to 2 GiB, an inversion of their bits, and a product of random 8192 x 8192 fp16 matrices.

    Not by a plain copy: in a graph that is done by the copy engine, which is slower than a kernel.
    """
    import torch

    size = min(_CEILING_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.randint(0, 1 << 30, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    read = statistics.median(milliseconds([lambda: torch.amax(source)]))
    copy = statistics.median(milliseconds([lambda: torch.bitwise_not(source, out=target)]))
    a, b = (torch.randn(_CEILING_SIZE, _CEILING_SIZE, dtype=torch.float16, device="cuda") for _ in range(2))
    product = statistics.median(milliseconds([lambda: torch.mm(a, b)] * 8))
    return Ceilings(read=size / read / 1e9, copy=2 * size / copy / 1e9, matmul=2e-9 * _CEILING_SIZE**3 / product)


def measure(name: str, case: Case, ceilings: Ceilings) -> Measured:
    """Run one case."""
    times = milliseconds(case.calls)
    ms = statistics.median(times)
    tb, tflop = case.bytes_moved / ms / 1e9, case.flops / ms / 1e9
    share = max(tb / ceilings.read, tflop / ceilings.matmul)
    return Measured(name, 1e3 * ms, (1e3 * min(times), 1e3 * max(times)), tb, tflop, share)


def milliseconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Time of one call, in each replay of a graph of the calls."""
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
        times.append(begin.elapsed_time(end) / len(calls))
    return times


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The ceilings, then every case against the one that binds it."""
    return [
        table("Ceilings, measured first", CEILINGS, [results["ceilings"]]),
        table("Kernels", CASES, results["cases"]),
    ]


CEILINGS = (
    Column("read, TB/s", "read", better="higher"),
    Column("copy, TB/s", "copy", better="higher"),
    Column("fp16 products, TFLOP/s", "matmul", better="higher"),
)
CASES = (
    Column("case", "name", case=True),
    Column("us", "us", better="lower", range="us_range"),
    Column("TB/s", "tb_per_s", better="higher"),
    Column("TFLOP/s", "tflop_per_s", better="higher"),
    Column("% of ceiling", "of_ceiling", 100, better="higher"),
)


def figures(results: Mapping[str, Any]) -> list[Figure]:
    """How near each comes to its ceiling."""
    cases = results["cases"]
    return [
        Bars(
            "Share of the ceiling that binds",
            "The larger of two shares: of what this GPU reads a second at most, and of what it multiplies.",
            "% of the measured ceiling",
            tuple(case["name"] for case in cases),
            {"share": tuple(100 * case["of_ceiling"] for case in cases)},
            horizontal=True,
        )
    ]
