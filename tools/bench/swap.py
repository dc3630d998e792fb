"""Swaps and what they cost: forced ones, a load under pressure, a long request, a prefix that fell out of the pool.

Owns: the list of cases, and what the command prints, writes and returns. Does not know: what a case does. A case is a
module with `measure` for one KV format, and `tables` and `figures` of all formats' results; these are dataclasses that
know whether they `passed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any

from pydantic import Field, field_validator

from ...logs import tell
from ...protocol.messages import ModelInfo
from ..children import run_until_signal
from . import swap_load, swap_long, swap_pairs, swap_prefix
from .capacity import GIB, capacity_bars, tokens_in
from .command import conclude, run_command, shown_name
from .engines import require_model
from .figures import Figure
from .report import Column, Table, table

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
    return run_command(SwapSettings, argv, PROG, __doc__, run)


def run(settings: SwapSettings) -> int:
    """Refuse what cannot be measured, then measure."""
    if "load" in settings.cases:
        settings.pools(swap_load.POOL_SHARE)
    require_model(settings)
    return run_until_signal(lambda: measure(settings))


async def measure(settings: SwapSettings) -> int:
    """Measure every case in every format, then report."""
    found: dict[str, list[Any]] = {}
    models: dict[str, ModelInfo] = {}
    work = [(case, kv_cache_dtype) for case in settings.cases.split(",") for kv_cache_dtype in settings.formats]
    for number, (case, kv_cache_dtype) in enumerate(work, 1):
        tell(PROG, f"{number}/{len(work)}: {case}, {kv_cache_dtype} ...")
        result, models[kv_cache_dtype] = await CASES[case].measure(kv_cache_dtype, settings)
        found.setdefault(case, []).append(result)
    results: dict[str, Any] = {
        case: [{**asdict(result), "passed": result.passed} for result in of_case] for case, of_case in found.items()
    }
    results["capacity"] = [capacity(name, model) for name, model in models.items()]
    model = models[work[-1][1]]
    title = f"Swaps of {shown_name(model.name)} on {model.device}"
    passed = all(result.passed for of_case in found.values() for result in of_case)
    return conclude(settings, PROG, title, model, results, tables(results), figures(results), passed)


def capacity(kv_cache_dtype: str, model: ModelInfo) -> dict[str, Any]:
    """What a token's KV takes."""
    each = model.kv_block_bytes / model.block_size
    return {"kv_cache_dtype": kv_cache_dtype, "bytes_per_token": each, "tokens_per_gib": tokens_in(GIB, each)}


def tables(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """Each case's."""
    found = [shown for name, case in CASES.items() if name in results for shown in case.tables(results[name])]
    return [*found, table("Tokens that fit, by KV format", CAPACITY, results.get("capacity", ()))]


CAPACITY = (
    Column("KV", "kv_cache_dtype", case=True),
    Column("bytes a token", "bytes_per_token", better="lower"),
    Column("tokens in 1 GiB", "tokens_per_gib", better="higher"),
)


def figures(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Figure]:
    """Each case's, then how many tokens fit."""
    found = [shown for name, case in CASES.items() if name in results for shown in case.figures(results[name])]
    each = {row["kv_cache_dtype"]: row["bytes_per_token"] for row in results["capacity"]}
    return [*found, capacity_bars(each, {"in 1 GiB": GIB})]
