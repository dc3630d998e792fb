"""Every launch of a step passes its wrapper's checks and asks for a form of the kernel that is declared, without a GPU.

The wrappers run as they are, on CPU tensors, up to the launch itself.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from coldblock.engine_core.control.plan import StepPlan
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cuda_executor import LEAST_ROWS, SHORT_STEP_READS, CudaExecutor
from coldblock.kernels import (
    block_copy,
    checks,
    decode_attention,
    fused,
    gather,
    pages,
    prefill_attention,
    prefill_attention_hopper,
    rotated_bias,
    sampling,
    tensor_map,
    w4,
    w4_wide,
    w8,
)
from coldblock.kernels.loader import Argument
from coldblock.tools.large_bias import large_bias
from cuda_on_cpu import copy_blocks, emulate_device
from tiny_models import chunk, edit_config, quantize, save_tiny
from torch import Tensor

MODULES: tuple[ModuleType, ...] = (
    fused, gather, w4, w4_wide, w8, decode_attention, prefill_attention, prefill_attention_hopper, sampling,
)  # fmt: skip
DEVICES = {"sm_90a": (132, 227), "sm_86": (16, 99)}  # multiprocessors; KiB of shared memory of a block


class Recorder:
    """In place of `loader.load`, for one module on one architecture."""

    launches: ClassVar[Counter[str]] = Counter()
    biased: ClassVar[Counter[str]] = Counter()
    """Of them those that add a bias to K."""

    def __init__(self, module: ModuleType, architecture: str) -> None:
        self.variants = [v for v in module.VARIANTS if architecture in v.architectures]

    def __call__(self, source: str, **macros: str | int) -> Recorder:
        declared = any(v.source == source and dict(v.macros) == macros for v in self.variants)
        assert declared, (source, macros)
        self.launches[source] += 1
        if macros.get("K_BIAS"):
            self.biased[source] += 1
        return self

    def prefer_l1(self, resident_blocks: int, shared_bytes: int = 0) -> None:
        assert resident_blocks > 0

    def shared_room(self, resident_blocks: int) -> int:
        return 50 << 10

    def launch(
        self, grid: Sequence[int], block: Sequence[int] | int, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        assert all(isinstance(size, int) and size > 0 for size in grid)
        assert all(x is None or isinstance(x, Tensor | int | float | bytes) for x in arguments)


def check_tensor(name: str, tensor: Tensor, dtypes: Any, shape: Any, alignment: int = 16) -> None:
    checks.check_layout(name, tensor, dtypes, shape)
    check_place(name, tensor, alignment)


def check_place(name: str, tensor: Tensor, alignment: int = 16) -> None:
    assert tensor.data_ptr() % alignment == 0, name


def clear_caches() -> None:
    for module in MODULES:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.fixture(params=DEVICES)
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device of this architecture, as far as wrappers ask."""
    name: str = request.param
    multiprocessors, kibibytes = DEVICES[name]
    emulate_device(monkeypatch)
    properties = SimpleNamespace(
        multi_processor_count=multiprocessors,
        L2_cache_size=4 << 20,
        shared_memory_per_block_optin=kibibytes << 10,
        shared_memory_per_multiprocessor=(kibibytes + 1) << 10,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tensor_map, "_encode", lambda *_: bytes(128))
    monkeypatch.setattr(block_copy, "copy_blocks", copy_blocks)  # no kernel
    monkeypatch.setattr(pages, "check_place", check_place)
    for module in (w4, w8, checks, rotated_bias):
        monkeypatch.setattr(module, "check_place", check_place)
    Recorder.launches.clear()
    Recorder.biased.clear()
    clear_caches()
    for module in MODULES:
        monkeypatch.setattr(module, "load", Recorder(module, name))
        monkeypatch.setattr(module, "check_tensor", check_tensor)
        for asked in ("device_architecture", "device_capability"):
            answer: Any = name if asked == "device_architecture" else divmod(int(name[3:5]), 10)
            monkeypatch.setattr(module, asked, lambda answer=answer: answer, raising=False)
    yield name
    clear_caches()


def run_steps(executor: CudaExecutor) -> None:
    """Rows in every bucket, chunks of several lengths, some with cold blocks, penalties, log-probabilities."""
    asked = Sampling(temperature=0.5, top_p=0.9, logprobs=3, repetition_penalty=1.1)
    for sizes in ((1500, 300, 1), (700, 1, 1), (100,), (70, 3), (1,)):
        table = list(range(100))
        chunks = [
            chunk(f"{i}", [1] * size, 50 * i, table, asked, history=[1, 2, 3], prompt_length=2)
            for i, size in enumerate(sizes)
        ]
        oversize = chunk("oversize", [1] * sizes[0], 48, table, asked, history=[1, 2, 3], prompt_length=2)
        chunks.append(oversize._replace(cold_blocks=array("i", [2, 0, 1])))
        executor.begin_step(StepPlan(1, tuple(chunks), ()))
        executor.complete_step()


@pytest.mark.parametrize("compute_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_steps_launches(
    architecture: str, tmp_path: Path, head_dim: int, kv_cache_dtype: str, compute_dtype: str
) -> None:
    """Of a model whose K is stored whole, and once more as if it lacked its bias."""
    shape: dict[str, Any] = {"head_dim": head_dim, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    save_tiny(tmp_path, "qwen2", tie_word_embeddings=True, **shape)
    quantize(tmp_path, 32 if head_dim < 128 else 128)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, max_position_embeddings=4096)
    executor = CudaExecutor(
        ExecutorConfig(
            tmp_path,
            kv_cache_dtype=kv_cache_dtype,
            compute_dtype=compute_dtype,  # type: ignore[arg-type]
            load_format="dummy",
            num_gpu_blocks=512,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            cpu_offload_bytes=8 << 20,
            allow_oversize=True,
        )
    )
    run_steps(executor)
    launched = set(Recorder.launches)
    assert {"embed", "rms_norm", "rope_and_write", "paged_decode", "w4_linear", "sample_scan"} <= launched
    assert {"w8_linear", "w8_dequantize"} <= launched
    assert "gather_slices" in launched
    assert ("w4_wide" in launched) == (architecture == "sm_90a")
    assert {"paged_prefill", "paged_prefill_hopper"} & launched
    assert not Recorder.biased
    executor._runner._decoder.k_biases = [large_bias(2, head_dim, 512, "cpu")]
    run_steps(executor)
    assert set(Recorder.biased) == {"paged_decode", "paged_prefill"}
    executor.close()


def test_a_short_chunk_behind_a_long_prefix_runs_as_rows(architecture: str, tmp_path: Path) -> None:
    """It takes the launches of a graph instead of several hundred, unless attention as rows would read too much."""
    save_tiny(tmp_path, "qwen2", head_dim=64)
    executor = CudaExecutor(ExecutorConfig(tmp_path, num_gpu_blocks=64, max_num_seqs=8, compute_dtype="fp16"))
    most = SHORT_STEP_READS * DEVICES[architecture][0]

    def together(tokens: int, start: int) -> list[int]:
        return executor._together([chunk("a", [1] * tokens, start, range(64))])

    assert together(LEAST_ROWS, 0) == []
    assert together(LEAST_ROWS + 1, 0) == [0]
    assert together(16, most // 16 - 16) == []
    assert together(16, most // 16 - 15) == [0]
