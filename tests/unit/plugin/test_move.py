"""The states of one request's move: every end is final, every waiting state has a deadline, one event decides a
race."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_plugin.move import ALONE, DEADLINES_S, TRANSITIONS, Member, Move
from vllm_plugin.states import LAST_RESORT_S, LONG_FREEZE_S, RECOMPUTE_PATIENCE_S

ENDS = {"moved", "stayed", "finished"}


def move(state: str = "attaching") -> Move:
    return Move("r", "w1/s1", "t", [Member("r", epoch=0)], prompt_tokens=5, kv_blocks=1, state=state)  # type: ignore[arg-type]


def test_the_ends_are_final_and_reachable_from_everywhere():
    assert {state for state, after in TRANSITIONS.items() if not after} == ENDS
    for state, after in TRANSITIONS.items():
        if state not in ENDS:
            assert {"stayed", "finished"} <= after, f"{state} has no way back"


def test_every_state_in_which_a_request_stands_still_has_a_deadline():
    assert set(DEADLINES_S) == {"attaching", "frozen", "sent", "committed"}
    assert DEADLINES_S["frozen"] < DEADLINES_S["sent"]


@pytest.mark.parametrize("state", list(TRANSITIONS))
@pytest.mark.parametrize("to", list(TRANSITIONS))
def test_only_transitions_of_the_table_are_taken(state: str, to: str):
    one = move(state)
    assert one.advance(to) == (to in TRANSITIONS[state])  # type: ignore[arg-type,index]
    assert one.state == (to if to in TRANSITIONS[state] else state)  # type: ignore[index]


def test_of_two_events_that_race_one_decides():
    for _ in range(50):
        one = move("committed")
        with ThreadPoolExecutor(2) as threads:
            won = list(threads.map(one.advance, ("moved", "stayed")))
        assert sorted(won) == [False, True]
        assert one.state == ("moved" if won[0] else "stayed")
        assert one.done.is_set()


def test_a_deadline_counts_from_entering_the_state():
    one = move("copying")
    assert not one.overdue(one.entered + 1000)
    one.advance("frozen")
    assert not one.overdue(one.entered + 0.5)
    assert one.overdue(one.entered + 1.5)


def test_what_b_must_compute_or_copy_first_may_take_longer():
    one = move("frozen")
    one.freeze_s = LONG_FREEZE_S
    assert not one.overdue(one.entered + 2.0)
    assert one.overdue(one.entered + LONG_FREEZE_S + 0.1)
    one.patience_s = RECOMPUTE_PATIENCE_S
    for state in ("sent", "committed"):
        one.advance(state)  # type: ignore[arg-type]
        # A resumes by itself only long after the proxy has given B up.
        assert not one.overdue(one.entered + RECOMPUTE_PATIENCE_S + 5)
        assert one.overdue(one.entered + RECOMPUTE_PATIENCE_S + LAST_RESORT_S)


def test_the_result_names_what_the_panel_shows():
    one = move("committed")
    one.advance("stayed", "commit_too_late", "The commit came after the deadline.")
    result = one.result()
    assert (result["outcome"], result["code"], result["stream_id"]) == ("stayed", "commit_too_late", "s1")
    assert one.proxy == "w1"


def test_an_event_that_may_come_too_late_names_the_states_in_which_it_counts():
    early, late = move("frozen"), move("sent")
    assert early.advance("stayed", "preempted", "Its blocks are gone.", only_from=ALONE)
    assert not late.advance("stayed", "preempted", "Its blocks are gone.", only_from=ALONE)
    assert (early.state, late.state) == ("stayed", "sent")
