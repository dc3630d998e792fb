"""The embedded model on a GPU says what it says on the CPU, in every KV format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coldblock.engine_core.control.plan import SampledToken
from coldblock.engine_core.control.sampling import Sampling
from coldblock.engine_core.device.config import ExecutorConfig
from coldblock.engine_core.device.cpu_executor import CpuExecutor
from coldblock.engine_core.device.cuda_executor import CudaExecutor
from scheduled_answers import agreement, finish, scheduler_for
from tokenizers import Tokenizer

NEW = 48
NEAR_TIE = 0.5  # between two logprobs: the two devices sum in other orders, and round to other codes
QUESTIONS = (
    "Explain what a hash table is in two sentences.",
    "Count from one to twelve, in words.",
    "Write a Python function that returns the sum of a list.",
)


def answers_of(kind: Any, model: Path, prompts: list[list[int]], kv_cache_dtype: str) -> list[list[SampledToken]]:
    executor = kind(ExecutorConfig(model, num_gpu_blocks=64, max_model_len=256, kv_cache_dtype=kv_cache_dtype))
    scheduler = scheduler_for(executor, cpu_offload=False, vocab_size=executor.model_config.vocab_size)
    for index, prompt in enumerate(prompts):
        scheduler.add(str(index), prompt, Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=5))
    answers = finish(scheduler, executor)
    executor.close()
    return answers


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["fp16", "bf16", "int8", "fp8", "fp8_e5m2"])
def test_greedy_text_is_that_of_the_cpu(embedded_model: Path, kv_cache_dtype: str) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [tokenizer.encode(text).ids for text in texts]
    wanted = answers_of(CpuExecutor, embedded_model, prompts, kv_cache_dtype)
    found = answers_of(CudaExecutor, embedded_model, prompts, kv_cache_dtype)
    equal = [agreement(answer, other, NEAR_TIE) for answer, other in zip(found, wanted, strict=True)]
    assert sum(equal) >= 3 * 16, equal
