"""Block residency: every state with every event."""

from __future__ import annotations

import itertools

import pytest
from coldblock.engine_core.control.plan import BlockMove, Direction
from coldblock.engine_core.control.swap import Block, BlockEvent, IllegalMove, Move, Residency, advance

EXPECTED = {
    Residency.NOWHERE: {BlockEvent.ALLOCATE: Residency.GPU},
    Residency.GPU: {BlockEvent.BEGIN_OUT: Residency.COPYING_OUT, BlockEvent.DROP_GPU: Residency.NOWHERE},
    Residency.COPYING_OUT: {BlockEvent.COPIED: Residency.BOTH, BlockEvent.FAILED: Residency.GPU},
    Residency.BOTH: {BlockEvent.DROP_GPU: Residency.CPU, BlockEvent.DROP_CPU: Residency.GPU},
    Residency.CPU: {BlockEvent.BEGIN_IN: Residency.COPYING_IN, BlockEvent.DROP_CPU: Residency.NOWHERE},
    Residency.COPYING_IN: {BlockEvent.COPIED: Residency.BOTH, BlockEvent.FAILED: Residency.CPU},
}


@pytest.mark.parametrize(("residency", "event"), list(itertools.product(Residency, BlockEvent)))
def test_every_pair_is_a_known_step_or_raises(residency: Residency, event: BlockEvent) -> None:
    block = Block(residency)
    target = EXPECTED[residency].get(event)
    if target is None:
        with pytest.raises(IllegalMove, match=f"{event.name} on a block in {residency.name}"):
            advance([block], event)
        assert block.residency is residency
    else:
        advance([block], event)
        assert block.residency is target


def test_a_block_that_leaves_can_be_read_and_one_that_arrives_cannot() -> None:
    assert [residency for residency in Residency if Block(residency).readable] == [
        Residency.GPU,
        Residency.COPYING_OUT,
        Residency.BOTH,
    ]


def test_a_move_names_the_slots_in_pairs() -> None:
    move = Move(7, Direction.IN, [Block(gpu=1, cpu=5), Block(gpu=4, cpu=0)], "resume", None)
    assert move.as_plan() == BlockMove(7, Direction.IN, (1, 4), (5, 0))
