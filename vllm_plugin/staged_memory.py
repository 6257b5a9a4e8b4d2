"""A worker's share of the host memory in which KV blocks wait for room (staging.py)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_plugin.topology import Place

__all__ = ["StagedMemory"]


class StagedMemory:
    """Room for `count` blocks with the ids `first` to `first` + `count` - 1, laid out layer by layer like the cache
    (`sizes`: bytes of one block in each layer). The kernel gives the memory when it is first written."""

    def __init__(self, first: int, count: int, sizes: Sequence[int]) -> None:
        self.first = first
        self.count = count
        self._sizes = list(sizes)
        self._strides = list(sizes)
        self._offsets = [0] * len(self._sizes)
        self._layers = [np.empty(count * size, np.uint8) for size in sizes]

    def cut(self, places: Sequence[Place]) -> StagedMemory:
        """The same memory as far as these places of each block go, in their order (`KVCache.cut`)."""
        part = copy.copy(self)
        chosen = [layer for layer, _, _ in places]
        for name in ("_layers", "_strides"):
            setattr(part, name, [getattr(self, name)[layer] for layer in chosen])
        part._offsets = [self._offsets[layer] + offset for layer, offset, _ in places]
        part._sizes = [size for _, _, size in places]
        return part

    def has(self, block: int) -> bool:
        return self.first <= block < self.first + self.count

    @property
    def addresses(self) -> list[int]:
        """Where each layer's block 0 would lie: ids count from there, as in the cache."""
        layers = zip(self._layers, self._offsets, self._strides, strict=True)
        return [int(layer.ctypes.data) + offset - self.first * stride for layer, offset, stride in layers]

    def piece(self, layer: int, start: int, end: int) -> memoryview:
        """The bytes of blocks `start` to `end` - 1 of one layer: several only where a block is one piece."""
        stride = self._strides[layer]
        flat: Any = self._layers[layer]
        place = (start - self.first) * stride + self._offsets[layer]
        return memoryview(flat[place : place + (end - start - 1) * stride + self._sizes[layer]])
