"""What becomes of a checkpoint's tensors for the GPU, and the forward pass with emulated kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from coldblock.engine_core.models import cuda_linears
from coldblock.engine_core.models.cuda_decoder import CudaDecoder, TokenInputs, Workspace, load_cuda_decoder
from coldblock.engine_core.models.cuda_linears import (
    CudaBuilder,
    DenseCudaLinear,
    Scratch,
    W4CudaLinear,
    W8CudaHead,
)
from coldblock.engine_core.models.layers import Int8Weight
from coldblock.engine_core.models.registry import read_model_config
from coldblock.engine_core.models.w4a16 import W4Weight
from coldblock.engine_core.models.weights import Checkpoint, DummyCheckpoint
from coldblock.kernels import w4, w8
from coldblock.kernels.pages import KVPages
from coldblock.kernels.rotated_bias import RotatedBias, Turns
from cuda_on_cpu import attend, emulate
from tiny_models import quantize, save_tiny
from torch import Tensor

FITTING: dict[str, Any] = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 192}
TOKENS = [(i * 37) % 320 for i in range(20)]


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        yield


def load(path: Path, dtype: torch.dtype = torch.float16, dense_copies: bool = False) -> CudaDecoder:
    return load_cuda_decoder(read_model_config(path), Checkpoint(path), dtype, 64, dense_copies)


@torch.inference_mode()
def logits(decoder: CudaDecoder, chosen: list[int] | None = None) -> Tensor:
    """fp32 [T, V] of TOKENS, or of those that are chosen."""
    config, count = decoder.config, len(TOKENS)
    workspace = Workspace(config, decoder.dtype, 32, 32, decoder.scratch_elements, "cpu")
    pages = KVPages(torch.zeros(2, 4 * 2 * 2 * 16 * 64 * 2, dtype=torch.uint8), "fp16", 16, 4, 2, 64)
    span, zeros = torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    ids = torch.tensor(TOKENS, dtype=torch.int32)
    inputs = TokenInputs(ids, zeros - 1, span, zeros, zeros[:1], torch.tensor([[0, 1]], dtype=torch.int32))

    def attend_pool(layer: int, q: Tensor, out: Tensor, k_bias: RotatedBias | None) -> None:
        assert k_bias is decoder.k_biases[layer]
        planes = pages.pool.view(torch.float16).view(2, 4, 2, 2, 16, 64)[:, layer]
        keys, values = planes.permute(1, 2, 0, 3, 4).reshape(2, 2, 32, 64)[:, :, :count].float()
        if k_bias is not None:
            k_bias.add_to(keys, 0)
        out.copy_(attend(q, keys, values, 0))

    rows = None if chosen is None else torch.tensor(chosen, dtype=torch.int32)
    found = decoder.logits(inputs, pages, attend_pool, workspace, rows)[:, : config.vocab_size].clone()
    assert pages.pool.view(torch.float16).view(2, 4, -1).count_nonzero(dim=2).all()  # K and V of every layer
    return found


@pytest.mark.parametrize("group_size", [None, 32, 64])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("qwen2", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("llama", {"tie_word_embeddings": True})],
)
def test_logits_equal_transformers(tmp_path: Path, kind: str, changes: dict[str, Any], group_size: int | None) -> None:
    model = save_tiny(tmp_path, kind, num_hidden_layers=4, **FITTING, **changes)
    if group_size is not None:
        model.load_state_dict(quantize(tmp_path, group_size), strict=False)
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(load(tmp_path)), wanted, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("chosen", [[], [19], [3, 0, 19, 7]])
def test_logits_of_chosen_tokens_are_those_among_all(tmp_path: Path, chosen: list[int]) -> None:
    save_tiny(tmp_path, "qwen2", num_hidden_layers=4, **FITTING)
    decoder = load(tmp_path)
    found = logits(decoder, chosen)
    assert found.shape == (len(chosen), 320)
    torch.testing.assert_close(found, logits(decoder)[chosen], atol=0.01, rtol=0.01)


def test_a_bias_that_k_lacks_is_added_where_k_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", num_hidden_layers=4, **FITTING)
    decoder = load(tmp_path)
    wanted, apart = logits(decoder), []
    for layer in decoder._layers:
        bias = layer.qkv.bias
        assert bias is not None
        keys = bias[4 * 64 : 6 * 64]
        apart.append(RotatedBias(keys.view(2, 64).float(), decoder._rotary, Turns.of(decoder._rotary)))
        keys.zero_()
    assert (logits(decoder) - wanted).abs().max() > 0.2
    decoder.k_biases = apart
    torch.testing.assert_close(logits(decoder), wanted, atol=0.01, rtol=0.01)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    tied, untied = tmp_path / "tied", tmp_path / "untied"
    save_tiny(tied, tie_word_embeddings=True, **FITTING)
    save_tiny(untied, **FITTING)
    decoder = load(tied)
    assert decoder._head._weight.data_ptr() == decoder._embedding.data_ptr()  # type: ignore[attr-defined]
    assert load(untied).nbytes - decoder.nbytes == 320 * 128 * 2


def test_four_bit_matrices_stay_packed_unless_their_groups_are_odd(tmp_path: Path) -> None:
    save_tiny(tmp_path, **FITTING)
    for group_size, kind in ((32, W4CudaLinear), (16, DenseCudaLinear)):
        save_tiny(tmp_path, **FITTING)
        quantize(tmp_path, group_size)
        decoder = load(tmp_path, torch.bfloat16)
        assert {type(linear) for linear in decoder._linears()} == {kind}


def int8_table(rows: int, columns: int, group: int = 32) -> Int8Weight:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    return Int8Weight(codes, torch.rand(rows, columns // group, generator=generator).half() / 64)


def test_an_int8_embedding_is_also_the_tied_head(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True, **FITTING)
    dense = load(tmp_path).nbytes
    quantize(tmp_path)
    for dense_copies in (False, True):
        decoder = load(tmp_path, dense_copies=dense_copies)
        linears = sum(linear.nbytes for linear in decoder._linears())
        assert isinstance(decoder._embedding, w8.W8Matrix) and isinstance(decoder._head, W8CudaHead)
        assert decoder._head._matrix is decoder._embedding
        table = 320 * 128 + 320 * 4 * 2 + (320 * 128 * 2 if dense_copies else 0)
        assert decoder.nbytes - linears == table + (dense - 320 * 128 * 2 - dense_linears(tmp_path))


def dense_linears(path: Path) -> int:
    """Bytes of a tiny model's linears in 16 bits, without biases."""
    return 2 * read_model_config(path).linear_elements


