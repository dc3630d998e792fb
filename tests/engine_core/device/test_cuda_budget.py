"""A 3B model within 4 GiB of GPU memory, whatever a step holds; and the same pool at every start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coldblock.engine_core.main import SHAPES

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, random, sys, torch
from array import array
from coldblock.engine_core.control.plan import Chunk, SampleSpec, StepPlan
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cuda_executor import CudaExecutor

shape, cap, held_mib, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
settings = json.loads(sys.argv[5])
torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
held = torch.empty(held_mib << 20, dtype=torch.uint8, device="cuda")
executor = CudaExecutor(ExecutorConfig(shape, load_format="dummy", **settings))
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


def run(shape: Path, cap: int, held_mib: int = 0, steps: int = 0, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The program, in a process of its own."""
    arguments = [str(shape), str(cap), str(held_mib), str(steps), json.dumps(settings)]
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


def report(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the program printed."""
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def two_layers(tmp_path: Path) -> Path:
    """The 3B shape with fewer layers: quick to load."""
    raw = json.loads((SHAPES / "qwen2.5-3b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 2}))
    return tmp_path


def test_a_3b_model_on_4_gib() -> None:
    found = report(run(SHAPES / "qwen2.5-3b", 4 * GIB, steps=40))
    assert found["blocks"] * 16 > 8192, found
    assert found["peak"] <= 4 * GIB, found


def test_an_int8_head_leaves_half_of_its_memory_to_kv_blocks(two_layers: Path) -> None:
    """Of a model with so many layers that there is no room for dense copies, whatever the head is."""
    raw = json.loads((two_layers / "config.json").read_text())
    raw["num_hidden_layers"] = 6
    (two_layers / "config.json").write_text(json.dumps(raw))
    plain = report(run(two_layers, 4 * GIB))
    raw["quantization_config"]["embedding_bits"] = 8
    (two_layers / "config.json").write_text(json.dumps(raw))
    found = report(run(two_layers, 4 * GIB, steps=10))
    spared = 151936 * 2048 * (2 - 17 / 16)
    weights = [int(re.search(r"weights (\S+) ", x["sum"])[1].replace(",", "")) for x in (plain, found)]  # type: ignore[index]
    assert weights[0] - weights[1] == pytest.approx(spared / (1 << 20), abs=2), (plain, found)
    assert found["blocks"] >= plain["blocks"] and found["peak"] <= 4 * GIB, (plain, found)


def test_the_same_pool_at_every_start(two_layers: Path) -> None:
    found = [report(run(two_layers, 4 * GIB, held_mib=700)) for _ in range(2)]
    assert found[0]["blocks"] == found[1]["blocks"] > 500, found


def test_a_pool_that_does_not_fit_is_refused_with_the_sum(two_layers: Path) -> None:
    result = run(two_layers, 4 * GIB, num_gpu_blocks=10**6)
    assert re.search(r"--num-gpu-blocks: 1000000 blocks .* weights \d{3} \+ workspace ", result.stderr), result.stderr


def test_a_model_that_does_not_fit_is_refused() -> None:
    result = run(SHAPES / "qwen2.5-3b", GIB)
    assert "MODEL: the model and its workspace do not fit" in result.stderr, result.stderr
