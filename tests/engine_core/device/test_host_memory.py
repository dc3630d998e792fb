"""The arena is pinned in pages of its own, and unpinned once: by close, or when nobody has it any more."""

from __future__ import annotations

import mmap

import pytest
import torch
from coldblock.engine_core.device.host_memory import HostArena


class FakeCudart:
    """Refuses what CUDA refuses: pages that are pinned already."""

    def __init__(self) -> None:
        self.pages: dict[int, set[int]] = {}
        self.answer = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = set(range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1))
        if any(pages & pinned for pinned in self.pages.values()):
            return 712
        if self.answer == 0:
            self.pages[address] = pages
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.pages[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return fake


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


def test_close_unpins_once(cudart: FakeCudart) -> None:
    arena = HostArena(4096, pin=True)
    arena.close()
    assert cudart.pages == {}
    arena.close()
    del arena


def test_without_pinning_or_without_bytes_nothing_is_pinned(cudart: FakeCudart) -> None:
    for arena in (HostArena(4096, pin=False), HostArena(0, pin=True)):
        arena.close()
    assert cudart.pages == {}


def test_what_cannot_be_pinned_is_used_as_it_is_and_named(cudart: FakeCudart, caplog: pytest.LogCaptureFixture) -> None:
    """Case 12."""
    cudart.answer = 2
    arena = HostArena(3 << 20, pin=True)
    arena.memory.fill_(7)
    arena.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in ("3 MiB of RAM", "CUDA error 2", "--max-cpu-offload-mb", "ulimit -l"):
        assert part in record.getMessage()