def test_an_untied_embedding_and_a_head_of_its_own() -> None:
    builder, table = CudaBuilder(torch.float16, False), int8_table(37, 64)
    embedding, head = builder.embedding(table), builder.head(int8_table(37, 64), torch.ones(64), None)
    assert isinstance(embedding, w8.W8Matrix) and isinstance(head, W8CudaHead)
    assert torch.equal(w8.unpack_w8(embedding), table.dequantize())
    assert head.nbytes == embedding.nbytes == 48 * (64 + 2 * 2)


@pytest.mark.parametrize("scales_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", [16, 32, 48, 96])
def test_int8_tables_stay_packed_unless_their_groups_are_odd(group: int, scales_dtype: torch.dtype) -> None:
    table = int8_table(40, 96, group)
    table = Int8Weight(table.qweight, table.scales.to(scales_dtype))
    packed = group % 32 == 0 and scales_dtype is torch.float16
    builder = CudaBuilder(torch.bfloat16, False)
    embedding = builder.embedding(table)
    assert isinstance(embedding, w8.W8Matrix) == packed
    assert isinstance(builder.head(table, torch.ones(96), embedding), W8CudaHead if packed else DenseCudaLinear)
    if not packed:
        assert isinstance(embedding, Tensor) and torch.equal(embedding, table.dequantize().bfloat16())


