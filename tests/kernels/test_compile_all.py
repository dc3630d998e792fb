"""Every kernel compiles to cubin for every architecture, without a GPU.

Per source and architecture a covering subset of the variants is compiled: every value of every macro at least once,
and on each architecture other combinations of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import coldblock.kernels
import pytest
from coldblock.kernels.loader import ARCHITECTURES, SOURCES, Variant, compile_cubin

pytest.importorskip("cupy_backends")
THREADS = 2
ELF = b"\x7fELF"


def declared_variants() -> list[Variant]:
    found: list[Variant] = []
    for module in pkgutil.iter_modules(coldblock.kernels.__path__):
        found += getattr(importlib.import_module(f"coldblock.kernels.{module.name}"), "VARIANTS", ())
    return found


def covering(variants: list[Variant], architecture: int) -> list[Variant]:
    """Few of one source's variants with every value of every macro; the choice turns with `architecture`."""
    variants = variants[architecture * 7 % len(variants) :] + variants[: architecture * 7 % len(variants)]
    missing = {pair for variant in variants for pair in variant.macros.items()}
    chosen = []
    while missing or not chosen:
        best = max(variants, key=lambda variant: len(missing & set(variant.macros.items())))
        chosen.append(best)
        missing -= set(best.macros.items())
    return chosen


def jobs() -> list[tuple[str, Variant]]:
    by_target: dict[tuple[str, str], list[Variant]] = defaultdict(list)
    for variant in declared_variants():
        for architecture in variant.architectures:
            by_target[variant.source, architecture].append(variant)
    return [
        (architecture, variant)
        for (_, architecture), variants in by_target.items()
        for variant in covering(variants, ARCHITECTURES.index(architecture))
    ]


def compile_one(job: tuple[str, Variant]) -> str | None:
    architecture, variant = job
    try:
        cubin = compile_cubin(variant.source, variant.macros, architecture)
    except Exception as error:
        return f"{variant.source} {dict(variant.macros)} {architecture}: {error}"
    return None if cubin.startswith(ELF) else f"{variant.source} {architecture}: no cubin"


def test_every_source_has_a_wrapper_that_declares_its_variants() -> None:
    assert {variant.source for variant in declared_variants()} == {file.stem for file in SOURCES.glob("*.cu")}


def test_no_variant_is_declared_twice_or_for_an_unknown_architecture() -> None:
    found = Counter((v.source, a, *sorted(v.macros.items())) for v in declared_variants() for a in v.architectures)
    assert not [variant for variant, times in found.items() if times > 1]
    assert {architecture for _, architecture, *_ in found} == set(ARCHITECTURES)


def test_covering_meets_every_value_of_every_macro() -> None:
    variants = [Variant("x", {"A": a, "B": b}) for a in range(3) for b in range(5)]
    for architecture in range(6):
        chosen = covering(variants, architecture)
        assert {v.macros["A"] for v in chosen} == set(range(3))
        assert {v.macros["B"] for v in chosen} == set(range(5))
        assert len(chosen) == 5


@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_architecture() -> None:
    work = jobs()
    assert {architecture for architecture, _ in work} == set(ARCHITECTURES)
    with ThreadPoolExecutor(THREADS) as pool:
        failures = [text for text in pool.map(compile_one, work) if text]
    assert not failures, "\n".join(failures)
