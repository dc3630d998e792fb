"""What KV formats cost: figures against a plain computation, the embedded model's bars, what the command says."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from coldblock.tools import eval_kv
from coldblock.tools.kv_quality import compare
from safetensors.torch import load_file, save_file
from tiny_models import chunk, forward, load, make_executor, make_pool, save_biased, save_tiny
from tiny_tokenizer import write_tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

MOST_KL = {"int8": 0.0012, "fp8_e4m3": 0.012, "fp8_e5m2": 0.045}
WINDOWS = [[(i * 37 + i * i) % 320 for i in range(300)], [(i * 11) % 320 for i in range(90)]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny(tmp_path)
    write_tiny_tokenizer(tmp_path)
    return tmp_path


def run(model: Path, *flags: str) -> Any:
    """The results that the command writes."""
    out = model / "out"
    assert eval_kv.main(["kv", str(model), "--out", str(out), "--threads", "1", *flags]) == 0
    assert "KV formats of" in (out / "bench-eval-kv.html").read_text()
    return json.loads((out / "bench-eval-kv.json").read_text())["results"]


def test_the_embedded_model_keeps_its_quality(embedded_model: Path) -> None:
    """On the text's first tokens; all of it is measured in docs/results."""
    ids = Tokenizer.from_file(str(embedded_model / "tokenizer.json")).encode(eval_kv.TEXT.read_text()).ids
    assert len(ids) >= 4000
    executor = make_executor(embedded_model, compute_dtype="fp32", max_model_len=512)
    _, *found = compare(executor, [ids[:512]], 512, ["int8", "fp8_e4m3", "fp8_e5m2"])
    for quality in found:
        most = MOST_KL[quality.kv_format]
        assert most / 20 < quality.mean_kl <= most, quality
        assert quality.mean_kl < quality.p99_kl
        assert quality.perplexity < 40
    assert [quality.bytes_per_token for quality in found] == [11880, 11520, 11520]


