"""Names and bytes of the KV formats."""

from __future__ import annotations

import pytest
from coldblock.engine_core.kv_layout import KV_CACHE_DTYPES, KVShape, paged_kv_block_bytes, resolve_kv_cache_dtype

QWEN_3B = KVShape(num_layers=36, num_kv_heads=2, head_dim=128)


@pytest.mark.parametrize(
    ("kv_format", "size"),
    [("fp16", 589_824), ("bf16", 589_824), ("int8", 299_520), ("fp8_e4m3", 294_912), ("fp8_e5m2", 294_912)],
)
def test_block_bytes_of_a_real_model(kv_format: str, size: int) -> None:
    assert paged_kv_block_bytes(QWEN_3B, 16, kv_format) == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("int8", "int8"),
        ("i8", "int8"),
        ("fp8", "fp8_e4m3"),
        ("e4m3", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("e5m2", "fp8_e5m2"),
    ],
)
def test_names(name: str, kv_format: str) -> None:
    assert resolve_kv_cache_dtype(name, "fp32") == kv_format


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
def test_auto_is_the_compute_dtype(compute: str) -> None:
    assert resolve_kv_cache_dtype("auto", compute) == compute  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["int4", "FP8", "", "fp32"])
def test_anything_else_is_an_error_that_lists_the_names(name: str) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype") as caught:
        resolve_kv_cache_dtype(name, "fp16")
    assert all(allowed in str(caught.value) for allowed in KV_CACHE_DTYPES)
