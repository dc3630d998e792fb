"""The CUDA executor as the engine sees it; on a GPU, and with its kernels emulated where there is none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from coldblock.engine_core.control.plan import NO_TOKENS, BlockMove, Chunk, Direction, SampledToken, StepPlan
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from coldblock.engine_core.device.cuda_executor import LEAST_ROWS, CudaExecutor
from coldblock.engine_core.errors import EngineError, MemoryBudgetError
from cuda_on_cpu import emulate
from tiny_models import GREEDY, chunk, copy_blocks, quantize, run_step, save_biased, save_tiny

FITTING: dict[str, Any] = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 192}
ASKED = Sampling(temperature=0.0, logprobs=5)
TABLES = {"a": [11, 3, 7, 20, 50, 51, 52, 53], "b": [1, 40], "c": [9, 10], "d": [30, 31, 32, 33, 34, 35, 36]}
PROMPTS = {"a": [5, 9, 300, 4, 7] * 17, "b": [8, 1, 2], "c": [77] * 16, "d": list(range(100, 190))}
NEW = 10
TIE = 0.05  # logits closer than this may change places by rounding

Make = Callable[..., CudaExecutor]


@pytest.fixture(scope="module", params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes executors with a small pool."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "emulated":
            emulate(patch)

        def make(path: Path, **changes: Any) -> CudaExecutor:
            small = {"num_gpu_blocks": 64, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
            return CudaExecutor(ExecutorConfig(path, **{**small, "compute_dtype": "fp16", **changes}))

        yield make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny(path, "qwen2", **FITTING)


@pytest.fixture(scope="module")
def executor(make: Make, model: tuple[Path, Any]) -> CudaExecutor:
    """One that tests share; each uses blocks of its own or writes before it reads."""
    return make(model[0], cpu_offload_bytes=1 << 20)


def clear_answer(model: Any, prompt: Sequence[int], count: int = NEW) -> list[int]:
    """transformers' greedy answer, up to the first token that is nearly a tie."""
    ids, answer = torch.tensor([list(prompt)]), []
    with torch.inference_mode():
        for _ in range(count):
            best, second = model(ids).logits[0, -1].topk(2).values.tolist()
            if best - second < TIE:
                break
            answer.append(int(model(ids).logits[0, -1].argmax()))
            ids = torch.cat((ids, torch.tensor([answer[-1:]])), 1)
    return answer


def ahead(request_id: str, start: int, table: Sequence[int], sampling: Sampling = GREEDY, **spec: Any) -> Chunk:
    """A decode chunk whose token the executor has not told yet."""
    return chunk(request_id, [], start, table, sampling, **spec)._replace(token_ids=NO_TOKENS, from_previous=True)


def generate(
    executor: CudaExecutor, names: Sequence[str], piece: int = 1000, new: int = NEW, sampling: Sampling = GREEDY
) -> dict[str, list[SampledToken]]:
    """All prompts at once, `piece` tokens at a time, then token by token; one step is always ahead."""
    done = dict.fromkeys(names, 0)
    made: dict[str, list[SampledToken]] = {name: [] for name in names}
    begun, step = 0, 0
    sampled_last: set[str] = set()
    while any(len(tokens) < new for tokens in made.values()) or begun:
        chunks = []
        for name in names:
            prompt, start = PROMPTS[name], done[name]
            if start < len(prompt):
                tokens = prompt[start : start + piece]
                last = start + len(tokens) == len(prompt)
                chunks.append(chunk(name, tokens, start, TABLES[name], sampling if last else None))
                done[name] += len(tokens)
            elif start < len(prompt) + new - 1:
                assert name in sampled_last
                chunks.append(ahead(name, start, TABLES[name], sampling, output_index=start - len(prompt) + 1))
                done[name] += 1
        chunks.sort(key=lambda c: c.num_tokens)
        if chunks:
            executor.begin_step(StepPlan(step, tuple(chunks), ()))
            begun, step = begun + 1, step + 1
        sampled_last = {c.request_id for c in chunks if c.sample}
        if begun > (1 if chunks else 0):
            result = executor.complete_step()
            begun -= 1
            assert result.failed == {} and result.step == step - 1 - begun
            for name, token in result.tokens.items():
                made[name].append(token)
    return made


