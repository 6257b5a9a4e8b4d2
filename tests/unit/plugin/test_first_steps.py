"""When requests that have just been handed over step alone, and who waits for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_plugin.first_steps import NEVER, StepCosts, held


def costs(**seconds: float) -> StepCosts:
    """Steps seen: n4=0.1 means that one with four requests took 0.1 s."""
    known = StepCosts()
    for size, took in seconds.items():
        known.note(int(size.removeprefix("n")), took)
    return known


def test_nothing_is_expected_from_one_size():
    assert costs(n4=0.1).expected(4) == pytest.approx(0.1)
    assert costs(n4=0.1).expected(8) is None
    assert costs().expected(1) is None


def test_others_sizes_lie_on_the_line():
    assert costs(n4=0.1, n8=0.18).expected(16) == pytest.approx(0.34)
    assert costs(n4=0.1, n8=0.18).expected(2) == pytest.approx(0.06)


def test_a_line_that_goes_too_low_is_not_believed():
    assert costs(n4=0.01, n8=0.2).expected(2) == pytest.approx(0.005)
    assert costs(n4=0.2, n8=0.1).expected(40) == pytest.approx(0.1)


def test_only_the_last_steps_count():
    known = costs(n4=9.0, n8=0.2)
    for _ in range(5):
        known.note(4, 0.1)
    assert known.expected(4) == pytest.approx(0.1)


def test_a_step_of_a_cold_engine_does_not_bend_the_line():
    assert costs(n1=3.0, n4=0.1, n8=0.18, n12=0.26, n16=0.34).expected(32) == pytest.approx(0.66)


def test_sizes_that_were_not_seen_for_long_are_forgotten():
    known = costs(n100=2.0)
    for size in range(1, 20):
        known.note(size, 0.02 * size)
    assert 100 not in known._seconds


@pytest.mark.parametrize(
    ("arrived", "others", "alone"),
    [
        (4, 28, True),
        (4, 5, False),  # They would lose more than 80 % of a step.
        (4, 0, False),
        (0, 28, False),
    ],
)
def test_few_step_alone_before_many(arrived: int, others: int, alone: bool):
    assert costs(n4=0.13, n12=0.33).alone(arrived, others) is alone


def test_where_a_step_costs_the_same_for_many_nobody_waits():
    assert not costs(n4=0.02, n64=0.022).alone(4, 60)


def test_what_is_not_known_is_not_tried():
    assert not costs(n28=0.8).alone(4, 28)


def test_held_requests_are_skipped_and_come_back():
    requests = [SimpleNamespace(next_decode_eligible_step=0), SimpleNamespace(next_decode_eligible_step=7)]
    with pytest.raises(RuntimeError, match="as the scheduler might"), held(requests):
        assert [request.next_decode_eligible_step for request in requests] == [NEVER, NEVER]
        raise RuntimeError("as the scheduler might")
    assert [request.next_decode_eligible_step for request in requests] == [0, 7]
