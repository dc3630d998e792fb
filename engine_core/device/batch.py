"""One forward pass over several requests' chunks: its index tensors, and attention over the pages.

Owns: `PagedBatch`, which lives for one forward pass. Does not know: models, sampling, how chunks were chosen.

Chunks of one token (decode) are attended together in groups of similar length, unless each is to be attended alone;
longer chunks one by one. All indices are computed once and serve every layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ...kernels import reference
from ..control.plan import Chunk
from ..models.k_bias import KeyOffsets
from .kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows [first, last) of the batch whose pages are gathered at once by `planes`, in order (K or V, row, head, page).

    Either one token of each of several sequences, with `bias` [B, 1, 1, S]; or (`many`) one sequence's chunk of tokens,
    with `bias` [T, S] or None at the sequence's start, where `context` is the number of keys that the last token sees.
    """

    first: int
    last: int
    planes: Tensor
    bias: Tensor | None
    context: int
    many: bool


class PagedBatch:
    """`chunks` in the order in which their tokens lie in the batch: decode chunks first, longest context first.

    `alone`: no chunk shares its attention with another, whose length could decide how sums are split.
    """

    def __init__(self, pool: KVPool, chunks: Sequence[Chunk], *, alone: bool) -> None:
        self._pool, self._alone = pool, alone
        self.chunks = sorted(chunks, key=lambda c: (len(c.token_ids) > 1, -len(c.block_table)))
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for chunk in self.chunks:
            span = range(chunk.start, chunk.start + len(chunk.token_ids))
            tokens.extend(chunk.token_ids)
            positions.extend(span)
            blocks.extend([chunk.block_table[position // pool.block_size] for position in span])
        self.token_ids = torch.tensor(tokens)
        self.positions = torch.tensor(positions)
        offsets = (self.positions % pool.block_size)[:, None]
        self._slots = pool.format.slots(pool.plane_numbers(torch.tensor(blocks)), offsets)
        self._groups = self._make_groups()
        self._longest = max(chunk.start + len(chunk.token_ids) for chunk in self.chunks)
        self._clear_new_tail_blocks()

    def last_rows(self) -> list[int]:
        """The batch row of each chunk's last token, in the order of `chunks`."""
        ends, row = [], 0
        for chunk in self.chunks:
            row += len(chunk.token_ids)
            ends.append(row - 1)
        return ends

    def attend(self, layer: int, q: Tensor, kv: Tensor, key_offsets: KeyOffsets | None) -> Tensor:
        """Store kv fp32 [T, 2G, D], attend q fp32 [T, H, D] to each row's context -> [T, H*D].

        In the format's dtype; with offsets to the stored K in fp32, as the sum needs it.
        """
        pool, shape = self._pool, self._pool.shape
        planes = pool.layer(layer)
        pool.format.write(planes, self._slots, kv)
        dtype = pool.format.dtype if key_offsets is None else torch.float32
        q = q.to(dtype)
        offsets = None if key_offsets is None else key_offsets(self._longest)
        outputs = []
        for group in self._groups:
            pages = pool.format.read(planes.index_select(0, group.planes)).to(dtype)
            queries = q[group.first : group.last]
            bias = None if group.bias is None else group.bias.to(dtype)
            if group.many:
                keys, values = pages.view(2, shape.num_kv_heads, -1, shape.head_dim)[:, :, : group.context]
                _add(keys, offsets)
                outputs.append(reference.attend_many(queries, keys, values, bias))
            else:
                keys, values = pages.view(2, len(queries), shape.num_kv_heads, -1, shape.head_dim)
                _add(keys, offsets)
                outputs.append(reference.attend_one(queries, keys, values, cast("Tensor", bias)))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _make_groups(self) -> list[_Group]:
        groups, first = [], 0
        pending: list[Chunk] = []
        for chunk in self.chunks:
            if pending and not self._joins(chunk, pending[0]):
                groups.append(self._decode_group(first, pending))
                first += len(pending)
                pending = []
            if len(chunk.token_ids) > 1:
                groups.append(self._prefill_group(first, chunk))
                first += len(chunk.token_ids)
            else:
                pending.append(chunk)
        if pending:
            groups.append(self._decode_group(first, pending))
        return groups

    def _joins(self, chunk: Chunk, longest: Chunk) -> bool:
        """Whether a chunk is attended in the group of decode chunks that `longest` leads."""
        single = len(chunk.token_ids) == 1 and not self._alone
        return single and 2 * self._pages(chunk) > self._pages(longest)

    def _pages(self, chunk: Chunk) -> int:
        """Pages that hold the chunk's context; the block table may be longer."""
        return math.ceil((chunk.start + len(chunk.token_ids)) / self._pool.block_size)

    def _decode_group(self, first: int, chunks: Sequence[Chunk]) -> _Group:
        """Shorter contexts are padded with their own first page, so that nobody's values but their own are touched."""
        pages = [self._pages(chunk) for chunk in chunks]
        longest = max(pages)
        tables = []
        for chunk, used in zip(chunks, pages, strict=True):
            tables.append((*chunk.block_table[:used], *[chunk.block_table[0]] * (longest - used)))
        ends = torch.tensor([chunk.start for chunk in chunks])
        bias = self._bias(ends, longest * self._pool.block_size)[:, None, None]
        return _Group(first, first + len(chunks), self._gather_order(tables), bias, 0, many=False)

    def _prefill_group(self, first: int, chunk: Chunk) -> _Group:
        context = chunk.start + len(chunk.token_ids)
        bias = self._bias(torch.arange(chunk.start, context), context) if chunk.start else None
        order = self._gather_order([chunk.block_table[: self._pages(chunk)]])
        return _Group(first, first + len(chunk.token_ids), order, bias, context, many=True)

    def _bias(self, last_seen: Tensor, keys: int) -> Tensor:
        """[rows, keys]: 0 up to each row's last visible key, -inf behind it."""
        hidden = torch.arange(keys) > last_seen[:, None]
        return torch.zeros(hidden.shape, dtype=self._pool.format.dtype).masked_fill_(hidden, -math.inf)

    def _gather_order(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """Plane numbers in the order (K or V, row, head, page)."""
        numbers = self._pool.plane_numbers(torch.tensor(tables))
        rows, pages, _ = numbers.shape
        return numbers.view(rows, pages, 2, -1).permute(2, 0, 3, 1).reshape(-1)

    def _clear_new_tail_blocks(self) -> None:
        """Zero the blocks that this pass begins and does not fill: whole pages are read, and NaN times 0 is NaN."""
        new = []
        for chunk in self.chunks:
            end = chunk.start + len(chunk.token_ids)
            first_of_last_page = (end - 1) // self._pool.block_size * self._pool.block_size
            if end % self._pool.block_size and chunk.start <= first_of_last_page:
                new.append(chunk.block_table[first_of_last_page // self._pool.block_size])
        if new:
            self._pool.clear(new)


def _add(keys: Tensor, offsets: Tensor | None) -> None:
    """Add to keys [..., G, S, D], gathered and nobody else's, those of their positions; padding has none."""
    if offsets is not None:
        length = min(keys.shape[-2], offsets.shape[-2])
        keys[..., :length, :].add_(offsets[:, :length])
