"""The way between GPUs of one host, as far as it goes without one: what is agreed, what is copied, and what is said
when it cannot be had. CPU tensors stand for mapped GPU memory; the handles themselves need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.plugin.test_data import LAYERS, Side
from vllm_plugin import cuda_ipc
from vllm_plugin.cuda_ipc import Mapped
from vllm_plugin.data_messages import Probe, Probed, SharedLayer
from vllm_plugin.wire import ProtocolError

#: What the fixture below replaces.
EXPORT, MAPPED_LAYERS = cuda_ipc.export, cuda_ipc.mapped_layers
#: Layers that have been handed out, by handle.
_SHARED: dict[bytes, torch.Tensor] = {}


def on_gpu(side: Side) -> Side:
    """Says of a worker's cache that it lies on a GPU."""
    side.server._cache.device, side.server._cache.on_host = "cuda", False
    return side


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(rows: list[torch.Tensor]) -> list[SharedLayer]:
        shared = []
        for layer in rows:
            handle = f"layer-{len(_SHARED)}".encode()
            _SHARED[handle] = layer
            shared.append(SharedLayer(layer.shape[0], 0, handle, layer.numel(), 0, b"", 0, b"", False))
        return shared

    def mapped_layers(gpu: str, layers: list[SharedLayer], sizes: list[int], strides: list[int]) -> list[torch.Tensor]:
        assert gpu == "GPU-0"
        mapped = [_SHARED[layer.handle] for layer in layers]
        assert [layer.shape[1] for layer in mapped] == sizes and [layer.stride(0) for layer in mapped] == strides
        return mapped

    monkeypatch.setattr(cuda_ipc, "gpu_of", lambda _: "GPU-0")
    monkeypatch.setattr(cuda_ipc, "export", export)
    monkeypatch.setattr(cuda_ipc, "mapped_layers", mapped_layers)


def pair(first: str = "", second: str = "") -> tuple[Side, Side]:
    a, b = on_gpu(Side(1.0, first)), on_gpu(Side(-1.0, second))
    b.allow("s")
    for index in range(12):
        for offset, name in enumerate(LAYERS):
            a.layers[name][index] = index + offset / 2
    return a, b


def test_blocks_of_gpus_on_one_host_are_read_there():
    a, b = pair()
    pushed = a.push(b, [2, 3, 7], [5, 9, 1])
    assert (pushed.ok, pushed.transport, pushed.sent_bytes) == (True, "cuda_ipc", 3 * b.server._cache.block_bytes)
    for name in LAYERS:
        assert torch.equal(b.layers[name][[5, 9, 1]], a.layers[name][[2, 3, 7]])
        assert (b.layers[name][[0, 2, 3, 4, 6, 7, 8, 10, 11]] == -1.0).all()
    probed = a.ask(lambda call: Probe(call, "127.0.0.1", b.server.port))
    assert isinstance(probed, Probed) and (probed.transport, probed.reason) == ("cuda_ipc", "")


@pytest.mark.parametrize("backends", [("tcp", ""), ("", "tcp"), ("tcp_shm", "")])
def test_who_asks_for_another_way_gets_it(backends: tuple[str, str]):
    a, b = pair(*backends)
    pushed = a.push(b, [2], [5])
    assert (pushed.ok, pushed.transport) == (True, "tcp")
    assert "VLLM_HI_TRANSFER_BACKEND" in a.sender.reason
    assert torch.equal(b.layers[LAYERS[1]][5], a.layers[LAYERS[1]][2])


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("side", ["export", "mapped_layers"])
def test_memory_that_cannot_be_shared(side: str, asked: bool, monkeypatch: pytest.MonkeyPatch):
    def impossible(*_: Any) -> Any:
        raise ProtocolError("transport_unavailable", "invalid argument")

    monkeypatch.setattr(cuda_ipc, side, impossible)
    a, b = pair("cuda_ipc" if asked else "")
    pushed = a.push(b, [2], [5])
    if asked:
        # Somebody wants just this: nothing else is taken instead.
        assert not pushed.ok and "invalid argument" in pushed.message
        assert (b.layers[LAYERS[0]][5] == -1.0).all()
    else:
        assert (pushed.ok, pushed.transport) == (True, "tcp")
        assert a.sender.reason == "invalid argument"
        assert torch.equal(b.layers[LAYERS[0]][5], a.layers[LAYERS[0]][2])


def test_it_is_not_to_be_had_between_caches_in_host_memory():
    a, b = Side(1.0, "cuda_ipc"), Side(-1.0, "")
    b.allow("s")
    refused = a.push(b, [2], [5])
    assert not refused.ok and "host memory" in refused.message


def test_a_gpu_and_a_host_use_tcp_and_say_why():
    a, b = Side(1.0, ""), on_gpu(Side(-1.0, ""))
    b.allow("s")
    assert a.push(b, [2], [5]).transport == "tcp"
    assert "cpu" in a.sender.reason and "cuda" in a.sender.reason
    assert (b.layers[LAYERS[0]][5] == 1.0).all()


@pytest.mark.parametrize("block", [0, 12, -1])
def test_a_block_that_the_source_does_not_have_is_refused_before_the_gpu_sees_it(block: int):
    theirs, ours = [torch.zeros(12, 8, dtype=torch.uint8)], [torch.ones(12, 8, dtype=torch.uint8)]
    with pytest.raises(ProtocolError, match="blocks 1 to 11") as refused:
        Mapped(theirs, ours).copy([3, block], [1, 2])
    assert refused.value.code == "bad_block"
    assert (ours[0] == 1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_handed_out_or_mapped():
    with pytest.raises(ProtocolError, match="cannot be shared") as refused:
        EXPORT([torch.zeros(12, 8, dtype=torch.uint8)])
    assert refused.value.code == "transport_unavailable"
    with pytest.raises(ProtocolError, match="not visible"):
        MAPPED_LAYERS("GPU-0", [], [], [])
    with pytest.raises(ProtocolError, match="0 layers were shared"):
        MAPPED_LAYERS("GPU-0", [], [8], [8])
