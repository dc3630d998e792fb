"""The request's state machine: every state with every event."""

from __future__ import annotations

import itertools
from array import array

import pytest
from coldblock.engine_core.control.request import Event, IllegalTransition, Request, State
from coldblock.engine_core.control.sampling import Sampling

BACK = "state before the swap"
EXPECTED = {
    State.WAITING: {Event.ADMIT: State.PREFILL, Event.LOAD: State.LOADING, Event.FINISH: State.FINISHED},
    State.LOADING: {
        Event.IN_DONE: State.PREFILL,
        Event.IN_FAILED: State.WAITING,
        Event.FINISH: State.FINISHED,
    },
    State.PREFILL: {
        Event.PREFILL_DONE: State.DECODE,
        Event.SWAP_OUT: State.SWAPPING_OUT,
        Event.PREEMPT: State.WAITING,
        Event.FINISH: State.FINISHED,
    },
    State.DECODE: {
        Event.SWAP_OUT: State.SWAPPING_OUT,
        Event.PREEMPT: State.WAITING,
        Event.FINISH: State.FINISHED,
    },
    State.SWAPPING_OUT: {
        Event.OUT_DONE: State.SWAPPED,
        Event.OUT_FAILED: BACK,
        Event.PREEMPT: State.WAITING,
        Event.FINISH: State.FINISHED,
    },
    State.SWAPPED: {Event.SWAP_IN: State.SWAPPING_IN, Event.PREEMPT: State.WAITING, Event.FINISH: State.FINISHED},
    State.SWAPPING_IN: {Event.IN_DONE: BACK, Event.IN_FAILED: State.SWAPPED, Event.FINISH: State.FINISHED},
    State.FINISHED: {},
}


def make_request(state: State = State.WAITING, before: State | None = None) -> Request:
    request = Request("r", array("i", [1, 2, 3]), 3, Sampling(), 0, 8, (), 0, 1, 0.0, 0.0)
    request.state, request.state_before_swap = state, before
    return request


@pytest.mark.parametrize("before", [State.PREFILL, State.DECODE])
@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_a_known_step_or_raises(state: State, event: Event, before: State) -> None:
    request = make_request(state, before)
    target = EXPECTED[state].get(event)
    if target is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} in state {state.name}"):
            request.on(event)
        assert request.state is state
    else:
        request.on(event)
        assert request.state is (before if target == BACK else target)


@pytest.mark.parametrize("state", [State.PREFILL, State.DECODE])
def test_a_swap_returns_to_the_state_it_began_in(state: State) -> None:
    request = make_request(state)
    for event in (Event.SWAP_OUT, Event.OUT_DONE, Event.SWAP_IN, Event.IN_FAILED, Event.SWAP_IN):
        request.on(event)
        assert request.state_before_swap is state
    request.on(Event.IN_DONE)
    assert (request.state, request.state_before_swap) == (state, None)


def test_stall_time_adds_up_over_swaps() -> None:
    request = make_request()
    for out, back in ((1.0, 3.0), (10.0, 10.5)):
        request.swapped_since = out
        request.end_stall(back)
        request.end_stall(99.0)
    assert request.stall_s == 2.5
