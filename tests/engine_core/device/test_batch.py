"""Attention over pages equals attention over contiguous memory, however the tokens are cut into chunks."""

from __future__ import annotations

import random

import pytest
import torch
from coldblock.engine_core.models.layers import Decoder
from tiny_models import chunk, forward, load, make_pool, save_tiny
from torch import Tensor

LENGTHS = {"a": 45, "b": 16, "c": 3, "d": 100, "e": 33}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "qwen2")
    return load(path)


def tokens_of(name: str) -> list[int]:
    return [random.Random(f"{name}{i}").randrange(320) for i in range(LENGTHS[name])]


def tables(block_size: int) -> dict[str, list[int]]:
    """Scattered blocks for every request."""
    blocks = random.Random(0).sample(range(250), 249)
    return {name: [blocks.pop() for _ in range(-(-length // block_size))] for name, length in LENGTHS.items()}


def alone(decoder: Decoder, name: str) -> Tensor:
    """Logits of a whole prompt in one chunk, pages in order."""
    return forward(decoder, make_pool(decoder, 16), [chunk(name, tokens_of(name), 0, range(8))])[name]


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_and_batching(decoder: Decoder, block_size: int, seed: int) -> None:
    pool, rng = make_pool(decoder, 250, block_size), random.Random(seed)
    table, done = tables(block_size), dict.fromkeys(LENGTHS, 0)
    parts: dict[str, list[Tensor]] = {name: [] for name in LENGTHS}
    while unfinished := [name for name in LENGTHS if done[name] < LENGTHS[name]]:
        chunks = []
        for name in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            size = min(rng.choice([1, 1, 2, 7, 16, 40]), LENGTHS[name] - done[name])
            chunks.append(chunk(name, tokens_of(name)[done[name] : done[name] + size], done[name], table[name]))
            done[name] += size
        for name, logits in forward(decoder, pool, chunks).items():
            parts[name].append(logits)
    for name, logits in parts.items():
        torch.testing.assert_close(torch.cat(logits), alone(decoder, name), atol=2e-4, rtol=1e-4)


def test_decode_rows_of_very_different_lengths(decoder: Decoder) -> None:
    pool, table = make_pool(decoder, 250), tables(16)
    for name, length in LENGTHS.items():
        forward(decoder, pool, [chunk(name, tokens_of(name)[:-1], 0, table[name])] if length > 1 else [])
    last = [chunk(name, tokens_of(name)[-1:], length - 1, table[name]) for name, length in LENGTHS.items()]
    for name, logits in forward(decoder, pool, last).items():
        torch.testing.assert_close(logits, alone(decoder, name)[-1:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_format", ["fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_rounded_formats_stay_close(decoder: Decoder, kv_format: str) -> None:
    pool, tokens = make_pool(decoder, 16, kv_format=kv_format), tokens_of("d")
    got = forward(decoder, pool, [chunk("d", tokens, 0, range(8))])["d"].log_softmax(-1)
    wanted = alone(decoder, "d").log_softmax(-1)
    limit = {"fp16": 1e-5, "bf16": 1e-4, "int8": 1e-3, "fp8_e4m3": 0.02, "fp8_e5m2": 0.06}[kv_format]
    assert 0 < (wanted.exp() * (wanted - got)).sum(-1).mean() < limit


def test_nan_left_behind_in_a_page_does_not_reach_its_next_owner(decoder: Decoder) -> None:
    pool = make_pool(decoder, 16)
    pool.gpu.fill_(0xFF)
    for start in range(0, 45, 5):
        logits = forward(decoder, pool, [chunk("a", tokens_of("a")[start : start + 5], start, range(8))])["a"]
        assert logits.isfinite().all()


def test_nan_stays_with_its_request(decoder: Decoder) -> None:
    pool, table = make_pool(decoder, 250), tables(16)
    names = ("a", "d")
    for name in names:
        forward(decoder, pool, [chunk(name, tokens_of(name)[:-1], 0, table[name])])
    pool.gpu[table["a"][0]] = 0xFF
    last = [chunk(name, tokens_of(name)[-1:], LENGTHS[name] - 1, table[name]) for name in names]
    logits = forward(decoder, pool, last)
    assert logits["a"].isnan().all()
    torch.testing.assert_close(logits["d"], alone(decoder, "d")[-1:], atol=2e-4, rtol=1e-4)


def test_a_block_table_may_be_longer_than_the_context(decoder: Decoder) -> None:
    pool = make_pool(decoder, 32)
    got = forward(decoder, pool, [chunk("c", tokens_of("c"), 0, [7, 8, 9])])["c"]
    torch.testing.assert_close(got, alone(decoder, "c"), atol=2e-4, rtol=1e-4)
