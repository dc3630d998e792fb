"""The line at start: what was decided, and why."""

from __future__ import annotations

from typing import Any

import pytest
from coldblock.engine_core.config import EngineSettings
from coldblock.engine_core.decisions import describe_start
from coldblock.settings import load

MIB = 1 << 20
SIZES = {
    "weights_bytes": 3 * MIB,
    "kv_format": "fp16",
    "kv_blocks": 10,
    "kv_bytes": 5 * MIB,
    "cpu_tier_blocks": 4096,
    "cpu_tier_bytes": 2048 * MIB,
}


def described(
    *argv: str, max_model_len: int = 8192, why_no_gpu: str | None = None, **sizes: Any
) -> tuple[str, dict[str, object]]:
    settings = load(EngineSettings, ["tiny", *argv], prog="coldblock engine", summary="Run.")
    return describe_start(settings, {**SIZES, **sizes}, max_model_len, why_no_gpu)


def test_on_the_cpu() -> None:
    line, fields = described(threads=2, why_no_gpu="CuPy is missing")
    assert line == (
        "tiny on the CPU (CuPy is missing; threads: 2): weights 3.0 + KV 5.0 MiB; "
        "KV fp16 (as the model computes): 10 blocks of 16 tokens = 160 tokens (what fits, at most 4 GiB); "
        "CPU tier 2.0 GiB = 4,096 blocks (the default)"
    )
    assert fields["kv_tokens"] == 160 and fields["kv_bytes"] == 5 * MIB and fields["device"] == "the CPU"


def test_on_a_gpu_the_sum_says_of_how_much() -> None:
    needs = {"workspace_bytes": 512 * MIB, "graphs_bytes": 20 * MIB, "reserve_bytes": 96 * MIB}
    sizes = {"gpu": "NVIDIA X", "free_bytes": 3800 * MIB, **needs, "weights_bytes": 1900 * MIB, "kv_bytes": 800 * MIB}
    line, _ = described("--kv-cache-dtype", "int8", "--no-cpu-offload", **sizes, cpu_tier_bytes=0)
    assert line == (
        "tiny on NVIDIA X: weights 1.9 + workspace 0.5 + graphs 0.0 + reserve 0.1 + KV 0.8 GiB of 90% of 3.7 free; "
        "KV fp16 (as asked): 10 blocks of 16 tokens = 160 tokens (what fits); CPU tier off (--no-cpu-offload)"
    )


@pytest.mark.parametrize(
    ("argv", "changes", "field", "reason"),
    [
        (("--num-gpu-blocks", "10"), {}, "kv_blocks_reason", "as asked"),
        (
            ("--max-num-seqs", "2"),
            {"max_model_len": 80},
            "kv_blocks_reason",
            "all that 2 requests of 80 tokens can use",
        ),
        (("--max-cpu-offload-mb", "2048"), {}, "cpu_tier_reason", "as asked"),
        ((), {"cpu_tier_bytes": 512 * MIB}, "cpu_tier_reason", "a quarter of the free RAM"),
        ((), {"cpu_tier_bytes": 2048 * MIB - 1000}, "cpu_tier_reason", "the default"),
    ],
)
def test_the_reasons(argv: tuple[str, ...], changes: dict[str, Any], field: str, reason: str) -> None:
    assert described(*argv, **changes)[1][field] == reason
