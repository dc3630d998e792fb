"""Free memory as the system and the control group report it."""

from __future__ import annotations

from pathlib import Path

import pytest
from coldblock.engine_core.device import memory


def test_this_machine_has_some() -> None:
    assert 1 << 20 < memory.available_memory() < 1 << 50


def test_the_nearest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(name: str, limit: str, used: str) -> tuple[Path, Path]:
        (tmp_path / f"{name}.max").write_text(limit)
        (tmp_path / f"{name}.current").write_text(used)
        return tmp_path / f"{name}.max", tmp_path / f"{name}.current"

    groups = [
        pair("own", "max\n", "5\n"),
        pair("parent", "2000000\n", "500000\n"),
        (tmp_path / "none", tmp_path / "none"),
    ]
    monkeypatch.setattr(memory, "_cgroup_files", lambda: groups)
    assert memory.available_memory() == 1_500_000
    pair("own", "400000", "900000")
    assert memory.available_memory() == 0
