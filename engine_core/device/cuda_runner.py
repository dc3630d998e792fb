"""Passes of tokens through the model on the GPU: inputs shipped, kernels launched, logits left behind.

Owns: the inputs' memory, the block tables on the GPU, decode graphs. Does not know: sampling, steps, copies.

A pass is one of two kinds. Rows: tokens that attend one by one, whoever they belong to; padded to a bucket and run as a
CUDA graph. Chunks: several tokens of a sequence attend together; run kernel by kernel. A pass of sequences with cold
blocks may be of either kind, and is never a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels import decode_attention, prefill_attention
from ...kernels.decode_attention import DecodeSplits
from ...kernels.pages import KVPages
from ...kernels.prefill_attention import PrefillSplits
from ...kernels.rotated_bias import RotatedBias
from ...kernels.sampling import PARAMETERS
from ...progress import track
from ..control.plan import NO_BLOCKS
from ..models.cuda_decoder import Attend, CudaDecoder, TokenInputs, Workspace
from .block_tables import NO_CHANGES, TableChanges
from .cold_attention import NO_COLD, ColdAttention, ColdBlocks
from .cuda_batch import NOWHERE, PADDING_POSITION, IntArray, Packer, TokenArrays, aligned, bucket_of
from .graphs import DecodeGraphs
from .staging import Staging

_MOST_CHANGES = 1 << 16  # of block tables that travel with one pass


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """`buckets`: numbers of rows of a pass. `max_tokens` in a pass of chunks; `max_seqs` sequences, each with a block
    table of `max_blocks`. `deterministic`: one bucket, attention cut always alike."""

    buckets: Sequence[int]
    max_tokens: int
    max_seqs: int
    max_blocks: int
    max_len: int
    deterministic: bool

    @property
    def max_rows(self) -> int:
        """The most rows of one pass."""
        return self.buckets[-1]


@dataclass(frozen=True, slots=True)
class PassLogits:
    """What a pass leaves: `logits` fp32 [R, V], valid until the next pass; `parameters` int32 [R * 8], as shipped."""

    logits: Tensor
    parameters: Tensor


class PassMemory:
    """What passes need beside the workspace. Made before the pool is: `pages` may be any pool of its kind."""

    def __init__(self, pages: KVPages, num_heads: int, sizes: RunnerSizes, device: str) -> None:
        most_context = sizes.max_rows * sizes.max_len
        splits = DecodeSplits.allocate(pages, num_heads, sizes.max_rows, most_context, sizes.deterministic)
        self.sizes, self.rows = sizes, _RowInputs(sizes.max_rows, len(splits.plan))
        self.staging = Staging(self.rows.ints + _variable_ints(sizes), device)
        self.decode_splits = replace(splits, plan=self.staging.device[self.rows.plan])
        self.prefill_splits = PrefillSplits(pages.head_dim, pages.pool.device)
        shape = (sizes.max_blocks,)
        self.tables = torch.zeros(sizes.max_seqs, *shape, dtype=torch.int32, device=device)
        self.own_tables = torch.zeros(max(sizes.max_rows, sizes.max_seqs), *shape, dtype=torch.int32, device=device)


class CudaRunner:
    """`previous` int32: where a token's source points. Everything is launched on the current stream.

    `cold_attention`: for passes of sequences with cold blocks, where there may be any.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        workspace: Workspace,
        memory: PassMemory,
        pages: KVPages,
        previous: Tensor,
        cold_attention: ColdAttention | None,
    ) -> None:
        self._decoder, self._workspace, self._memory = decoder, workspace, memory
        self._pages, self._previous, self._cold_attention = pages, previous, cold_attention
        self._graphs = DecodeGraphs()

    def warm_up(self, most_rows: int) -> None:
        """Compile and load the kernels, and capture graphs of up to `most_rows` rows. Block 0 is written into."""
        sizes = self._memory.sizes
        captured = [bucket for bucket in sizes.buckets if bucket <= most_rows or bucket == sizes.buckets[0]]
        for bucket in track(captured, "compiling kernels and capturing graphs", "graph"):
            self.run_rows(_padding(bucket), np.zeros(0, PARAMETERS), NO_CHANGES)
        if not sizes.deterministic:
            for count in _warm_up_chunks(min(sizes.max_tokens, sizes.max_len)):
                last = np.arange(sizes.max_len - count, sizes.max_len, dtype=np.int32)
                tokens = replace(_padding(count), positions=last)
                self.run_chunks(tokens, tokens.ends, np.zeros(1, PARAMETERS), NO_CHANGES)
        if self._cold_attention is not None:
            last = replace(_padding(1), positions=np.array([sizes.max_len - 1], np.int32))
            self.run_rows(last, np.zeros(0, PARAMETERS), NO_CHANGES, {0: NO_BLOCKS})

    def run_rows(
        self, tokens: TokenArrays, parameters: NDArray[np.void], changes: TableChanges, cold: ColdBlocks = NO_COLD
    ) -> PassLogits:
        """Tokens that attend one by one; logits of all, for which there are sampling `parameters` [T].

        `cold`: empty, or what each of the pass's block tables begins with.
        """
        bucket = bucket_of(self._memory.sizes.buckets, len(tokens))
        buffer, packer = self._begin(changes)
        self._memory.rows.fill(buffer, tokens, bucket, self._memory.decode_splits)
        places = packer.add(parameters)
        self._send(packer, changes)
        if cold:
            with self._attention(tokens, cold) as attend:
                self._launch_rows(bucket, attend)
        else:
            self._graphs(bucket, self._launch_rows)
        return PassLogits(self._workspace.logits[: len(tokens)], self._at(places))

    def run_chunks(
        self,
        tokens: TokenArrays,
        sampled: IntArray,
        parameters: NDArray[np.void],
        changes: TableChanges,
        cold: ColdBlocks = NO_COLD,
    ) -> PassLogits | None:
        """Whole chunks, best the longest context first; logits of the tokens `sampled` [R], None where R is 0.

        `cold`: as for `run_rows`.
        """
        starts = np.concatenate((np.zeros(1, np.int32), tokens.ends + 1))
        contexts = tokens.positions[tokens.ends] + 1
        _, packer = self._begin(changes)
        places = [packer.add(a) for a in (tokens.ids, tokens.source, tokens.positions, tokens.rows)]
        chunk_places = [packer.add(a) for a in (tokens.rows[tokens.ends], starts, contexts)]
        sampled_place, parameter_place = packer.add(sampled), packer.add(parameters)
        self._send(packer, changes)
        inputs = TokenInputs(*map(self._at, places), self._previous, self._memory.tables)
        if cold:
            with self._attention(tokens, cold) as attend:
                logits = self._decoder.logits(inputs, self._pages, attend, self._workspace, self._at(sampled_place))
        else:
            chunks = _Chunks(*map(self._at, chunk_places), int(np.diff(starts).max()), int(contexts.max()))
            logits = self._launch_chunks(inputs, chunks, self._at(sampled_place))
        return PassLogits(logits, self._at(parameter_place)) if len(sampled) else None

    def _attention(self, tokens: TokenArrays, cold: ColdBlocks) -> AbstractContextManager[Attend]:
        if self._cold_attention is None:
            raise ValueError("cold_blocks are given; allowed: none, without allow_oversize")
        return self._cold_attention.begin(tokens, self._memory.tables, cold)

    def _at(self, place: slice) -> Tensor:
        return self._memory.staging.device[place]

    def _begin(self, changes: TableChanges) -> tuple[IntArray, Packer]:
        """A buffer for one pass. More changes of block tables than it has room for are sent ahead."""
        for first in range(_MOST_CHANGES, len(changes.places), _MOST_CHANGES):
            packer = Packer(self._memory.staging.take(), self._memory.rows.ints)
            self._send(packer, changes.part(first, first + _MOST_CHANGES))
        buffer = self._memory.staging.take()
        return buffer, Packer(buffer, self._memory.rows.ints)

    def _send(self, packer: Packer, changes: TableChanges) -> None:
        """Ship the buffer, and bring the block tables up to date from it."""
        changes = changes.part(0, _MOST_CHANGES)
        places, values = packer.add(changes.places), packer.add(changes.values)
        self._memory.staging.send(packer.used)
        if len(changes.places):
            self._memory.tables.view(-1).index_copy_(0, self._at(places).view(torch.int64), self._at(values))

    def _launch_rows(self, bucket: int, attend: Attend | None = None) -> None:
        """`attend`: instead of the decode kernel."""
        fields = [self._at(field)[:bucket] for field in self._memory.rows.fields]
        contexts, own_tables = fields.pop(), self._memory.own_tables[:bucket]
        inputs = TokenInputs(*fields, self._previous, self._memory.tables)
        torch.index_select(self._memory.tables, 0, inputs.sequences, out=own_tables)

        def decode(layer: int, q: Tensor, out: Tensor, k_bias: RotatedBias | None) -> None:
            splits = self._memory.decode_splits
            decode_attention.paged_decode(q, self._pages, layer, own_tables, contexts, splits, out, k_bias)

        self._decoder.logits(inputs, self._pages, attend or decode, self._workspace, None)

    def _launch_chunks(self, inputs: TokenInputs, chunks: _Chunks, sampled: Tensor) -> Tensor:
        own_tables = self._memory.own_tables[: len(chunks.rows)]
        tables = torch.index_select(self._memory.tables, 0, chunks.rows, out=own_tables)

        def attend(layer: int, q: Tensor, out: Tensor, k_bias: RotatedBias | None) -> None:
            lengths = (chunks.starts, chunks.contexts, chunks.max_queries, chunks.max_context)
            splits = self._memory.prefill_splits
            prefill_attention.paged_prefill(q, self._pages, layer, tables, *lengths, out, splits, k_bias)

        return self._decoder.logits(inputs, self._pages, attend, self._workspace, sampled)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """int32 on the GPU: `rows` [C], their block tables; `starts` [C + 1] of their queries; `contexts` [C]."""

    rows: Tensor
    starts: Tensor
    contexts: Tensor
    max_queries: int
    max_context: int


