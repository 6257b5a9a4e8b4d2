"""Byte views of one worker's KV cache: what transports read from and write into."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_plugin.rdma import Nixl
from vllm_plugin.side_stream import SideStream
from vllm_plugin.staged_memory import StagedMemory
from vllm_plugin.wire import ProtocolError

__all__ = ["KVCache", "flat_bytes"]

PAGE = 4096


class KVCache:
    """This worker's KV cache, by layer name.

    Each tensor has the logical shape [blocks, kv_heads, block_size, 2 * head_size] (vLLM RFC #42082) and one block
    of it is contiguous. "Wire order" everywhere: for each layer in name order, each block in list order.

    Attributes:
        bytes_per_layer: bytes of one block in each layer, in wire order.
        block_bytes: bytes of one block over all layers.
        device: kind of memory that the tensors lie in, as torch names it; `on_host`: host memory.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor]) -> None:
        self.names = sorted(layers)
        self._tensors = [layers[name] for name in self.names]
        kinds = {tensor.device.type for tensor in self._tensors}
        self.device = kinds.pop() if len(kinds) == 1 else "cpu"
        self.on_host = self.device == "cpu"
        for name, tensor in zip(self.names, self._tensors, strict=True):
            if not tensor[0].is_contiguous():
                raise ValueError(f"KV blocks of layer {name} are not contiguous (strides {tensor.stride()})")
        self.bytes_per_layer = [tensor[0].numel() * tensor.element_size() for tensor in self._tensors]
        self.block_bytes: int = sum(self.bytes_per_layer)
        self.num_blocks = min((tensor.shape[0] for tensor in self._tensors), default=0)
        # Flat uint8 arrays over the tensors' own memory: slicing one gives a buffer that sockets read and write
        # directly.
        self._flat = [flat_bytes(tensor) for tensor in self._tensors] if self.on_host else []
        #: Blocks beside the cache, with ids of their own; only where the cache is in host memory.
        self.staged = StagedMemory(self.num_blocks + 1, 0, self.bytes_per_layer)

    @cached_property
    def nixl(self) -> Nixl:
        """The agent that lets others read these tensors. Raises: ProtocolError `transport_unavailable`."""
        return Nixl(self._tensors)

    @cached_property
    def _beside(self) -> SideStream:
        return SideStream(self._tensors[0].device)

    @cached_property
    def rows(self) -> list[torch.Tensor]:
        """Each layer as uint8 [blocks, bytes of a block], over its own memory."""
        return [tensor.view(torch.uint8).view(tensor.shape[0], -1) for tensor in self._tensors]

    def shape(self) -> list[int]:
        return list(self._tensors[0].shape[1:]) if self._tensors else []

    @property
    def addresses(self) -> list[int]:
        """Where block 0 of each layer lies in this process's memory."""
        return [tensor.data_ptr() for tensor in self._tensors]

    def addresses_for(self, blocks: list[int]) -> list[int]:
        """The same for these blocks: all in the cache, or all staged, as `check` makes sure."""
        return self.staged.addresses if blocks and self.staged.has(blocks[0]) else self.addresses

    def stage(self, count: int) -> int:
        """Makes room for so many staged blocks; returns the id of the first."""
        # There is a gap between the ids, so that blocks of the cache and staged ones are never neighbours.
        self.staged = StagedMemory(self.num_blocks + 1, count if self.on_host else 0, self.bytes_per_layer)
        return self.staged.first

    def unstage(self, moves: list[tuple[int, int]]) -> None:
        """Copies staged blocks into the cache: (staged id, block id)."""
        for staged, block in moves:
            for source, target in zip(self.buffers([staged]), self.buffers([block]), strict=True):
                target[:] = source

    def check(self, blocks: list[int]) -> None:
        """Raises: ProtocolError `bad_block` when a block id lies outside the cache. Block 0 is vLLM's null block."""
        if blocks and all(self.staged.has(block) for block in blocks):
            return
        if any(not 0 < block < self.num_blocks for block in blocks):
            raise ProtocolError("bad_block", f"block ids must lie between 1 and {self.num_blocks - 1}")

    def buffers(self, blocks: list[int]) -> list[memoryview]:
        """Writable views in wire order; neighbouring blocks of a layer are one view. Host memory only."""
        views = []
        for layer, (flat, size) in enumerate(zip(self._flat, self.bytes_per_layer, strict=True)):
            for start, end in _runs(blocks):
                staged = self.staged.has(start)
                piece = self.staged.piece(layer, start, end) if staged else memoryview(flat[start * size : end * size])
                views.append(piece)
        return views

    def touch(self) -> None:
        """Makes the kernel give every page now, and not while a client waits: host memory is given at the first write,
        and in a virtual machine that can take seconds for a gigabyte. Only before the first request."""
        for flat in self._flat:
            pages = flat[::PAGE]
            pages[:] = pages.copy()

    def read(self, block: int) -> Any:
        """A copy of one block's bytes, in wire order. Host memory only."""
        return np.concatenate([np.frombuffer(view, np.uint8) for view in self.buffers([block])])

    def write(self, block: int, content: Any) -> None:
        """Puts the bytes of one block, in wire order, into their places. Host memory only."""
        place = 0
        for view in self.buffers([block]):
            view[:] = memoryview(content[place : place + len(view)])
            place += len(view)

    def gather(self, blocks: list[int]) -> list[memoryview]:
        """Copies blocks of a device cache into host memory, in wire order."""
        index = torch.tensor(blocks)
        with self._beside.run():
            gathered = [tensor[index.to(tensor.device)].contiguous().cpu() for tensor in self._tensors]
        return [memoryview(flat_bytes(tensor)) for tensor in gathered]

    def scatter(self, blocks: list[int], staged: list[torch.Tensor]) -> None:
        """Copies blocks from host memory into a device cache; `staged` as `staging()` made it."""
        with self._beside.run():
            for tensor, source in zip(self._tensors, staged, strict=True):
                index = torch.tensor(blocks, device=tensor.device)
                tensor.index_copy_(0, index, source.to(tensor.device))

    def staging(self, count: int) -> list[torch.Tensor]:
        return [torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in self._tensors]


def flat_bytes(tensor: torch.Tensor) -> Any:
    """The tensor's own memory as a one-dimensional array of bytes."""
    return tensor.view(torch.uint8).reshape(-1).numpy()


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """[4, 5, 9] -> [(4, 6), (9, 10)]: half-open runs of neighbours, in list order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