@pytest.mark.parametrize("dense_copies", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_a_head_of_few_and_many_rows(monkeypatch: pytest.MonkeyPatch, more: int, dense_copies: bool) -> None:
    """Logits go into rows that lie apart; many rows multiply values in 16 bits, slices of them without a copy."""
    monkeypatch.setattr(cuda_linears, "_SLICE_ELEMENTS", 128 * 96)
    launched: list[int] = []
    linear = w8.w8_linear
    monkeypatch.setattr(w8, "w8_linear", lambda x, *rest: (launched.append(len(x)), linear(x, *rest)))
    most = cuda_linears.HEAD_MOST_ROWS_BESIDE_DENSE if dense_copies else cuda_linears.HEAD_MOST_ROWS
    table, rows = int8_table(301, 96), most + more
    head = CudaBuilder(torch.float16, dense_copies).head(table, torch.ones(96), None)
    assert head.scratch_elements == (0 if dense_copies else 128 * 96)
    scratch = Scratch(torch.empty(head.scratch_elements).half(), torch.empty(0).half())
    x, out = torch.randn(rows, 96).half(), torch.full((rows, 304), torch.nan)
    head(x, out[:, :301], scratch)
    torch.testing.assert_close(out[:, :301], x.float() @ table.dequantize().t(), atol=0.02, rtol=0.01)
    assert out[:, 301:].isnan().all() and launched == ([] if more else [rows])


def packed(rows: int, columns: int, dense_copies: bool = False, group: int = 32) -> tuple[W4Weight, W4CudaLinear]:
    generator = torch.Generator().manual_seed(rows)
    qweight = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, columns // group, generator=generator).half() / 16
    weight = W4Weight(qweight, scales, -8 * scales)
    linear = CudaBuilder(torch.float16, dense_copies).linear(weight, None)
    assert isinstance(linear, W4CudaLinear)
    return weight, linear


@pytest.mark.parametrize("dense_copies", [False, True])
@pytest.mark.parametrize("rows", [-63, 0, 1])
def test_few_and_many_rows_give_the_same(monkeypatch: pytest.MonkeyPatch, rows: int, dense_copies: bool) -> None:
    """Many rows multiply slices of the dequantized matrix, of which the last is smaller, or the dense copy."""
    monkeypatch.setattr(cuda_linears, "_SLICE_ELEMENTS", 128 * 96)
    rows += cuda_linears.LINEAR_MOST_ROWS_WITHOUT_WIDE
    weight, linear = packed(320, 96, dense_copies)
    assert linear.scratch_elements == (0 if dense_copies else 128 * 96)
    scratch = Scratch(torch.empty(linear.scratch_elements).half(), torch.empty(rows * 320).half())
    x, out, gated = torch.randn(rows, 96).half(), torch.empty(rows, 320).half(), torch.empty(rows, 160).half()
    linear(x, out, scratch)
    wanted = x.float() @ weight.dequantize().t()
    torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.01)
    linear.gated(x, gated, scratch)
    gate, up = wanted.view(rows, 20, 2, 8).unbind(2)
    torch.testing.assert_close(gated.float(), (torch.nn.functional.silu(gate) * up).flatten(1), atol=0.05, rtol=0.02)
    residual = torch.randn(rows, 320)
    before = residual.clone()
    linear.add_to(residual, x, scratch)
    torch.testing.assert_close(residual, before + wanted, atol=0.02, rtol=0.01)


def test_every_number_of_rows_has_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {w4.w4_linear: "linear", cuda_linears.w4_wide.w4_wide_linear: "wide", None: "dense"}
    for wide, dense_copies, wanted in (
        (False, False, {"linear": 64, "dense": 9999}),
        (False, True, {"linear": 64, "dense": 9999}),
        (True, False, {"linear": 8, "wide": 512, "dense": 9999}),
        (True, True, {"linear": 8, "wide": 96, "dense": 9999}),
    ):
        monkeypatch.setattr(cuda_linears.w4_wide, "supports", lambda matrix, m, wide=wide: wide)
        _, linear = packed(128, 64, dense_copies)
        chosen = {ways[linear._packed_product(rows)]: rows for rows in range(1, 10000)}  # type: ignore[index]
        assert chosen == wanted


def test_bytes_are_those_of_the_tensors() -> None:
    codes, scales = 128 * 64 // 2, 128 * 2 * 4
    assert packed(128, 64)[1].nbytes == codes + scales
    assert packed(128, 64, dense_copies=True)[1].nbytes == codes + scales + 128 * 64 * 2


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", num_hidden_layers=4, **FITTING)
    quantize(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = read_model_config(tmp_path)
    first, again, other = (
        logits(load_cuda_decoder(config, DummyCheckpoint(config, seed), torch.float16, 64, True)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.isfinite().all() and 0.1 < first.std() < 20
