"""A large K bias costs no quality in any format, and nothing but rounding in the format without any."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coldblock.engine_core.kv_layout import FormatName
from coldblock.engine_core.models import k_bias, layers
from coldblock.engine_core.models.k_bias import KeyBias, Rotation
from coldblock.engine_core.models.registry import read_model_config
from tiny_models import FP32, chunk, forward, load, make_pool, quantize, save_biased, save_tiny
from torch import Tensor

TOKENS = [(i * 37 + i * i) % 320 for i in range(400)]
TABLE = [9, 3, 27, 14, 5, 30, 2, 61, 44, 12, *range(31, 44), 50, 55]
ONE_BYTE = ("int8", "fp8_e4m3", "fp8_e5m2")


def logits(path: Path, kv_format: str, at_once: int = 400) -> Tensor:
    """Logits of all tokens, fed so many at a time."""
    decoder = load(path)
    pool = make_pool(decoder, kv_format=kv_format)
    starts = range(0, len(TOKENS), at_once)
    parts = [forward(decoder, pool, [chunk("a", TOKENS[i : i + at_once], i, TABLE)])["a"] for i in starts]
    return torch.cat(parts)


def divergence(wanted: Tensor, got: Tensor) -> float:
    """Mean Kullback-Leibler divergence per token, in nats."""
    wanted, got = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


@pytest.fixture(scope="module", params=[0, 1])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model without K bias, and with one of norm 400 in layer 0."""
    plain, biased = (tmp_path_factory.mktemp(name) for name in ("plain", "biased"))
    save_biased(plain, 0.0, request.param)
    save_biased(biased, 400.0, request.param)
    return plain, biased


@pytest.fixture
def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k_bias, "SPLIT_ABOVE", math.inf)


def loss(path: Path, kv_format: str) -> float:
    """What a format costs this model."""
    return divergence(logits(path, "fp32"), logits(path, kv_format))


@pytest.mark.parametrize("kv_format", ["fp16", "bf16", *ONE_BYTE])
def test_with_the_bias_apart_a_format_costs_what_it_costs_without_bias(
    models: tuple[Path, Path], kv_format: str
) -> None:
    plain, biased = models
    assert loss(biased, kv_format) <= 2 * loss(plain, kv_format)


@pytest.mark.usefixtures("unsplit")
@pytest.mark.parametrize("kv_format", ["fp16", "bf16", *ONE_BYTE])
def test_with_the_bias_stored_it_costs_twenty_times_as_much(models: tuple[Path, Path], kv_format: str) -> None:
    plain, biased = models
    assert loss(biased, kv_format) >= 20 * loss(plain, kv_format)


