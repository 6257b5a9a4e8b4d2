"""Copies on a GPU beside the stream that decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SideStream"]


class SideStream:
    """A stream of its own on `device`, so that no step waits for a copy; on a CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def run(self) -> Iterator[None]:
        """What is started inside has ended when this does."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
