"""How soon a thread of this process that has work gets the interpreter.

While vLLM's engine core and its workers wait for each other they spin without letting the interpreter go, and Python
makes them do so only after its switch interval: 5 ms by default, several times in one handover. A migration shortens
it for as long as it lasts.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["SWITCHING", "Switching"]

QUICK_S = 0.0002


class Switching:
    """Quick for as long as anybody holds it. One for a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[str] = set()
        self._usual = sys.getswitchinterval()

    def hold(self, holder: str) -> None:
        with self._lock:
            if not self._holders:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(QUICK_S)
            self._holders.add(holder)

    def release(self, holder: str) -> None:
        """Does nothing for somebody who does not hold it."""
        with self._lock:
            if holder in self._holders:
                self._holders.remove(holder)
                if not self._holders:
                    sys.setswitchinterval(self._usual)


SWITCHING = Switching()
