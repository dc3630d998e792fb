"""Four-bit weights: the layout, the operator, the dispatch, whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from coldblock.engine_core.models.w4a16 import W4Linear, W4Weight, fits_operator, stack_rows
from coldblock.engine_core.models.weights import LoadOptions
from safetensors.torch import load_file, save_file
from tiny_models import FP32, chunk, forward, load, make_pool, quantize, save_tiny

TOKENS = [(i * 37) % 320 for i in range(50)]


def random_weight(rows: int, columns: int, group_size: int = 32) -> W4Weight:
    groups = columns // group_size
    return W4Weight(
        torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        (torch.rand(rows, groups) * 0.02 + 0.005).half(),
        (-torch.rand(rows, groups) * 0.2).half(),
    )


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


def test_layout_low_nibble_first() -> None:
    weight = W4Weight(torch.tensor([[0x21, 0x43]], dtype=torch.uint8), torch.tensor([[0.5]]), torch.tensor([[-1.0]]))
    assert weight.codes().tolist() == [[1, 2, 3, 4]]
    assert weight.dequantize().tolist() == [[-0.5, 0.0, 0.5, 1.0]]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 40])
def test_operator_and_dense_copy_agree_with_the_dequantized_matrix(rows: int, group_size: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = random_weight(48, 256, group_size), torch.randn(48), torch.randn(rows, 256)
    wanted = x @ weight.dequantize().t() + bias
    assert relative_error(W4Linear(weight, bias, None)(x), wanted) < 1e-2
    assert relative_error(W4Linear(weight, bias, torch.float32)(x), wanted) < (1e-2 if rows <= 16 else 1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_operator_sums_each_row_on_its_own(threads: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        linear, x = W4Linear(random_weight(160, 576), None, None), torch.randn(67, 576)
        whole = linear(x)
        for first, last in ((0, 1), (0, 4), (3, 8), (5, 67), (66, 67), (10, 27)):
            assert torch.equal(linear(x[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(before)


def test_rows_and_stacking() -> None:
    a, b = random_weight(16, 64), random_weight(32, 64)
    order = torch.randperm(16)
    assert torch.equal(a.rows(order).dequantize(), a.dequantize()[order])
    assert torch.equal(stack_rows([a, b]).dequantize(), torch.cat([a.dequantize(), b.dequantize()]))


def test_shapes_that_the_operator_does_not_take() -> None:
    assert fits_operator(random_weight(16, 64))
    assert not fits_operator(random_weight(20, 64))
    assert not fits_operator(random_weight(16, 64, 16))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_model_equals_its_dequantized_self(tmp_path: Path, kind: str, tied: bool) -> None:
    model = save_tiny(tmp_path, kind, tie_word_embeddings=tied)
    exact = quantize(tmp_path)
    model.load_state_dict(exact, strict=not tied)
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    decoder = load(tmp_path)
    ours = forward(decoder, make_pool(decoder), [chunk("a", TOKENS, 0, [5, 2, 7, 1])])["a"]
    torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=1e-4)
    for copies in (False, True):
        packed = load(tmp_path, LoadOptions(torch.float32, four_bit=True, dense_copies=copies, positions=512))
        ours = forward(packed, make_pool(packed), [chunk("a", TOKENS, 0, [5, 2, 7, 1])])["a"]
        assert relative_error(ours, wanted) < (1e-2 if copies and tied else 3e-2)


def test_odd_row_counts_fall_back_to_a_dense_matrix(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, num_attention_heads=4, num_key_value_heads=1, head_dim=12, vocab_size=330)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if "o_proj" in name}  # its 48 columns are no whole groups
    rest = {name: tensor for name, tensor in tensors.items() if name not in plain}
    save_file(rest, tmp_path / "model.safetensors")
    exact = quantize(tmp_path)
    save_file(plain, tmp_path / "plain.safetensors")
    model.load_state_dict({**exact, **plain})
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    packed = load(tmp_path, LoadOptions(torch.float32, four_bit=True, dense_copies=False, positions=512))
    ours = forward(packed, make_pool(packed), [chunk("a", TOKENS, 0, [5, 2, 7, 1])])["a"]
    assert relative_error(ours, wanted) < 3e-2


def test_int8_head_of_its_own(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    exact = quantize(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("qweight", "scales"):
        tensors[f"lm_head.{part}"] = tensors[f"model.embed_tokens.{part}"].flip(0).contiguous()
    del tensors["lm_head.mins"]
    save_file(tensors, tmp_path / "model.safetensors")
    exact["lm_head.weight"] = exact["model.embed_tokens.weight"].flip(0)
    model.load_state_dict(exact)
    with torch.inference_mode():
        wanted = model(torch.tensor([TOKENS])).logits[0]
    decoder = load(tmp_path, FP32)
    ours = forward(decoder, make_pool(decoder), [chunk("a", TOKENS, 0, [5, 2, 7, 1])])["a"]
    torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=1e-4)
