"""Aiming at the steps of another engine."""

from __future__ import annotations

import pytest

from vllm_plugin.pulse import ERROR, LONGEST_S, STEPS_AHEAD, Aim, Pulse, aim, hold_s


def wasted(asked: float, own_last: float, own: float, next_: float, step: float, lead: float) -> float:
    """How long a commit waits at B when the freeze is asked for then (now is 100); a step that would be met too
    narrowly counts as missed."""
    ends = own_last + own
    while ends < asked:
        ends += own
    early, margin = next_ - (ends + lead), ERROR * (ends - 100.0)
    wait = early if early > 0 else early % step
    if early < 0 and step - wait + margin <= hold_s(step):
        return 0.0
    return wait + step if margin - wait > hold_s(step) else wait


@pytest.mark.parametrize("own", [0.03, 0.045, 0.05])
@pytest.mark.parametrize("step", [0.02, 0.031, 0.05])
@pytest.mark.parametrize("phase", [0.0013, 0.0077, 0.0131, 0.0243])
def test_no_moment_in_the_next_steps_is_better(own: float, step: float, phase: float) -> None:
    now, lead = 100.0, 0.006
    own_last, next_ = now - 0.4 * own, now + phase
    found = aim(now, own_last, own, next_, step, lead)
    cost = wasted(now + found.sleep_s, own_last, own, next_, step, lead)
    others = [wasted(now + ahead * own, own_last, own, next_, step, lead) for ahead in range(STEPS_AHEAD)]
    assert cost <= min(others) + 1e-9
    assert 0 <= found.sleep_s < STEPS_AHEAD * own


@pytest.mark.parametrize("own", [0.1, 0.3, 0.6, 2.0])
@pytest.mark.parametrize("phase", [0.01, 0.2, 0.5])
def test_slow_steps_do_not_use_up_the_promise_of_a_run_slot(own: float, phase: float) -> None:
    assert 0 <= aim(100.0, 100.0 - 0.4 * own, own, 100.0 + phase, 0.7, 0.006).sleep_s <= LONGEST_S


def test_nothing_to_aim_at() -> None:
    assert aim(10.0, 9.99, 0.03, 10.01, 0.0, 0.005) == Aim(0.0, pytest.approx(0.02))
    assert aim(10.0, 9.99, 0.0, 10.01, 0.03, 0.005) == Aim(0.0, 0.0)


def test_a_target_waits_for_what_comes_a_little_late() -> None:
    # A's steps end in 0.2, 0.6 s; B's begin in 0.1, 0.5 s: 0.1 s after each, which B waits.
    assert aim(100.0, 99.8, 0.4, 100.1, 0.4, 0.0) == Aim(0.0, pytest.approx(0.2))
    assert hold_s(0.4) == pytest.approx(0.2)
    assert hold_s(0.01) == pytest.approx(0.02)


def test_a_step_that_has_begun_waits_for_nothing() -> None:
    # B has begun one just now. A's next ends 0.05 s later, those after it 0.05 s after one of B's has begun: B waits.
    assert aim(100.0, 99.85, 0.2, 100.2, 0.2, 0.0) == Aim(pytest.approx(0.15), pytest.approx(0.25), 1)


def test_the_length_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("vllm_plugin.pulse.time.monotonic", lambda: now)
    pulse = Pulse()
    assert pulse.step_s == 0.0
    for length in (0.0, 0.04, 0.04, 0.4, 0.05):
        now += length
        pulse.beat(now)
    assert pulse.step_s == pytest.approx(0.045)
    now += 1.5
    assert pulse.step_s == 0.0
    pulse.beat(now)
    assert pulse.step_s == 0.0
