"""Logits against transformers, on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from coldblock.engine_core.models.weights import LoadOptions
from tiny_models import chunk, forward, load, make_pool, save_tiny
from torch import Tensor

TOKENS = [(i * 37) % 320 for i in range(150)]
TABLE = [9, 3, 27, 14, 5, 30, 2, 61, 44, 12]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}


def reference_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


def assert_same_logits(path: Path, model: Any) -> None:
    decoder = load(path)
    ours = forward(decoder, make_pool(decoder), [chunk("a", TOKENS, 0, TABLE)])["a"]
    torch.testing.assert_close(ours, reference_logits(model), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_rope_kinds(tmp_path: Path, kind: str, rope: dict[str, Any]) -> None:
    assert_same_logits(tmp_path, save_tiny(tmp_path, kind, rope_parameters={"rope_theta": 10000.0, **rope}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tied_and_untied_heads(tmp_path: Path, kind: str, tied: bool) -> None:
    assert_same_logits(tmp_path, save_tiny(tmp_path, kind, tie_word_embeddings=tied))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (71, 1)])
def test_query_heads_per_kv_head(tmp_path: Path, heads: int, kv_heads: int) -> None:
    model = save_tiny(tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=16 * heads)
    assert_same_logits(tmp_path, model)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 100, 128, 256])
def test_head_dims(tmp_path: Path, head_dim: int) -> None:
    assert_same_logits(tmp_path, save_tiny(tmp_path, head_dim=head_dim))


def test_biases_where_the_config_asks_for_them(tmp_path: Path) -> None:
    assert_same_logits(tmp_path, save_tiny(tmp_path, attention_bias=True, mlp_bias=True))


def test_bf16_linears_stay_close(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    decoder = load(tmp_path, LoadOptions(torch.bfloat16, four_bit=True, dense_copies=True, positions=512))
    ours = forward(decoder, make_pool(decoder, kv_format="bf16"), [chunk("a", TOKENS, 0, TABLE)])["a"]
    ours, wanted = ours.log_softmax(-1), reference_logits(model).log_softmax(-1)
    assert (wanted.exp() * (wanted - ours)).sum(-1).mean() < 2e-3


def test_bytes_are_counted(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    weights = sum(p.nbytes for p in model.parameters() if p.ndim > 1)
    assert load(tmp_path).nbytes() == pytest.approx(weights, rel=0.1)
