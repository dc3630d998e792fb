"""What a monitor puts together from snapshots and events: rates, courses, the log; without any engine."""

from __future__ import annotations

import pytest
from coldblock.tools.top.history import ENDED_TRACKS, UNSEEN, History
from fake_engine import PEER, swap_event
from showing_engine import row, snapshot


@pytest.fixture
def history() -> History:
    return History()


def texts(history: History) -> list[str]:
    return [moment.text for moment in history.frame().log]


def states(history: History, key: tuple[str, str] = (PEER, "req-a")) -> list[tuple[float, str]]:
    track = history.track(key)
    assert track is not None
    return [(change.time, change.state) for change in track.changes]


def test_tokens_per_second_come_from_two_snapshots(history: History) -> None:
    history.snapshot(snapshot(row(generated_tokens=10), time=1000.0))
    assert history.frame().rates[PEER, "req-a"] is None
    history.snapshot(snapshot(row(generated_tokens=25), time=1000.5))
    assert history.frame().rates[PEER, "req-a"] == 30.0


def test_the_past_is_one_value_a_snapshot(history: History) -> None:
    assert history.frame().past.tokens_per_s == ()
    for rate in (1.0, 2.0, 3.0):
        history.snapshot(snapshot(tokens_per_s=rate))
    assert history.frame().past.tokens_per_s == (1.0, 2.0, 3.0)
    assert history.frame().past.out_bytes_per_s == (2e9,) * 3


def test_a_course_begins_with_what_the_first_sight_tells(history: History) -> None:
    history.snapshot(snapshot(row(age_s=10.0, queue_s=2.0, ttft_s=5.0, swaps=0)))
    assert states(history) == [(990.0, "waiting"), (992.0, "prefill"), (995.0, "decode")]


def test_what_was_before_the_first_sight_of_a_swapped_request_is_not_made_up(history: History) -> None:
    history.snapshot(snapshot(row(state="swapped", age_s=10.0, queue_s=2.0, ttft_s=5.0, swaps=1)))
    assert states(history) == [(990.0, "waiting"), (992.0, UNSEEN), (1000.0, "swapped")]


def test_swap_events_give_the_course_its_times(history: History) -> None:
    history.snapshot(snapshot(row(age_s=10.0, swaps=0)))
    for at, phase in ((1000.1, "swapping_out"), (1000.2, "swapped"), (1001.0, "swapping_in"), (1001.1, "resumed")):
        history.swap(swap_event("req-a", phase, time=at))
    assert states(history)[-4:] == [
        (1000.1, "swapping_out"), (1000.2, "swapped"), (1001.0, "swapping_in"), (1001.1, "decode"),
    ]  # fmt: skip
    track = history.track((PEER, "req-a"))
    assert track is not None and [m.kind for m in track.moments][-1] == "resumed"
    history.swap(swap_event("req-a", "swapping_out", time=999.0))  # another clock: never back in time
    assert states(history)[-1] == (1001.1, "swapping_out")


def test_an_event_of_an_id_that_two_peers_use_is_its_own_peers(history: History) -> None:
    history.snapshot(snapshot(row(peer="a"), row(peer="b")))
    history.swap(swap_event("req-a", "swapped", peer="b", time=1001.0))
    assert "swapped" not in [state for _, state in states(history, ("a", "req-a"))]
    assert states(history, ("b", "req-a"))[-1] == (1001.0, "swapped")
    history.swap(swap_event("req-a", "swapped", peer="c", time=1002.0))  # in no snapshot yet
    assert [moment.key for moment in history.frame().log][-2:] == [("b", "req-a"), ("c", "req-a")]


def test_copies_in_the_background_share_a_line(history: History) -> None:
    for i in range(5):
        history.swap(
            swap_event("", "copied_out", reason="write_behind", blocks=2, bytes=2048, seconds=0.001, time=1.0 + i / 10)
        )
    assert texts(history) == ["▽ 10 blocks, 10.0 KiB copied to CPU (write-behind) in 5.00 ms, 5 copies"]
    history.swap(swap_event("", "copied_out", reason="write_behind", time=2.5))
    assert len(texts(history)) == 2  # a second later: the log goes on
    history.swap(swap_event("req-a", "swapped", time=2.6))
    history.swap(swap_event("", "copied_out", reason="write_behind", time=2.7))
    assert len(texts(history)) == 4  # never over another line


def test_a_restart_is_said_and_ends_what_was_known(history: History) -> None:
    history.snapshot(snapshot(row()))
    history.lost(1001.0, "no engine answers")
    history.lost(1002.0, "no engine answers")
    assert history.frame().away == "no engine answers"
    history.snapshot(snapshot(engine_id="engine-2", time=1010.0))
    assert [text.split(":")[0] for text in texts(history)] == [
        "connected to fake-model on cpu", "no engine answers", "the engine was restarted",
    ]  # fmt: skip
    track = history.track((PEER, "req-a"))
    assert track is not None and track.ended_at == 1000.0
    assert history.frame().away == "" and len(history.frame().past.step_ms) == 1


def test_the_same_engine_that_answers_again_is_no_restart(history: History) -> None:
    history.snapshot(snapshot(row()))
    history.lost(1001.0, "no snapshot for 5 s")
    history.snapshot(snapshot(row(age_s=12.5), time=1010.0))
    assert texts(history)[-1].startswith("connected to")
    track = history.track((PEER, "req-a"))
    assert track is not None and track.ended_at is None


def test_an_id_that_is_used_again_is_another_request(history: History) -> None:
    history.snapshot(snapshot(row(age_s=50.0)))
    history.snapshot(snapshot(row(age_s=0.2), time=1000.5))
    track = history.track((PEER, "req-a"))
    assert track is not None and track.arrived_at == pytest.approx(1000.3)


def test_a_recompute_is_a_moment(history: History) -> None:
    history.snapshot(snapshot(row()))
    history.snapshot(snapshot(row(recomputes=1), time=1000.5))
    track = history.track((PEER, "req-a"))
    assert track is not None and track.moments[-1].kind == "recomputed"


def test_requests_that_ended_are_remembered_but_not_for_ever(history: History) -> None:
    for i in range(ENDED_TRACKS + 50):
        history.snapshot(snapshot(row(f"req-{i}"), time=1000.0 + i))
    assert history.track((PEER, "req-10")) is None
    assert history.track((PEER, f"req-{ENDED_TRACKS + 40}")) is not None


def test_names_cannot_steer_the_terminal(history: History) -> None:
    evil = "\x1b]0;owned\x07\n\u202e"
    history.snapshot(snapshot(row(evil)))
    history.swap(swap_event(evil, "rejected", detail=evil, time=1001.0))
    assert all(text.isprintable() for text in texts(history))