def peak_memory(*arguments: str) -> int:
    """KiB that the command takes by itself. What the system counts for a child begins with what its parent has, so the
    command says it of itself."""
    code = (
        "import sys; from coldblock.tools import eval_kv; code = eval_kv.main(sys.argv[1:]);"
        "status = open('/proc/self/status').read(); print(code, status.partition('VmHWM:')[2].split()[0])"
    )
    command = [sys.executable, "-c", code, "kv", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    code, peak = ended.stdout.splitlines()[-1].split()
    assert code == "0"
    return int(peak)


def test_memory_does_not_grow_with_the_text(embedded_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(eval_kv.TEXT.read_text()[:4500])
    peak = peak_memory(str(embedded_model), "--text", str(text), "--out", str(tmp_path), "--threads", "1")
    assert peak < 2 << 20, "KiB; the model and a chunk's logits take 1.4 GiB"


def test_figures_are_those_of_a_plain_computation(model: Path) -> None:
    """In pieces and out of order in the pool, or at once: perplexity, KL and agreement are the same."""
    found = {q.kv_format: q for q in compare(make_executor(model), WINDOWS, 300, ["fp8_e5m2"])}
    decoder, kl, losses, same = load(model), [], [], []
    for window in WINDOWS:
        logits = {}
        for name in ("fp16", "fp8_e5m2"):
            pool = make_pool(decoder, kv_format=name)
            logits[name] = forward(decoder, pool, [chunk("a", window, 0, range(30))])["a"].double()
        wanted, got = (logits[name].log_softmax(-1) for name in ("fp16", "fp8_e5m2"))
        kl.append((wanted.exp() * (wanted - got)).sum(-1))
        losses.append(F.nll_loss(got[:-1], torch.tensor(window[1:]), reduction="none"))
        same.append(wanted.argmax(-1) == got.argmax(-1))
    quality = found["fp8_e5m2"]
    assert quality.mean_kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
    assert quality.p99_kl == pytest.approx(float(torch.cat(kl).quantile(0.99)), rel=1e-3)
    assert quality.perplexity == pytest.approx(math.exp(float(torch.cat(losses).mean())), rel=1e-5)
    assert quality.top1_agreement == pytest.approx(float(torch.cat(same).double().mean()), abs=0.006)
    assert (found["fp16"].mean_kl, found["fp16"].top1_agreement) == (0.0, 1.0)


def test_the_command_writes_what_it_prints(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "text").write_text("To be read, one byte a token. " * 10)
    found = run(model, "--text", str(model / "text"), "--formats", "int8,fp8,e4m3", "--window=64", "--windows=2")
    assert (found["tokens"], found["windows"]) == (128, 2)
    assert [entry["kv_format"] for entry in found["formats"]] == ["fp16", "int8", "fp8_e4m3"]
    fp16, int8, _ = found["formats"]
    assert (int8["bytes_per_token"], fp16["bytes_per_token"]) == (2 * 2 * 2 * (16 + 2), 2 * 2 * 2 * 32)
    assert int8["tokens_in_pool"] == (1024 << 20) // 144
    assert 0 == fp16["mean_kl"] < int8["mean_kl"] < 0.1
    printed = capsys.readouterr().out
    assert "128 tokens" in printed
    assert f"{int8['perplexity']:.4g}" in printed
    assert f"{int8['tokens_in_pool']:,}" in printed


def test_of_a_long_text_what_the_windows_need_is_read(model: Path) -> None:
    """What comes behind may be of any size, and is not looked at."""
    start, flags = b"To be read, one byte a token. " * 100, ("--formats", "int8", "--window=64", "--windows=2")
    (model / "short").write_bytes(start)
    (model / "long").write_bytes(start * 100 + b"\xff")
    short, long = (run(model, "--text", str(model / name), *flags) for name in ("short", "long"))
    assert short == long
    assert long["tokens"] == 128


def test_tokens_of_many_characters_are_read_on() -> None:
    """As many as are asked for, though a first part of the text holds fewer."""
    words = Tokenizer(models.WordLevel({"w" * 50: 7, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = " ".join(["w" * 50] * 1000)
    assert eval_kv.read_tokens(io.StringIO(text), words, 100) == [7] * 100
    assert eval_kv.read_tokens(io.StringIO(text), words, 5000) == [7] * 1000
    assert eval_kv.read_tokens(io.StringIO(text), words, None) == [7] * 1000


@pytest.mark.parametrize("windows", [10**7, 10**25])
def test_more_windows_than_the_text_has_are_all_of_it(model: Path, windows: int) -> None:
    (model / "text").write_text("To be read, one byte a token. " * 5)
    found = run(model, "--text", str(model / "text"), "--formats", "int8", "--window=64", f"--windows={windows}")
    assert (found["tokens"], found["windows"]) == (150, 3)


def test_a_tokenizer_neither_cuts_nor_fills_up_the_text(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(20)
    tokenizer.enable_padding(length=90)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "text").write_text("x" * 70)
    assert run(model, "--text", str(model / "text"), "--formats", "int8")["tokens"] == 70


def test_a_text_that_the_tokenizer_has_nothing_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Tokenizer(models.WordLevel({"one": 1}, unk_token="?")).save(str(model / "tokenizer.json"))
    assert eval_kv.main(["kv", str(model), "--out", str(model)]) == 2
    error = capsys.readouterr().err
    assert "the model's tokenizer cannot encode the text" in error
    assert len(error.splitlines()) == 1


def test_a_byte_order_mark_is_not_text(model: Path) -> None:
    (model / "text").write_bytes(b"\xef\xbb\xbf" + b"x" * 70)
    assert run(model, "--text", str(model / "text"), "--formats", "int8")["tokens"] == 70


def test_a_model_for_one_token_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1}))
    assert eval_kv.main(["kv", str(model), "--out", str(model)]) == 1
    assert "the model was made for 1 token; at least 2 are needed" in capsys.readouterr().err


def test_a_folder_is_told_by_its_name(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model)
    assert eval_kv.main(["kv", ".", "--windows=1", "--window=16", "--formats=int8", "--out", "."]) == 0
    assert f"KV formats of {model.name} over 16 tokens" in capsys.readouterr().out
    assert json.loads((model / "bench-eval-kv.json").read_text())["settings"]["model"] == model.name


def change(model: Path, name: str, factor: float) -> None:
    """Multiply one tensor of the checkpoint."""
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name] * factor
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_a_model_that_is_not_finite_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(model, "model.layers.0.self_attn.k_proj.weight", math.nan)
    assert eval_kv.main(["kv", str(model), "--windows=1", "--out", str(model)]) == 1
    assert "the model's output is not finite with fp16 KV" in capsys.readouterr().err
    assert not list(model.glob("bench-*"))


def test_what_a_format_clamps_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(model, "model.layers.1.self_attn.v_proj.weight", 1e4)
    run(model, "--formats", "fp8, bf16", "--windows=1")
    errors = capsys.readouterr().err
    assert errors.count("V in fp8_e4m3 is clamped at 448, and by its weights V of layer 1 reaches") == 1
    assert "in bf16" not in errors
    assert "in fp16" not in errors


def test_what_the_reference_clamps_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All figures are compared with it, whether it is asked for or not."""
    change(model, "model.layers.1.self_attn.v_proj.weight", 1e5)
    run(model, "--formats", "bf16", "--windows=1")
    errors = capsys.readouterr().err
    assert errors.count("V in fp16 is clamped at 65504, and by its weights V of layer 1 reaches") == 1


def test_a_perplexity_that_no_float_holds_is_infinite(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(model, "lm_head.weight", 1e5)
    run(model, "--formats", "fp16", "--windows=1")
    assert " inf " in capsys.readouterr().out


def test_a_tokenizer_of_another_model_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors = load_file(model / "model.safetensors")
        tensors[name] = tensors[name][:100].contiguous()
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert eval_kv.main(["kv", str(model), "--windows=1", "--out", str(model)]) == 1
    assert "; the model knows 100" in capsys.readouterr().err


def test_a_report_is_written_whole_or_not_at_all(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "out" / "bench-eval-kv.html").mkdir(parents=True)
    assert eval_kv.main(["kv", str(model), "--windows=1", "--out", str(model / "out")]) == 1
    assert "--out" in capsys.readouterr().err
    assert not (model / "out" / "bench-eval-kv.json").exists()


def test_a_k_bias_kept_apart_is_seen_by_the_command(tmp_path: Path) -> None:
    """It runs what the engine runs."""
    save_biased(tmp_path, 400.0)
    write_tiny_tokenizer(tmp_path)
    found = run(tmp_path, "--formats", "int8", "--window", "128", "--windows", "1")
    assert 0 < found["formats"][1]["mean_kl"] < 1e-3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--formats", "int8,int3"], ["--formats", "int3", "fp8_e5m2"]),
        (["--formats", "auto"], ["--formats", "'auto' is not one of fp16, "]),
        (["--pool-mb", "99999999999999999999"], ["--pool-mb", "1073741824"]),
        (["--window", "513"], ["--window", "513", "at most 512"]),
        (["--threads", "100000"], ["--threads", "100000"]),
        (["--window=64", "--text", "/nowhere/text"], ["--text", "/nowhere/text"]),
        (["--window=64", "--text", "{model}/one"], ["--text", "1 tokens", "at least 2"]),
    ],
)
def test_wrong_settings_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    (model / "one").write_text("x")
    arguments = ["kv", str(model), *[flag.format(model=model) for flag in flags]]
    try:
        code = eval_kv.main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert all(word in error for word in words)


def test_a_model_without_tokenizer_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer.json").unlink()
    assert eval_kv.main(["kv", str(model), "--window=64", "--out", str(model)]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    (model / "tokenizer.json").write_text("{}")
    assert eval_kv.main(["kv", str(model), "--window=64", "--out", str(model)]) == 1
    assert "is not a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["text"], 2), (["--help"], 0)])
def test_without_a_known_evaluation_it_tells_the_usage(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_kv.main(arguments) == code
    assert "usage: coldblock eval kv" in "".join(capsys.readouterr())
