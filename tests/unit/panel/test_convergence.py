"""The three stop rules, row by row."""

from __future__ import annotations

import pytest

from migrations_app.convergence import StopReason, stop_reason

MAX, STALLED, SMALL = StopReason.MAX_ROUNDS, StopReason.STALLED, StopReason.SMALL_ENOUGH


@pytest.mark.parametrize(
    ("blocks", "tn", "expected"),
    [
        # Nothing sent yet, or only the full transfer.
        ([], 2, None),
        ([100], 2, None),
        ([0], 2, None),
        # With tn = 1 no increment is required.
        ([100], 1, StopReason.NOT_REQUIRED),
        # Rule 3, whatever tn says.
        ([100, 1], 2, SMALL),
        ([100, 0], 9, SMALL),
        ([100, 2], 2, None),
        # Rule 1: eight increments, the full transfer does not count.
        ([100, 90, 80, 70, 60, 50, 40, 30], 2, None),
        ([100, 90, 80, 70, 60, 50, 40, 30, 20], 2, MAX),
        # Rule 2: two in a row that are no smaller than the minimum so far.
        ([100, 100], 2, None),
        ([100, 100, 100], 2, STALLED),
        ([100, 50, 50, 50], 2, STALLED),
        ([100, 50, 60, 70], 2, STALLED),
        # The minimum is the historical one, not the one before.
        ([100, 50, 60, 55], 2, STALLED),
        # A smaller one in between starts the count afresh.
        ([100, 50, 60, 40, 60], 2, None),
        ([100, 50, 60, 40, 40, 40], 2, STALLED),
        # The full transfer seeds the minimum.
        ([10, 12, 11], 2, STALLED),
        # Rule 2 waits for tn - 1 increments.
        ([100, 100, 100], 4, None),
        ([100, 100, 100, 100], 4, STALLED),
    ],
)
def test_stop_rules(blocks: list[int], tn: int, expected: StopReason | None) -> None:
    assert stop_reason(blocks, tn=tn) == expected


def test_limits_can_be_set() -> None:
    assert stop_reason([100, 90, 80], max_increments=2) == MAX
    assert stop_reason([100, 100], stall_rounds=1) == STALLED
    assert stop_reason([100, 100, 100], stall_rounds=3) is None
