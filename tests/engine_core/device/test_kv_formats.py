"""Every format stores what it can hold, and a finite number never becomes NaN."""

from __future__ import annotations

import math

import pytest
import torch
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.kv_layout import FormatName, KVShape
from torch import Tensor

FORMATS: tuple[FormatName, ...] = ("fp32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2")
TOLERANCE = {"fp32": 0.0, "fp16": 5e-4, "bf16": 4e-3, "int8": 0.05, "fp8_e4m3": 0.0626, "fp8_e5m2": 0.126}
SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=10)
BLOCK = 4


def store_and_load(kv_format: FormatName, values: Tensor, layer: int = 1) -> Tensor:
    """Write values [tokens, 2G, D] into scattered slots of a pool of garbage and read them back."""
    pool = KVPool(SHAPE, BLOCK, kv_format, 5, 0)
    pool.gpu.fill_(0xFF)
    positions = torch.arange(len(values))
    blocks = torch.tensor([3, 0, 4])[positions // BLOCK]
    planes = pool.plane_numbers(blocks)
    pool.format.write(pool.layer(layer), pool.format.slots(planes, (positions % BLOCK)[:, None]), values)
    rows = pool.format.read(pool.layer(layer).index_select(0, planes.view(-1))).float()
    pages = rows.view(len(values), -1, BLOCK, SHAPE.head_dim)
    return torch.stack([page[:, position % BLOCK] for position, page in enumerate(pages)])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_round_trip(kv_format: FormatName) -> None:
    torch.manual_seed(0)
    values = torch.randn(11, 4, 10) * torch.logspace(-1, 1.5, 11)[:, None, None]
    got = store_and_load(kv_format, values)
    largest = values.abs().amax(-1, keepdim=True)
    limit = TOLERANCE[kv_format] * (largest / 12 if kv_format == "int8" else values.abs()) + 2e-3 * (
        kv_format != "fp32"
    )
    assert ((got - values).abs() <= limit).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_out_of_range_is_clamped_and_never_nan(kv_format: FormatName) -> None:
    values = torch.zeros(3, 4, 10)
    values[0] = torch.tensor([1e4, -1e4] * 5)
    values[1, :, :2] = torch.tensor([math.inf, -math.inf])
    values[2, :, :2] = torch.tensor([3e38, -3e38])
    got = store_and_load(kv_format, values)
    assert not got.isnan().any()
    limit = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}.get(kv_format)
    if limit is not None:
        assert got[1:, :, 0].eq(limit).all()
        assert got[1:, :, 1].eq(-limit).all()
    if kv_format == "fp8_e4m3":
        assert got[0].abs().eq(448).all()


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_reads_as_torch_reads_it(kv_format: FormatName) -> None:
    pool = KVPool(KVShape(1, 1, 16), 16, kv_format, 1, 0)
    codes = torch.arange(256, dtype=torch.uint8)
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_format]
    torch.testing.assert_close(
        pool.format.read(codes[None])[0], codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kv_format", FORMATS)
def test_writing_touches_its_own_slots_alone(kv_format: FormatName) -> None:
    pool = KVPool(SHAPE, BLOCK, kv_format, 3, 0)
    pool.gpu.zero_()
    slots = pool.format.slots(pool.plane_numbers(torch.tensor([1])), torch.tensor([[2]]))
    pool.format.write(pool.layer(2), slots, torch.ones(1, 4, 10))
    assert pool.gpu[[0, 2]].sum() == 0
    per_layer = pool.gpu[1].view(SHAPE.num_layers, -1).count_nonzero(dim=1)
    assert per_layer[:2].sum() == 0
    assert 0 < per_layer[2] <= pool.block_bytes // SHAPE.num_layers // BLOCK


@pytest.mark.parametrize("kv_format", FORMATS)
def test_scales_lie_inside_the_block_for_int8_only(kv_format: FormatName) -> None:
    pool = KVPool(SHAPE, BLOCK, kv_format, 2, 0)
    element = {"fp32": 4, "fp16": 2, "bf16": 2}.get(kv_format, 1)
    elements = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * BLOCK * SHAPE.head_dim * element
    scales = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * BLOCK * 2 if kv_format == "int8" else 0
    assert pool.gpu.shape[1] == pool.block_bytes == elements + scales


def test_int8_of_zeros() -> None:
    assert store_and_load("int8", torch.zeros(2, 4, 10)).eq(0).all()
