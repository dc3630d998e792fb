"""Convert a Q4_1/Q8_0 GGUF file of the llama architecture into a Coldblock W4A16 checkpoint, without loss.

Owns: the mapping of GGUF tensors, metadata and vocabulary to the checkpoint's files, and the repacking of nibbles.
Does not know: where the file came from (`fetch_model`) or how the checkpoint is run (`engine_core/models`).

The checkpoint holds, for a linear P of N rows and K columns: `P.qweight` uint8 [N, K/2] (element k of a row in byte
k // 2, the low nibble when k is even), `P.scales` and `P.mins` fp16 [N, K/32], w = q * scale + min; for the embedding
`qweight` int8 [V, H] and `scales` fp16 [V, H/32], w = q * scale; norms in fp32.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.gguf_reader import ReaderTensor
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ..progress import track
from .errors import ToolError

GROUP_SIZE = 32
Q4_1_BLOCK_BYTES = 20  # fp16 scale, fp16 min, 32 nibbles
Q8_0_BLOCK_BYTES = 34  # fp16 scale, 32 int8
CONTROL_TOKEN = 3  # GGUF's token type of special tokens

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert_gguf(source: Path, target: Path) -> None:
    """Write the checkpoint of `source` into the existing empty folder `target`, every file synced to the disk.

    Raises ToolError when the file holds what the layout cannot express, OSError when writing fails.
    """
    reader = GGUFReader(str(source))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise ToolError(
            f"{source.name}: architecture {meta.get('general.architecture')!r}; only 'llama' can be converted"
        )
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in track(reader.tensors, "converting", "tensor"):
        tensors.update(convert_tensor(tensor, heads))
    write_file(target / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_file(target / "tokenizer.json", build_tokenizer(meta).to_str(pretty=False).encode())
    write_file(target / "chat_template.jinja", meta["tokenizer.chat_template"].encode())
    write_json(target / "tokenizer_config.json", tokenizer_config(meta))
    write_json(target / "generation_config.json", token_id_settings(meta))
    write_json(target / "config.json", model_config(meta))
    sync_folder(target)


def checkpoint_name(gguf_name: str) -> tuple[str, str]:
    """("model.layers.0.self_attn.q_proj", "attn_q") for "blk.0.attn_q.weight". Raises ToolError for unknown names."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name):
        layer, part = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}", part
    elif (part := gguf_name.removesuffix(".weight")) in _TOP_NAMES:
        return _TOP_NAMES[part], part
    raise ToolError(f"tensor {gguf_name!r} has no place in a llama checkpoint with tied embeddings")


def convert_tensor(tensor: ReaderTensor, heads: dict[str, int]) -> dict[str, NDArray[Any]]:
    """The checkpoint tensors of one GGUF tensor; rows of `heads`' tensors are put back into their original order."""
    name, part = checkpoint_name(tensor.name)
    kind = tensor.tensor_type
    if kind == GGMLQuantizationType.F32:
        return {f"{name}.weight": np.ascontiguousarray(tensor.data)}
    if kind == GGMLQuantizationType.Q8_0 and part == "token_embd":
        values, scales = split_q8_0(tensor.data)
        return {f"{name}.qweight": values, f"{name}.scales": scales}
    if kind == GGMLQuantizationType.Q4_1 and part != "token_embd":
        rows = unpermute_rows(tensor.data, heads[part]) if part in heads else tensor.data
        qweight, scales, mins = split_q4_1(rows)
        return {f"{name}.qweight": qweight, f"{name}.scales": scales, f"{name}.mins": mins}
    raise ToolError(f"tensor {tensor.name!r} is {kind.name}; linears must be Q4_1, the embedding Q8_0 and norms F32")


def unpermute_rows(rows: NDArray[np.uint8], heads: int) -> NDArray[np.uint8]:
    """Undo the row permutation that GGUF applies to the q and k projections of llama models."""
    count, width = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


def split_q4_1(rows: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Q4_1 rows uint8 [N, K/32*20] -> qweight uint8 [N, K/2], scales fp16 [N, K/32], mins fp16 [N, K/32].

    A Q4_1 block keeps elements 0-15 in the low nibbles of its 16 bytes and 16-31 in the high ones.
    """
    count = rows.shape[0]
    blocks = rows.reshape(count, -1, Q4_1_BLOCK_BYTES)
    factors = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    nibbles = np.concatenate([blocks[..., 4:] & 0x0F, blocks[..., 4:] >> 4], axis=-1)
    qweight = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return qweight.reshape(count, -1), factors[..., 0].copy(), factors[..., 1].copy()


def split_q8_0(rows: NDArray[np.uint8]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Q8_0 rows uint8 [V, H/32*34] -> qweight int8 [V, H], scales fp16 [V, H/32]."""
    count = rows.shape[0]
    blocks = rows.reshape(count, -1, Q8_0_BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].copy()
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(count, -1), scales


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes (pre-tokenizer "smollm": digits one by one)."""
    if (pre := meta.get("tokenizer.ggml.pre")) != "smollm":
        raise ToolError(f"pre-tokenizer {pre!r} is not known; only 'smollm' can be converted")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    left_right = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, left_right))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": bool(meta["tokenizer.ggml.add_bos_token"]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


def token_id_settings(meta: dict[str, Any]) -> dict[str, int]:
    """The special token ids, as generation_config.json and config.json name them."""
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The contents of config.json: a llama config in Hugging Face's names, with our quantization settings."""
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": shortest_float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest_float(meta["llama.rope.freq_base"]),
        "max_position_embeddings": meta["llama.context_length"],
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **token_id_settings(meta),
        "quantization_config": {
            "quant_method": "coldblock",
            "bits": 4,
            "group_size": GROUP_SIZE,
            "embedding_bits": 8,
        },
    }


def shortest_float(value: float) -> float:
    """The decimal number that a float32 of the file stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as indented JSON."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_file(path: Path, data: bytes) -> None:
    """Write `data` and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
