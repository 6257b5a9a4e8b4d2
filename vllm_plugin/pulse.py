"""When an engine's steps begin, and how one engine aims at the steps of another.

A commit is taken between two steps. One that comes just after a step has begun waits for all of it, and so does its
client: on a busy target that is the longest part of the gap.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

__all__ = ["Pulse", "TargetStep", "aim"]

#: Steps that tell how long the next one takes.
REMEMBERED = 7
#: Nothing ran for so long: the engine is idle, and takes a commit at once.
IDLE_S = 1.0
#: So many of A's own steps are looked at for a good moment: each later one only means one token more from A.
STEPS_AHEAD = 6
#: And no later than this: B keeps its promise of a run slot for two seconds, and the proxy its patience for three.
LONGEST_S = 0.8
#: Nobody knows steps better than so, as a share of the time until then: who comes late waits for a whole one.
ERROR = 0.06


@dataclass(frozen=True)
class TargetStep:
    """When B begins a step, on this side's clock, and how long its steps take; 0 when it is idle."""

    next: float
    step_s: float


class Pulse:
    """The steps of this engine. Written by the engine thread, read by others."""

    def __init__(self) -> None:
        self.last = 0.0
        self._lengths: deque[float] = deque(maxlen=REMEMBERED)

    def beat(self, now: float) -> None:
        """A step begins."""
        if now - self.last < IDLE_S:
            self._lengths.append(now - self.last)
        else:
            self._lengths.clear()
        self.last = now

    @property
    def step_s(self) -> float:
        """How long a step takes at the moment; 0 when the engine is idle or has only begun."""
        lengths = list(self._lengths)
        if len(lengths) < 2 or time.monotonic() - self.last > IDLE_S:
            return 0.0
        return statistics.median(lengths)


def aim(now: float, own_last: float, own_step_s: float, next_: float, step_s: float, lead_s: float) -> float:
    """When to ask for a freeze so that the commit meets the beginning of one of B's steps.

    The freeze comes with the first of A's steps to end after it was asked for, the commit `lead_s` later.

    Args:
        own_last: when A's running step began. own_step_s: how long A's steps take.
        next_: when B begins a step. step_s: how long B's steps take, 0 when it is idle.

    Returns:
        Seconds from now; 0 when there is nothing to gain.
    """
    if not own_step_s or not step_s:
        return 0.0
    running = max(0.0, own_step_s - (now - own_last) % own_step_s)
    waits = []
    for ahead in range(STEPS_AHEAD):
        away = running + ahead * own_step_s
        if not ahead or away <= LONGEST_S:
            margin = ERROR * away
            waits.append(((next_ - (now + away + lead_s + margin)) % step_s + margin, ahead))
    _, best = min(waits)
    return max(0.0, running + (best - 0.5) * own_step_s) if best else 0.0
