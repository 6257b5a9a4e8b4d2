"""When to stop copying and hand over: the three stop rules, as a pure function."""

from __future__ import annotations

import enum
from collections.abc import Sequence

__all__ = ["StopReason", "stop_reason"]


class StopReason(enum.StrEnum):
    MAX_ROUNDS = "max_rounds"
    STALLED = "stalled"
    SMALL_ENOUGH = "small_enough"
    NOT_REQUIRED = "not_required"


def stop_reason(
    blocks: Sequence[int], *, tn: int = 2, max_increments: int = 8, stall_rounds: int = 2
) -> StopReason | None:
    """Says whether the final round starts now.

    Args:
        blocks: blocks of each round so far over all requests that are not handed over yet. The first is the full
            transfer, the others are increments.
        tn: with 1 no increment is required.
        max_increments: rule 1, so many increments are enough.
        stall_rounds: rule 2, so many consecutive increments that are no smaller than the historical minimum before
            them, which the full transfer seeds. Counts only when at least `tn - 1` increments are done.

    Returns:
        The rule that stops the copying, or None: one more increment.
    """
    if not blocks:
        return None
    increments = blocks[1:]
    if tn <= 1:
        return StopReason.NOT_REQUIRED
    if increments and increments[-1] <= 1:
        return StopReason.SMALL_ENOUGH
    if len(increments) >= max_increments:
        return StopReason.MAX_ROUNDS
    minimum = blocks[0]
    stalled = 0
    for count in increments:
        if count >= minimum:
            stalled += 1
        else:
            stalled = 0
            minimum = count
    if stalled >= stall_rounds and len(increments) >= tn - 1:
        return StopReason.STALLED
    return None
