"""Which blocks are copied together."""

from __future__ import annotations

import pytest
from coldblock.engine_core.device.cuda_transfer import runs


@pytest.mark.parametrize(
    ("read", "write", "wanted"),
    [
        ((), (), []),
        ((4,), (9,), [(4, 9, 1)]),
        ((4, 5, 6), (0, 1, 2), [(4, 0, 3)]),
        ((4, 5, 6), (0, 2, 3), [(4, 0, 1), (5, 2, 2)]),
        ((4, 6, 5), (0, 1, 2), [(4, 0, 1), (6, 1, 1), (5, 2, 1)]),
    ],
)
def test_neighbours_on_both_sides_go_together(
    read: tuple[int, ...], write: tuple[int, ...], wanted: list[tuple[int, int, int]]
) -> None:
    assert list(runs(read, write)) == wanted
