"""How kernels see the KV pool: where a token's K or V lies in its block.

Owns: `KVPages`, the address arithmetic of a page-major pool, and reading one in plain torch. Does not know: which block
belongs to whom.

Block b begins at byte b * block_bytes; inside it planes [layer][K, V][kv_head] of `plane_bytes` each. A plane is
[block_size][head_dim] elements, and in int8 behind them [block_size] fp16 scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .checks import check_layout, check_multiple, check_number, check_place
from .errors import KernelArgumentError

PageFormat = Literal["fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"]
FORMAT_NUMBERS: dict[PageFormat, int] = {"fp16": 0, "bf16": 1, "int8": 2, "fp8_e4m3": 3, "fp8_e5m2": 4}
"""The macro KV_FORMAT of the kernels."""

HEAD_DIMS = (64, 96, 128, 256)
_DTYPES: dict[PageFormat, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class KVPages:
    """One pool. `pool` uint8 [num_blocks, block_bytes] on the GPU; `block_size` a multiple of 16.

    `plane_bytes` are those of K (or V) of one head in one block and layer, `block_bytes` those of a block.

    Raises KernelArgumentError for a shape or format that the kernels do not have.
    """

    pool: Tensor
    format: PageFormat
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    plane_bytes: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.format not in FORMAT_NUMBERS:
            raise KernelArgumentError(f"the KV format is {self.format}; allowed: {', '.join(FORMAT_NUMBERS)}")
        check_number("head_dim", self.head_dim, HEAD_DIMS)
        check_multiple("block_size", self.block_size, 16)
        for name in ("num_layers", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise KernelArgumentError(f"{name} is {getattr(self, name)}; allowed: from 1 on")
        scale_bytes = 2 if self.format == "int8" else 0
        plane_bytes = self.block_size * (self.head_dim * _DTYPES[self.format].itemsize + scale_bytes)
        object.__setattr__(self, "plane_bytes", plane_bytes)  # once: every launch asks for these
        object.__setattr__(self, "block_bytes", self.layer_offset(self.num_layers))
        check_layout("pool", self.pool, torch.uint8, [("num_blocks", None), ("block_bytes", self.block_bytes)])

    def check(self, layer: int) -> None:
        """Raises KernelArgumentError unless kernels can read the pool where it is, and it has this layer."""
        check_place("pool", self.pool)
        if not 0 <= layer < self.num_layers:
            raise KernelArgumentError(f"layer is {layer}; the pool has layers 0 to {self.num_layers - 1}")

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block that are one layer's."""
        return 2 * self.num_kv_heads * self.plane_bytes

    def layer_offset(self, layer: int) -> int:
        """Byte, within a block, of this layer's first K plane; its V planes follow num_kv_heads planes later."""
        return layer * self.layer_bytes


def stored_keys_and_values(pages: KVPages, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` tokens of a sequence in `blocks` int [n], as stored: K and V fp32 [length, G, D]."""
    begin = pages.layer_offset(layer)
    needed = blocks[: math.ceil(length / pages.block_size)].long()
    slices = pages.pool[needed, begin : begin + pages.layer_bytes]
    out = torch.empty(2, pages.num_kv_heads, len(needed) * pages.block_size, pages.head_dim, device=pages.pool.device)
    dequantize(pages, slices, out)
    k, v = out[:, :, :length].transpose(1, 2)
    return k, v


def dequantize(pages: KVPages, slices: Tensor, out: Tensor) -> None:
    """Some blocks' `slices` of one layer, uint8 [n, layer_bytes], as K and V fp32 into `out` [2, G, n * B, D]."""
    planes = slices.view(-1, 2, pages.num_kv_heads, pages.plane_bytes).permute(1, 2, 0, 3)
    scale_bytes = 2 * pages.block_size if pages.format == "int8" else 0
    shape = (*planes.shape[:3], pages.block_size, pages.head_dim)
    elements = planes[..., : pages.plane_bytes - scale_bytes].view(_DTYPES[pages.format]).view(shape)
    if scale_bytes:
        scales = planes[..., -scale_bytes:].view(torch.float16).float()
        torch.mul(elements, scales[..., None], out=out.view(shape))
    else:
        out.view(shape).copy_(elements)
