"""Tiny random checkpoints, and helpers that run chunks of tokens through a decoder or an executor."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from coldblock.engine_core.control.plan import BlockMove, Chunk, MoveDone, SampleSpec, StepPlan, StepResult
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.batch import PagedBatch
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.models.layers import Decoder
from coldblock.engine_core.models.registry import read_model_config
from coldblock.engine_core.models.weights import Checkpoint, LoadOptions, load_decoder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

GREEDY = Sampling(temperature=0.0)
FP32 = LoadOptions(torch.float32, four_bit=False, dense_copies=False, positions=512)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def save_tiny(path: Path, kind: str = "llama", **overrides: Any) -> PreTrainedModel:
    """Save a random fp32 model of transformers in `path` and return it."""
    torch.manual_seed(overrides.pop("seed", 0))
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    model = model_class(config_class(**{**SIZES, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return model


def save_biased(path: Path, norm: float, seed: int = 0, **overrides: Any) -> None:
    """Save a random Qwen2 model with a K bias of this norm in layer 0 and none elsewhere.

    As in the real ones it lies in channels that rotate slowly: it hardly moves attention, but it is large.
    """
    slow = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    save_tiny(path, "qwen2", seed=seed, **{**slow, **overrides})
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("k_proj.bias")]:
        tensors[name].zero_()
    config = read_model_config(path)
    bias = tensors["model.layers.0.self_attn.k_proj.bias"]
    pairs = bias.view(config.num_kv_heads, 2, config.head_dim // 2)[..., config.head_dim // 4 :]
    values = torch.randn(pairs.shape, generator=torch.Generator().manual_seed(seed))
    pairs.copy_(values * (norm / values.norm()))
    save_file(tensors, path / "model.safetensors")


def edit_config(path: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def quantize(path: Path, group_size: int = 32) -> dict[str, Tensor]:
    """Turn a saved model into our four-bit layout; returns its weights dequantized, by transformers' names."""
    tensors, exact = load_file(path / "model.safetensors"), {}
    stored: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        stem = name.removesuffix(".weight")
        if weight.ndim == 1:
            stored[name] = exact[name] = weight
        elif "embed" in name:
            groups = weight.view(len(weight), -1, group_size)
            scales = (groups.abs().amax(-1) / 127).half()
            codes = (groups / scales.float()[..., None]).round().clamp(-127, 127)
            stored |= {f"{stem}.qweight": codes.view(weight.shape).to(torch.int8), f"{stem}.scales": scales}
            exact[name] = (codes * scales.float()[..., None]).view(weight.shape)
        else:
            groups = weight.view(len(weight), -1, group_size)
            low = groups.amin(-1).half()
            scales = ((groups.amax(-1) - low.float()) / 15).half()
            codes = ((groups - low.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
            flat = codes.view(weight.shape).to(torch.uint8)
            stored[f"{stem}.qweight"] = flat[:, ::2] | flat[:, 1::2] << 4
            stored |= {f"{stem}.scales": scales, f"{stem}.mins": low}
            exact[name] = (codes * scales.float()[..., None] + low.float()[..., None]).view(weight.shape)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    quantization = {"quant_method": "coldblock", "bits": 4, "group_size": group_size, "embedding_bits": 8}
    edit_config(path, quantization_config=quantization)
    return exact


def load(path: Path, options: LoadOptions = FP32) -> Decoder:
    """The decoder of a checkpoint folder."""
    return load_decoder(read_model_config(path), Checkpoint(path), options)


def chunk(
    request_id: str,
    tokens: Sequence[int],
    start: int,
    table: Sequence[int],
    sampling: Sampling | None = None,
    **spec: Any,
) -> Chunk:
    """A chunk; sampled when `sampling` is given."""
    sample = None
    if sampling is not None:
        sample = SampleSpec(sampling, **{"seed": 0, "output_index": 0, "prompt_length": len(tokens), **spec})
    return Chunk(request_id, array("i", tokens), start, array("i", table), sample)


@torch.inference_mode()
def forward(decoder: Decoder, pool: KVPool, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
    """Run one batch; the logits of every token, fp32 [tokens, vocab], by request."""
    batch = PagedBatch(pool, chunks, alone=False)
    logits = decoder.logits(decoder.forward(batch.token_ids, batch.positions, batch.attend))
    parts = logits.split([len(c.token_ids) for c in batch.chunks])
    return {c.request_id: part for c, part in zip(batch.chunks, parts, strict=True)}


def make_pool(decoder: Decoder, blocks: int = 64, block_size: int = 16, kv_format: str = "fp32") -> KVPool:
    """A pool for a decoder, filled with NaN bytes, so that reading what was never written shows."""
    pool = KVPool(decoder.config.kv_shape, block_size, kv_format, blocks, blocks)  # type: ignore[arg-type]
    pool.gpu.fill_(0xFF)
    return pool


def run_step(
    executor: CpuExecutor, chunks: Sequence[Chunk] = (), moves: Sequence[BlockMove] = (), step: int = 0
) -> StepResult:
    """One step, begun and completed."""
    executor.begin_step(StepPlan(step, tuple(chunks), tuple(moves)))
    return executor.complete_step()


def copy_blocks(executor: CpuExecutor, *moves: BlockMove) -> list[MoveDone]:
    """Copies from their beginning to their end, in steps that do nothing else."""
    done = list(run_step(executor, moves=moves).moves_done)
    while len(done) < len(moves):
        done += run_step(executor).moves_done
    return done


def make_executor(path: Path, **changes: Any) -> CpuExecutor:
    """An executor with a small pool."""
    return CpuExecutor(ExecutorConfig(path, **{"num_gpu_blocks": 64, "max_model_len": 512, **changes}))