class _RowInputs:
    """Where the inputs of a pass of rows lie at the beginning of the staging buffer: places that graphs know."""

    def __init__(self, max_rows: int, plan_ints: int) -> None:
        size = aligned(max_rows)
        self.fields = [slice(i * size, i * size + max_rows) for i in range(5)]
        """ids, source, positions, rows, contexts"""
        self.plan = slice(5 * size, 5 * size + plan_ints)
        self.ints = 5 * size + aligned(plan_ints)

    def fill(self, buffer: IntArray, tokens: TokenArrays, bucket: int, splits: DecodeSplits) -> None:
        """Write the tokens, padding up to `bucket`, and how their attention is cut."""
        count = len(tokens)
        arrays = (tokens.ids, tokens.source, tokens.positions, tokens.rows, tokens.positions + 1)
        for field, values, padding in zip(self.fields, arrays, (0, NOWHERE, PADDING_POSITION, 0, 0), strict=True):
            buffer[field][:count] = values
            buffer[field][count:bucket] = padding
        plan = splits.plan_for(buffer[self.fields[-1]][:bucket])
        buffer[self.plan][: len(plan)] = plan


def _warm_up_chunks(most: int) -> list[int]:
    """Lengths for which libraries may choose different kernels: powers of two, and the most."""
    return [*(1 << i for i in range(7, most.bit_length()) if 1 << i < most), most]


def _padding(count: int) -> TokenArrays:
    """So many tokens that belong to nobody."""
    zeros, nowhere = np.zeros(count, np.int32), np.full(count, NOWHERE, np.int32)
    return TokenArrays(
        zeros, nowhere, np.full(count, PADDING_POSITION, np.int32), zeros, np.array([count - 1], np.int32)
    )


def _variable_ints(sizes: RunnerSizes) -> int:
    """The most that a pass packs behind the inputs of rows."""
    token_arrays, chunk_arrays = 4 * aligned(sizes.max_tokens), 4 * aligned(sizes.max_seqs + 1)
    parameters = max(sizes.max_rows, sizes.max_seqs) * PARAMETERS.itemsize // 4
    return token_arrays + chunk_arrays + parameters + 3 * _MOST_CHANGES