@torch.inference_mode()
def fill(block: torch.Tensor, value: int) -> None:
    """Overwrite a block, in order with what the executor does."""
    block.fill_(value)
    if block.is_cuda:
        torch.cuda.synchronize()


def ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize("piece", [1000, 50, 16, 7])
def test_greedy_answers_equal_transformers(executor: CudaExecutor, model: tuple[Path, Any], piece: int) -> None:
    made = generate(executor, list(PROMPTS), piece)
    wanted = {name: clear_answer(model[1], prompt) for name, prompt in PROMPTS.items()}
    assert sum(map(len, wanted.values())) > 2 * NEW
    assert {name: ids(made[name])[: len(answer)] for name, answer in wanted.items()} == wanted


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "biases": {"kind": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": {"kind": "qwen2", "tie_word_embeddings": True},
    "one kv head": {"kind": "qwen2", "num_attention_heads": 9, "num_key_value_heads": 1},
    "head_dim 96": {"kind": "llama", "head_dim": 96},
    "head_dim 128": {"kind": "qwen2", "head_dim": 128, "hidden_size": 256},
    "head_dim 256": {"kind": "llama", "head_dim": 256},
    "odd vocabulary": {"kind": "llama", "vocab_size": 323},
    "w4 groups of 32": {"kind": "qwen2", "group_size": 32},
    "w4, int8 head": {"kind": "qwen2", "group_size": 32, "tie_word_embeddings": True},
    "w4 groups of 128": {"kind": "llama", "hidden_size": 256, "intermediate_size": 384, "group_size": 128},
    "w4 with biases": {"kind": "llama", "attention_bias": True, "mlp_bias": True, "group_size": 64},
    "w4 in groups of 16": {"kind": "llama", "group_size": 16},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_of_models(make: Make, tmp_path: Path, shape: dict[str, Any]) -> None:
    changes = {**FITTING, **shape}
    group_size = changes.pop("group_size", None)
    model = save_tiny(tmp_path, changes.pop("kind"), **changes)
    if group_size is not None:
        model.load_state_dict(quantize(tmp_path, group_size), strict=False)
    made = generate(make(tmp_path), list(PROMPTS))
    wanted = {name: clear_answer(model, prompt) for name, prompt in PROMPTS.items()}
    assert {name: ids(made[name])[: len(answer)] for name, answer in wanted.items()} == wanted


@pytest.fixture(scope="module", params=[0.0, 400.0], ids=["plain", "large K bias"])
def of_any_bias(
    request: pytest.FixtureRequest, model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if not request.param:
        return model[0]
    path = tmp_path_factory.mktemp("biased")
    save_biased(path, request.param, **FITTING)
    return path


@pytest.mark.parametrize("compute_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp16", "bf16", "int8", "fp8", "fp8_e5m2"])
def test_log_probabilities_are_close_to_the_cpu_executors(
    make: Make, of_any_bias: Path, compute_dtype: str, kv_cache_dtype: str
) -> None:
    """A prompt in two chunks, then a token: the second chunk and the token read the format."""
    config = ExecutorConfig(of_any_bias, num_gpu_blocks=64, max_model_len=512, compute_dtype="fp32")
    asked = Sampling(temperature=0.0, logprobs=20)
    prompt, logprobs = PROMPTS["d"], []
    for ours in (CpuExecutor(config), make(of_any_bias, compute_dtype=compute_dtype, kv_cache_dtype=kv_cache_dtype)):
        run_step(ours, [chunk("d", prompt[:70], 0, TABLES["d"])])
        first = run_step(ours, [chunk("d", prompt[70:], 70, TABLES["d"], asked)]).tokens["d"]
        second = run_step(ours, [chunk("d", [55], len(prompt), TABLES["d"], asked)]).tokens["d"]
        logprobs.append([dict(first.top), dict(second.top)])
    limit = {"int8": 0.05, "fp8": 0.15, "fp8_e5m2": 0.3}.get(kv_cache_dtype, 0.0) + 0.05
    for wanted, got in zip(*logprobs, strict=True):
        assert len(wanted.keys() & got.keys()) > 10
        assert max(abs(wanted[token] - got[token]) for token in wanted.keys() & got.keys()) < limit


@pytest.mark.parametrize("count", range(1, 9))
def test_padding_rows_change_nothing(executor: CudaExecutor, count: int) -> None:
    """Any number of sequences in one step: each as if alone, but for rounding."""
    names = [f"s{i}" for i in range(count)]
    prompts = {name: [(37 * i + 11 * k) % 320 for k in range(5 + 3 * i)] for i, name in enumerate(names)}
    tables = {name: [2 * i, 2 * i + 1, 60] for i, name in enumerate(names)}

    def last_logprobs(together: list[str]) -> dict[str, float]:
        run_step(executor, [chunk(name, prompts[name][:-1], 0, tables[name]) for name in together])
        last = [chunk(name, prompts[name][-1:], len(prompts[name]) - 1, tables[name], ASKED) for name in together]
        return {name: token.logprob or 0.0 for name, token in run_step(executor, last).tokens.items()}

    together = last_logprobs(names)
    for name in names:
        assert last_logprobs([name])[name] == pytest.approx(together[name], abs=0.02)


def test_one_token_feeds_the_next_step_before_anybody_reads_it(executor: CudaExecutor) -> None:
    plain = generate(executor, ["c"])["c"]
    executor.begin_step(StepPlan(1, (chunk("c", PROMPTS["c"], 0, TABLES["c"], GREEDY),), ()))
    executor.begin_step(StepPlan(2, (ahead("c", 16, TABLES["c"]),), ()))
    results = [executor.complete_step(), executor.complete_step()]
    assert [r.step for r in results] == [1, 2]
    assert [r.tokens["c"].token_id for r in results] == ids(plain[:2])
    with pytest.raises(RuntimeError, match="without begin_step"):
        executor.complete_step()


def test_a_mixed_step_samples_decode_and_prefill(executor: CudaExecutor) -> None:
    """A decode row that is fed from the step before, beside a chunk that is too large for rows."""
    assert len(PROMPTS["d"]) > LEAST_ROWS
    wanted = {name: generate(executor, [name], new=2)[name] for name in ("a", "d")}
    executor.begin_step(StepPlan(1, (chunk("a", PROMPTS["a"], 0, TABLES["a"], GREEDY),), ()))
    mixed = (ahead("a", 85, TABLES["a"]), chunk("d", PROMPTS["d"], 0, TABLES["d"], GREEDY))
    executor.begin_step(StepPlan(2, mixed, ()))
    last = (ahead("a", 86, TABLES["a"]), ahead("d", 90, TABLES["d"]))
    first = executor.complete_step().tokens
    executor.begin_step(StepPlan(3, last, ()))
    second, third = executor.complete_step().tokens, executor.complete_step().tokens
    assert [first["a"].token_id, second["a"].token_id] == ids(wanted["a"])
    assert [second["d"].token_id, third["d"].token_id] == ids(wanted["d"])


def test_a_chunk_without_sample_and_a_plan_without_chunks(executor: CudaExecutor) -> None:
    for chunks in ([], [chunk("a", [1, 2, 3], 0, [0])], [chunk("a", [1] * 80, 0, range(5))]):
        result = run_step(executor, chunks, step=9)
        assert (result.step, result.tokens, result.failed, result.moves_done) == (9, {}, {}, ())


@pytest.mark.parametrize("kv_cache_dtype", ["fp16", "bf16", "int8", "fp8", "fp8_e5m2"])
def test_swapped_out_and_in_elsewhere_the_answer_is_the_same(
    make: Make, model: tuple[Path, Any], kv_cache_dtype: str
) -> None:
    executor = make(model[0], cpu_offload_bytes=1 << 20, kv_cache_dtype=kv_cache_dtype)
    prompt = PROMPTS["a"][:35]
    first = run_step(executor, [chunk("a", prompt, 0, [0, 1, 2], ASKED)]).tokens["a"].token_id
    stays = run_step(executor, [chunk("a", [first], len(prompt), [0, 1, 2], ASKED)]).tokens["a"]
    done = copy_blocks(executor, BlockMove(1, Direction.OUT, (0, 1, 2), (2, 0, 1)))
    assert [(move.move_id, move.error, move.seconds > 0) for move in done] == [(1, None, True)]
    run_step(executor, [chunk("x", [3] * 48, 0, [0, 1, 2])])
    copy_blocks(executor, BlockMove(2, Direction.IN, (9, 4, 7), (2, 0, 1)))
    moved = run_step(executor, [chunk("a", [first], len(prompt), [9, 4, 7], ASKED)]).tokens["a"]
    assert moved == stays


def test_copies_follow_the_steps_before_their_own(executor: CudaExecutor) -> None:
    """The block goes out while the step that fills it may still run, and comes back where a step may still read."""
    prompt = PROMPTS["a"][:16]
    first = run_step(executor, [chunk("a", prompt, 0, [5, 6], GREEDY)]).tokens["a"].token_id
    wanted = run_step(executor, [chunk("a", [first], 16, [5, 6], GREEDY)]).tokens["a"]
    fill(executor._pool.gpu[5], 0)
    executor.begin_step(StepPlan(1, (chunk("a", prompt, 0, [5, 6], GREEDY),), ()))
    executor.begin_step(StepPlan(2, (chunk("b", [1], 16, [5, 7], GREEDY),), (BlockMove(1, Direction.OUT, (5,), (2,)),)))
    done = [*executor.complete_step().moves_done, *executor.complete_step().moves_done]
    while not done:
        done += run_step(executor).moves_done
    executor.begin_step(StepPlan(3, (chunk("b", [1] * 16, 0, [8], GREEDY),), ()))
    executor.begin_step(StepPlan(4, (), (BlockMove(2, Direction.IN, (8,), (2,)),)))
    done = [*executor.complete_step().moves_done, *executor.complete_step().moves_done]
    while not done:
        done += run_step(executor).moves_done
    assert run_step(executor, [chunk("a", [first], 16, [8, 6], GREEDY)]).tokens["a"] == wanted


def test_an_empty_step_waits_for_a_copy(executor: CudaExecutor) -> None:
    assert len(run_step(executor, moves=[BlockMove(1, Direction.OUT, (5,), (2,))]).moves_done) == 1


def test_copies_beside_running_steps_change_no_token(make: Make, model: tuple[Path, Any]) -> None:
    """Both ways at once, of blocks that the steps do not write, as many as there are."""
    executor = make(model[0], cpu_offload_bytes=1 << 20)
    wanted = generate(executor, list(PROMPTS))
    used = {block for table in TABLES.values() for block in table}
    spare = [block for block in range(64) if block not in used]
    begin_step, moves, told = executor.begin_step, iter(range(10**6)), []

    def begin_with_moves(plan: StepPlan) -> None:
        k = next(moves)
        out = BlockMove(2 * k, Direction.OUT, tuple(TABLES["a"]), tuple(range(16 * (k % 2), 16 * (k % 2) + 8)))
        back = BlockMove(2 * k + 1, Direction.IN, tuple(spare[:8]), tuple(range(8, 16)))
        begin_step(plan if running() else StepPlan(plan.step, plan.chunks, (out, back)))

    def running() -> int:
        return len(executor._transfers._flights)

    executor.begin_step = begin_with_moves  # type: ignore[method-assign]
    complete_step = executor.complete_step

    def complete() -> Any:
        result = complete_step()
        told.extend(result.moves_done)
        return result

    executor.complete_step = complete  # type: ignore[method-assign]
    assert generate(executor, list(PROMPTS)) == wanted
    assert len(told) > 4 and all(done.error is None for done in told)
    executor.close()


def test_a_block_that_does_not_exist_fails_its_move_alone(executor: CudaExecutor) -> None:
    moves = [BlockMove(7, Direction.OUT, (0,), (10**6,)), BlockMove(8, Direction.OUT, (0,), (1,))]
    done = {move.move_id: move.error for move in copy_blocks(executor, *moves)}
    assert done[7] is not None and done[8] is None


def test_delayed_copies_read_and_write_late(
    make: Make, model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDBLOCK_TEST_COPY_DELAY_STEPS", "2")
    executor = make(model[0], cpu_offload_bytes=1 << 20)
    fill(executor._pool.gpu[0], 1)
    fill(executor._pool.cpu[3], 2)
    assert run_step(executor, moves=[BlockMove(1, Direction.OUT, (0,), (3,))]).moves_done == ()
    fill(executor._pool.gpu[0], 7)  # reused too early: the late copy sees it
    assert run_step(executor).moves_done == () and executor._pool.cpu[3].eq(2).all()
    done = run_step(executor).moves_done
    while not done:
        done = run_step(executor).moves_done
    assert [move.move_id for move in done] == [1] and executor._pool.cpu[3].eq(7).all()


def test_output_that_is_not_finite_fails_its_request_alone(executor: CudaExecutor) -> None:
    """Also when the next step is fed from it already."""
    prompts = {"a": [4] * 20, "b": [5] * 9}
    run_step(executor, [chunk(name, prompts[name], 0, TABLES[name]) for name in prompts])
    fill(executor._pool.gpu[TABLES["a"][0]], 0xFF)
    last = tuple(chunk(name, [4], len(prompts[name]), TABLES[name], ASKED) for name in prompts)
    executor.begin_step(StepPlan(1, last, ()))
    executor.begin_step(StepPlan(2, tuple(ahead(name, len(prompts[name]) + 1, TABLES[name]) for name in prompts), ()))
    for _ in range(2):
        result = executor.complete_step()
        assert (set(result.failed), set(result.tokens)) == ({"a"}, {"b"})
    assert run_step(executor, [chunk("d", prompts["a"], 0, TABLES["a"], GREEDY)]).failed == {}


def test_a_step_may_be_begun_after_one_that_failed(executor: CudaExecutor) -> None:
    wanted = run_step(executor, [chunk("a", PROMPTS["b"], 0, [60], GREEDY)]).tokens
    with pytest.raises(KeyError):
        executor.begin_step(StepPlan(0, (ahead("nobody", 3, [1]),), ()))
    assert run_step(executor, [chunk("a", PROMPTS["b"], 0, [60], GREEDY)]).tokens == wanted


def test_capacity_and_description(make: Make, model: tuple[Path, Any]) -> None:
    executor = make(model[0], num_gpu_blocks=7, cpu_offload_bytes=100_000, kv_cache_dtype="int8")
    block = 2 * 2 * 2 * 16 * (64 + 2)
    assert (executor.capacity.num_gpu_blocks, executor.capacity.block_bytes) == (7, block)
    assert executor.capacity.num_cpu_blocks == 100_000 // block
    text = executor.describe()
    assert (text["kv_format"], text["kv_bytes"]) == ("int8", 7 * block)
    executor.close()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"cpu_offload_bytes": 900 << 30}, "--max-cpu-offload-mb"),
        ({"num_gpu_blocks": 10**9}, "--num-gpu-blocks"),
        ({"num_gpu_blocks": None, "gpu_memory_utilization": 1e-9}, "--gpu-memory-utilization"),
    ],
)
def test_too_much_memory_names_the_flag(
    make: Make, model: tuple[Path, Any], settings: dict[str, Any], flag: str
) -> None:
    with pytest.raises(MemoryBudgetError, match=flag) as caught:
        make(model[0], **settings)
    assert caught.value.flag == flag


