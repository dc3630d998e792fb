"""The embedded model: its logits against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coldblock.engine_core.models.layers import dequantize_groups
from coldblock.engine_core.models.registry import ModelConfig, read_model_config
from coldblock.engine_core.models.w4a16 import W4Weight
from coldblock.engine_core.models.weights import LoadOptions
from safetensors.torch import load_file
from tiny_models import FP32, chunk, forward, load, make_pool
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = (
    "<|im_start|>user\nExplain what a hash table is in two sentences.<|im_end|>\n<|im_start|>assistant\nA hash table "
    "is a data structure that maps keys to values using a hash function."
)


def as_transformers(config: ModelConfig) -> LlamaForCausalLM:
    """transformers' model of the same sizes with our weights, dequantized in fp32."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            tie_word_embeddings=True,
        )
    )
    stored, state = load_file(config.path / "model.safetensors"), {}
    for name, tensor in stored.items():
        stem = name.removesuffix(".qweight")
        if name.endswith(".weight"):
            state[name] = tensor.float()
        elif tensor.dtype == torch.int8:
            state[f"{stem}.weight"] = dequantize_groups(tensor, stored[f"{stem}.scales"])
        elif tensor.dtype == torch.uint8:
            weight = W4Weight(tensor, stored[f"{stem}.scales"], stored[f"{stem}.mins"])
            state[f"{stem}.weight"] = weight.dequantize()
    model.load_state_dict(state, strict=False)
    return model.eval()


@pytest.fixture(scope="module")
def tokens(embedded_model: Path) -> list[int]:
    return Tokenizer.from_file(str(embedded_model / "tokenizer.json")).encode(TEXT).ids


@pytest.fixture(scope="module")
def wanted(embedded_model: Path, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return as_transformers(read_model_config(embedded_model))(torch.tensor([tokens])).logits[0]


def divergence(wanted: Tensor, got: Tensor) -> float:
    """Mean Kullback-Leibler divergence per token, in nats."""
    wanted, got = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


def ours(path: Path, tokens: list[int], options: LoadOptions, kv_format: str, at_once: int) -> Tensor:
    """Logits of all tokens, fed `at_once` at a time."""
    decoder = load(path, options)
    pool = make_pool(decoder, blocks=8, kv_format=kv_format)
    parts = [
        forward(decoder, pool, [chunk("a", tokens[start : start + at_once], start, range(8))])["a"]
        for start in range(0, len(tokens), at_once)
    ]
    return torch.cat(parts)


def test_fp32_equals_transformers(embedded_model: Path, tokens: list[int], wanted: Tensor) -> None:
    assert divergence(wanted, ours(embedded_model, tokens, FP32, "fp32", 1000)) < 1e-8


@pytest.mark.parametrize("at_once", [1, 1000], ids=["token by token", "at once"])
def test_as_served_stays_close(embedded_model: Path, tokens: list[int], wanted: Tensor, at_once: int) -> None:
    options = LoadOptions(torch.float32, four_bit=True, dense_copies=True, positions=512)
    assert divergence(wanted, ours(embedded_model, tokens, options, "bf16", at_once)) < 1e-3
