"""Which model and which device the settings mean, and the line that says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from coldblock.engine_core import main
from coldblock.engine_core.config import EngineSettings
from coldblock.engine_core.device import cuda_support
from coldblock.engine_core.device.executor import Capacity
from coldblock.engine_core.kv_layout import KVShape
from coldblock.engine_core.models.registry import read_model_config
from coldblock.settings import UsageError, load
from tiny_models import save_tiny

MIB = 1 << 20


def settings(*argv: str) -> EngineSettings:
    return load(EngineSettings, list(argv), prog="coldblock engine", summary="Run.")


@pytest.fixture(autouse=True)
def no_fetched_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDBLOCK_MODELS_DIR", str(tmp_path / "models"))


def test_a_shape_serves_dummy_weights_alone() -> None:
    folder = main.find_checkpoint("qwen2.5-3b", "dummy")
    config = read_model_config(folder)
    assert config.kv_shape == KVShape(36, 2, 128)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (2048, 11008, 151936)
    assert config.dtype == "fp16" and config.tie_word_embeddings and config.architecture.qkv_bias
    assert config.quantization is not None and config.quantization.group_size == 128
    with pytest.raises(UsageError, match=r"'qwen2\.5-3b' .*--load-format dummy, qwen2\.5-3b, .* will do"):
        main.find_checkpoint("qwen2.5-3b", "auto")


def test_a_folder_comes_before_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen2.5-3b").mkdir()
    (tmp_path / "qwen2.5-3b" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main.find_checkpoint("qwen2.5-3b", "dummy") == tmp_path / "qwen2.5-3b"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--device: 'cuda' is not allowed: .*use --device cpu"):
        main.load_executor(settings("model", "--device", "cuda"), tmp_path)


@pytest.mark.parametrize(
    ("argv", "free", "wanted"),
    [
        ((), 64 << 30, 2048 * MIB),
        ((), 2 << 30, 512 * MIB),
        (("--max-cpu-offload-mb", "3000"), 2 << 30, 3000 * MIB),
        (("--no-cpu-offload", "--max-cpu-offload-mb", "3000"), 64 << 30, 0),
    ],
)
def test_the_cpu_tier_is_as_large_as_asked_or_as_a_small_machine_can_spare(
    argv: tuple[str, ...], free: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 12."""
    monkeypatch.setattr("coldblock.engine_core.device.memory.available_memory", lambda: free)
    assert main.executor_config(settings("model", *argv), tmp_path).cpu_offload_bytes == wanted


@pytest.mark.parametrize(
    ("argv", "blocks"),
    [((), 10), (("--allow-oversize",), 5 + 30), (("--allow-oversize", "--no-cpu-offload"), 10)],
)
def test_oversize_is_told_to_executor_scheduler_and_peers(argv: tuple[str, ...], blocks: int, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    given = settings("tiny", "--max-model-len", "900", *argv)
    executor = SimpleNamespace(capacity=Capacity(10, 30, 1000), describe=dict, kv_format="fp16")
    model = main.describe_model(given, tmp_path, read_model_config(tmp_path), executor)  # type: ignore[arg-type]
    assert main.executor_config(given, tmp_path).allow_oversize is bool(argv)
    scheduler = main.scheduler_config(given, model)
    assert scheduler.allow_oversize is bool(argv)
    assert scheduler.max_request_tokens == model.max_request_tokens == blocks * 16


def test_auto_says_why_it_takes_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_support, "why_no_cuda", lambda: "CuPy is missing: install it")
    save_tiny(tmp_path)
    caplog.set_level("INFO")
    for device, said in (("cpu", False), ("auto", True)):
        caplog.clear()
        executor = main.load_executor(settings("tiny", "--device", device, "--num-gpu-blocks", "4"), tmp_path)
        executor.close()
        assert ("on the CPU (CuPy is missing: install it; " in caplog.messages[-1]) == said