def test_a_workspace_that_does_not_fit_names_the_flags(
    make: Make, model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits grow with the sequences, deterministic attention with the length."""

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("coldblock.engine_core.device.cuda_executor.Workspace", refuse)
    with pytest.raises(MemoryBudgetError, match=r"--max-num-batched-tokens, --max-num-seqs or --max-model-len"):
        make(model[0])


def test_a_gpu_that_refuses_a_context_is_said(
    make: Make, model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ...")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    with pytest.raises(EngineError, match=r"^the GPU cannot be used: CUDA error: out of memory; `nvidia-smi`"):
        make(model[0])


def test_what_a_gpu_cannot_serve_is_refused(make: Make, model: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--block-size"):
        make(model[0], block_size=8)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        make(model[0], kv_cache_dtype="int3")
    save_tiny(tmp_path)
    with pytest.raises(EngineError, match="head_dim 16"):
        make(tmp_path)


def test_padding_ids_of_the_model_are_never_sampled(make: Make, tmp_path: Path) -> None:
    save_tiny(tmp_path, **FITTING)
    tokenizer = {
        "model": {"vocab": {str(i): i for i in range(290)}},
        "added_tokens": [{"id": i} for i in range(290, 300)],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    executor, hot = make(tmp_path), Sampling(temperature=1e6)
    tokens = []
    for seed in range(30):
        chunks = [chunk(str(i), [i], 0, [i], hot, seed=100 * seed + i) for i in range(8)]
        tokens += [token.token_id for token in run_step(executor, chunks).tokens.values()]
    assert max(tokens) < 300 and len(set(tokens)) > 100


def test_draws_depend_on_seed_and_place_alone(executor: CudaExecutor) -> None:
    warm = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01)

    def draw(names: Sequence[str], **spec: Any) -> dict[str, int]:
        chunks = [chunk(n, PROMPTS[n][:3], 0, TABLES[n], warm, seed=ord(n), **spec) for n in names]
        return {name: token.token_id for name, token in run_step(executor, chunks).tokens.items()}

    together = draw("abcd")
    assert {name: draw([name])[name] for name in "abcd"} == together == draw("dcba")
    assert len({tuple(draw("abcd", output_index=i).values()) for i in range(20)}) > 10


def test_a_top_k_beyond_every_vocabulary_filters_nothing(executor: CudaExecutor) -> None:
    def draw(top_k: int) -> dict[str, SampledToken]:
        warm = Sampling(temperature=0.8, top_k=top_k)
        return run_step(executor, [chunk(n, PROMPTS[n][:3], 0, TABLES[n], warm, seed=ord(n)) for n in "abcd"]).tokens

    assert draw(2**31) == draw(2**64) == draw(0)


def test_penalties_and_bans(executor: CudaExecutor) -> None:
    """The log-probabilities told are the model's own, before both; who shares the step is left alone."""
    prompt = PROMPTS["b"]

    def sample(sampling: Sampling, **spec: Any) -> tuple[SampledToken, SampledToken]:
        both = [chunk("a", prompt, 0, TABLES["a"], ASKED), chunk("b", prompt, 0, TABLES["b"], sampling, **spec)]
        tokens = run_step(executor, both).tokens
        return tokens["a"], tokens["b"]

    plain, same = sample(ASKED)
    assert plain == same
    best, second = plain.top[0][0], plain.top[1][0]
    for sampling, spec in (
        (ASKED, {"banned": (best, 10**6)}),
        (Sampling(temperature=0.0, logprobs=5, frequency_penalty=2.0), {"history": [*prompt, *[best] * 9, 10**6]}),
        (Sampling(temperature=0.0, logprobs=5, presence_penalty=2.0), {"history": [*prompt, best, best]}),
        (Sampling(temperature=0.0, logprobs=5, repetition_penalty=9.0), {"history": [*prompt[:2], best]}),
    ):
        alone, changed = sample(sampling, **{"prompt_length": 3, **spec})
        assert alone == plain
        assert changed.top == plain.top
        assert changed.token_id != best and (not spec.get("banned") or changed.token_id == second)
        assert changed.logprob == dict(plain.top).get(changed.token_id, changed.logprob)


def test_a_ban_of_every_token_bans_none(executor: CudaExecutor) -> None:
    for sampling in (ASKED, Sampling(temperature=1.0, top_k=9)):
        plain, banned = (
            run_step(executor, [chunk("b", PROMPTS["b"], 0, TABLES["b"], sampling, banned=ids)]).tokens["b"]
            for ids in ((), tuple(range(1000)))
        )
        assert banned == plain


def test_long_tables_travel_in_pieces(make: Make, model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldblock.engine_core.device.cuda_runner._MOST_CHANGES", 3)
    executor = make(model[0])
    wanted = generate(make(model[0]), ["a"], new=3)
    assert ids(generate(executor, ["a"], new=3)["a"]) == ids(wanted["a"])


class Run:
    """Requests run in random chunks and batches, one step ahead now and then, moved to the host and back."""

    BLOCKS = 4

    def __init__(self, executor: CudaExecutor, names: Sequence[str], seed: int) -> None:
        self.executor, self.rng = executor, random.Random(seed)
        self.free = self.rng.sample(range(64), 64)
        self.tables = {name: [self.free.pop() for _ in range(self.BLOCKS)] for name in names}
        self.tokens = {name: list(PROMPTS[name][:40]) for name in names}
        self.done = dict.fromkeys(names, 0)
        self.results: dict[str, list[SampledToken]] = {name: [] for name in names}

    def finish(self, swaps: bool) -> dict[str, list[SampledToken]]:
        while unfinished := [name for name, result in self.results.items() if len(result) < 5]:
            if swaps and self.rng.random() < 0.4:
                self.swap(self.rng.choice(unfinished))
            self.step(self.rng.sample(unfinished, self.rng.randint(1, len(unfinished))))
        return self.results

    def step(self, names: Sequence[str]) -> None:
        chunks = []
        for name in names:
            left = self.tokens[name][self.done[name] :]
            size = self.rng.randint(1, len(left))
            sampling = ASKED if size == len(left) else None
            chunks.append(chunk(name, left[:size], self.done[name], self.tables[name], sampling))
            self.done[name] += size
        result = run_step(self.executor, sorted(chunks, key=lambda c: c.num_tokens))
        for name, token in result.tokens.items():
            self.results[name].append(token)
            self.tokens[name].append(token.token_id)

    def swap(self, name: str) -> None:
        there = tuple(range(self.BLOCKS))
        copy_blocks(self.executor, BlockMove(1, Direction.OUT, tuple(self.tables[name]), there))
        self.free = self.tables[name] + self.free
        self.tables[name] = [self.free.pop() for _ in range(self.BLOCKS)]
        copy_blocks(self.executor, BlockMove(2, Direction.IN, tuple(self.tables[name]), there))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("weights", ["dense", "w4"])
def test_deterministic_bit_for_bit(make: Make, tmp_path: Path, weights: str, kv_cache_dtype: str) -> None:
    save_tiny(tmp_path, **FITTING)
    if weights == "w4":
        quantize(tmp_path)
    executor = make(tmp_path, deterministic=True, kv_cache_dtype=kv_cache_dtype, cpu_offload_bytes=1 << 20)
    alone = {name: Run(executor, [name], 0).finish(swaps=False)[name] for name in PROMPTS}
    for seed in range(3):
        assert Run(executor, list(PROMPTS), seed).finish(swaps=True) == alone
