"""The tables of the three sides: total, without dead ends, with a deadline for everything that is held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proxy.settings import ProxySettings
from tests.unit.plugin.three_sides.proxy import Proxy
from tests.unit.plugin.three_sides.source import Source
from tests.unit.plugin.three_sides.target import Target
from vllm_plugin.move import DEADLINES_S, TRANSITIONS
from vllm_plugin.states import FAULTS, PROXY, SIDES, SOURCE, TARGET, Side, markdown

ROOT = Path(__file__).parents[3]
sides = pytest.mark.parametrize("side", SIDES, ids=[side.name for side in SIDES])
NAMES = {side.name: side for side in SIDES}


@sides
def test_every_event_has_an_answer_in_every_state(side: Side):
    assert set(side.steps) == {(state, event) for state in side.states for event in side.events}
    for (state, event), step in side.steps.items():
        assert step.state in side.states
        if step.state == state and not step.actions:
            assert step.why, f"{side.name}: {state} ignores {event} and does not say why"


@sides
def test_every_state_is_at_rest_or_has_a_deadline_that_ends_it(side: Side):
    assert set(side.deadlines) == set(side.states) - side.resting
    assert side.terminal() <= side.resting
    for state, deadline in side.deadlines.items():
        assert deadline.seconds > 0
        event = {"own": "timeout", "lease": "session_closed", "proxy": "request_ended"}[deadline.keeper]
        assert side.steps[state, event].state != state, f"{side.name}: {state} outlives its deadline"


@sides
def test_deadlines_alone_lead_to_rest(side: Side):
    """Nobody says anything any more: by its clocks alone each side comes to hold nothing."""
    for state in side.states:
        seen = [state]
        while seen[-1] not in side.resting:
            event = {"own": "timeout", "lease": "session_closed", "proxy": "request_ended"}[
                side.deadlines[seen[-1]].keeper
            ]
            seen.append(side.steps[seen[-1], event].state)
            assert len(seen) <= len(side.states), f"{side.name} goes in circles: {seen}"


@sides
def test_every_state_is_reached_and_every_event_matters(side: Side):
    reached, grown = {side.initial}, True
    while grown:
        more = {after for state in reached for after in side.successors()[state]} - reached
        reached |= more
        grown = bool(more)
    assert reached == set(side.states)
    for event in side.events:
        steps = [(state, side.steps[state, event]) for state in side.states]
        matters = any(step.actions or step.state != state for state, step in steps)
        assert matters or (side.name, event) == ("proxy", "control_lost"), f"{side.name}: nothing comes of {event}"


def test_terminal_states_hold_nothing_and_change_nothing():
    assert SOURCE.terminal() == {"moved", "stayed", "finished"}
    assert TARGET.terminal() == {"ended"}
    assert PROXY.terminal() == {"switched", "discarded"}
    for state in SOURCE.terminal():
        assert all(not SOURCE.steps[state, event].actions for event in SOURCE.events)


def test_a_and_the_proxy_go_by_this_table():
    assert {state: set(after) for state, after in TRANSITIONS.items()} == {
        state: set(after) for state, after in SOURCE.successors().items()
    }
    assert DEADLINES_S.items() <= SOURCE.own_deadlines().items()
    settings = ProxySettings("redis://", "token", "worker")
    assert settings.patience_s == PROXY.deadlines["frozen"].seconds
    assert settings.orphan_patience_s == PROXY.deadlines["orphaned"].seconds


def test_whoever_waits_waits_longer_than_whom_it_waits_for():
    """A's last resort comes after B has refused or the proxy has given up, so that two engines never both go on by
    their clocks."""
    commit, patience = TARGET.deadlines["prepared"].seconds, PROXY.deadlines["frozen"].seconds
    assert SOURCE.deadlines["frozen"].seconds < commit < patience
    assert commit + patience < SOURCE.deadlines["sent"].seconds == SOURCE.deadlines["committed"].seconds
    assert SOURCE.deadlines["committed"].seconds < TARGET.deadlines["parked"].seconds
    # Without leg one, giving up is the end of the answer: B gets all the time that it may need.
    assert commit + patience < PROXY.deadlines["orphaned"].seconds


def test_once_the_tail_is_sent_only_the_proxy_or_a_refusal_takes_it_back():
    back = {
        (state, event)
        for state in ("sent", "committed")
        for event in SOURCE.events
        if "unfreeze" in SOURCE.steps[state, event].actions
    }
    asked = {"commit_refused", "discarded", "discarded_ended"}
    assert {event for _, event in back} - {"timeout", "settled"} == asked
    assert ("committed", "commit_refused") not in back


def test_whatever_is_rolled_back_is_undone_on_all_three_sides():
    for (state, event), step in SOURCE.steps.items():
        if step.state in ("stayed", "finished") and state not in SOURCE.terminal():
            assert step.actions == ("unfreeze", "close_leg", "release"), (state, event)
    for (state, event), step in PROXY.steps.items():
        if step.state == "discarded" and state in ("two_legs", "frozen", "orphaned"):
            assert "close_leg_two" in step.actions, (state, event)
    for (state, event), step in TARGET.steps.items():
        if step.state == "ended" and state in ("parked", "prepared", "dropped"):
            assert "unpin" in step.actions, (state, event)


def test_b_frees_blocks_only_when_nobody_can_write_into_them():
    allowed = {"release", "commit", "commit_queued", "session_closed", "timeout"}
    assert {event for (_, event), step in TARGET.steps.items() if "unpin" in step.actions} <= allowed
    for (_, event), step in TARGET.steps.items():
        if "unpin" in step.actions and event in ("session_closed", "timeout"):
            assert step.actions.index("revoke") < step.actions.index("unpin")


def test_every_death_and_cancellation_reaches_the_sides_that_live_on():
    for raised in FAULTS.values():
        for name, events in raised.items():
            assert set(events) <= set(NAMES[name].events)
    for fault in ("A dies", "the proxy dies", "the operator aborts", "the control plane dies"):
        for state in ("parked", "prepared"):
            (event,) = FAULTS[fault]["B"]
            assert TARGET.steps[state, event].state in ("dropped", "ended"), f"B keeps a {state} request: {fault}"
    for fault in ("B dies", "the operator aborts", "the control plane dies"):
        for state in ("attaching", "copying", "frozen"):
            assert any(SOURCE.steps[state, event].state == "stayed" for event in FAULTS[fault]["A"])


def test_the_model_does_what_the_tables_say_and_nothing_else():
    for side, model in ((SOURCE, Source), (TARGET, Target), (PROXY, Proxy)):
        for action in {action for step in side.steps.values() for action in step.actions}:
            assert callable(getattr(model, f"_{action}", None)), f"the model's {side.name} cannot {action}"


def test_it_needs_neither_vllm_nor_django():
    code = "import sys, vllm_plugin.states; print(sorted({'vllm', 'torch', 'django'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_it_prints_itself():
    text = markdown()
    for side in SIDES:
        assert f"## {side.name}\n" in text
        assert all(f"| {state} |" in text for state in side.states)
        assert all(f"`{event}`" in text for event in side.events)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == sum(len(side.steps) + 1 for side in SIDES)
    assert all(len(row.replace("\\|", "").split("|")) == 8 for row in rows)
