"""How fast the tokens of one stream reach its client."""

from __future__ import annotations

import statistics
import time
from collections import deque

__all__ = ["Pace"]


class Pace:
    """When tokens reached the client; times in seconds on the monotonic clock."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.last_at: float | None = None
        self.switched_at = 0.0
        self._gaps: deque[float] = deque(maxlen=512)

    def event(self, tokens: int) -> None:
        now = time.monotonic()
        if self.last_at is not None:
            self._gaps.append((now - self.last_at) / max(tokens, 1))
        self.last_at = now

    def gap_ms(self) -> float:
        """Returns how long it is since the last token event, or since the switch if there was none."""
        since = self.switched_at if self.last_at is None else self.last_at
        return (time.monotonic() - since) * 1000

    def itl_ms(self) -> float:
        """Returns the median time between tokens so far, 0 if there were less than two."""
        return statistics.median(self._gaps) * 1000 if self._gaps else 0.0
