"""Attention on a GPU of requests that are larger than its pool: exact, in pieces that pass through a staging area.

Owns: the staging area and the workspace, the stream on which cold blocks come, the arithmetic. Does not know: models,
or why a block is cold.

A sequence is cut, from its first token on, into pieces of always the same length, whichever tier a block is in. A
piece's slices of one layer are staged, and what each query makes of them is merged into its running maximum, sum of
weights and weighted sum of values (the online softmax of Milakov and Gimelshein, 2018; FlashAttention, Dao et al.,
2022), all in fp32. So a token's result does not depend on how much is cold; nor, where each is attended alone, on the
other tokens of its pass.

Cold blocks are fetched one piece ahead, also across layers: a kernel of the other stream waits for the last reader of
its stage, and the pass ends behind the last of them.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels import gather
from ...kernels.pages import KVPages, dequantize
from ...kernels.rotated_bias import RotatedBias
from ..models.cuda_decoder import Attend
from .cuda_batch import TokenArrays
from .kv_pool import KVPool

PIECE_TOKENS = 4096
_MOST_SCORES = 8 << 20  # of a tile of queries and a piece

ColdBlocks = Mapping[int, "array[int]"]
"""Row among the block tables -> the CPU blocks that its table begins with."""
NO_COLD: ColdBlocks = {}


class _Stage:
    """`slices` uint8 [blocks, layer_bytes]. Events: they have come; they were read."""

    def __init__(self, slices: Tensor) -> None:
        self.slices = slices
        self.ready, self.free = torch.cuda.Event(), torch.cuda.Event()


class ColdMemory:
    """What it takes, for passes of up to `max_tokens` tokens. Made before the pool: `pages` may be any of its kind.

    `alone`: each token is attended in operations of its own.
    """

    def __init__(self, pages: KVPages, num_heads: int, max_tokens: int, alone: bool) -> None:
        device, self.groups, self.head_dim = pages.pool.device, pages.num_kv_heads, pages.head_dim
        self.ratio = num_heads // self.groups
        self.piece_blocks = max(1, PIECE_TOKENS // pages.block_size)
        piece = self.piece_blocks * pages.block_size
        self.tile = 1 if alone else max(1, _MOST_SCORES // (num_heads * piece))
        slices = torch.empty(2, self.piece_blocks, pages.layer_bytes, dtype=torch.uint8, device=device)
        self.stages = [_Stage(stage) for stage in slices]
        self.kv = torch.empty(2, self.groups, piece, self.head_dim, device=device)
        self.scores = torch.empty(num_heads * min(self.tile, max_tokens) * piece, device=device)
        self.sums = torch.empty(num_heads * max_tokens * self.head_dim, device=device)


class _Span(NamedTuple):
    """Rows [first, last) of a pass: neighbouring tokens of a sequence, from position `start` on. `table` int32: its
    blocks, first the `cold` ones, whose ids the host has too."""

    first: int
    last: int
    start: int
    table: Tensor
    cold: array[int]


class _Piece(NamedTuple):
    """Blocks [begin, end) of a span's sequence, the first `cold` of them in the CPU tier."""

    span: _Span
    begin: int
    end: int
    cold: int


