"""How fast KV blocks are copied: a copier that never rests slows the decoding next to it."""

from __future__ import annotations

import math
import time

__all__ = ["CHUNK", "Pace"]

#: Bytes between two looks at the clock.
CHUNK = 4 * 1024 * 1024


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
