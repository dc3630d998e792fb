"""The conversion of GGUF tensors and vocabulary: exact against the reference dequantizer, and refusing the rest."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from coldblock.tools import convert
from coldblock.tools.errors import ToolError
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import load_file
from tokenizers import Tokenizer

DATA = Path(__file__).parent.parent / "data"
RNG = np.random.default_rng(7)


def q4_1_rows(rows: int, columns: int) -> np.ndarray:
    return quants.quantize(RNG.normal(size=(rows, columns)).astype(np.float32), GGMLQuantizationType.Q4_1)


def dequantize(qweight: np.ndarray, scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    nibbles = np.stack([qweight & 0x0F, qweight >> 4], axis=-1).reshape(qweight.shape[0], -1)
    groups = nibbles.reshape(*scales.shape, convert.GROUP_SIZE).astype(np.float32)
    weight = groups * scales[..., None].astype(np.float32) + mins[..., None].astype(np.float32)
    return weight.reshape(nibbles.shape)


def permute_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """The permutation that makes a GGUF file of a checkpoint's q and k projections."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def test_q4_1_repack_is_bit_exact() -> None:
    rows = q4_1_rows(6, 128)
    expected = quants.dequantize(rows, GGMLQuantizationType.Q4_1)
    assert np.array_equal(dequantize(*convert.split_q4_1(rows)), expected)


def test_q8_0_repack_is_bit_exact() -> None:
    rows = quants.quantize(RNG.normal(size=(5, 96)).astype(np.float32), GGMLQuantizationType.Q8_0)
    qweight, scales = convert.split_q8_0(rows)
    weight = qweight.reshape(5, 3, 32).astype(np.float32) * scales[..., None].astype(np.float32)
    assert np.array_equal(weight.reshape(5, 96), quants.dequantize(rows, GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_unpermute_restores_the_rows(heads: int) -> None:
    rows = np.arange(heads * 8 * 20, dtype=np.int64).reshape(heads * 8, 20)
    assert np.array_equal(convert.unpermute_rows(permute_rows(rows, heads), heads), rows)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blk.0.attn_q.weight", GGMLQuantizationType.Q4_K),
        ("token_embd.weight", GGMLQuantizationType.Q4_1),
        ("blk.0.attn_q.bias", GGMLQuantizationType.F32),
        ("output.weight", GGMLQuantizationType.Q8_0),
    ],
)
def test_tensors_that_the_layout_cannot_express_are_refused_by_name(name: str, kind: GGMLQuantizationType) -> None:
    tensor = SimpleNamespace(name=name, tensor_type=kind, data=np.zeros((4, 20), np.uint8))
    with pytest.raises(ToolError, match=name):
        convert.convert_tensor(tensor, {})  # type: ignore[arg-type]


def test_config_has_short_floats() -> None:
    assert convert.shortest_float(9.999999747378752e-06) == 1e-05
    assert convert.shortest_float(100000.0) == 100000.0


def test_embedded_model_tokenizes_like_the_reference(embedded_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    cases = json.loads((DATA / "smollm2_tokens.json").read_text(encoding="utf-8"))
    assert len(cases) == 300
    wrong = [case["text"] for case in cases if tokenizer.encode(case["text"]).ids != case["ids"]]
    assert wrong == []


def test_embedded_model_is_complete(embedded_model: Path) -> None:
    config = json.loads((embedded_model / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(embedded_model / "model.safetensors")
    linears = [name for name in tensors if name.endswith(".mins")]
    assert len(linears) == 7 * 30
    assert tensors["model.embed_tokens.qweight"].shape == (49152, 576)
    assert tensors["model.layers.29.mlp.down_proj.qweight"].shape == (576, 768)
    assert tensors["model.norm.weight"].dtype == np.float32
    assert config["quantization_config"] == {
        "quant_method": "coldblock",
        "bits": 4,
        "group_size": 32,
        "embedding_bits": 8,
    }
    template = json.loads((embedded_model / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    assert template == (embedded_model / "chat_template.jinja").read_text(encoding="utf-8")