@pytest.mark.parametrize("at_once", [1, 7, 400])
def test_exact_but_for_rounding(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    apart = logits(models[1], "fp32", at_once)
    monkeypatch.setattr(k_bias, "SPLIT_ABOVE", math.inf)
    torch.testing.assert_close(apart, logits(models[1], "fp32"), atol=2e-4, rtol=1e-4)


def test_rows_of_several_lengths_in_one_pass(models: tuple[Path, Path]) -> None:
    """Each sequence's K gets the bias of its own positions, whatever the company's lengths."""
    decoder = load(models[1])
    lengths, pool = {"a": 100, "b": 70, "c": 3, "d": 33}, make_pool(decoder)
    tables = {name: range(8 * i, 8 * i + 8) for i, name in enumerate(lengths)}
    forward(decoder, pool, [chunk(name, TOKENS[:n], 0, tables[name]) for name, n in lengths.items()])
    rows = [chunk(name, TOKENS[n : n + 1], n, tables[name]) for name, n in lengths.items()]
    got, wanted = forward(decoder, pool, rows), logits(models[1], "fp32")
    for name, n in lengths.items():
        torch.testing.assert_close(got[name][0], wanted[n], atol=2e-4, rtol=1e-4)


def test_the_rotary_table_may_end_inside_a_block(models: tuple[Path, Path]) -> None:
    """A block's last slots may lie behind the last position that the model knows."""
    decoder = load(models[1], replace(FP32, positions=19))
    pool = make_pool(decoder)
    forward(decoder, pool, [chunk("a", TOKENS[:18], 0, [4, 2])])
    got = forward(decoder, pool, [chunk("a", TOKENS[18:19], 18, [4, 2])])["a"]
    torch.testing.assert_close(got[0], logits(models[1], "fp32")[18], atol=2e-4, rtol=1e-4)


def test_which_layers_are_split(models: tuple[Path, Path]) -> None:
    plain, biased = (load(path) for path in models)
    assert [layer.key_bias.apart for layer in plain.layers] == [None, None]
    first, second = [layer.key_bias.apart for layer in biased.layers]
    assert first is not None
    assert (first.shape, first.dtype, second) == ((2, 16), torch.float32, None)
    assert float(first.norm()) == pytest.approx(400)
    assert biased.layers[0].key_bias.ratio > 100


def test_four_bit_weights_are_measured_as_what_they_stand_for(tmp_path: Path) -> None:
    save_biased(tmp_path, 60.0)
    plain = load(tmp_path).layers[0].key_bias
    quantize(tmp_path)
    packed = load(tmp_path).layers[0].key_bias
    assert packed.ratio == pytest.approx(plain.ratio, rel=0.02)
    assert packed.apart is not None
    torch.testing.assert_close(packed.apart, plain.apart)


def rotation(head_dim: int, last: float = 1000.0, factor: float = 1.0) -> Rotation:
    """Every pair turns as far as `last`, in radians."""
    return Rotation(torch.full((head_dim // 2,), last, dtype=torch.float64), factor)


def test_what_k_and_v_reach_follows_from_their_weights() -> None:
    torch.manual_seed(0)
    weight, norm, bias = torch.randn(32, 256) * 0.3, torch.rand(256) * 2, torch.linspace(-90, 5, 32)
    x = torch.randn(4000, 256)
    keys = (x / x.square().mean(-1, keepdim=True).sqrt() * norm) @ weight.t()
    found = k_bias.measure((weight, bias), (weight, bias), norm, rotation(16))
    assert found.ratio == pytest.approx(90 / float(keys[:, :16].square().mean().sqrt()), rel=0.02)
    loudest = keys.square().mean(0).sqrt()
    assert found.peaks[0] == pytest.approx(4 * float(loudest.amax()), rel=0.05)
    assert found.peaks[1] == pytest.approx(float((4 * loudest + bias.abs()).amax()), rel=0.05)
    assert found.apart is not None
    assert found.apart.equal(bias.view(2, 16))


@pytest.mark.parametrize("angle", [0.0, 0.1, 0.5, 1.0, 2.0, 100.0])
def test_the_peak_of_a_stored_bias_is_that_of_what_rotation_makes_of_it(angle: float) -> None:
    """A pair that turns far has all of its bias in one channel somewhere; yarn makes all of it larger."""
    torch.manual_seed(0)
    bias, turns = torch.randn(2, 16), torch.linspace(0, angle, 2000, dtype=torch.float64)
    rotary = torch.polar(torch.full((2000, 8), 1.25, dtype=torch.float64), turns[:, None].expand(-1, 8))
    reached = k_bias.rotated(bias, rotary.to(torch.complex64))(2000).abs().amax(1)
    peaks = rotation(16, angle, 1.25).peaks(bias)
    torch.testing.assert_close(peaks, reached.view(2, 8, 2).amax(-1).double(), rtol=2e-3, atol=0)


def test_the_peak_of_k_is_that_of_its_bias_and_of_the_rest() -> None:
    weight, bias = torch.full((16, 64), 1 / 8.0), torch.full((16,), 3.0)
    found = k_bias.measure((weight, bias), (weight, None), torch.ones(64), rotation(16, factor=1.25))
    assert found.apart is None
    assert found.peaks == pytest.approx((1.25 * (4 + 3 * 2**0.5), 4))
    slow = k_bias.measure((weight, bias), (weight, None), torch.ones(64), rotation(16, 0.0))
    assert slow.peaks == pytest.approx((4 + 3, 4))


def test_a_models_rotation_is_told_from_its_config(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5}
    plain = load(tmp_path).layers[0].key_bias.peaks
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert load(tmp_path).layers[0].key_bias.peaks == pytest.approx((1.5 * plain[0], plain[1]))
    found = layers.whole_rotation(read_model_config(tmp_path))
    last = layers.rotary_table(read_model_config(tmp_path), 512)[-1]
    torch.testing.assert_close(torch.polar(torch.full((8,), found.factor).double(), found.angles).to(last.dtype), last)


@pytest.mark.parametrize(("ratio", "split"), [(15.9, False), (16.1, True)])
def test_the_ratio_decides(ratio: float, split: bool) -> None:
    weight, norm = torch.full((4, 64), 1 / 8.0), torch.ones(64)  # a signal of 1
    k = weight, torch.tensor([1.0, -ratio, 0.0, 2.0])
    found = k_bias.measure(k, (weight, None), norm, rotation(4))
    assert found.ratio == pytest.approx(ratio)
    assert (found.apart is not None) is split
    assert found.peaks == pytest.approx((4 + (0 if split else math.hypot(1, ratio)), 4))


def test_a_quiet_head_is_not_hidden_by_a_loud_one() -> None:
    weight, bias = torch.full((8, 64), 1 / 8.0), torch.zeros(8)
    weight[:4] *= 12
    bias[6] = 20.0
    found = k_bias.measure((weight, bias), (weight, None), torch.ones(64), rotation(4))
    assert found.ratio == pytest.approx(20)
    assert found.apart is not None


def quiet_but(*peaks: tuple[float, float]) -> list[KeyBias]:
    """Layers whose K and V reach this much."""
    return [KeyBias(0.0, peak, None) for peak in ((1.0, 1.0), *peaks)]


@pytest.mark.parametrize(
    ("kv_format", "most", "others"),
    [
        ("fp8_e4m3", 448, "int8 or fp16 or bf16"),
        ("fp8_e5m2", 57344, "int8 or fp16 or bf16"),
        ("int8", 65504, "bf16"),
        ("fp16", 65504, "bf16"),
    ],
)
@pytest.mark.parametrize("name", ["K", "V"])
def test_what_a_format_clamps_is_told(kv_format: FormatName, most: int, others: str, name: str) -> None:
    def loud(peak: float) -> list[KeyBias]:
        return quiet_but((peak, 1.0) if name == "K" else (1.0, peak))

    text = k_bias.misfit(loud(most + 1), kv_format)
    assert text == (
        f"{name} in {kv_format} is clamped at {most}, and by its weights {name} of layer 1 reaches {most + 1}: "
        f"this loses quality; use {others}"
    )
    assert k_bias.misfit(loud(most - 1), kv_format) is None
    assert k_bias.misfit(loud(most + 1), "bf16") is None


@pytest.mark.parametrize("peaks", [[(500.0, 70000.0)], [(70000.0, 500.0)], [(500.0, 1.0), (1.0, 70000.0)]])
def test_only_formats_that_hold_both_k_and_v_are_named(peaks: list[tuple[float, float]]) -> None:
    text = k_bias.misfit(quiet_but(*peaks), "fp8_e4m3")
    assert text is not None
    assert text.endswith("use bf16")


def test_a_model_without_bias_has_nothing_apart(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    assert [(layer.key_bias.ratio, layer.key_bias.apart) for layer in load(tmp_path).layers] == [(0.0, None)] * 2
