"""The first step of requests that have just been handed over.

On hardware where a step takes longer the more requests it has (CPUs, small models), one that is added to thirty others
waits for all of them. It may step alone first, as long as the others lose little by it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

__all__ = ["NEVER", "StepCosts", "held"]

#: A step number that the scheduler never reaches: a request with it is skipped (v1/core/sched/scheduler.py,
#: `schedule`).
NEVER = 1 << 60

#: Steps that tell what one with so many requests costs, and sizes that are remembered: those seen last.
REMEMBERED, SIZES = 5, 16
#: The others lose at most this share of one of their own steps, what they have waited for a commit included.
SHARE = 0.8


class StepCosts:
    """What steps took in which every request generated, by how many requests they had. Written by the engine thread,
    read by others."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def note(self, requests: int, seconds: float) -> None:
        took = self._seconds.pop(requests, deque(maxlen=REMEMBERED))
        took.append(seconds)
        self._seconds[requests] = took
        if len(self._seconds) > SIZES:
            del self._seconds[next(iter(self._seconds))]

    def expected(self, requests: int) -> float | None:
        """Returns seconds, along the line through what was seen; None while only one size was."""
        seen = {size: statistics.median(list(seconds)) for size, seconds in list(self._seconds.items())}
        if requests in seen:
            return seen[requests]
        if len(seen) < 2:
            return None
        # Theil and Sen's line: one size that was only seen while the engine was cold does not bend it.
        slope = statistics.median((two - one) / (n - m) for (m, one), (n, two) in combinations(seen.items(), 2))
        base = statistics.median(took - slope * size for size, took in seen.items())
        nearest = min(seen, key=lambda size: abs(size - requests))
        # Where the line goes too low: a step of fewer is no cheaper than their share of a larger one.
        return max(base + slope * requests, seen[nearest] * min(1.0, requests / nearest))

    def alone(self, arrived: int, others: int, waited_s: float = 0.0) -> bool:
        """Whether a step of those that have arrived costs the others little; they have waited `waited_s` already."""
        if not arrived or not others:
            return False
        few, many = self.expected(arrived), self.expected(others)
        return few is not None and many is not None and few + waited_s <= SHARE * many


@contextmanager
def held(requests: Sequence[Any]) -> Iterator[None]:
    """Lets the scheduler skip running requests for one `schedule`."""
    before = [request.next_decode_eligible_step for request in requests]
    for request in requests:
        request.next_decode_eligible_step = NEVER
    try:
        yield
    finally:
        for request, step in zip(requests, before, strict=True):
            request.next_decode_eligible_step = step
