"""KV blocks from one process's GPU memory into another's on the same host, without a way through host memory.

As with `vllm_plugin.memory` the receiver reads: the source hands out handles of its layers, the target maps them and
copies on a stream of its own, beside the one that decodes. The handles are torch's
(torch/multiprocessing/reductions.py): legacy ones for what came from `cudaMalloc`, file descriptors for expandable
segments. Memory of other allocators, such as the pool of vLLM's sleep mode, cannot be handed out; then it says so, and
blocks go another way.

Not run on a GPU so far: there was none. What does not need one is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_plugin.data_messages import SharedLayer
from vllm_plugin.side_stream import SideStream
from vllm_plugin.wire import ProtocolError

__all__ = ["Mapped", "export", "gpu_of", "mapped_layers"]


def gpu_of(tensor: torch.Tensor) -> str:
    """The GPU's own id: processes may number their devices differently."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def export(rows: Sequence[torch.Tensor]) -> list[SharedLayer]:
    """Handles by which another process on this host can map these layers.

    Args:
        rows: of each layer, uint8 [blocks, bytes of a block]; the rows of a part of a layer lie further apart.

    Raises:
        ProtocolError: `transport_unavailable`, with what the allocator says.
    """
    try:
        return [_share(layer) for layer in rows]
    except RuntimeError as error:
        raise ProtocolError("transport_unavailable", f"GPU memory cannot be shared: {_first_line(error)}") from error


def _share(layer: torch.Tensor) -> SharedLayer:
    storage: Any = layer.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, event_required = storage._share_cuda_()
    return SharedLayer(
        blocks=layer.shape[0],
        start=layer.storage_offset(),
        handle=bytes(handle),
        size=size,
        offset=offset,
        counter=bytes(counter),
        counter_offset=counter_offset,
        event=bytes(event),
        event_required=event_required,
    )


def mapped_layers(
    gpu: str, layers: Sequence[SharedLayer], sizes: Sequence[int], strides: Sequence[int]
) -> list[torch.Tensor]:
    """Maps another process's layers: uint8 [blocks, bytes of a block] each.

    Args:
        gpu: where they lie (`gpu_of`). sizes: bytes of one block of each. strides: from one block to the next.

    Raises:
        ProtocolError: `transport_unavailable`; `size_mismatch` for another number of layers.
    """
    if not len(layers) == len(sizes) == len(strides):
        raise ProtocolError("size_mismatch", f"{len(layers)} layers were shared, {len(sizes)} are needed")
    indexes = [index for index in range(torch.cuda.device_count()) if _uuid(index) == gpu]
    if not indexes:
        raise ProtocolError("transport_unavailable", "the source's GPU is not visible to the target")
    try:
        return [_map(indexes[0], *layer) for layer in zip(layers, sizes, strides, strict=True)]
    except RuntimeError as error:
        text = f"the source's GPU memory cannot be mapped: {_first_line(error)}"
        raise ProtocolError("transport_unavailable", text) from error


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _map(device: int, layer: SharedLayer, size: int, stride: int) -> torch.Tensor:
    torch.cuda.init()
    storages: Any = torch.UntypedStorage
    storage = storages._new_shared_cuda(
        *(device, layer.handle, layer.size, layer.offset),
        *(layer.counter, layer.counter_offset, layer.event, layer.event_required),
    )
    if layer.start + (layer.blocks - 1) * stride + size > storage.nbytes():
        raise RuntimeError("the layer is larger than the memory that was shared")
    whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return whole.set_(storage, layer.start, (layer.blocks, size), (stride, 1))


class Mapped:
    """Another worker's KV cache as it is seen from this one.

    Args:
        theirs, ours: layers in wire order, uint8 [blocks, bytes of a block].
    """

    def __init__(self, theirs: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> None:
        self._theirs, self._ours = theirs, ours
        self._blocks = min(layer.shape[0] for layer in theirs)
        self._beside = SideStream(ours[0].device)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Returns when the blocks are in place.

        Raises:
            ProtocolError: `bad_block`, before anything is copied; `source_unreadable`.
        """
        self._check(source)
        with self._errors(), self._beside.run():
            for theirs, ours in zip(self._theirs, self._ours, strict=True):
                index = torch.tensor(target, device=ours.device)
                ours.index_copy_(0, index, self._gathered(theirs, source).to(ours.device))

    def take(self, source: Sequence[int]) -> None:
        """Copies blocks to nowhere, for a measurement."""
        self._check(source)
        with self._errors(), self._beside.run():
            for theirs, ours in zip(self._theirs, self._ours, strict=True):
                self._gathered(theirs, source).to(ours.device)

    def _check(self, source: Sequence[int]) -> None:
        # An index that is out of range would end the whole CUDA context, and with it the engine.
        if any(not 0 < block < self._blocks for block in source):
            raise ProtocolError("bad_block", f"the source has blocks 1 to {self._blocks - 1}")

    @staticmethod
    def _gathered(layer: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        return layer.index_select(0, torch.tensor(blocks, device=layer.device))

    @staticmethod
    @contextmanager
    def _errors() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ProtocolError("source_unreadable", _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
