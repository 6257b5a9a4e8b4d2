"""How fast KV blocks are copied: a copier that never rests slows the decoding next to it."""

from __future__ import annotations

import math
import time

__all__ = ["CHUNK", "Pace", "brake"]

#: Bytes between two looks at the clock.
CHUNK = 4 * 1024 * 1024

#: A source that is slowed down writes at most this share of what the way carries: each round is half of the one before.
WRITTEN_SHARE = 0.5
#: Longest pause before a step: the engine answers nobody meanwhile.
LONGEST_PAUSE_S = 0.5


def brake(bytes_per_step: float, step_s: float, bytes_per_s: float) -> float:
    """How long a source pauses before each step so that its KV can be copied faster than it is written.

    Args:
        bytes_per_step: KV that one step writes. step_s: how long one takes without a pause.
        bytes_per_s: what the way carried.

    Returns:
        Seconds; 0 where it is slow enough as it is.
    """
    if bytes_per_s <= 0:
        return 0.0
    return min(LONGEST_PAUSE_S, max(0.0, bytes_per_step / (WRITTEN_SHARE * bytes_per_s) - step_s))


class Pace:
    """Keeps one transfer at `bytes_per_s` on average; infinite = as fast as it goes."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._started = time.monotonic()
        self._next = CHUNK

    def rest(self, done: int) -> None:
        """Sleeps if `done` bytes came too early."""
        if done < self._next or math.isinf(self._bytes_per_s):
            return
        self._next = done + CHUNK
        time.sleep(max(0.0, done / self._bytes_per_s - (time.monotonic() - self._started)))
