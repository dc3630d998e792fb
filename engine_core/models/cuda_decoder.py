"""The forward pass of a decoder on the GPU, kernel by kernel, in memory set aside beforehand.

Owns: the order of the kernels in a layer, the workspace. Does not know: requests, steps, CUDA graphs, how a linear
multiplies (`cuda_linears`), or which attention a pass wants: that is a function that the caller passes in.

The residual stream is fp32, and linears add to it. Every call writes into the workspace and nowhere else, so that a
pass can be captured in a graph, and passes must follow each other on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels import fused
from ...kernels.pages import KVPages
from ...kernels.rotated_bias import RotatedBias, Turns
from .cuda_linears import CudaBuilder, CudaHead, CudaLinear, EmbeddingTable, Scratch
from .layers import DecoderLayer, rotary_table
from .registry import ModelConfig
from .weights import DecoderParts, TensorSource, load_parts

Attend = Callable[[int, Tensor, Tensor, RotatedBias | None], None]
"""(layer, q [T, H, D], out [T, H*D], what the layer's K in the pool lacks, if anything): attention of the pass's
tokens, whose K and V are already in the pool."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The tokens of one pass, all int32 on the GPU.

    `ids` [T], or previous[source[t]] where `source` [T] is not negative; `positions` [T], -1 for padding; `sequences`
    [T]: each token's row in `block_tables` [S, max_blocks]; `previous` [P]: tokens that the step before sampled.
    """

    ids: Tensor
    source: Tensor
    positions: Tensor
    sequences: Tensor
    previous: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class Activations:
    """What a pass over T tokens leaves behind it, and what the next one writes over. W is ffn."""

    residual: Tensor  # fp32 [T, N]
    normed: Tensor  # [T, N]
    qkv: Tensor  # [T, (H + 2G) * D]
    q: Tensor  # [T, H, D]
    attended: Tensor  # [T, H * D]
    gated: Tensor  # [T, W]


class Workspace:
    """Memory for passes of up to `max_tokens` tokens with up to `max_rows` rows of logits."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        max_tokens: int,
        max_rows: int,
        scratch_elements: int,
        device: str,
    ) -> None:
        self._config = config
        self._residual = torch.empty(max_tokens, config.hidden_size, dtype=torch.float32, device=device)
        self._flat = {
            name: torch.empty(max_tokens * width, dtype=dtype, device=device) for name, width in _widths(config).items()
        }
        self.scratch = Scratch(
            dense=torch.empty(scratch_elements, dtype=dtype, device=device),
            gate_up=torch.empty(max_tokens * 2 * config.intermediate_size, dtype=dtype, device=device),
        )
        self._chosen_residual = torch.empty(max_rows, config.hidden_size, dtype=torch.float32, device=device)
        self._chosen_attended = torch.empty(max_rows, config.num_heads * config.head_dim, dtype=dtype, device=device)
        self.logits = torch.empty(max_rows, _logits_stride(config), dtype=torch.float32, device=device)

    def activations(self, tokens: int) -> Activations:
        """The memory of a pass over so many tokens: always the same place."""
        parts = {name: self._flat[name][: tokens * width] for name, width in _widths(self._config).items()}
        shaped = {name: part.view(tokens, -1) for name, part in parts.items() if name != "q"}
        q = parts["q"].view(tokens, self._config.num_heads, self._config.head_dim)
        return Activations(residual=self._residual[:tokens], q=q, **shaped)

    def chosen(self, run: Activations, tokens: Tensor) -> Activations:
        """Some `tokens` int32 [R] of a pass, in memory of their own, as the layer after attention wants them."""
        count = len(tokens)
        return replace(
            self.activations(count),
            residual=torch.index_select(run.residual, 0, tokens, out=self._chosen_residual[:count]),
            attended=torch.index_select(run.attended, 0, tokens, out=self._chosen_attended[:count]),
        )


