"""From a checkpoint folder to a `ModelConfig`: which architecture it is and every size that follows.

Owns: the list of architectures, the reading of config.json, generation_config.json and the tokenizer's size.
Does not know: tensors; torch is not needed here, so that a wrong model is refused before anything heavy is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..kv_layout import ComputeDtype, KVShape
from .architecture import Architecture
from .llama import LLAMA
from .qwen2 import QWEN2

ARCHITECTURES: dict[str, Architecture] = {name: entry for entry in (LLAMA, QWEN2) for name in entry.names}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
_DTYPES: dict[str, ComputeDtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is one of ROPE_KINDS; the rest are the usual config.json keys of that kind."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class Quantization:
    """Our four-bit layout: `bits` 4 for linears; `embedding_bits` 8 (grouped int8) or 16 (plain)."""

    bits: int
    group_size: int
    embedding_bits: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything known of a model before its tensors are read.

    `tokenizer_vocab_size`: ids from there on to `vocab_size` are padding rows that no tokenizer can produce.
    `eos_token_ids`: config.json's and generation_config.json's, merged.
    """

    path: Path
    architecture: Architecture
    vocab_size: int
    tokenizer_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: ComputeDtype
    quantization: Quantization | None

    @property
    def kv_shape(self) -> KVShape:
        """What one token's KV looks like."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim)

    @property
    def linear_elements(self) -> int:
        """Weights in all linears of the layers."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def int8_head_elements(self) -> int:
        """Weights in the output head if that is int8."""
        quantized = self.quantization is not None and self.quantization.embedding_bits == 8
        return self.vocab_size * self.hidden_size if quantized else 0


def read_model_config(path: Path) -> ModelConfig:
    """Read a checkpoint folder's JSON files. Raises CheckpointError that names the file and the key."""
    path = Path(path)
    file = path / "config.json"
    raw = _read_json(file)
    if raw is None:
        raise CheckpointError(file, "not found; the model must be a folder with config.json and safetensors files")
    with _blaming(file):
        return _model_config(path, file, raw)


@contextmanager
def _blaming(file: Path) -> Iterator[None]:
    """What a value of the wrong kind leads to becomes an error that names the file."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(file, f"holds a value of the wrong kind: {error}") from error


def _model_config(path: Path, file: Path, raw: Mapping[str, Any]) -> ModelConfig:
    architecture = _architecture(file, raw)
    _refuse_unsupported(file, raw)
    hidden, heads = _positive(file, raw, "hidden_size"), _positive(file, raw, "num_attention_heads")
    kv_heads = _positive(file, raw, "num_key_value_heads", heads)
    head_dim = _positive(file, raw, "head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        sizes = f"num_attention_heads {heads}, num_key_value_heads {kv_heads}, head_dim {head_dim}"
        raise CheckpointError(file, f"{sizes} do not fit together")
    vocab_size = _positive(file, raw, "vocab_size")
    max_positions = _positive(file, raw, "max_position_embeddings", 2048)
    generation_file = path / "generation_config.json"
    with _blaming(generation_file):
        generation_ends = _eos_ids(_read_json(generation_file) or {})
    return ModelConfig(
        path=path,
        architecture=architecture,
        vocab_size=vocab_size,
        tokenizer_vocab_size=min(vocab_size, _tokenizer_size(path) or vocab_size),
        hidden_size=hidden,
        intermediate_size=_positive(file, raw, "intermediate_size"),
        num_layers=_positive(file, raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_above(file, "rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_positions,
        rope=_rope(file, raw, max_positions),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(dict.fromkeys((*_eos_ids(raw), *generation_ends))),
        dtype=_DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), "fp32"),
        quantization=_quantization(file, raw),
    )


def _read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None when there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(file, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(file, "is not a JSON object")
    return value


def _architecture(file: Path, raw: Mapping[str, Any]) -> Architecture:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise CheckpointError(file, f"architectures {names} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(file: Path, raw: Mapping[str, Any]) -> None:
    """Keys whose other values would change the computation in silence."""
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(file, f"hidden_act {raw['hidden_act']!r} is not supported; supported: 'silu'")
    if raw.get("use_sliding_window"):
        raise CheckpointError(file, "use_sliding_window true is not supported")


def _positive(file: Path, raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key) or default
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(file, f"{key} is {value!r}; a positive integer is needed")
    return value


def _above(file: Path, key: str, value: Any, least: float = 0.0) -> float:
    """The number, refused unless it is finite and above `least`: every answer would be nonsense otherwise."""
    number = float(value)
    if not least < number < math.inf:
        raise CheckpointError(file, f"{key} is {value!r}; a finite number above {least:g} is needed")
    return number


def _rope(file: Path, raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """From `rope_scaling` (`type` or `rope_type`) or the newer `rope_parameters`; absent, null and {} are "default".

    A number that is 0 or null counts as absent, as in transformers.
    """
    scaling = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(file, f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    given = {key: _above(file, f"rope scaling's {key}", scaling[key]) for key in _ROPE_NUMBERS if scaling.get(key)}
    rope = RopeConfig(
        kind=kind,
        theta=_above(file, "rope_theta", scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0, 1.0),
        factor=_above(file, "rope scaling's factor", scaling.get("factor") or max_positions / original),
        original_max_positions=int(_above(file, "original_max_position_embeddings", original)),
        **given,
    )
    if kind == "llama3":
        _above(file, "rope scaling's high_freq_factor", rope.high_freq_factor, rope.low_freq_factor)
    return rope


def _eos_ids(source: Mapping[str, Any]) -> list[int]:
    value = source.get("eos_token_id")
    return [int(token) for token in (value if isinstance(value, list) else [] if value is None else [value])]


def _tokenizer_size(path: Path) -> int | None:
    """One more than the largest id in tokenizer.json, added tokens included; None without such a file."""
    file = path / "tokenizer.json"
    tokenizer = _read_json(file)
    if tokenizer is None:
        return None
    with _blaming(file):
        vocab = tokenizer.get("model", {}).get("vocab", {})
        ids = list(vocab.values()) if isinstance(vocab, dict) else range(len(vocab))
        added = [entry["id"] for entry in tokenizer.get("added_tokens") or []]
        return int(max([*ids, *added], default=-1) + 1)


def _quantization(file: Path, raw: Mapping[str, Any]) -> Quantization | None:
    section = raw.get("quantization_config")
    if not section:
        return None
    method, bits = section.get("quant_method"), section.get("bits", 4)
    if method != "coldblock" or bits != 4:
        found = f"quant_method {method!r} with bits {bits!r}"
        raise CheckpointError(file, f"quantization_config: {found} is not supported; supported: 'coldblock' with 4")
    return Quantization(4, int(section.get("group_size", 32)), int(section.get("embedding_bits", 16)))
