"""Copies beside the steps: what goes together, what waits for what, and what is told. Streams are emulated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from coldblock.engine_core.control.plan import BlockMove, Direction, MoveDone
from coldblock.engine_core.device import cuda_transfer
from coldblock.engine_core.device.cuda_transfer import CudaTransfers, runs
from coldblock.engine_core.device.kv_pool import KVPool
from coldblock.engine_core.errors import MemoryBudgetError
from coldblock.engine_core.kv_layout import KVShape
from coldblock.kernels import block_copy
from coldblock.kernels.errors import KernelError
from cuda_on_cpu import copy_blocks
from streams import Streams

OUT, IN = Direction.OUT, Direction.IN


@pytest.mark.parametrize(
    ("gpu", "cpu", "wanted"),
    [
        ((4,), (9,), [(4, 9, 1)]),
        ((4, 5, 6), (0, 1, 2), [(4, 0, 3)]),
        ((6, 5, 4), (2, 1, 0), [(4, 0, 3)]),
        ((4, 5, 6), (0, 2, 3), [(4, 0, 1), (5, 2, 2)]),
        ((4, 6, 5), (0, 1, 2), [(4, 0, 1), (5, 2, 1), (6, 1, 1)]),
        ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10), [(1, 6, 2), (3, 8, 3)]),
    ],
)
def test_neighbours_on_both_sides_go_together_within_a_slab(
    gpu: tuple[int, ...], cpu: tuple[int, ...], wanted: list[tuple[int, int, int]]
) -> None:
    found = runs(np.array(gpu), np.array(cpu), slab=8)
    assert list(zip(*(array.tolist() for array in found), strict=True)) == wanted


def test_runs_cover_every_pair_once() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 40)
        gpu, cpu = rng.sample(range(50), count), rng.sample(range(60), count)
        parts = zip(*(array.tolist() for array in runs(np.array(gpu), np.array(cpu), rng.randint(1, 30))), strict=True)
        assert sorted((g + k, c + k) for g, c, n in parts for k in range(n)) == sorted(zip(gpu, cpu, strict=True))


class Bench:
    """A pool of numbered blocks, its transfers, and streams that do their work when told."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, gpu: int = 12, cpu: int = 12) -> None:
        self.streams = Streams(patch, seed)
        self.pool = KVPool(KVShape(1, 1, 8), 16, "fp16", gpu, cpu)
        self.pool.gpu.zero_()
        self.pool.cpu.zero_()
        self.calls: list[tuple[Any, ...]] = []

        def queued(*arguments: Any) -> None:
            self.calls.append(arguments)
            self.streams.do(lambda: copy_blocks(*arguments))

        patch.setattr(block_copy, "copy_blocks", queued)
        patch.setattr(cuda_transfer, "_QUERY_EVERY_S", 0.0)
        self.transfers = CudaTransfers(self.pool)

    def begin(self, moves: Sequence[BlockMove]) -> None:
        self.transfers.begin(moves)
        self.transfers.start()

    def end(self) -> list[MoveDone]:
        """Do all the work; what is told of it."""
        done: list[MoveDone] = []
        for _ in range(10):
            self.streams.turns(10**6)
            done += self.transfers.poll()
        assert not self.transfers._flights
        return done


