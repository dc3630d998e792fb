"""A 3B model within 4 GiB of GPU memory, whatever a step holds; and the same pool at every start."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, random, sys, torch
from array import array
from coldblock.engine_core.control.plan import Chunk, SampleSpec, StepPlan
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cuda_executor import CudaExecutor
from coldblock.engine_core.main import SHAPES

cap, held_mib, settings, steps = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
held = torch.empty(held_mib << 20, dtype=torch.uint8, device="cuda")
executor = CudaExecutor(ExecutorConfig(SHAPES / "qwen2.5-3b", load_format="dummy", **settings))
blocks, rng, failed = executor.capacity.num_gpu_blocks, random.Random(0), 0
asked = Sampling(temperature=0.7, top_p=0.9, logprobs=20, repetition_penalty=1.1)
for step in range(steps):
    sequences, budget, chunks, first = rng.choice((1, 5, 63)), 1024, [], 0
    for i in range(sequences):
        size = rng.choice((1, 1, 512)) if i else 512
        size = min(size, budget - (sequences - i))
        start = rng.randrange(300)
        needed = -(-(start + size) // 16)
        table = array("i", range(first, first + needed))
        first, budget = first + needed, budget - size
        assert first <= blocks
        history = tuple(rng.randrange(151936) for _ in range(200))
        spec = SampleSpec(asked, i, step, 100, history)
        ids = array("i", [rng.randrange(151936) for _ in range(size)])
        chunks.append(Chunk(f"{i}", ids, start, table, spec))
    executor.begin_step(StepPlan(step, tuple(sorted(chunks, key=lambda c: c.num_tokens)), ()))
    if step:
        executor.complete_step()
peak = torch.cuda.max_memory_reserved()
print(json.dumps({"blocks": blocks, "peak": peak, "sum": str(executor._memory)}))
"""
GIB = 1 << 30


def run(cap: int, held_mib: int, steps: int, **settings: Any) -> dict[str, Any]:
    """The program's report, in a process of its own."""
    arguments = [sys.executable, "-c", PROGRAM, str(cap), str(held_mib), json.dumps(settings), str(steps)]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_a_3b_model_on_4_gib() -> None:
    report = run(4 * GIB, 0, steps=40)
    assert report["blocks"] * 16 > 8192, report
    assert report["peak"] <= 4 * GIB, report


def test_the_same_pool_at_every_start() -> None:
    reports = [run(4 * GIB, 700, steps=0) for _ in range(3)]
    assert len({report["blocks"] for report in reports}) == 1, reports
    assert reports[0]["blocks"] > 500


def test_a_pool_that_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(AssertionError, match=r"--num-gpu-blocks: 9000 blocks .* weights 2,0\d\d"):
        run(4 * GIB, 0, steps=0, num_gpu_blocks=9000)
    with pytest.raises(AssertionError, match="MODEL: the model and its workspace do not fit"):
        run(GIB, 0, steps=0)
