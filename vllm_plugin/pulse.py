"""When an engine's steps begin, and how one engine aims at the steps of another.

A commit is taken between two steps. One that comes just after a step has begun waits for all of it, and so does its
client: on a busy target that is the longest part of the gap.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

__all__ = ["Aim", "Pulse", "TargetStep", "aim", "hold_s"]

#: Steps that tell how long the next one takes.
REMEMBERED = 7
#: Nothing ran for so long: the engine is idle, and takes a commit at once.
IDLE_S = 1.0
#: So many of A's own steps are looked at for a good moment: each later one only means one token more from A.
STEPS_AHEAD = 6
#: And no later than this: B keeps its promise of a run slot for two seconds.
LONGEST_S = 1.4
#: Nobody knows steps better than so, as a share of the time until then: who comes late waits for a whole one.
ERROR = 0.08
#: B's own streams wait no longer than that for a commit that is about to come: seconds, or this share of a step.
HOLD_S, HOLD_SHARE = 0.02, 0.5


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


@dataclass(frozen=True)
class Aim:
    """Seconds from now: when to ask for a freeze, and when it will come; `ahead`: how many of A's steps begin until
    then."""

    sleep_s: float
    freeze_s: float
    ahead: int = 0


def hold_s(step_s: float) -> float:
    """How long a target lets its own requests wait between two steps for a commit that is about to come."""
    return max(HOLD_S, HOLD_SHARE * step_s)


def aim(now: float, own_last: float, own_step_s: float, next_: float, step_s: float, lead_s: float) -> Aim:
    """When to ask for a freeze so that the commit meets the beginning of one of B's steps.

    The freeze comes with the first of A's steps to end after it was asked for, the commit `lead_s` later.

    Args:
        own_last: when A's running step began. own_step_s: how long A's steps take, 0 when it is idle.
        next_: when B begins a step. step_s: how long B's steps take, 0 when it is idle.
    """
    running = max(0.0, own_step_s - (now - own_last) % own_step_s) if own_step_s else 0.0
    if not own_step_s or not step_s:
        return Aim(0.0, running)
    waits = []
    for ahead in range(STEPS_AHEAD):
        away = running + ahead * own_step_s
        if not ahead or away <= LONGEST_S:
            waits.append((_wait(next_ - (now + away + lead_s), step_s, ERROR * away), ahead))
    _, best = min(waits)
    return Aim(max(0.0, running + (best - 0.5) * own_step_s) if best else 0.0, running + best * own_step_s, best)


def _wait(early: float, step_s: float, margin: float) -> float:
    """How long a commit waits that comes `early` seconds, give or take `margin`, before the target's next step; others
    follow every `step_s`."""
    wait, hold = early % step_s, hold_s(step_s)
    if early < 0 and step_s - wait + margin <= hold:
        # A little late for a step that has not begun yet: the target waits for it.
        return 0.0
    if early > 0:
        wait = early
    return wait if margin - wait <= hold else wait + step_s
