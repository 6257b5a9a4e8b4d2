"""The data server of one worker: sends KV blocks to another worker's data server and receives them.

Blocks go from KV tensor to socket to KV tensor without a copy of our own on CPUs; on other devices they pass
through host memory. Every connection is authenticated; blocks are accepted only for sessions that this worker's
own engine core has allowed. One data connection per session, never shared by two jobs (interleaved frames would
corrupt both).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_plugin.messages import (
    AllowSession,
    Answer,
    Push,
    Pushed,
    RevokeSession,
    Write,
    Written,
    decode_data,
)
from vllm_plugin.wire import FrameSocket, ProtocolError

__all__ = ["DataServer", "KVCache"]

logger = logging.getLogger("vllm.vllm_hi.data")

#: Bytes sent between two looks at the pace, and the default pace. A copier that never rests slows the decoding
#: next to it.
PACE_CHUNK = 4 * 1024 * 1024
DEFAULT_BYTES_PER_S = 1.5e9
#: Buffers per sendmsg call; Linux allows 1024 (IOV_MAX).
VECTOR = 256
TRANSFER_TIMEOUT_S = 10.0


class KVCache:
    """Byte views of this worker's KV cache, by layer name.

    Each tensor has the logical shape [blocks, kv_heads, block_size, 2 * head_size] (vLLM RFC #42082) and one block
    of it is contiguous. `block_bytes` counts one block over all layers.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor]) -> None:
        self.names = sorted(layers)
        self._tensors = [layers[name] for name in self.names]
        self.on_host = all(tensor.device.type == "cpu" for tensor in self._tensors)
        for name, tensor in zip(self.names, self._tensors, strict=True):
            if not tensor[0].is_contiguous():
                raise ValueError(f"KV blocks of layer {name} are not contiguous (strides {tensor.stride()})")
        self._bytes_per_layer = [tensor[0].numel() * tensor.element_size() for tensor in self._tensors]
        self.block_bytes: int = sum(self._bytes_per_layer)
        self.num_blocks = min((tensor.shape[0] for tensor in self._tensors), default=0)
        # Flat uint8 arrays over the tensors' own memory: slicing one gives a buffer that sockets read and write
        # directly.
        self._flat = [_flat_bytes(tensor) for tensor in self._tensors] if self.on_host else []

    def shape(self) -> list[int]:
        return list(self._tensors[0].shape[1:]) if self._tensors else []

    def check(self, blocks: list[int]) -> None:
        """Raises: ProtocolError `bad_block` when a block id lies outside the cache. Block 0 is vLLM's null block."""
        if any(not 0 < block < self.num_blocks for block in blocks):
            raise ProtocolError("bad_block", f"block ids must lie between 1 and {self.num_blocks - 1}")

    def buffers(self, blocks: list[int]) -> list[memoryview]:
        """Writable views in wire order; neighbouring blocks of a layer are one view. Host memory only."""
        views = []
        for flat, size in zip(self._flat, self._bytes_per_layer, strict=True):
            for start, end in _runs(blocks):
                views.append(memoryview(flat[start * size : end * size]))
        return views

    def gather(self, blocks: list[int]) -> list[memoryview]:
        """Copies blocks of a device cache into host memory, in wire order."""
        index = torch.tensor(blocks)
        return [memoryview(_flat_bytes(tensor[index.to(tensor.device)].contiguous().cpu())) for tensor in self._tensors]

    def scatter(self, blocks: list[int], staged: list[torch.Tensor]) -> None:
        """Copies blocks from host memory into a device cache; `staged` as `staging()` made it."""
        for tensor, source in zip(self._tensors, staged, strict=True):
            index = torch.tensor(blocks, device=tensor.device)
            tensor.index_copy_(0, index, source.to(tensor.device))

    def staging(self, count: int) -> list[torch.Tensor]:
        return [torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in self._tensors]


def _flat_bytes(tensor: torch.Tensor) -> Any:
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


