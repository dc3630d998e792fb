"""config.json in all its dialects."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coldblock.engine_core.errors import CheckpointError
from coldblock.engine_core.kv_layout import KVShape
from coldblock.engine_core.models.registry import read_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def write(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**BASE, **changes}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_sizes(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert config.kv_shape == KVShape(2, 2, 16)
    assert (config.vocab_size, config.max_position_embeddings, config.dtype) == (320, 512, "bf16")
    assert config.quantization is None


def test_kv_heads_default_to_heads_and_head_dim_may_be_given(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, num_key_value_heads=None, head_dim=80))
    assert (config.num_kv_heads, config.head_dim) == (4, 80)


def test_end_tokens_of_both_files_are_merged(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, {"eos_token_id": [7, 2, 9]}, eos_token_id=2))
    assert config.eos_token_ids == (2, 7, 9)


def test_no_end_token(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize("scaling", [None, {}, {"type": "default"}, {"rope_type": "default"}])
def test_plain_rope(tmp_path: Path, scaling: Any) -> None:
    rope = read_model_config(write(tmp_path, rope_scaling=scaling, rope_theta=5e5)).rope
    assert (rope.kind, rope.theta, rope.factor) == ("default", 5e5, 1.0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rope_by_either_name(tmp_path: Path, key: str, kind: str) -> None:
    rope = read_model_config(write(tmp_path, rope_scaling={key: kind, "factor": 8})).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == (kind, 8.0, 512)


def test_a_rope_number_of_zero_is_none(tmp_path: Path) -> None:
    """As in transformers, where files with `"mscale": 0` or `"beta_fast": 0` mean the default."""
    scaling = {"type": "yarn", "factor": 8, "beta_fast": 0, "beta_slow": 0.0, "mscale": 0, "attention_factor": 0}
    rope = read_model_config(write(tmp_path, rope_scaling=scaling)).rope
    assert (rope.beta_fast, rope.beta_slow, rope.mscale, rope.attention_factor) == (32.0, 1.0, 0.0, None)


def test_rope_parameters_of_newer_files(tmp_path: Path) -> None:
    section = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 128}
    rope = read_model_config(write(tmp_path, rope_parameters=section)).rope
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 1e6, 4.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"quantization_config": {"quant_method": "unknown", "bits": 4}}, "unknown"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"head_dim": -16}, "head_dim"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
        ({"architectures": 5}, "wrong kind"),
        ({"eos_token_id": "</s>"}, "wrong kind.*</s>"),
        ({"eos_token_id": [[1]]}, "wrong kind"),
        ({"rope_scaling": [1]}, "wrong kind"),
        ({"rope_scaling": {"type": "linear", "factor": "a"}}, "wrong kind.*'a'"),
        ({"rms_norm_eps": None}, "wrong kind"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; a finite number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"rope_theta": -5.0}, "rope_theta is -5.0"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": 1}, "rope_theta is 1; a finite number above 1"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": -1.5}}, "attention_factor is -1.5"),
        ({"rope_scaling": {"type": "yarn", "attention_factor": math.nan}}, "attention_factor is nan"),
        ({"rope_scaling": {"type": "yarn", "beta_slow": -1}}, "beta_slow is -1; a finite number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": -5}}, "original.* is -5"),
        ({"rope_scaling": {"type": "llama3", "low_freq_factor": 4.0}}, "high_freq_factor is 4.0; .* above 4"),
        ({"quantization_config": "awq"}, "wrong kind"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        read_model_config(write(tmp_path, **changes))
    assert caught.value.path == tmp_path / "config.json"


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not found"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[" * 200_000),
        ("generation_config.json", '{"eos_token_id": ["x"]}'),
        ("tokenizer.json", '{"model": null}'),
        ("tokenizer.json", '{"model": {"vocab": 3}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}'),
        ("tokenizer.json", '{"model": {"vocab": {}}, "added_tokens": [{}]}'),
    ],
)
def test_a_file_with_other_content_is_named(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(tmp_path)
    assert caught.value.path == tmp_path / name


def test_tokenizer_size_counts_added_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    tokenizer = {"model": {"vocab": {"a": 0, "b": 297}}, "added_tokens": [{"id": 299}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_model_config(tmp_path).tokenizer_vocab_size == 300


def test_tokenizer_size_without_tokenizer_is_the_vocabulary(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path)).tokenizer_vocab_size == 320


def test_reading_needs_no_torch() -> None:
    code = "import sys, coldblock.engine_core.models.registry; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "False"
