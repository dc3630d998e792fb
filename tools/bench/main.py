"""Benchmarks of a running or fresh engine (serve, swap, jitter, monitor), and of the GPU's kernels alone.

Owns: the list of benchmarks. Does not know: their settings or what they measure.
"""

from __future__ import annotations

import importlib
import sys

from ...settings import EXIT_OK, EXIT_USAGE

COMPARE = "two reports side by side, with ratios: compare A B"
BENCHMARKS = {
    "serve": "tokens/s and latency over concurrency; also against transformers, and over HTTP",
    "swap": "swaps in every KV format: forced, under load, of a long request, of a prefix; against the link's peak",
    "jitter": "times between tokens of swapped and other requests, with and without swap pressure",
    "monitor": "what ten subscribers, and two stuck ones, cost the engine's steps",
    "kernels": "every kernel alone on this GPU, against its measured ceilings",
}


def modules() -> dict[str, str]:
    """The module of every command that writes reports, by the name that stands in them."""
    return {**{name: f".{name}" for name in BENCHMARKS}, "eval-kv": "..eval_kv", "validate": "..validate"}


def main(argv: list[str]) -> int:
    """Run one benchmark, or compare, and return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: coldblock bench NAME [ARGUMENTS]      coldblock bench NAME --help\n")
        print("\n".join(f"  {name:<7} {summary}" for name, summary in BENCHMARKS.items()))
        print(f"  compare {COMPARE}")
        print("\nEach prints its tables and writes bench-NAME.json and bench-NAME.html, with the machine described.")
        return EXIT_OK if argv else EXIT_USAGE
    if argv[0] not in (*BENCHMARKS, "compare"):
        names = ", ".join((*BENCHMARKS, "compare"))
        print(f"coldblock bench: no benchmark {argv[0]!r}; there are {names}", file=sys.stderr)
        return EXIT_USAGE
    return int(importlib.import_module(f".{argv[0]}", __package__).main(argv[1:]))
