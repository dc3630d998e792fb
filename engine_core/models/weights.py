"""From a checkpoint's tensors to the parts of a decoder, whatever the device.

Owns: reading safetensors (one file, or shards with an index), the dummy checkpoint, which tensors make which part.
Does not know: KV pages, or how a device computes with a part: that is its `Builder`'s.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.errors import KernelArgumentError
from ...progress import track
from ..errors import CheckpointError
from .cpu_builder import CpuBuilder, LoadOptions
from .k_bias import KeyBias, measure
from .layers import Decoder, DecoderLayer, Int8Weight, pair_order, rotary_table, whole_rotation
from .registry import ModelConfig
from .w4a16 import W4Weight, stack_rows

logger = logging.getLogger(__name__)

LinearT = TypeVar("LinearT")
EmbeddingT = TypeVar("EmbeddingT")
HeadT = TypeVar("HeadT")


class TensorSource(Protocol):
    """Where tensors come from, by name."""

    device: str
    """Where they arrive."""

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor of that name and shape. Raises CheckpointError when it is missing or has another shape."""
        ...


class Checkpoint:
    """The safetensors files of a folder. Remembers what was asked for, so that unused tensors can be reported."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self._path, self.device = path, device
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

    def _open_file(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt", device=self.device)
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
    """Seeded random tensors of the shapes that config.json gives; each depends on seed, device and its name alone."""

    def __init__(self, config: ModelConfig, seed: int, device: str = "cpu") -> None:
        self._config, self._seed, self.device = config, seed, device

    def __contains__(self, name: str) -> bool:
        quantization = self._config.quantization
        embedding = name.startswith(self._config.architecture.embedding)
        if name.endswith(".qweight"):
            return quantization is not None and (not embedding or quantization.embedding_bits == 8)
        return not name.endswith(".bias") and not (embedding and name.endswith(".mins"))

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """See TensorSource."""
        with torch.device(self.device):
            return self._make(name, tuple(shape))

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        embedding = name.startswith(self._config.architecture.embedding)
        hidden = self._config.hidden_size
        if name.endswith(".qweight"):
            low, high, dtype = (-127, 128, torch.int8) if embedding else (0, 256, torch.uint8)
            return torch.randint(low, high, shape, generator=generator, dtype=dtype)
        if name.endswith(".scales"):
            spread = 73.0 * 8 if embedding else 4.6 * math.sqrt(hidden)  # standard deviation of the codes
            return torch.full(shape, 1.0 / spread, dtype=torch.float16)
        if name.endswith(".mins"):
            return torch.full(shape, -7.5 / (4.6 * math.sqrt(hidden)), dtype=torch.float16)
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
        return torch.randn(shape, generator=generator).div_(math.sqrt(shape[1]))


class Builder(Protocol[LinearT, EmbeddingT, HeadT]):
    """Turns tensors, as they were read, into the parts of one device's decoder."""

    turns: int | None
    """How many rows of gate, then of up, take turns in the fused matrix; None: all of gate, then all of up."""

    def norm(self, weight: Tensor) -> Tensor:
        """A norm's weight [N]."""
        ...

    def linear(self, weight: Tensor | W4Weight, bias: Tensor | None) -> LinearT:
        """A matrix [N, K] and its bias fp32 [N]."""
        ...

    def embedding(self, table: Tensor | Int8Weight) -> EmbeddingT:
        """The token embedding [V, N]."""
        ...

    def head(self, matrix: Tensor | Int8Weight | W4Weight, norm: Tensor, tied: EmbeddingT | None) -> HeadT:
        """The output head [V, N]; `norm` is the weight in front of it; `tied`: the embedding made of this matrix."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderParts(Generic[LinearT, EmbeddingT, HeadT]):
    """All parts of one decoder, as its builder made them."""

    embedding: EmbeddingT
    layers: list[DecoderLayer[LinearT]]
    final_norm: Tensor
    head: HeadT


def load_decoder(config: ModelConfig, source: TensorSource, options: LoadOptions) -> Decoder:
    """The CPU's decoder. Raises CheckpointError that names the tensor and the file."""
    parts = load_parts(config, source, CpuBuilder(options))
    return Decoder(
        config=config,
        embedding=parts.embedding,
        layers=parts.layers,
        final_norm=parts.final_norm,
        head=parts.head,
        floor=torch.tensor(math.sqrt(config.hidden_size * config.rms_norm_eps)),
        rotary=rotary_table(config, options.positions),
    )


