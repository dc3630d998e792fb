"""Swaps and what they cost: forced ones, a load under pressure, a long request, a prefix that fell out of the pool.

Owns: the list of cases, and what the command prints, writes and returns. Does not know: what a case does. A case is a
module with `measure` for one KV format, `render`, and plots in `PANELS`; its results are dataclasses that know whether
they `passed`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any

from pydantic import Field, field_validator

from ...protocol.errors import ColdblockError
from ...protocol.messages import ModelInfo
from ...settings import EXIT_FAILED, EXIT_OK, UsageError, load
from ..children import run_until_signal
from ..errors import report as show_error
from . import report, swap_load, swap_long, swap_pairs, swap_prefix
from .engines import require_model

PROG = "coldblock bench swap"
FORMATS = ("fp16", "int8", "fp8", "fp8_e5m2")
CASES: dict[str, ModuleType] = {
    "pairs": swap_pairs,
    "load": swap_load,
    "long": swap_long,
    "prefix": swap_prefix,
}


class SwapSettings(swap_prefix.PrefixSettings, swap_long.LongSettings, swap_pairs.PairsSettings):
    """Settings of `coldblock bench swap`."""

    cases: str = Field("pairs,load", description=f"what to measure, of {','.join(CASES)}")
    kv_cache_dtype: str = Field("all", description="KV formats, separated by commas; all stands for every one")

    @field_validator("cases")
    @classmethod
    def _known_cases(cls, cases: str) -> str:
        unknown = [name for name in cases.split(",") if name not in CASES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(CASES)}")
        return cases

    @property
    def formats(self) -> tuple[str, ...]:
        """The KV formats by name."""
        return FORMATS if self.kv_cache_dtype == "all" else tuple(self.kv_cache_dtype.split(","))


def main(argv: list[str]) -> int:
    """Run the command; 0 only if everything passed."""
    settings = load(SwapSettings, argv, prog=PROG, summary=(__doc__ or "").partition("\n")[0])
    try:
        report.require_plotting()
        report.require_folder(settings.out)
        if "load" in settings.cases:
            settings.pools(swap_load.POOL_SHARE)
        require_model(settings)
        return run_until_signal(lambda: run(settings))
    except (ColdblockError, UsageError) as error:
        return show_error(PROG, error)


async def run(settings: SwapSettings) -> int:
    """Measure every case in every format, then print and write."""
    results: dict[str, list[Any]] = {}
    model: ModelInfo | None = None
    for case in settings.cases.split(","):
        results[case] = []
        for kv_cache_dtype in settings.formats:
            print(f"{PROG}: {case}, {kv_cache_dtype} ...", file=sys.stderr, flush=True)
            result, model = await CASES[case].measure(kv_cache_dtype, settings)
            results[case].append(result)
        print(CASES[case].render(results[case]) + "\n", flush=True)
    folder = settings.out or report.default_folder()
    plain = {case: [asdict(result) for result in found] for case, found in results.items()}
    written = report.write(folder, "swap", settings.model_dump(), model, plain)
    panels = [partial(plot, found) for case, found in results.items() for plot in CASES[case].PANELS]
    plotted = report.plot(folder, "swap", f"Swaps, {settings.model}", panels)
    print(f"written: {written}, {plotted}")
    return EXIT_OK if all(result.passed for found in results.values() for result in found) else EXIT_FAILED