@pytest.mark.parametrize("delay", ["0", "2"])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_streams_do_first_no_byte_is_wrong(seed: int, delay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps write blocks, and check those they read, as `BlockMove` lets them; copies run both ways beside them."""
    monkeypatch.setenv("COLDBLOCK_TEST_COPY_DELAY_STEPS", delay)
    bench, rng = Bench(monkeypatch, seed), random.Random(seed)
    pool, values = bench.pool, {"gpu": [0] * 12, "cpu": [0] * 12}
    written, read = {"gpu": set[int](), "cpu": set[int]()}, {"gpu": set[int](), "cpu": set[int]()}
    moves: dict[int, BlockMove] = {}

    def step(number: int) -> None:
        free = sorted({*range(12)} - written["gpu"] - read["gpu"])
        for block in rng.sample(free, min(2, len(free))):
            values["gpu"][block] = number % 251 + 1
            bench.streams.do(lambda block=block, value=number % 251 + 1: pool.gpu[block].fill_(value))
        readable = sorted({*range(12)} - written["gpu"])
        expected = {block: values["gpu"][block] for block in rng.sample(readable, min(4, len(readable)))}

        def look() -> None:
            assert {block: int(pool.gpu[block, 0]) for block in expected} == expected

        bench.streams.do(look)

    def move(number: int) -> BlockMove | None:
        direction = rng.choice((OUT, IN))
        source, target = ("gpu", "cpu") if direction is OUT else ("cpu", "gpu")
        sources = sorted({*range(12)} - written[source] - read[source])
        targets = sorted({*range(12)} - written[target] - read[target])
        count = min(rng.randint(1, 4), len(sources), len(targets))
        if not count:
            return None
        ids = {source: rng.sample(sources, count), target: rng.sample(targets, count)}
        read[source] |= set(ids[source])
        written[target] |= set(ids[target])
        moves[number] = BlockMove(number, direction, tuple(ids["gpu"]), tuple(ids["cpu"]))
        return moves[number]

    def end(done: MoveDone) -> None:
        ended = moves.pop(done.move_id)
        assert done.error is None and done.seconds > 0 and done.queued_s >= 0
        ids = {"gpu": ended.gpu_blocks, "cpu": ended.cpu_blocks}
        source, target = ("gpu", "cpu") if ended.direction is OUT else ("cpu", "gpu")
        for a, b in zip(ids[source], ids[target], strict=True):
            values[target][b] = values[source][a]
        read[source] -= set(ids[source])
        written[target] -= set(ids[target])

    told = 0
    for number in range(120):
        bench.begin([one for k in range(rng.randint(0, 2)) if (one := move(2 * number + k)) is not None])
        step(number)
        bench.streams.turns(rng.randint(0, 12))
        for done in bench.transfers.poll():
            told += 1
            end(done)
    for done in bench.end():
        end(done)
    bench.streams.turns(10**6)
    assert told > 30 and not moves
    assert {name: memory[:, 0].tolist() for name, memory in (("gpu", pool.gpu), ("cpu", pool.cpu))} == values


def test_the_directions_run_beside_one_another_and_beside_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that stands still holds up neither the other nor the steps."""
    bench = Bench(monkeypatch, 0)
    bench.begin([BlockMove(1, OUT, (0,), (1,)), BlockMove(2, IN, (2,), (3,))])
    out = bench.transfers._streams[OUT]
    bench.streams.all.remove(out)
    steps: list[int] = []
    bench.streams.do(lambda: steps.append(1))
    bench.streams.turns(10**6)
    assert steps == [1] and [done.move_id for done in bench.transfers.poll()] == [2]
    bench.streams.all.append(out)
    assert [done.move_id for done in bench.end()] == [1]


def test_a_copy_waits_for_what_was_launched_before_it_was_taken_and_for_nothing_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, 0)
    bench.pool.gpu[0] = 7
    bench.streams.do(lambda: bench.pool.gpu[0].fill_(9))
    bench.transfers.begin([BlockMove(1, OUT, (0,), (1,))])
    bench.streams.do(lambda: pytest.fail("the copy waited for this"))
    bench.transfers.start()
    compute = bench.streams.current
    while len(compute.queue) > 1:
        bench.streams.turn()
    bench.streams.all.remove(compute)
    assert [done.move_id for done in bench.end()] == [1]
    assert bench.pool.cpu[1].eq(9).all()