def load_parts(
    config: ModelConfig, source: TensorSource, builder: Builder[LinearT, EmbeddingT, HeadT]
) -> DecoderParts[LinearT, EmbeddingT, HeadT]:
    """Read all tensors and build the model's parts, one after another, so that nothing is held twice for long.

    Raises CheckpointError that names the tensor and the file.
    """
    loader = _Loader(config, source, builder)
    embedding, head = loader.ends()
    layers = [loader.layer(i) for i in track(range(config.num_layers), "loading weights", "layer")]
    parts = DecoderParts(embedding, layers, loader.norm(config.architecture.final_norm), head)
    if isinstance(source, Checkpoint) and (unused := source.unused()):
        logger.info("%s: %d tensors are not used: %s", config.path, len(unused), ", ".join(unused[:8]))
    return parts


class _Loader(Generic[LinearT, EmbeddingT, HeadT]):
    """Loads parts of one model; holds what all parts need."""

    def __init__(self, config: ModelConfig, source: TensorSource, builder: Builder[LinearT, EmbeddingT, HeadT]) -> None:
        self._config, self._source, self._builder = config, source, builder
        self._rotation = whole_rotation(config)

    def layer(self, number: int) -> DecoderLayer[LinearT]:
        """All of one layer, linears over the same input fused."""
        config, names = self._config, self._config.architecture
        prefix = names.layer.format(layer=number)
        hidden, ffn = config.hidden_size, config.intermediate_size
        qkv, key_bias = self._qkv(prefix)
        return DecoderLayer(
            input_norm=self.norm(prefix + names.input_norm),
            qkv=qkv,
            key_bias=key_bias,
            attention_out=self.linear([prefix + names.attention_out], [hidden], config.num_heads * config.head_dim),
            mlp_norm=self.norm(prefix + names.mlp_norm),
            gate_up=self.linear([prefix + name for name in names.gate_up], [ffn, ffn], hidden, self._turns()),
            down=self.linear([prefix + names.down], [hidden], ffn),
        )

    def _qkv(self, prefix: str) -> tuple[LinearT, KeyBias]:
        """The linear of q, k and v, and what becomes of the bias of k."""
        config, names = self._config, self._config.architecture
        parts = [prefix + name for name in names.qkv]
        q_rows, k_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = [q_rows, k_rows, k_rows]
        weight, bias = self._stacked(parts, rows, config.hidden_size, self._pairs(), names.qkv_bias)
        keys, values = slice(q_rows, q_rows + k_rows), slice(q_rows + k_rows, None)
        k, v = ((_rows(weight, part), None if bias is None else bias[part]) for part in (keys, values))
        norm = self._norm_weight(prefix + names.input_norm)
        found = measure(k, v, norm, self._rotation)
        if bias is not None and found.apart is not None:
            bias[keys].zero_()
        return self._built(parts, weight, bias), found

    def _pairs(self) -> Tensor:
        """Row order of the stacked q, k and v that brings rotary pairs together in q and k."""
        config, dim = self._config, self._config.head_dim
        heads = torch.arange(config.num_heads + config.num_kv_heads)[:, None]
        rotated = (heads * dim + pair_order(dim)).view(-1)
        return torch.cat((rotated, torch.arange(len(rotated), len(rotated) + config.num_kv_heads * dim)))

    def _turns(self) -> Tensor | None:
        """Row order of the stacked gate and up that the builder asks for."""
        turns = self._builder.turns
        if turns is None:
            return None
        return torch.arange(2 * self._config.intermediate_size).view(2, -1, turns).transpose(0, 1).reshape(-1)

    def norm(self, name: str) -> Tensor:
        """A norm's weight, as the builder keeps it."""
        return self._builder.norm(self._norm_weight(name))

    def _norm_weight(self, name: str) -> Tensor:
        return self._source.tensor(f"{name}.weight", [self._config.hidden_size]).float()

    def linear(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        order: Tensor | None = None,
    ) -> LinearT:
        """The linear of matrices over the same input, see `_stacked`."""
        return self._built(names, *self._stacked(names, rows, columns, order))

    def _stacked(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        order: Tensor | None,
        needs_bias: bool = False,
    ) -> tuple[Tensor | W4Weight, Tensor | None]:
        """The named matrices stacked, their rows then reordered. Biases are taken where they exist."""
        weight = _stack([self._weight(name, n, columns) for name, n in zip(names, rows, strict=True)])
        bias = self._stacked_bias(names, rows, needs_bias)
        if order is not None:
            weight, bias = _reorder(weight, order), None if bias is None else bias[order.to(bias.device)]
        return weight, bias

    def _built(self, names: Sequence[str], weight: Tensor | W4Weight, bias: Tensor | None) -> LinearT:
        try:
            return self._builder.linear(weight, bias)
        except KernelArgumentError as error:
            raise CheckpointError(self._config.path, f"{', '.join(names)}: {error}") from error

    def _weight(self, name: str, rows: int, columns: int) -> Tensor | W4Weight:
        if f"{name}.qweight" not in self._source:
            return self._source.tensor(f"{name}.weight", [rows, columns])
        groups = [rows, columns // self._group_size(columns)]
        return W4Weight(
            self._codes(name, [rows, columns // 2], torch.uint8),
            self._source.tensor(f"{name}.scales", groups),
            self._source.tensor(f"{name}.mins", groups),
        )

    def _codes(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes = self._source.tensor(f"{name}.qweight", shape)
        if codes.dtype is not dtype:
            problem = f"tensor {name}.qweight has the wrong dtype {codes.dtype}, wanted: {dtype}"
            raise CheckpointError(self._config.path, problem)
        return codes

    def _group_size(self, columns: int) -> int:
        """Columns that share a scale; all of them where the checkpoint says so."""
        quantization = self._config.quantization
        if quantization is None:
            file = self._config.path / "config.json"
            raise CheckpointError(file, "there are quantized tensors but no quantization_config")
        size = columns if quantization.group_size < 1 else quantization.group_size
        if columns % size:
            file = self._config.path / "config.json"
            raise CheckpointError(file, f"group_size {size} does not divide a matrix's {columns} columns")
        return size

    def _stacked_bias(self, names: Sequence[str], rows: Sequence[int], needed: bool) -> Tensor | None:
        present = [needed or f"{name}.bias" in self._source for name in names]
        if not any(present):
            return None
        parts = [
            self._source.tensor(f"{name}.bias", [n]).float() if there else torch.zeros(n, device=self._source.device)
            for name, n, there in zip(names, rows, present, strict=True)
        ]
        return torch.cat(parts)

    def ends(self) -> tuple[EmbeddingT, HeadT]:
        """Embedding and head: of one matrix when tied, whether the checkpoint has a head or not."""
        config, builder, names = self._config, self._builder, self._config.architecture
        table = self._table(names.embedding)
        norm = self._norm_weight(names.final_norm)
        if isinstance(table, W4Weight):
            table = table.dequantize()
        embedding = builder.embedding(table)
        if config.tie_word_embeddings:
            return embedding, builder.head(table, norm, embedding)
        del table
        return embedding, builder.head(self._table(names.head), norm, None)

    def _table(self, name: str) -> Tensor | Int8Weight | W4Weight:
        """A matrix with a row a token: plain, int8 in groups, or in four bits."""
        rows, columns = self._config.vocab_size, self._config.hidden_size
        if f"{name}.qweight" not in self._source or f"{name}.mins" in self._source:
            return self._weight(name, rows, columns)
        groups = [rows, columns // self._group_size(columns)]
        return Int8Weight(self._codes(name, [rows, columns], torch.int8), self._source.tensor(f"{name}.scales", groups))


def _stack(weights: Sequence[Tensor | W4Weight]) -> Tensor | W4Weight:
    """Matrices over the same input, one below the other; four-bit ones stay so unless one is plain."""
    packed = [weight for weight in weights if isinstance(weight, W4Weight)]
    if len(packed) == len(weights):
        return stack_rows(packed)
    return torch.cat([weight.dequantize() if isinstance(weight, W4Weight) else weight for weight in weights])


def _rows(weight: Tensor | W4Weight, part: slice) -> Tensor | W4Weight:
    return weight.rows(part) if isinstance(weight, W4Weight) else weight[part]


def _reorder(weight: Tensor | W4Weight, order: Tensor) -> Tensor | W4Weight:
    if isinstance(weight, W4Weight):
        return weight.rows(order.to(weight.qweight.device))
    return weight[order.to(weight.device)]
