"""B's side of the data plane: who may write into this worker's KV cache, and how the blocks get there."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from vllm_plugin import cuda_ipc, memory
from vllm_plugin.data_messages import Measure, Offer, Patch, Reach, Reached, Receiving, Write, Written, decode_data
from vllm_plugin.kv_cache import KVCache, flat_bytes
from vllm_plugin.pacing import CHUNK, Pace
from vllm_plugin.patching import apply_patch
from vllm_plugin.wire import FrameSocket, ProtocolError

__all__ = ["Receiver"]

logger = logging.getLogger("vllm.vllm_hi.data")

TRANSFER_TIMEOUT_S = 10.0
#: The sender hears so often that bytes still come in.
ALIVE_S = 2.0
#: Buffers per recvmsg call; Linux allows 1024 (IOV_MAX).
VECTOR = 256
#: A measurement may ask for no more than so many bytes at once.
MEASURE_LIMIT = 1024 * 1024 * 1024


class Reader(Protocol):
    """A transport by which B reads A's memory. `remote`, `local`: pieces as `vllm_plugin.memory.vectors` makes them.

    Raises:
        OSError, ProtocolError: not all could be read.
    """

    def __call__(self, remote: Any, local: Any) -> int: ...


@dataclass
class _Way:
    """What is agreed on one connection.

    Attributes:
        cache: what of this worker's cache it is for. session: what it is for, "" for a measurement.
        pid: A's process, for the transport `memory`.
        reader, addresses, strides: how to read A's blocks, and where they lie; without a reader their bytes follow over
            TCP.
        registers: the reader writes only into registered memory (NIXL).
        mapped: A's blocks in GPU memory, for the transport `cuda_ipc`; `asked`: somebody wants just that one.
    """

    cache: KVCache
    session: str = ""
    pid: int = 0
    reader: Reader | None = None
    registers: bool = False
    mapped: cuda_ipc.Mapped | None = None
    asked: bool = False
    addresses: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)
    bytes_per_s: float = math.inf


class Receiver:
    """Takes blocks of sessions that this worker's own engine core has allowed, until it revokes them."""

    def __init__(self, cache: KVCache, backend: str, bytes_per_s: float) -> None:
        self._cache = cache
        self._backend = backend
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._allowed: set[str] = set()
        self._incoming: dict[str, list[FrameSocket]] = {}
        self._writing: dict[str, int] = {}
        self._idle = threading.Condition(self._lock)
        self._measuring = threading.Lock()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="vllm-hi-copy")
        self._scratch: list[torch.Tensor] = []
        self._scratch_registered = False

    def allow(self, session: str) -> None:
        with self._lock:
            self._allowed.add(session)

    def revoke(self, session: str) -> None:
        """Returns when no thread writes into this worker's KV cache for the session any more."""
        with self._idle:
            self._allowed.discard(session)
            for frames in self._incoming.pop(session, []):
                frames.close()
            self._idle.wait_for(lambda: not self._writing.get(session))

    def serve(self, frames: FrameSocket) -> None:
        """Serves one connection of a worker until it ends. Raises: OSError, ProtocolError."""
        way = _Way(self._cache, bytes_per_s=self._bytes_per_s)
        while True:
            message = decode_data(frames.receive_body())
            try:
                if isinstance(message, Reach):
                    frames.send(self._reach(message, way))
                elif isinstance(message, Offer):
                    frames.send(self._accept(message, way))
                elif isinstance(message, Measure):
                    self._measure(frames, message, way)
                    frames.send(Written(True))
                elif isinstance(message, Patch):
                    self._patch(frames, message, way.cache)
                    frames.send(Written(True))
                elif isinstance(message, Write):
                    self._write(frames, message, way)
                    frames.send(Written(True))
                else:
                    raise ProtocolError("unexpected_message", type(message).__name__)
            except ProtocolError as error:
                frames.send(Written(False, error.code, error.message))
                raise

    # -- the way -------------------------------------------------------------------------------------------------------

    def _reach(self, reach: Reach, way: _Way) -> Reached:
        way.cache, way.session = self._cache.cut(reach.places), reach.session
        way.bytes_per_s = min(way.bytes_per_s, reach.bytes_per_s)
        host = memory.host_identity()
        same_host = bool(host) and host == reach.host
        if "rdma" in (reach.backend, self._backend):
            # Raises where it is not to be had: somebody has asked for just this.
            _ = self._cache.nixl
            return Reached("rdma", same_host)
        way.asked = "cuda_ipc" in (reach.backend, self._backend)
        why = self._why_tcp(reach, same_host)
        if why and way.asked:
            raise ProtocolError("transport_unavailable", f"cuda_ipc cannot be used: {why}")
        if why:
            return Reached("tcp", same_host, why)
        way.pid = reach.pid
        return Reached("memory" if self._cache.on_host else "cuda_ipc", same_host, pid=os.getpid())

    def _why_tcp(self, reach: Reach, same_host: bool) -> str:
        """Why the target does not read the source's memory, or "" when it can try."""
        asked = {reach.backend, self._backend}
        if self._cache.device != reach.device:
            return f"one KV cache lies in {reach.device} memory and the other in {self._cache.device} memory"
        if "tcp" in asked:
            return "VLLM_HI_TRANSFER_BACKEND asks for it"
        if not same_host:
            return "the instances run on different hosts"
        if self._cache.on_host:
            return "the KV caches lie in host memory" if "cuda_ipc" in asked else ""
        if "tcp_shm" in asked:
            return "VLLM_HI_TRANSFER_BACKEND asks for a way through host memory"
        return "" if self._cache.device == "cuda" else f"there is no faster way between {self._cache.device} devices"

    def _accept(self, offer: Offer, way: _Way) -> Reached:
        if not len(offer.addresses) == len(offer.sizes) == len(offer.strides):
            raise ProtocolError("size_mismatch", "an address, a size and a stride are needed for each layer")
        # A measurement goes to nowhere, and may come from a cache that is cut differently.
        if offer.sizes != way.cache.bytes_per_layer and way.session:
            raise ProtocolError("size_mismatch", "the source's layers have other block sizes")
        if not self._cache.on_host and not offer.agent:
            return self._try_cuda_ipc(offer, way)
        if not offer.agent:
            return self._try_memory(offer, way)
        name = self._cache.nixl.meet(offer.agent)
        way.addresses, way.strides, way.registers = offer.addresses, offer.strides, True
        way.reader = lambda remote, local: self._cache.nixl.read(name, remote, local)
        return Reached("rdma", False)

    def _try_memory(self, offer: Offer, way: _Way) -> Reached:
        """Whether A's memory can really be read: in containers, and with some kernels, it cannot."""
        found = np.zeros(len(offer.check), np.uint8)
        try:
            memory.read(
                way.pid,
                memory.vectors([offer.check_address], [len(offer.check)], [0]),
                memory.vectors([int(found.ctypes.data)], [len(offer.check)], [0]),
            )
        except OSError as error:
            return Reached("tcp", True, f"the source's memory cannot be read: {error.strerror or error}")
        if found.tobytes() != offer.check:
            return Reached("tcp", True, "the source's process id names another process here")
        way.addresses, way.strides = offer.addresses, offer.strides
        way.reader = lambda remote, local: memory.read(way.pid, remote, local)
        return Reached("memory", True)

    def _try_cuda_ipc(self, offer: Offer, way: _Way) -> Reached:
        try:
            if offer.refusal:
                raise ProtocolError("transport_unavailable", offer.refusal)
            theirs = cuda_ipc.mapped_layers(offer.gpu, offer.layers, offer.sizes, offer.strides)
        except ProtocolError as error:
            if way.asked:
                raise
            return Reached("tcp", True, error.message)
        way.mapped = cuda_ipc.Mapped(theirs, way.cache.rows)
        return Reached("cuda_ipc", True)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _write(self, frames: FrameSocket, write: Write, way: _Way) -> None:
        self._begin_write(write, frames, way.cache)
        try:
            if way.reader is None and way.mapped is None:
                self._receive_blocks(frames, write.blocks, way.cache)
            elif len(write.source_blocks) != len(write.blocks):
                raise ProtocolError("size_mismatch", "as many source blocks as target blocks are needed")
            elif way.mapped is not None:
                self._copy_mapped(write, way, way.mapped)
            elif way.reader is not None:
                self._read_blocks(write, way, way.reader)
        finally:
            self._end_write(write.session)

    def _patch(self, frames: FrameSocket, patch: Patch, cache: KVCache) -> None:
        cache.check([patch.block])
        if not 0 < patch.size <= 2 * cache.block_bytes:
            raise ProtocolError("size_mismatch", f"{patch.size} bytes are no patch of a block")
        self._enter(patch.session, frames)
        try:
            content = bytearray(patch.size)
            _take(frames, [memoryview(content)])
            block = cache.read(patch.block)
            apply_patch(block, content)
            cache.write(patch.block, block)
        finally:
            self._end_write(patch.session)

    def _begin_write(self, write: Write, frames: FrameSocket, cache: KVCache) -> None:
        cache.check(write.blocks)
        expected = len(write.blocks) * cache.block_bytes
        if write.size != expected:
            raise ProtocolError("size_mismatch", f"{write.size} bytes announced, {expected} expected for these blocks")
        self._enter(write.session, frames)

    def _enter(self, session: str, frames: FrameSocket) -> None:
        with self._lock:
            if session not in self._allowed:
                raise ProtocolError(
                    "unknown_session", "this worker's engine has not allowed the session, or revoked it"
                )
            self._writing[session] = self._writing.get(session, 0) + 1
            connections = self._incoming.setdefault(session, [])
            if frames not in connections:
                connections.append(frames)

    def _end_write(self, session: str) -> None:
        with self._idle:
            self._writing[session] -= 1
            if not self._writing[session]:
                del self._writing[session]
                self._idle.notify_all()

    def _copy_mapped(self, write: Write, way: _Way, mapped: cuda_ipc.Mapped) -> None:
        """In pieces, between which it rests and sees whether the session has been revoked."""
        pace = Pace(math.inf if write.urgent else way.bytes_per_s)
        piece = max(1, CHUNK // way.cache.block_bytes)
        for start in range(0, len(write.blocks), piece):
            if write.session not in self._allowed:
                raise ProtocolError("unknown_session", "the session was revoked")
            part = slice(start, start + piece)
            mapped.copy(write.source_blocks[part], write.blocks[part])
            pace.rest((start + piece) * way.cache.block_bytes)

    def _read_blocks(self, write: Write, way: _Way, reader: Reader) -> None:
        sizes = way.cache.bytes_per_layer
        remote = memory.vectors(way.addresses, sizes, write.source_blocks, way.strides)
        local = memory.vectors(way.cache.addresses_for(write.blocks), sizes, write.blocks, way.cache.strides)
        if not write.urgent or way.registers:
            pace = math.inf if write.urgent else way.bytes_per_s
            self._read_memory(reader, remote, local, pace, write.session)
            return
        # Somebody waits for it: two threads, half each.
        half = len(local) // 2
        other = self._helper.submit(self._read_memory, reader, remote[half:], local[half:], math.inf, write.session)
        try:
            self._read_memory(reader, remote[:half], local[:half], math.inf, write.session)
        finally:
            # However it ends: nobody writes any more when this returns.
            other.result()

    def _read_memory(self, reader: Reader, remote: Any, local: Any, bytes_per_s: float, session: str) -> None:
        """In pieces, between which it rests and sees whether the session has been revoked."""
        pace = Pace(bytes_per_s)
        done = 0
        for part in _chunks(local):
            if session and session not in self._allowed:
                raise ProtocolError("unknown_session", "the session was revoked")
            try:
                done += reader(remote[part], local[part])
            except OSError as error:
                raise ProtocolError("source_unreadable", error.strerror or str(error)) from error
            pace.rest(done)

    def _receive_blocks(self, frames: FrameSocket, blocks: list[int], cache: KVCache) -> None:
        if cache.on_host:
            _take(frames, cache.buffers(blocks))
        else:
            staged = cache.staging(len(blocks))
            _take(frames, [memoryview(flat_bytes(tensor)) for tensor in staged])
            cache.scatter(blocks, staged)

    def _measure(self, frames: FrameSocket, measure: Measure, way: _Way) -> None:
        """Takes blocks of the source to nowhere: nothing here depends on how this worker's own cache is cut."""
        sizes, places = measure.sizes, list(range(len(measure.blocks)))
        size = len(places) * sum(sizes)
        if not sizes or min(sizes) < 1 or size > MEASURE_LIMIT:
            raise ProtocolError("size_mismatch", f"a measurement may have {MEASURE_LIMIT} bytes, not {size}")
        with self._measuring:
            if way.mapped is not None:
                way.mapped.take(measure.blocks)
                return
            nowhere = self._nowhere([size * len(places) for size in sizes], way)
            if way.reader is None:
                _take(frames, [memoryview(layer.numpy()) for layer in nowhere])
                return
            if len(sizes) != len(way.addresses):
                raise ProtocolError("size_mismatch", f"{len(way.addresses)} layers were offered")
            remote = memory.vectors(way.addresses, sizes, measure.blocks, way.strides)
            local = memory.vectors([layer.data_ptr() for layer in nowhere], sizes, places)
            self._read_memory(way.reader, remote, local, math.inf, "")

    def _nowhere(self, sizes: list[int], way: _Way) -> list[torch.Tensor]:
        """Where measured blocks go, layer by layer as in a cache, with so many bytes each. Kept: to touch new memory
        costs more than to copy."""
        if len(self._scratch) < len(sizes) or any(
            layer.numel() < size for layer, size in zip(self._scratch, sizes, strict=False)
        ):
            self._scratch = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            self._scratch_registered = False
        if way.registers and not self._scratch_registered:
            self._cache.nixl.register(self._scratch)
            self._scratch_registered = True
        return [layer[:size] for layer, size in zip(self._scratch, sizes, strict=False)]


def _take(frames: FrameSocket, views: list[memoryview]) -> None:
    """Fills all views, and lets the sender know from time to time that it is not stuck. Raises: OSError."""
    told = time.monotonic()

    def arrived() -> None:
        nonlocal told
        if (now := time.monotonic()) - told > ALIVE_S:
            told = now
            frames.send(Receiving())

    frames.sock.settimeout(TRANSFER_TIMEOUT_S)
    receive_all(frames.sock, views, arrived)
    frames.sock.settimeout(None)


def receive_all(sock: socket.socket, views: list[memoryview], arrived: Callable[[], None] | None = None) -> None:
    """Fills all views, many with one call; `arrived` is called after each. Raises: OSError."""
    first = 0
    while first < len(views):
        count = sock.recvmsg_into(views[first : first + VECTOR])[0]
        if count == 0:
            raise ConnectionError("connection closed by the other side")
        if arrived is not None:
            arrived()
        while first < len(views) and count >= len(views[first]):
            count -= len(views[first])
            first += 1
        if count:
            views[first] = views[first][count:]


def _chunks(pieces: Any) -> list[slice]:
    """Slices of pieces with about `CHUNK` bytes each."""
    ends = np.cumsum(pieces["size"])
    slices, start = [], 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + CHUNK, side="right")))
        end = min(end, start + memory.MAX_VECTORS)
        slices.append(slice(start, end))
        start = end
    return slices
