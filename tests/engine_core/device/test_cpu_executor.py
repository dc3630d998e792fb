"""The executor as the engine sees it: steps, tokens, failures, copies, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from coldblock.engine_core.control.plan import BlockMove, Direction, StepPlan
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device import cpu_executor
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from coldblock.engine_core.errors import CheckpointError, MemoryBudgetError
from safetensors.torch import load_file, save_file
from tiny_models import (
    GREEDY,
    chunk,
    copy_blocks,
    edit_config,
    make_executor,
    quantize,
    run_step,
    save_biased,
    save_tiny,
)

PROMPTS = {"a": [5, 9, 300, 4, 7] * 7, "b": [8, 1, 2], "c": [77] * 16}
TABLES = {"a": [11, 3, 7, 20], "b": [1, 40], "c": [9, 10]}
NEW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny(path)


def expected(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_greedy_answers_equal_transformers(model: tuple[Path, Any]) -> None:
    executor = make_executor(model[0])
    outputs: dict[str, list[int]] = {name: [] for name in PROMPTS}
    waiting = {name: list(prompt) for name, prompt in PROMPTS.items()}
    positions = dict.fromkeys(PROMPTS, 0)
    for step in range(NEW):
        chunks = [chunk(n, waiting[n], positions[n], TABLES[n], GREEDY, output_index=step) for n in PROMPTS]
        result = run_step(executor, sorted(chunks, key=lambda c: len(c.token_ids)), step=step)
        assert (result.step, result.failed, result.seconds > 0) == (step, {}, True)
        for name in PROMPTS:
            positions[name] += len(waiting[name])
            waiting[name] = [result.tokens[name].token_id]
            outputs[name] += waiting[name]
    assert outputs == {name: expected(model[1], prompt) for name, prompt in PROMPTS.items()}


def test_a_chunk_without_sample_gives_no_token(model: tuple[Path, Any]) -> None:
    result = run_step(make_executor(model[0]), [chunk("a", [1, 2, 3], 0, [0])])
    assert (result.tokens, result.failed) == ({}, {})


def test_a_plan_without_chunks_moves_and_polls(model: tuple[Path, Any]) -> None:
    executor = make_executor(model[0], cpu_offload_bytes=1 << 20)
    assert run_step(executor, step=9).step == 9
    assert [done.move_id for done in copy_blocks(executor, BlockMove(3, Direction.OUT, (0,), (1,)))] == [3]
    assert run_step(executor).moves_done == ()


def test_a_step_may_read_the_blocks_that_it_begins_to_copy(model: tuple[Path, Any]) -> None:
    """The copy has what the steps before wrote; once it is done the block may be given to another request."""
    executor = make_executor(model[0], cpu_offload_bytes=1 << 20)
    prompt = PROMPTS["a"][:16]
    first = run_step(executor, [chunk("a", prompt, 0, [5, 6], GREEDY)]).tokens["a"].token_id
    out = [BlockMove(1, Direction.OUT, (5,), (2,))]
    result = run_step(executor, [chunk("a", [first], 16, [5, 6], GREEDY)], out)
    wanted, done = result.tokens["a"], [*result.moves_done]
    while not done:
        done += run_step(executor).moves_done
    run_step(executor, [chunk("b", [1] * 16, 0, [5], GREEDY)])
    copy_blocks(executor, BlockMove(2, Direction.IN, (8,), (2,)))
    assert run_step(executor, [chunk("a", [first], 16, [8, 6], GREEDY)]).tokens["a"] == wanted


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp16", "int8", "fp8", "fp8_e5m2"])
def test_swapped_out_and_in_elsewhere_the_answer_is_the_same(model: tuple[Path, Any], kv_cache_dtype: str) -> None:
    executor = make_executor(model[0], cpu_offload_bytes=1 << 20, kv_cache_dtype=kv_cache_dtype)
    prompt, asked = PROMPTS["a"], Sampling(temperature=0.0, logprobs=5)
    first = run_step(executor, [chunk("a", prompt, 0, [0, 1, 2], asked)]).tokens["a"].token_id
    stays = run_step(executor, [chunk("a", [first], len(prompt), [0, 1, 2], asked)]).tokens["a"]
    copy_blocks(executor, BlockMove(1, Direction.OUT, (0, 1, 2), (2, 0, 1)))
    run_step(executor, [chunk("x", [3] * 48, 0, [0, 1, 2])])
    copy_blocks(executor, BlockMove(2, Direction.IN, (9, 4, 7), (2, 0, 1)))
    moved = run_step(executor, [chunk("a", [first], len(prompt), [9, 4, 7], asked)]).tokens["a"]
    assert moved == stays


def test_output_that_is_not_finite_fails_its_request_alone(model: tuple[Path, Any]) -> None:
    executor = make_executor(model[0])
    chunks = [chunk(name, prompt, 0, TABLES[name]) for name, prompt in PROMPTS.items()]
    run_step(executor, chunks)
    with torch.inference_mode():
        executor._pool.gpu[TABLES["a"][0]] = 0xFF
    last = [chunk(name, [4], len(prompt), TABLES[name], GREEDY) for name, prompt in PROMPTS.items()]
    result = run_step(executor, last)
    assert set(result.failed) == {"a"}
    assert set(result.tokens) == {"b", "c"}
    clean = run_step(executor, [chunk("d", PROMPTS["a"], 0, TABLES["a"], GREEDY)])
    assert clean.failed == {}


def test_complete_without_begin(model: tuple[Path, Any]) -> None:
    with pytest.raises(RuntimeError, match="without begin_step"):
        make_executor(model[0]).complete_step()


def test_padding_ids_of_the_model_are_never_sampled(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    vocabulary = {str(i): i for i in range(290)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": i} for i in range(290, 300)]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    executor, hot = make_executor(tmp_path), Sampling(temperature=1e6)
    chunks = [chunk(str(i), [i], 0, [i], hot, seed=i) for i in range(60)]
    tokens = {token.token_id for _ in range(4) for token in run_step(executor, chunks).tokens.values()}
    assert max(tokens) < 300


def test_capacity_and_description(model: tuple[Path, Any]) -> None:
    executor = make_executor(model[0], num_gpu_blocks=7, cpu_offload_bytes=100_000, kv_cache_dtype="int8")
    block = 2 * 2 * 2 * 16 * (16 + 2)
    assert (executor.capacity.num_gpu_blocks, executor.capacity.block_bytes) == (7, block)
    assert executor.capacity.num_cpu_blocks == 100_000 // block
    text = executor.describe()
    assert (text["kv_format"], text["kv_bytes"]) == ("int8", 7 * block)
    assert executor.model_config.vocab_size == 320


@pytest.mark.parametrize(
    ("compute_dtype", "kv_format"), [("auto", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")]
)
def test_kv_format_follows_the_compute_dtype(model: tuple[Path, Any], compute_dtype: str, kv_format: str) -> None:
    assert make_executor(model[0], compute_dtype=compute_dtype).kv_format == kv_format


def test_four_bit_checkpoints_compute_in_bf16(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    quantize(tmp_path)
    executor = make_executor(tmp_path)
    assert executor.kv_format == "bf16"
    assert run_step(executor, [chunk("a", [1, 2], 0, [0], GREEDY)]).failed == {}


def test_dummy_weights_need_no_tensors(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tokens = [
        run_step(make_executor(tmp_path, load_format="dummy", seed=seed), [chunk("a", [1, 2], 0, [0], GREEDY)]).tokens
        for seed in (4, 4)
    ]
    assert tokens[0] == tokens[1]
    with pytest.raises(CheckpointError):
        make_executor(tmp_path)


def test_pool_size_from_memory(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_executor, "available_memory", lambda: 64 << 20)
    block = make_executor(model[0]).capacity.block_bytes
    executor = make_executor(model[0], num_gpu_blocks=None, gpu_memory_utilization=0.5, cpu_offload_bytes=32 << 20)
    assert executor.capacity.num_gpu_blocks == (16 << 20) // block
    few = make_executor(model[0], num_gpu_blocks=None, max_num_seqs=2, max_model_len=40)
    assert few.capacity.num_gpu_blocks == 2 * 3


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"cpu_offload_bytes": 900 << 30}, "--max-cpu-offload-mb"),
        ({"num_gpu_blocks": 10**9}, "--num-gpu-blocks"),
        ({"num_gpu_blocks": None, "gpu_memory_utilization": 1e-9}, "--gpu-memory-utilization"),
    ],
)
def test_too_much_memory_names_the_flag(model: tuple[Path, Any], settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(MemoryBudgetError, match=flag) as caught:
        make_executor(model[0], **settings)
    assert caught.value.flag == flag


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, vocab_size=10**13)
    with pytest.raises(MemoryBudgetError, match="MODEL: the model does not fit into the free RAM") as caught:
        make_executor(tmp_path, load_format="dummy")
    assert caught.value.flag == "MODEL"


@pytest.mark.parametrize(("kv_cache_dtype", "told"), [("int8", 0), ("fp8", 1), ("fp16", 0)])
def test_a_format_that_does_not_suit_the_model_is_told_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kv_cache_dtype: str, told: int
) -> None:
    """A large bias of K suits all, as it is kept apart; V is as large as its weights make it."""
    save_biased(tmp_path, 400.0)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    make_executor(tmp_path, kv_cache_dtype=kv_cache_dtype)
    assert ["V of layer 1 reaches" in line for line in caplog.messages] == [True] * told


def test_wrong_kv_dtype(model: tuple[Path, Any]) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        make_executor(model[0], kv_cache_dtype="int3")


def test_wrong_architecture(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel"):
        make_executor(tmp_path)


def test_a_step_may_be_begun_after_one_that_failed(model: tuple[Path, Any]) -> None:
    executor: CpuExecutor = make_executor(model[0])
    with pytest.raises(IndexError):
        executor.begin_step(StepPlan(0, (chunk("a", [1], 99, [0], GREEDY),), ()))
    assert run_step(executor, [chunk("a", [1], 0, [0], GREEDY)]).failed == {}
