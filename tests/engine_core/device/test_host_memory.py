"""The arena is pinned in pages of its own, slab by slab as it is needed, and unpinned once: by close, or with its last
owner."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch
from coldblock.engine_core.device import host_memory
from coldblock.engine_core.device.host_memory import HostArena
from coldblock.engine_core.errors import MemoryBudgetError

SLAB = 1 << 20


class FakeCudart:
    """Refuses what CUDA refuses, pages that are pinned already, and what `answers` tells it to."""

    def __init__(self) -> None:
        self.pages: dict[int, set[int]] = {}
        self.sizes: list[int] = []
        self.answers: dict[int, int] = {}
        self.refused_on: list[threading.Thread] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = set(range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1))
        if any(pages & pinned for pinned in self.pages.values()):
            return 712
        code = self.answers.get(len(self.sizes), 0)
        self.sizes.append(size)
        if code == 0:
            self.pages[address] = pages
        else:
            self.refused_on.append(threading.current_thread())
        return code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pages[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_memory, "SLAB_BYTES", SLAB)
    return fake


def grown(arena: HostArena) -> None:
    """Wait for the thread."""
    if arena._growing is not None:
        arena._growing.result()


def test_many_arenas_at_once_and_one_after_another(cudart: FakeCudart) -> None:
    arenas = [HostArena(size, pin=True) for size in (1, 1000, 5000, 100_000, 1 << 20)]
    assert [len(arena.memory) for arena in arenas] == [1, 1000, 5000, 100_000, 1 << 20]
    assert len(cudart.pages) == 5
    for arena in arenas:
        arena.memory.fill_(7)
    del arena, arenas
    assert cudart.pages == {}
    for _ in range(20):
        view = HostArena(1 << 20, pin=True).memory[5:]
    assert cudart.pages == {} and len(view) == (1 << 20) - 5


@torch.inference_mode()
def test_grows_for_an_executor_whose_tensors_are_of_inference_mode(cudart: FakeCudart) -> None:
    arena = HostArena(2 * SLAB, pin=True)
    arena.memory[:10].copy_(torch.arange(10, dtype=torch.uint8))
    assert arena.ready(SLAB)
    grown(arena)
    assert arena.pinned == 2 * SLAB


def test_pinned_as_it_grows_one_slab_ahead_and_given_back_at_once(cudart: FakeCudart) -> None:
    arena = HostArena(4 * SLAB - 5000, pin=True)
    assert (arena.pinned, arena.ready(0)) == (SLAB, True)
    grown(arena)
    assert arena.pinned == SLAB
    assert arena.ready(1)
    grown(arena)
    assert arena.pinned == 2 * SLAB and arena.ready(SLAB)
    grown(arena)
    assert arena.pinned == 2 * SLAB
    assert not arena.ready(4 * SLAB - 5000)
    while not arena.ready(4 * SLAB - 5000):
        grown(arena)
    assert cudart.sizes == [SLAB, SLAB, SLAB, SLAB - 5000] and arena.pinned == 4 * SLAB - 5000
    arena.memory.fill_(7)
    arena.close()
    assert cudart.pages == {}


def test_no_unit_lies_in_two_slabs(cudart: FakeCudart) -> None:
    for unit in (299_520, 294_912, 589_824, 48, 4224):
        slab = HostArena(1 << 20, pin=True, unit=unit).slab
        assert slab % unit == 0 == slab % mmap.PAGESIZE and SLAB <= slab < SLAB + unit * mmap.PAGESIZE


def test_close_unpins_once(cudart: FakeCudart) -> None:
    arena = HostArena(4096, pin=True)
    arena.close()
    assert cudart.pages == {}
    arena.close()
    del arena


def test_without_pinning_or_without_bytes_nothing_is_pinned(cudart: FakeCudart) -> None:
    for arena in (HostArena(4096, pin=False), HostArena(0, pin=True)):
        assert arena.ready(len(arena.memory)) and arena.pinned == len(arena.memory)
        arena.close()
    assert cudart.pages == {}


@pytest.mark.parametrize("slab", [0, 1, 2])
def test_what_cannot_be_pinned_is_used_as_it_is_and_named_once(
    slab: int, cudart: FakeCudart, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 12."""
    cudart.answers[slab] = 2
    arena = HostArena(6 * SLAB, pin=True)
    for end in range(SLAB, 6 * SLAB + 1, SLAB):
        while not arena.ready(end):
            grown(arena)
    assert arena.pinned == slab * SLAB and len(cudart.pages) == slab
    # CUDA keeps an error for its thread: the next launch there would seem to have failed.
    assert len(cudart.refused_on) == 1 and threading.current_thread() not in cudart.refused_on
    arena.memory.fill_(7)
    arena.close()
    assert cudart.pages == {}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in (f"{6 - slab} MiB of RAM", "CUDA error 2", "several times slower", "--max-cpu-offload-mb", "ulimit -l"):
        assert part in record.getMessage()


def test_where_ram_has_run_out_the_arena_ends(
    cudart: FakeCudart, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 12: a control group's limit would end the process that touches more."""
    free = iter((3 * SLAB, SLAB, SLAB - 1))
    monkeypatch.setattr(host_memory, "available_memory", lambda: next(free))
    arena = HostArena(4 * SLAB, pin=True)
    arena.ready(2 * SLAB)
    grown(arena)
    assert arena.ready(2 * SLAB)
    grown(arena)
    for _ in range(2):
        with pytest.raises(MemoryBudgetError, match=r"--max-cpu-offload-mb: RAM has run out after 2 MiB"):
            arena.ready(2 * SLAB + 1)
    assert arena.ready(2 * SLAB) and len(caplog.records) == 1
    arena.close()
    assert cudart.pages == {}
