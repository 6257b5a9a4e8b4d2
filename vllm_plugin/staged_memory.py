"""A worker's share of the host memory in which KV blocks wait for room (staging.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["StagedMemory"]


class StagedMemory:
    """Room for `count` blocks with the ids `first` to `first` + `count` - 1, laid out layer by layer like the cache
    (`sizes`: bytes of one block in each layer). The kernel gives the memory when it is first written."""

    def __init__(self, first: int, count: int, sizes: Sequence[int]) -> None:
        self.first = first
        self.count = count
        self._sizes = list(sizes)
        self._layers = [np.empty(count * size, np.uint8) for size in sizes]

    def has(self, block: int) -> bool:
        return self.first <= block < self.first + self.count

    @property
    def addresses(self) -> list[int]:
        """Where each layer's block 0 would lie: ids count from there, as in the cache."""
        pairs = zip(self._layers, self._sizes, strict=True)
        return [int(layer.ctypes.data) - self.first * size for layer, size in pairs]

    def piece(self, layer: int, start: int, end: int) -> memoryview:
        """The bytes of blocks `start` to `end` - 1 of one layer."""
        size: int = self._sizes[layer]
        flat: Any = self._layers[layer]
        return memoryview(flat[(start - self.first) * size : (end - self.first) * size])
