"""Byte views of one worker's KV cache: what transports read from and write into."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_plugin.rdma import Nixl
from vllm_plugin.side_stream import SideStream
from vllm_plugin.staged_memory import StagedMemory
from vllm_plugin.topology import Place
from vllm_plugin.wire import ProtocolError

__all__ = ["KVCache", "flat_bytes"]

PAGE = 4096


class KVCache:
    """This worker's KV cache, by layer name, or the part of each block that one other worker has to do with (`cut`).

    Each tensor has the logical shape [blocks, kv_heads, block_size, 2 * head_size] (vLLM RFC #42082) and one block
    of it is contiguous, so a range of heads of a block is too. "Wire order" everywhere: for each layer in name order,
    each block in list order.

    Attributes:
        bytes_per_layer: bytes of one block in each layer, in wire order; in a part of the cache, of that part.
        block_bytes: bytes of one block over all layers.
        strides: bytes from one block to the next in each layer.
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
            if self.on_host and not tensor.is_contiguous():
                raise ValueError(f"KV blocks of layer {name} do not follow each other (strides {tensor.stride()})")
        self.bytes_per_layer = [tensor[0].numel() * tensor.element_size() for tensor in self._tensors]
        self.strides = [tensor.stride(0) * tensor.element_size() for tensor in self._tensors]
        self.block_bytes: int = sum(self.bytes_per_layer)
        self.num_blocks = min((tensor.shape[0] for tensor in self._tensors), default=0)
        # Flat uint8 arrays over the tensors' own memory: slicing one gives a buffer that sockets read and write
        # directly.
        self._flat = [flat_bytes(tensor) for tensor in self._tensors] if self.on_host else []
        self._offsets = [0] * len(self._tensors)
        self._whole: KVCache | None = None
        #: Blocks beside the cache, with ids of their own; only where the cache is in host memory.
        self.staged = StagedMemory(self.num_blocks + 1, 0, self.bytes_per_layer)

    def cut(self, places: Sequence[Place]) -> KVCache:
        """The same cache as far as these places of each block go, in their order; without places, all of it.

        Raises:
            ProtocolError: `bad_cut` when a place lies outside a block, or between two numbers.
        """
        if not places:
            return self
        part = copy.copy(self)
        part._whole = self._whole or self
        for layer, offset, size in places:
            if not 0 <= layer < len(self._tensors) or offset < 0 or size <= 0:
                raise ProtocolError("bad_cut", f"there is no place ({layer}, {offset}, {size}) in a block")
            if offset + size > self.bytes_per_layer[layer]:
                raise ProtocolError("bad_cut", f"a block of layer {layer} has {self.bytes_per_layer[layer]} bytes")
            if offset % self._tensors[layer].element_size() or size % self._tensors[layer].element_size():
                raise ProtocolError("bad_cut", f"({layer}, {offset}, {size}) cuts a number in two")
        chosen = [layer for layer, _, _ in places]
        for name in ("names", "_tensors", "strides", *(["_flat"] if self.on_host else [])):
            setattr(part, name, [getattr(self, name)[layer] for layer in chosen])
        part._offsets = [self._offsets[layer] + offset for layer, offset, _ in places]
        part.bytes_per_layer = [size for _, _, size in places]
        part.block_bytes = sum(part.bytes_per_layer)
        part.staged = self.staged.cut(places)
        for cached in ("rows", "_numbers", "nixl", "_beside"):
            part.__dict__.pop(cached, None)
        return part

    @cached_property
    def nixl(self) -> Nixl:
        """The agent that lets others read these tensors. Raises: ProtocolError `transport_unavailable`."""
        return self._whole.nixl if self._whole is not None else Nixl(self._tensors)

    @cached_property
    def _beside(self) -> SideStream:
        return self._whole._beside if self._whole is not None else SideStream(self._tensors[0].device)

    @cached_property
    def rows(self) -> list[torch.Tensor]:
        """Each layer as uint8 [blocks, bytes of a block], over its own memory."""
        return [
            tensor.view(torch.uint8).view(tensor.shape[0], -1)[:, offset : offset + size]
            for tensor, offset, size in zip(self._tensors, self._offsets, self.bytes_per_layer, strict=True)
        ]

    @cached_property
    def _numbers(self) -> list[torch.Tensor]:
        """Each layer as [blocks, numbers of a block], over its own memory."""
        numbers = []
        for tensor, offset, size in zip(self._tensors, self._offsets, self.bytes_per_layer, strict=True):
            one = tensor.element_size()
            numbers.append(tensor.view(tensor.shape[0], -1)[:, offset // one : (offset + size) // one])
        return numbers

    @property
    def heads(self) -> list[int]:
        """KV heads of each layer; a cache without heads is one."""
        return [tensor.shape[1] if tensor.dim() == 4 else 1 for tensor in self._tensors]

    def shape(self) -> list[int]:
        return list(self._tensors[0].shape[1:]) if self._tensors else []

    @property
    def addresses(self) -> list[int]:
        """Where block 0 of each layer lies in this process's memory."""
        return [tensor.data_ptr() + offset for tensor, offset in zip(self._tensors, self._offsets, strict=True)]

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
        """Writable views in wire order; neighbouring whole blocks of a layer are one view. Host memory only."""
        views = []
        runs = _runs(blocks)
        for layer, (flat, stride, offset, size) in enumerate(
            zip(self._flat, self.strides, self._offsets, self.bytes_per_layer, strict=True)
        ):
            for start, end in runs if size == stride else [(block, block + 1) for block in blocks]:
                first = start * stride + offset
                if self.staged.has(start):
                    views.append(self.staged.piece(layer, start, end))
                else:
                    views.append(memoryview(flat[first : first + (end - start - 1) * stride + size]))
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
            gathered = [layer[index.to(layer.device)].contiguous().cpu() for layer in self._numbers]
        return [memoryview(flat_bytes(tensor)) for tensor in gathered]

    def scatter(self, blocks: list[int], staged: list[torch.Tensor]) -> None:
        """Copies blocks from host memory into a device cache; `staged` as `staging()` made it."""
        with self._beside.run():
            for layer, source in zip(self._numbers, staged, strict=True):
                index = torch.tensor(blocks, device=layer.device)
                layer.index_copy_(0, index, source.to(layer.device))

    def staging(self, count: int) -> list[torch.Tensor]:
        return [torch.empty((count, layer.shape[1]), dtype=layer.dtype) for layer in self._numbers]


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
