"""From a checkpoint's tensors to a `Decoder`.

Owns: reading safetensors (one file, or shards with an index), the dummy checkpoint, the assembly of fused layers.
Does not know: KV pages, devices other than the CPU.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from .head import FixedPointHead, has_int8_products
from .layers import (
    Decoder,
    DecoderLayer,
    DenseLinear,
    Int8Embedding,
    Linear,
    PlainEmbedding,
    dequantize_groups,
    pair_order,
    rotary_table,
)
from .registry import ModelConfig
from .w4a16 import W4Linear, W4Weight, fits_operator, stack_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held in memory.

    `linear_dtype`: what dense linears compute in. `four_bit` False dequantizes four-bit linears at load; else they stay
    packed, with dense copies for many rows when `dense_copies`. `positions`: length of the rotary table.
    """

    linear_dtype: torch.dtype
    four_bit: bool
    dense_copies: bool
    positions: int


class TensorSource(Protocol):
    """Where tensors come from, by name."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor of that name and shape. Raises CheckpointError when it is missing or has another shape."""
        ...


class Checkpoint:
    """The safetensors files of a folder. Remembers what was asked for, so that unused tensors can be reported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._used: set[str] = set()
        self._files: dict[str, Path] = {}
        files = self._indexed_files() or sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(path, "holds no .safetensors file")
        self._open = {file: self._open_file(file) for file in files}
        for file, handle in self._open.items():
            self._files.update(dict.fromkeys(handle.keys(), file))

    def _indexed_files(self) -> list[Path]:
        index = self._path / "model.safetensors.index.json"
        if not index.exists():
            return []
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return [self._path / name for name in names]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(index, f"is not an index of safetensors shards: {error!r}") from error

    @staticmethod
    def _open_file(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(file, f"cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """See TensorSource."""
        file = self._files.get(name)
        if file is None:
            where = next(iter(self._open)) if len(self._open) == 1 else self._path
            raise CheckpointError(where, f"tensor {name} is missing")
        self._used.add(name)
        tensor: Tensor = self._open[file].get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            found = list(tensor.shape)
            raise CheckpointError(file, f"tensor {name} has shape {found}, config.json asks for {list(shape)}")
        if tensor.is_floating_point() == name.endswith(".qweight"):
            raise CheckpointError(file, f"tensor {name} has the wrong dtype {tensor.dtype}")
        return tensor

    def unused(self) -> list[str]:
        """Names of tensors that nobody asked for."""
        return sorted(self._files.keys() - self._used)


class DummyCheckpoint:
    """Seeded random tensors of the shape that config.json gives; each depends on the seed and its own name alone."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config, self._seed = config, seed

    def __contains__(self, name: str) -> bool:
        quantization = self._config.quantization
        embedding = name.startswith(self._config.architecture.embedding)
        if name.endswith(".qweight"):
            return quantization is not None and (not embedding or quantization.embedding_bits == 8)
        return not name.endswith(".bias") and not (embedding and name.endswith(".mins"))

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """See TensorSource."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        embedding = name.startswith(self._config.architecture.embedding)
        hidden = self._config.hidden_size
        if name.endswith(".qweight"):
            low, high, dtype = (-127, 128, torch.int8) if embedding else (0, 256, torch.uint8)
            return torch.randint(low, high, tuple(shape), generator=generator, dtype=dtype)
        if name.endswith(".scales"):
            spread = 73.0 * 8 if embedding else 4.6 * math.sqrt(hidden)  # standard deviation of the codes
            return torch.full(tuple(shape), 1.0 / spread, dtype=torch.float16)
        if name.endswith(".mins"):
            return torch.full(tuple(shape), -7.5 / (4.6 * math.sqrt(hidden)), dtype=torch.float16)
        if len(shape) == 1:
            return torch.zeros(tuple(shape)) if name.endswith(".bias") else torch.ones(tuple(shape))
        return torch.randn(tuple(shape), generator=generator) / math.sqrt(shape[1])


def load_decoder(config: ModelConfig, source: TensorSource, options: LoadOptions) -> Decoder:
    """Read all tensors and assemble the model. Raises CheckpointError that names the tensor and the file."""
    loader = _Loader(config, source, options)
    decoder = Decoder(
        config=config,
        embedding=loader.embedding(),
        layers=[loader.layer(i) for i in range(config.num_layers)],
        final_norm=loader.norm(config.architecture.final_norm),
        head=loader.head(),
        floor=torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps)),
        rotary=rotary_table(config, options.positions),
    )
    if isinstance(source, Checkpoint) and (unused := source.unused()):
        logger.info("%s: %d tensors are not used: %s", config.path, len(unused), ", ".join(unused[:8]))
    return decoder


class _Loader:
    """Loads parts of one model; holds what all parts need."""

    def __init__(self, config: ModelConfig, source: TensorSource, options: LoadOptions) -> None:
        self._config, self._source, self._options = config, source, options
        self._dtype = options.linear_dtype

    def layer(self, number: int) -> DecoderLayer:
        """All of one layer, linears over the same input fused."""
        config, names = self._config, self._config.architecture
        prefix = names.layer.format(layer=number)
        hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = [prefix + name for name in names.qkv]
        pairs = [_repeat_order(pair_order(dim), heads), _repeat_order(pair_order(dim), kv_heads), None]
        return DecoderLayer(
            input_norm=self.norm(prefix + names.input_norm),
            qkv=self.linear(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], hidden, pairs, names.qkv_bias),
            attention_out=self.linear([prefix + names.attention_out], [hidden], heads * dim),
            mlp_norm=self.norm(prefix + names.mlp_norm),
            gate_up=self.linear([prefix + name for name in names.gate_up], [ffn, ffn], hidden),
            down=self.linear([prefix + names.down], [hidden], ffn),
        )

    def norm(self, name: str) -> Tensor:
        """Norm weight times sqrt(N), fp32."""
        size = self._config.hidden_size
        return self._source.tensor(f"{name}.weight", [size]).float() * math.sqrt(size)

    def linear(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        orders: Sequence[Tensor | None] | None = None,
        needs_bias: bool = False,
    ) -> Linear:
        """The named matrices stacked; `orders` reorders each one's rows. Biases are taken where they exist."""
        orders = orders or [None] * len(names)
        weights = [self._weight(name, n, columns) for name, n in zip(names, rows, strict=True)]
        weights = [_reorder(weight, order) for weight, order in zip(weights, orders, strict=True)]
        bias = self._stacked_bias(names, rows, orders, needs_bias)
        packed = [weight for weight in weights if isinstance(weight, W4Weight)]
        if self._options.four_bit and len(packed) == len(weights):
            stacked = stack_rows(packed)
            if fits_operator(stacked):
                return W4Linear(stacked, bias, self._dtype if self._options.dense_copies else None)
        dense = [weight.dequantize() if isinstance(weight, W4Weight) else weight.to(self._dtype) for weight in weights]
        return DenseLinear(torch.cat(dense), bias, self._dtype)

    def _weight(self, name: str, rows: int, columns: int) -> Tensor | W4Weight:
        if f"{name}.qweight" not in self._source:
            return self._source.tensor(f"{name}.weight", [rows, columns])
        groups = [rows, columns // self._group_size(columns)]
        return W4Weight(
            self._source.tensor(f"{name}.qweight", [rows, columns // 2]),
            self._source.tensor(f"{name}.scales", groups),
            self._source.tensor(f"{name}.mins", groups),
        )

    def _group_size(self, columns: int) -> int:
        quantization = self._config.quantization
        if quantization is None:
            file = self._config.path / "config.json"
            raise CheckpointError(file, "there are quantized tensors but no quantization_config")
        return columns if quantization.group_size < 1 else quantization.group_size

    def _stacked_bias(
        self, names: Sequence[str], rows: Sequence[int], orders: Sequence[Tensor | None], needed: bool
    ) -> Tensor | None:
        present = [needed or f"{name}.bias" in self._source for name in names]
        if not any(present):
            return None
        parts = [
            self._source.tensor(f"{name}.bias", [n]).float() if there else torch.zeros(n)
            for name, n, there in zip(names, rows, present, strict=True)
        ]
        return torch.cat([part if order is None else part[order] for part, order in zip(parts, orders, strict=True)])

    def embedding(self) -> PlainEmbedding | Int8Embedding:
        """The token embedding, grouped int8 or plain."""
        name, shape = self._config.architecture.embedding, [self._config.vocab_size, self._config.hidden_size]
        if f"{name}.qweight" in self._source:
            return Int8Embedding(*self._int8(name, shape))
        return PlainEmbedding(self._source.tensor(f"{name}.weight", shape))

    def _int8(self, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        groups = shape[1] // self._group_size(shape[1])
        return self._source.tensor(f"{name}.qweight", shape), self._source.tensor(f"{name}.scales", [shape[0], groups])

    def head(self) -> Linear:
        """The output head: its own tensors, or the embedding's when tied, whether a head is there or not."""
        config = self._config
        names, shape = config.architecture, [config.vocab_size, config.hidden_size]
        name = names.embedding if config.tie_word_embeddings else names.head
        if f"{name}.qweight" in self._source and f"{name}.mins" not in self._source:
            weight = dequantize_groups(*self._int8(name, shape))
            if self._options.four_bit and has_int8_products():
                return FixedPointHead(weight, self.norm(names.final_norm))
            return DenseLinear(weight, None, self._dtype)
        return self.linear([name], [shape[0]], shape[1])


def _repeat_order(order: Tensor, heads: int) -> Tensor:
    """The order within one head, for all rows of `heads` heads."""
    return (torch.arange(heads)[:, None] * len(order) + order).view(-1)


def _reorder(weight: Tensor | W4Weight, order: Tensor | None) -> Tensor | W4Weight:
    if order is None:
        return weight
    return weight.rows(order) if isinstance(weight, W4Weight) else weight[order]
