"""The bytes of both tiers: the GPU pool and the host arena, page-major.

Owns: the memory of every block, and where in a block a plane lies. Does not know: which block is free or whose it is.

A block is one run of bytes: [layer][K, V][kv_head] planes (see `kv_formats`). All planes of the pool have one size, so
that (block, layer, K or V, head) is plane number ((block * layers + layer) * 2 + kv) * heads + head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.pages import KVPages
from ..kv_layout import FormatName, KVShape, paged_kv_block_bytes
from .host_memory import HostArena
from .kv_formats import KVFormat, make_format


class KVPool:
    """Blocks of one shape and format in two arenas of bytes, `gpu` and `cpu`, uint8 [blocks, block_bytes].

    On the CPU device both are plain memory, which the system commits when a page is first written, one behind the
    other: block b of `cpu` can be read as block len(gpu) + b. On a GPU, `gpu` is its memory, `cpu` is pinned as it is
    needed (`arena`), and kernels see the pool as `pages`; everything else here is the CPU device's.
    """

    def __init__(
        self,
        shape: KVShape,
        block_size: int,
        kv_format: FormatName,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        device: str = "cpu",
    ) -> None:
        self.shape, self.block_size, self.format_name = shape, block_size, kv_format
        self.block_bytes = paged_kv_block_bytes(shape, block_size, kv_format)
        on_host = device == "cpu"
        in_arena = num_cpu_blocks + (num_gpu_blocks if on_host else 0)
        self.arena = HostArena(in_arena * self.block_bytes, pin=not on_host, unit=self.block_bytes)
        memory = self.arena.memory.view(in_arena, self.block_bytes)
        if on_host:
            self.gpu, self.cpu = memory.split((num_gpu_blocks, num_cpu_blocks))
        else:
            self.gpu = torch.empty(num_gpu_blocks, self.block_bytes, dtype=torch.uint8, device=device)
            self.cpu = memory
        self.format: KVFormat = make_format(kv_format, block_size, shape.head_dim)
        planes = self.format.view((memory if on_host else self.gpu).view(-1))
        self.planes_per_layer = 2 * shape.num_kv_heads
        self.planes_per_block = shape.num_layers * self.planes_per_layer
        self._layers = [planes[layer * self.planes_per_layer :] for layer in range(shape.num_layers)]

    @property
    def pages(self) -> KVPages:
        """The GPU pool as kernels see it. Not for the format fp32, which no kernel knows."""
        assert self.format_name != "fp32"
        shape = self.shape
        return KVPages(
            self.gpu, self.format_name, self.block_size, shape.num_layers, shape.num_kv_heads, shape.head_dim
        )

    def layer(self, number: int) -> Tensor:
        """The planes from this layer's first plane of block 0 on: one index (`plane_numbers`) serves every layer."""
        return self._layers[number]

    def plane_numbers(self, blocks: Tensor) -> Tensor:
        """Plane of (block, K or V, head) in `layer`: int64 [..., 2G] for block ids [...], K's heads first."""
        return blocks[..., None] * self.planes_per_block + torch.arange(self.planes_per_layer)

    def clear(self, blocks: list[int]) -> None:
        """Zero whole blocks of the GPU pool."""
        self.gpu.index_fill_(0, torch.tensor(blocks), 0)

    def close(self) -> None:
        """Unpin the arena."""
        self.arena.close()
