"""Checkpoints that are complete, incomplete, sharded, or made up."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from coldblock.engine_core.errors import CheckpointError
from coldblock.engine_core.models.cuda_decoder import load_cuda_decoder
from coldblock.engine_core.models.registry import read_model_config
from coldblock.engine_core.models.weights import Checkpoint, DummyCheckpoint, LoadOptions, load_decoder
from safetensors.torch import load_file, save_file
from tiny_models import FP32, chunk, edit_config, forward, load, make_pool, quantize, save_tiny

TOKENS = [1, 5, 300, 17, 4]


def edit_tensors(path: Path, remove: str = "", **add: torch.Tensor) -> None:
    """Rewrite model.safetensors without one tensor and with others; double underscores stand for dots."""
    tensors = load_file(path / "model.safetensors")
    tensors.pop(remove, None)
    save_file({**tensors, **{k.replace("__", "."): v for k, v in add.items()}}, path / "model.safetensors")


def logits(path: Path) -> torch.Tensor:
    decoder = load(path)
    return forward(decoder, make_pool(decoder), [chunk("a", TOKENS, 0, [3])])["a"]


def test_shards_with_an_index_equal_one_file(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    whole = logits(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(logits(tmp_path), whole)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path).save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": 1, "b": "c"}}'])
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(tmp_path)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        load(tmp_path)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_tensors(tmp_path, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing") as caught:
        load(tmp_path)
    assert caught.value.path.name == "model.safetensors"


def test_missing_qwen2_bias_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    edit_tensors(tmp_path, "model.layers.0.self_attn.k_proj.bias")
    with pytest.raises(CheckpointError, match=r"k_proj\.bias is missing"):
        load(tmp_path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight has shape \[96, 64\].*\[128, 64\]"):
        load(tmp_path)


def test_tied_head_that_is_present_is_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True)
    before = logits(tmp_path)
    edit_tensors(tmp_path, lm_head__weight=torch.randn(320, 64))
    assert torch.equal(logits(tmp_path), before)


def test_untied_head_that_is_absent_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_tensors(tmp_path, "lm_head.weight")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(tmp_path)


def test_unexpected_bias_is_used(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    before = logits(tmp_path)
    edit_tensors(tmp_path, model__layers__0__self_attn__o_proj__bias=torch.zeros(64))
    assert torch.equal(logits(tmp_path), before)
    edit_tensors(tmp_path, model__layers__0__self_attn__o_proj__bias=torch.ones(64))
    assert not torch.allclose(logits(tmp_path), before)


def test_unused_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path)
    edit_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    assert "rotary_emb.inv_freq" in caplog.text


def test_half_precision_checkpoints(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    exact = logits(tmp_path)
    for dtype in (torch.float16, torch.bfloat16):
        model.to(dtype).save_pretrained(tmp_path)
        torch.testing.assert_close(logits(tmp_path), exact, atol=0.1, rtol=0.05)
        assert read_model_config(tmp_path).dtype == {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path, four_bit: bool, tied: bool) -> None:
    save_tiny(tmp_path, "qwen2", tie_word_embeddings=tied)
    if four_bit:
        quantize(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = read_model_config(tmp_path)
    options = LoadOptions(torch.float32, four_bit=four_bit, dense_copies=False, positions=512)
    results = []
    for seed in (1, 1, 2):
        decoder = load_decoder(config, DummyCheckpoint(config, seed), options)
        results.append(forward(decoder, make_pool(decoder), [chunk("a", TOKENS, 0, [3])])["a"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert results[0].isfinite().all()
    assert 0.1 < results[0].std() < 20


def test_a_wrong_kind_of_numbers_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_tensors(tmp_path, model__layers__1__mlp__down_proj__weight=torch.zeros(64, 96, dtype=torch.int64))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight has the wrong dtype torch.int64"):
        load(tmp_path)
    save_tiny(tmp_path)
    quantize(tmp_path)
    edit_tensors(tmp_path, model__layers__0__mlp__down_proj__qweight=torch.zeros(64, 48))
    with pytest.raises(CheckpointError, match=r"down_proj\.qweight has the wrong dtype torch.float32"):
        load(tmp_path)


def test_quantized_tensors_without_a_quantization_config(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    quantize(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load_decoder(read_model_config(tmp_path), Checkpoint(tmp_path), FP32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_codes_of_another_dtype_are_named(tmp_path: Path, dtype: torch.dtype) -> None:
    """They would be read in silence, and be wrong."""
    save_tiny(tmp_path)
    quantize(tmp_path)
    edit_tensors(tmp_path, model__layers__0__mlp__down_proj__qweight=torch.zeros(64, 48, dtype=dtype))
    with pytest.raises(CheckpointError, match=rf"down_proj\.qweight has the wrong dtype {dtype}, wanted: torch.uint8"):
        load(tmp_path)


@pytest.mark.parametrize("group_size", [48, 1000])
def test_groups_that_do_not_divide_the_columns_are_named(tmp_path: Path, group_size: int) -> None:
    save_tiny(tmp_path)
    quantize(tmp_path)
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path, quantization_config={**quantization, "group_size": group_size})
    config = read_model_config(tmp_path)
    for source in (DummyCheckpoint(config, 0), Checkpoint(tmp_path)):
        with pytest.raises(
            CheckpointError, match=rf"config\.json: group_size {group_size} does not divide .* 64 columns"
        ):
            load_decoder(config, source, FP32)


def test_weights_that_the_gpu_cannot_hold_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    quantize(tmp_path)
    edit_tensors(tmp_path, model__layers__0__mlp__down_proj__scales=torch.full((64, 3), 1e9))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj: scales or mins do not fit into fp16"):
        load_cuda_decoder(read_model_config(tmp_path), Checkpoint(tmp_path), torch.float16, 512, dense_copies=False)