class DataServer:
    """Listens on the data port; serves this worker's engine core and other workers.

    `read_generator(request_id)` returns the state of the request's random generator, or None if it has none.
    """

    def __init__(
        self,
        cache: KVCache,
        read_generator: Callable[[str], bytes | None],
        *,
        token: str,
        host: str,
        port: int,
        name: str,
        cpus: list[int],
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
    ) -> None:
        self._cache = cache
        self._read_generator = read_generator
        self._token = token
        self._name = name
        self._cpus = cpus
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._allowed: set[str] = set()
        self._incoming: dict[str, list[FrameSocket]] = {}
        self._outgoing: dict[str, FrameSocket] = {}
        self._writing: dict[str, int] = {}
        self._idle = threading.Condition(self._lock)
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="vllm-hi-data", daemon=True).start()

    def _leave_compute_core(self) -> None:
        # Threads inherit the core that vLLM binds a CPU worker to; a copier there makes decoding three times slower.
        try:
            os.sched_setaffinity(0, self._cpus)
        except (OSError, AttributeError):
            logger.debug("data thread keeps its CPU affinity")

    def _accept(self) -> None:
        self._leave_compute_core()
        while True:
            sock, address = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock, address), name="vllm-hi-data", daemon=True).start()

    def _serve(self, sock: socket.socket, address: tuple[str, int]) -> None:
        self._leave_compute_core()
        try:
            frames, auth = FrameSocket.accept(sock, self._token, self._name)
        except (OSError, ProtocolError) as error:
            logger.warning("data port: closed a connection from %s: %s", address[0], error)
            sock.close()
            return
        try:
            if auth.role == "engine":
                self._serve_engine(frames)
            elif auth.role == "worker":
                self._serve_worker(frames)
            else:
                logger.warning("data port: role %s has no business here", auth.role)
        except (OSError, ProtocolError) as error:
            logger.info("data connection of %s ended: %s", auth.name, error)
        finally:
            frames.close()

    # -- commands of our engine core -----------------------------------------------------------------------------------

    def _serve_engine(self, frames: FrameSocket) -> None:
        while True:
            message = decode_data(frames.receive_body())
            if isinstance(message, Push):
                frames.send(self._push(message))
            elif isinstance(message, AllowSession):
                with self._lock:
                    self._allowed.add(message.session)
                frames.send(Answer(message.call, True))
            elif isinstance(message, RevokeSession):
                self._revoke(message.session)
                frames.send(Answer(message.call, True))
            else:
                raise ProtocolError("unexpected_message", type(message).__name__)

    def _push(self, push: Push) -> Pushed:
        try:
            self._cache.check(push.source_blocks)
            generators = {rid: state for rid in push.generators if (state := self._read_generator(rid)) is not None}
            sent = self._send_blocks(push) if push.source_blocks else 0
        except (OSError, ProtocolError) as error:
            self._drop_outgoing(push.session)
            return Pushed(push.call, False, message=str(error) or type(error).__name__)
        return Pushed(push.call, True, sent, generators)

    def _send_blocks(self, push: Push) -> int:
        with self._lock:
            frames = self._outgoing.get(push.session)
        if frames is None:
            frames = FrameSocket.dial(push.host, push.port, self._token, "worker", self._name)
            frames.sock.settimeout(TRANSFER_TIMEOUT_S)
            with self._lock:
                self._outgoing[push.session] = frames
        size = len(push.source_blocks) * self._cache.block_bytes
        cache = self._cache
        buffers = cache.buffers(push.source_blocks) if cache.on_host else cache.gather(push.source_blocks)
        frames.send(Write(push.session, push.target_blocks, size))
        self._send_paced(frames.sock, buffers)
        answer = decode_data(frames.receive_body())
        if not isinstance(answer, Written):
            raise ProtocolError("unexpected_message", type(answer).__name__)
        if not answer.ok:
            raise ProtocolError(answer.code, answer.message)
        return size

    def _send_paced(self, sock: socket.socket, buffers: list[memoryview]) -> None:
        started = time.monotonic()
        sent = 0
        next_rest = PACE_CHUNK
        first = 0
        while first < len(buffers):
            count = sock.sendmsg(buffers[first : first + VECTOR])
            sent += count
            while first < len(buffers) and count >= len(buffers[first]):
                count -= len(buffers[first])
                first += 1
            if count:
                buffers[first] = buffers[first][count:]
            if sent >= next_rest:
                next_rest = sent + PACE_CHUNK
                time.sleep(max(0.0, sent / self._bytes_per_s - (time.monotonic() - started)))

    def _drop_outgoing(self, session: str) -> None:
        with self._lock:
            frames = self._outgoing.pop(session, None)
        if frames is not None:
            frames.close()

    def _revoke(self, session: str) -> None:
        """Returns when no thread writes into this worker's KV cache for the session any more."""
        self._drop_outgoing(session)
        with self._idle:
            self._allowed.discard(session)
            for frames in self._incoming.pop(session, []):
                frames.close()
            self._idle.wait_for(lambda: not self._writing.get(session))

    # -- blocks from another worker ------------------------------------------------------------------------------------

    def _serve_worker(self, frames: FrameSocket) -> None:
        while True:
            message = decode_data(frames.receive_body())
            if not isinstance(message, Write):
                raise ProtocolError("unexpected_message", type(message).__name__)
            try:
                self._begin_write(message, frames)
            except ProtocolError as error:
                frames.send(Written(False, error.code, error.message))
                raise
            try:
                self._receive_blocks(frames, message.blocks)
            finally:
                self._end_write(message.session)
            frames.send(Written(True))

    def _begin_write(self, write: Write, frames: FrameSocket) -> None:
        self._cache.check(write.blocks)
        expected = len(write.blocks) * self._cache.block_bytes
        if write.size != expected:
            raise ProtocolError("size_mismatch", f"{write.size} bytes announced, {expected} expected for these blocks")
        with self._lock:
            if write.session not in self._allowed:
                raise ProtocolError(
                    "unknown_session", "this worker's engine has not allowed the session, or revoked it"
                )
            self._writing[write.session] = self._writing.get(write.session, 0) + 1
            connections = self._incoming.setdefault(write.session, [])
            if frames not in connections:
                connections.append(frames)

    def _end_write(self, session: str) -> None:
        with self._idle:
            self._writing[session] -= 1
            if not self._writing[session]:
                del self._writing[session]
                self._idle.notify_all()

    def _receive_blocks(self, frames: FrameSocket, blocks: list[int]) -> None:
        frames.sock.settimeout(TRANSFER_TIMEOUT_S)
        if self._cache.on_host:
            for view in self._cache.buffers(blocks):
                frames.receive_into(view)
        else:
            staged = self._cache.staging(len(blocks))
            for tensor in staged:
                frames.receive_into(memoryview(_flat_bytes(tensor)))
            self._cache.scatter(blocks, staged)
        frames.sock.settimeout(None)
