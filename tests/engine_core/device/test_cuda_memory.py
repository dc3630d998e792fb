"""How GPU memory is shared out, without a GPU."""

from __future__ import annotations

import pytest
from coldblock.engine_core.device.cuda_memory import MIB, MemorySum, dense_copies_fit, num_blocks
from coldblock.engine_core.errors import MemoryBudgetError

SUM = MemorySum(free=4000 * MIB, share=0.9, weights=2000 * MIB, workspace=200 * MIB, graphs=40 * MIB, reserve=60 * MIB)
BLOCK = MIB // 2


def test_blocks_take_what_is_left() -> None:
    assert SUM.left == 1300 * MIB
    assert num_blocks(SUM, BLOCK, None, useful=10**9) == 2600
    assert num_blocks(SUM, BLOCK, None, useful=100) == 100
    assert num_blocks(SUM, BLOCK, 2600, useful=1) == 2600


@pytest.mark.parametrize(
    ("free", "wanted", "flag"),
    [(2500, None, "--gpu-memory-utilization"), (4000, 2601, "--num-gpu-blocks"), (100, 1, "--num-gpu-blocks")],
)
def test_what_does_not_fit_names_the_flag_and_the_sum(free: int, wanted: int | None, flag: str) -> None:
    memory = MemorySum(free * MIB, 0.9, SUM.weights, SUM.workspace, SUM.graphs, SUM.reserve)
    with pytest.raises(MemoryBudgetError) as caught:
        num_blocks(memory, BLOCK, wanted, useful=10**9)
    assert caught.value.flag == flag
    for part in (f"{free:,} MiB free", "weights 2,000", "workspace 200", "graphs 40", "reserve 60"):
        assert part in str(caught.value)


def test_dense_copies_never_take_the_place_of_what_must_fit() -> None:
    assert dense_copies_fit(499, memory=4000, asked_for=0)
    assert not dense_copies_fit(500, memory=4000, asked_for=0)
    assert not dense_copies_fit(499, memory=4000, asked_for=100)
    assert not dense_copies_fit(1, memory=4000, asked_for=5000)
