"""A child that ends when its parent is gone, however that went (Linux; elsewhere nothing happens)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

__all__ = ["end_with"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with(parent: int) -> Callable[[], None]:
    """To be run in the child before its program starts: it gets SIGTERM when process `parent` is gone."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return prepare