def test_how_long_a_copy_waited_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the step in front of it; the clock counts pieces of work."""
    bench = Bench(monkeypatch, 0)
    clock = bench.transfers._clock
    for _ in range(100):
        bench.streams.do(lambda: None)
    bench.begin([BlockMove(1, OUT, (0, 1), (1, 2))])
    while clock.queue:
        bench.streams.turn()
    (done,) = bench.end()
    assert done.queued_s > 0.05 and 0 < done.seconds < 0.01


def test_polling_waits_for_a_copy_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    assert bench.transfers.poll(wait_s=60.0) == ()
    bench.begin([BlockMove(1, OUT, (0,), (1,))])
    assert bench.transfers.poll() == ()
    monkeypatch.setattr(cuda_transfer.time, "sleep", lambda seconds: bench.streams.turn())
    assert [done.move_id for done in bench.transfers.poll(wait_s=60.0)] == [1]
    bench.begin([BlockMove(2, OUT, (0,), (1,))])
    assert bench.transfers.poll(wait_s=0.0) == ()


def test_a_move_that_fails_half_way_is_told_when_nothing_runs_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)

    def breaks(*arguments: Any) -> None:
        bench.streams.do(lambda: None)
        raise KernelError("copying blocks failed")

    monkeypatch.setattr(block_copy, "copy_blocks", breaks)
    steps = bench.streams.current
    bench.begin([BlockMove(1, OUT, (0,), (1,))])
    assert bench.streams.current is steps
    assert bench.transfers.poll() == ()
    assert [(done.move_id, done.error) for done in bench.end()] == [(1, "copying blocks failed")]


def test_a_block_that_does_not_exist_is_an_error_of_that_move_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    bench.begin([BlockMove(1, OUT, (0,), (12,)), BlockMove(2, IN, (12,), (0,)), BlockMove(3, OUT, (0,), (1,))])
    assert {done.move_id: done.error for done in bench.end()} == {
        1: "there is no such block",
        2: "there is no such block",
        3: None,
    }


def test_small_moves_of_one_direction_go_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to some size, so that none waits long for others; each is told with its share of the time."""
    bench = Bench(monkeypatch, 0)
    monkeypatch.setattr(cuda_transfer, "JOINED_BYTES", 4 * bench.pool.block_bytes)
    numbered = [((0, 1), (0, 1)), ((4,), (4,)), ((2, 3, 6), (5, 6, 9)), ((5,), (7,))]
    out = [BlockMove(number, OUT, *blocks) for number, blocks in enumerate(numbered)]
    bench.begin([*out[:2], BlockMove(9, IN, (11,), (11,)), *out[2:]])
    done = {one.move_id: one for one in bench.end()}
    assert [call[4].sum() for call in bench.calls] == [6, 1, 1]
    assert sorted(done) == [0, 1, 2, 3, 9] and not any(one.error for one in done.values())
    assert done[0].seconds == pytest.approx(2 * done[1].seconds) and done[2].seconds == pytest.approx(
        3 * done[1].seconds
    )


class FakeArena:
    """Ready when told."""

    def __init__(self, block_bytes: int) -> None:
        self.slab, self.answers, self.pinned = 4 * block_bytes, [False, False, True], 12 * block_bytes
        self.asked: list[int] = []

    def ready(self, end: int) -> bool:
        self.asked.append(end)
        answer: bool | MemoryBudgetError = self.answers.pop(0)
        if isinstance(answer, MemoryBudgetError):
            raise answer
        return answer


def with_arena(bench: Bench, answers: Sequence[Any], pinned: int = 12) -> FakeArena:
    arena = FakeArena(bench.pool.block_bytes)
    arena.answers, arena.pinned = list(answers), pinned * bench.pool.block_bytes
    bench.pool.arena = arena  # type: ignore[assignment]
    return arena


def test_copies_wait_until_their_memory_is_pinned_and_do_not_cross_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    arena = with_arena(bench, [False, False, True])
    bench.begin([BlockMove(1, OUT, (0, 1, 2, 3), (2, 3, 4, 5))])
    bench.streams.turns(10**6)
    assert bench.transfers.poll() == () and bench.calls == []
    assert [done.error for done in bench.end()] == [None]
    assert arena.asked == [6 * bench.pool.block_bytes] * 3
    ((_, reads, _, writes, counts),) = bench.calls
    assert (reads.tolist(), writes.tolist(), counts.tolist()) == ([0, 2], [2, 4], [2, 2])


def test_without_ram_for_the_slab_the_move_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    with_arena(bench, [MemoryBudgetError("--max-cpu-offload-mb", "RAM has run out"), True], pinned=3)
    bench.begin([BlockMove(1, OUT, (0,), (5,)), BlockMove(2, OUT, (1,), (0,))])
    errors = {done.move_id: done.error for done in bench.end()}
    assert errors == {1: "--max-cpu-offload-mb: RAM has run out", 2: None}


def test_what_is_not_pinned_is_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the call for many, which takes pinned memory."""
    bench = Bench(monkeypatch, 0)
    with_arena(bench, [True, True], pinned=4)
    bench.pool.gpu[3] = 7
    bench.begin([BlockMove(1, OUT, (3, 4), (9, 2)), BlockMove(2, IN, (5,), (9,))])
    assert [done.error for done in bench.end()] == [None, None]
    assert bench.calls == [] and bench.pool.cpu[9].eq(7).all() and bench.pool.gpu[5].eq(7).all()


def test_close_waits_for_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0)
    bench.pool.gpu[0] = 9
    bench.begin([BlockMove(1, OUT, (0,), (1,))])
    bench.transfers.close()
    assert bench.pool.cpu[1].eq(9).all()