class ColdAttention:
    """Attention over `pool`, for one pass at a time, on the stream that is current throughout."""

    def __init__(self, memory: ColdMemory, pool: KVPool) -> None:
        self._memory, self._pool, self._pages = memory, pool, pool.pages
        self._stream = torch.cuda.Stream()
        self._coming: Iterator[tuple[int, _Piece]] = iter(())
        self._fetched = self._taken = 0

    @contextmanager
    def begin(self, tokens: TokenArrays, tables: Tensor, cold: ColdBlocks) -> Iterator[Attend]:
        """The attention of a pass over `tokens`, whose block tables int32 [S, max_blocks] are up to date in stream
        order. The CPU blocks must hold what they should already now."""
        spans = _spans(tokens, tables, cold)
        pieces = [self._pieces(span) for span in spans]
        layers = range(self._pages.num_layers)
        self._coming = ((layer, piece) for layer in layers for of_span in pieces for piece in of_span)
        self._fetched = self._taken = 0

        def attend(layer: int, q: Tensor, out: Tensor, k_bias: RotatedBias | None) -> None:
            for span, of_span in zip(spans, pieces, strict=True):
                self._attend(layer, of_span, q[span.first : span.last], out[span.first : span.last], k_bias)

        try:
            for stage in self._memory.stages:
                stage.free.record()
                self._fetch()
            yield attend
        finally:
            fetched = torch.cuda.Event()
            fetched.record(self._stream)
            fetched.wait()

    def _pieces(self, span: _Span) -> list[_Piece]:
        size, block_size = self._memory.piece_blocks, self._pages.block_size
        blocks = math.ceil((span.start + span.last - span.first) / block_size)
        pieces = []
        for begin in range(0, blocks, size):
            end = min(begin + size, blocks)
            pieces.append(_Piece(span, begin, end, max(0, min(end, len(span.cold)) - begin)))
        return pieces

    def _attend(self, layer: int, pieces: Sequence[_Piece], q: Tensor, out: Tensor, k_bias: RotatedBias | None) -> None:
        """One span: q [T, H, D] -> out [T, H * D]."""
        running, block_size, tile = _OnlineSoftmax(self._memory, len(q)), self._pages.block_size, self._memory.tile
        for piece in pieces:
            keys, values = self._take(layer, piece)
            if k_bias is not None:
                k_bias.add_to(keys, piece.begin * block_size)
            before = piece.span.start - piece.begin * block_size  # keys of this piece that come before q
            for first in range(0, len(q), tile):
                last = min(first + tile, len(q))
                seen = min((piece.end - piece.begin) * block_size, before + last)
                if seen > 0:
                    running.add(first, q[first:last], keys[:, :seen], values[:, :seen], before + first + 1)
        running.finish(out)

    def _take(self, layer: int, piece: _Piece) -> tuple[Tensor, Tensor]:
        """K and V fp32 [G, tokens, D] of the piece, which is the next one, until the next call."""
        stage = self._memory.stages[self._taken % 2]
        self._taken += 1
        count = piece.end - piece.begin
        stage.ready.wait()
        if piece.cold < count:
            hot = piece.span.table[piece.begin + piece.cold : piece.end]
            gather.gather_slices(self._pool.gpu, self._pages.layer_offset(layer), hot, stage.slices[piece.cold : count])
        keys, values = kv = self._memory.kv[:, :, : count * self._pages.block_size]
        dequantize(self._pages, stage.slices[:count], kv)
        stage.free.record()
        self._fetch()
        return keys, values

    def _fetch(self) -> None:
        """The cold blocks of the next piece, if there is one."""
        coming = next(self._coming, None)
        if coming is None:
            return
        layer, piece = coming
        stage = self._memory.stages[self._fetched % 2]
        self._fetched += 1
        with torch.cuda.stream(self._stream):
            stage.free.wait()
            if piece.cold:
                self._copy(layer, piece, stage.slices[: piece.cold])
            stage.ready.record()

    def _copy(self, layer: int, piece: _Piece, target: Tensor) -> None:
        """What is not pinned, no kernel can read."""
        pool, offset = self._pool, self._pages.layer_offset(layer)
        ids = np.frombuffer(piece.span.cold, np.int32)[piece.begin : piece.begin + piece.cold]
        if (int(ids.max()) + 1) * pool.block_bytes <= pool.arena.pinned:
            blocks = piece.span.table[piece.begin : piece.begin + piece.cold]
            gather.gather_slices(pool.cpu, offset, blocks, target)
        else:
            target.copy_(pool.cpu[:, offset : offset + target.shape[1]][torch.from_numpy(ids.astype(np.int64))])


class _OnlineSoftmax:
    """Attention of one span of `tokens` queries, keys coming piece by piece. The rows of a KV head's queries lie
    together, in the order (token, head)."""

    def __init__(self, memory: ColdMemory, tokens: int) -> None:
        self._memory = memory
        groups, rows, head_dim = memory.groups, tokens * memory.ratio, memory.head_dim
        self._sums = memory.sums[: groups * rows * head_dim].view(groups, rows, head_dim).zero_()
        self._highest = self._sums.new_full((groups, rows, 1), -math.inf)
        self._total = self._sums.new_zeros(groups, rows, 1)

    def add(self, first: int, q: Tensor, keys: Tensor, values: Tensor, first_sees: int) -> None:
        """Queries q [T, H, D], from the `first` on, and fp32 [G, S, D] of which the first query sees the first
        `first_sees`, and each one after it one more. Of the first piece each must see one at least."""
        memory, tokens, seen = self._memory, len(q), keys.shape[1]
        rows = slice(first * memory.ratio, (first + tokens) * memory.ratio)
        by_group = q.view(tokens, memory.groups, memory.ratio, -1).transpose(0, 1)
        queries = by_group.float().mul_(memory.head_dim**-0.5).reshape(memory.groups, -1, memory.head_dim)
        scores = memory.scores[: queries.shape[0] * queries.shape[1] * seen].view(*queries.shape[:2], seen)
        torch.bmm(queries, keys.transpose(1, 2), out=scores)
        if seen > first_sees:
            hidden = torch.ones(tokens, seen, dtype=torch.bool, device=q.device).triu_(first_sees)[:, None]
            scores.view(memory.groups, tokens, memory.ratio, seen).masked_fill_(hidden, -math.inf)
        before = self._highest[:, rows]
        highest = torch.maximum(before, scores.amax(-1, keepdim=True))
        kept = torch.exp(before - highest)
        weights = scores.sub_(highest).exp_()
        self._total[:, rows].mul_(kept).add_(weights.sum(-1, keepdim=True))
        self._sums[:, rows].mul_(kept).baddbmm_(weights, values)
        before.copy_(highest)

    def finish(self, out: Tensor) -> None:
        """The result into `out` [T, H * D]."""
        memory, tokens = self._memory, len(out)
        by_group = self._sums.div_(self._total).view(memory.groups, tokens, memory.ratio, memory.head_dim)
        out.view(tokens, memory.groups, memory.ratio, memory.head_dim).copy_(by_group.transpose(0, 1))


def _spans(tokens: TokenArrays, tables: Tensor, cold: ColdBlocks) -> list[_Span]:
    """The tokens of a sequence follow each other in a pass."""
    firsts = [0, *(np.flatnonzero(np.diff(tokens.rows)) + 1).tolist(), len(tokens)]
    spans = []
    for first, last in itertools.pairwise(firsts):
        row = int(tokens.rows[first])
        spans.append(_Span(first, last, int(tokens.positions[first]), tables[row], cold[row]))
    return spans