def _logits_stride(config: ModelConfig) -> int:
    """The vocabulary, rounded up so that rows of logits begin at multiples of 16 bytes."""
    return -(-config.vocab_size // 4) * 4


def _widths(config: ModelConfig) -> dict[str, int]:
    """Elements a token of each of the activations in the compute dtype."""
    heads = config.num_heads * config.head_dim
    return {
        "normed": config.hidden_size,
        "qkv": heads + 2 * config.num_kv_heads * config.head_dim,
        "q": heads,
        "attended": heads,
        "gated": config.intermediate_size,
    }


class CudaDecoder:
    """A loaded model. `dtype`: fp16 or bf16, of matrices and activations."""

    def __init__(
        self,
        config: ModelConfig,
        parts: DecoderParts[CudaLinear, EmbeddingTable, CudaHead],
        dtype: torch.dtype,
        rotary: Tensor,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.key_biases = [layer.key_bias for layer in parts.layers]
        self._embedding = parts.embedding
        self._layers: list[DecoderLayer[CudaLinear]] = parts.layers
        self._final_norm, self._head = parts.final_norm, parts.head
        self._rotary = rotary
        apart = [layer.key_bias.apart for layer in parts.layers]
        self._turns = None if all(bias is None for bias in apart) else Turns.of(rotary)
        self.k_biases: Sequence[RotatedBias | None] = [
            None if bias is None or self._turns is None else RotatedBias(bias, rotary, self._turns) for bias in apart
        ]
        """Layer by layer, the bias that its linear does not add to K, so that it is added when K is read."""

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and tables on the GPU; a tied head's matrix is the embedding's and counts once."""
        embedding = 0 if self.config.tie_word_embeddings else self._embedding.nbytes
        linears = sum(linear.nbytes for linear in self._linears())
        norms = (2 * len(self._layers) + 1) * self._final_norm.nbytes
        tables = self._rotary.nbytes + (0 if self._turns is None else self._turns.nbytes)
        return embedding + self._head.nbytes + linears + norms + tables

    @property
    def scratch_elements(self) -> int:
        """What the workspace's scratch must hold for the linears and the head."""
        return max(part.scratch_elements for part in (self._head, *self._linears()))

    def _linears(self) -> list[CudaLinear]:
        return [linear for x in self._layers for linear in (x.qkv, x.attention_out, x.gate_up, x.down)]

    def logits(
        self, tokens: TokenInputs, pages: KVPages, attend: Attend, workspace: Workspace, chosen: Tensor | None
    ) -> Tensor:
        """Run the tokens through all layers; their K and V go into the pool.

        Returns logits fp32 [R, V rounded up to 4], valid until the next call, of the tokens `chosen` int32 [R], which
        may be none, or of all if it is None. Of the others nobody needs more than the last layer's K and V: there they
        end.
        """
        eps, scratch = self.config.rms_norm_eps, workspace.scratch
        run = workspace.activations(len(tokens.ids))
        fused.embed(tokens.ids, tokens.source, tokens.previous, self._embedding, run.residual)
        for index, layer in enumerate(self._layers):
            fused.rms_norm(run.residual, layer.input_norm, eps, run.normed)
            layer.qkv(run.normed, run.qkv, scratch, biased=False)
            self._rope_and_write(index, tokens, pages, run)
            rows = chosen if layer is self._layers[-1] else None
            if rows is not None and not len(rows):
                return workspace.logits[:0]
            attend(index, run.q, run.attended, self.k_biases[index])
            if rows is not None:
                run = workspace.chosen(run, rows)
            layer.attention_out.add_to(run.residual, run.attended, scratch)
            fused.rms_norm(run.residual, layer.mlp_norm, eps, run.normed)
            layer.gate_up.gated(run.normed, run.gated, scratch)
            layer.down.add_to(run.residual, run.gated, scratch)
        logits = workspace.logits[: len(run.residual)]
        fused.rms_norm(run.residual, self._final_norm, eps, run.normed)
        self._head(run.normed, logits[:, : self.config.vocab_size], scratch)
        return logits

    def _rope_and_write(self, index: int, tokens: TokenInputs, pages: KVPages, run: Activations) -> None:
        fused.rope_and_write(
            run.qkv,
            self._layers[index].qkv.bias,
            self._rotary,
            tokens.positions,
            tokens.sequences,
            tokens.block_tables,
            pages,
            index,
            self.config.num_heads,
            run.q,
        )


def load_cuda_decoder(
    config: ModelConfig, source: TensorSource, dtype: torch.dtype, positions: int, dense_copies: bool
) -> CudaDecoder:
    """Read all tensors onto the source's device. `positions`: length of the rotary table. Raises CheckpointError."""
    parts = load_parts(config, source, CudaBuilder(dtype, dense_copies))
    rotary = torch.view_as_real(rotary_table(config, positions)).contiguous().to(source.device)
    return CudaDecoder(config, parts, dtype, rotary)
