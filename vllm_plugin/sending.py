"""A's side of the data plane: one session's way to one worker of B."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_plugin import cuda_ipc, memory
from vllm_plugin.data_messages import Measure, Offer, Patch, Reach, Reached, Receiving, Write, Written, decode_data
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.pacing import Pace
from vllm_plugin.patching import patch_of
from vllm_plugin.topology import Place
from vllm_plugin.wire import FrameSocket, ProtocolError

__all__ = ["Measured", "Sender"]

#: Buffers per sendmsg call; Linux allows 1024 (IOV_MAX).
VECTOR = 256
PIECE = 64 * 1024
#: The other side is silent for so long: it is lost.
TRANSFER_TIMEOUT_S = 10.0
#: TCP connections between two hosts: one alone fills neither a long nor a fast link.
STREAMS = 4
#: A block that takes longer is sent ahead of the handover, while it is still being written.
SLOW_BLOCK_S = 0.005
#: A measurement copies for about that long, and no more than so many bytes.
MEASURE_S = 0.02
MEASURE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Measured:
    """What a measurement of the way to one worker found: the transport in use, why no better one, bytes per second
    and the seconds that one block takes."""

    transport: str
    reason: str
    bytes_per_s: float
    block_s: float


class Sender:
    """Sends blocks of `cache`, which may be a part of this worker's, to one worker of B. One transfer at a time.

    Attributes:
        transport: what is really in use. reason: why it is not the fastest one, "" where it is.
        block_s: seconds that one block took, the last time that whole ones were sent; 0 before.

    Args:
        dial: opens an authenticated connection to the worker.
        backend: transport that the operator wants, "" for the fastest.
        places: where the blocks go in those of the worker; none where whole blocks go.

    Raises:
        OSError, ProtocolError: B's worker cannot be reached, or refuses the session.
    """

    def __init__(
        self,
        cache: KVCache,
        dial: Callable[[], FrameSocket],
        session: str,
        backend: str,
        bytes_per_s: float,
        places: tuple[Place, ...] = (),
    ) -> None:
        self._cache = cache
        self._places = places
        #: B's process that may read this one, 0 for none.
        self._reader = 0
        self._session = session
        self._bytes_per_s = bytes_per_s
        self._dial = dial
        # What B has of blocks that were sent ahead, by target block and owner.
        self._shadows: dict[tuple[int, int], Any] = {}
        self.block_s = 0.0
        self._channels = [self._connect()]
        try:
            self._reach(self._channels[0], backend)
        except BaseException:
            self.close()
            raise
        self._pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="vllm-hi-stream")

    def _connect(self) -> FrameSocket:
        frames = self._dial()
        frames.sock.settimeout(TRANSFER_TIMEOUT_S)
        return frames

    def _reach(self, frames: FrameSocket, backend: str) -> None:
        """Agrees with B on a transport."""
        host = memory.host_identity()
        # What was asked for and cannot be had is an error, and not a reason to take something else.
        agent = self._cache.nixl.metadata if backend == "rdma" else b""
        reached = self._ask(frames, self._opening(host, backend))
        offer = Offer(self._cache.addresses, self._cache.bytes_per_layer, self._cache.strides)
        if reached.transport == "memory":
            self._let_read(reached.pid)
            # B reads this once: whoever reads it right can read the blocks too.
            offer.check = secrets.token_bytes(32)
            held = np.frombuffer(bytearray(offer.check), np.uint8)
            offer.check_address = int(held.ctypes.data)
            reached = self._ask(frames, offer)
        elif reached.transport == "rdma":
            offer.agent = agent or self._cache.nixl.metadata
            reached = self._ask(frames, offer)
        elif reached.transport == "cuda_ipc":
            # File descriptors of expandable segments are taken from this process, for which the same right is needed.
            self._let_read(reached.pid)
            try:
                offer.gpu, offer.layers = cuda_ipc.gpu_of(self._cache.rows[0]), cuda_ipc.export(self._cache.rows)
            except ProtocolError as error:
                offer.refusal = error.message
            reached = self._ask(frames, offer)
        self._reads = reached.transport != "tcp"
        self.transport, self.reason, self._same_host = reached.transport, reached.message, reached.same_host

    def _let_read(self, pid: int) -> None:
        memory.let_read(pid)
        self._reader = pid

    def _opening(self, host: str, backend: str) -> Reach:
        return Reach(self._session, host, os.getpid(), backend, self._bytes_per_s, self._cache.device, self._places)

    def _another(self) -> FrameSocket:
        """One more connection for bytes over TCP."""
        frames = self._connect()
        if self._places:
            # B takes what comes on a connection for whole blocks until it is told otherwise.
            self._ask(frames, self._opening("", "tcp"))
        return frames

    @staticmethod
    def _ask(frames: FrameSocket, message: Reach | Offer) -> Reached:
        frames.send(message)
        answer = decode_data(frames.receive_body())
        if isinstance(answer, Written):
            raise ProtocolError(answer.code, answer.message)
        if not isinstance(answer, Reached):
            raise ProtocolError("unexpected_message", type(answer).__name__)
        return answer

    def send(
        self,
        source: list[int],
        target: list[int],
        owners: Sequence[int] = (),
        urgent: bool = False,
        still_open: Sequence[tuple[int, int, int]] = (),
    ) -> int:
        """Copies blocks and returns the number of bytes sent once they are in place.

        Args:
            owners: a number for each block. What was sent ahead of a block is of use only for the same owner: B may
                have given its place to another request since.
            urgent: without pacing; somebody waits for just these.
            still_open: (source, target, owner) of blocks that A still writes. Over a slow link they are sent now, and
                when they come again only what has changed in them.

        Raises:
            OSError, ProtocolError: nothing is known about the blocks on the other side.
        """
        blocks = list(zip(source, target, owners or [0] * len(source), strict=True))
        known = [block for block in blocks if block[1:] in self._shadows]
        fresh = [block for block in blocks if block[1:] not in self._shadows]
        sent = self._send_whole([block[0] for block in fresh], [block[1] for block in fresh], urgent) if fresh else 0
        for here, there, owner in known:
            sent += self._patch(here, there, owner)
            del self._shadows[there, owner]
        if self.slow:
            sent += sum(self._patch(*block) for block in still_open)
        return sent

    @property
    def slow(self) -> bool:
        """One block takes so long that a client would notice."""
        return self._cache.on_host and self.transport == "tcp" and self.block_s > SLOW_BLOCK_S

    def _patch(self, source: int, target: int, owner: int) -> int:
        """Sends what has changed in a block since it was sent for this owner; all of it, the first time."""
        shadow = self._shadows.get((target, owner))
        current = self._cache.read(source)
        frames = self._channels[0]
        if shadow is None:
            frames.send(Write(self._session, [target], len(current)))
            _send_pieces(frames.sock, memoryview(current))
            self._shadows[target, owner] = current
            sent = len(current)
        else:
            patch = patch_of(current, shadow)
            frames.send(Patch(self._session, target, len(patch)))
            _send_pieces(frames.sock, memoryview(patch))
            sent = len(patch)
        self._until_written(frames)
        return sent

    def _send_whole(self, source: list[int], target: list[int], urgent: bool) -> int:
        bytes_per_s = math.inf if urgent else self._bytes_per_s
        started = time.monotonic()
        parts = self._shares(len(source))
        if len(parts) == 1:
            self._write(self._channels[0], source, target, bytes_per_s)
        else:
            while len(self._channels) < len(parts):
                self._channels.append(self._another())
            share = bytes_per_s / len(parts)
            written = [
                self._pool.submit(self._write, channel, source[part], target[part], share)
                for channel, part in zip(self._channels, parts, strict=False)
            ]
            for one in written:
                one.result()
        self.block_s = (time.monotonic() - started) / len(source)
        return len(source) * self._cache.block_bytes

    def _shares(self, count: int) -> list[slice]:
        """Which blocks go over which connection."""
        streams = 1 if self._reads or self._same_host else min(STREAMS, count)
        size = -(-count // streams)
        return [slice(start, start + size) for start in range(0, count, size)]

    def _write(self, frames: FrameSocket, source: list[int], target: list[int], bytes_per_s: float) -> None:
        size = len(source) * self._cache.block_bytes
        frames.send(Write(self._session, target, size, source if self._reads else [], math.isinf(bytes_per_s)))
        if not self._reads:
            self._send_bytes(frames.sock, source, Pace(bytes_per_s))
        self._until_written(frames)

    def _send_bytes(self, sock: socket.socket, blocks: list[int], pace: Pace) -> None:
        buffers = self._cache.buffers(blocks) if self._cache.on_host else self._cache.gather(blocks)
        sent = 0
        first = 0
        while first < len(buffers):
            count = sock.sendmsg(buffers[first : first + VECTOR])
            sent += count
            while first < len(buffers) and count >= len(buffers[first]):
                count -= len(buffers[first])
                first += 1
            if count:
                buffers[first] = buffers[first][count:]
            pace.rest(sent)

    @staticmethod
    def _until_written(frames: FrameSocket) -> None:
        while isinstance(answer := decode_data(frames.receive_body()), Receiving):
            # What the link's buffers hold can take longer than the deadline; it is one for silence.
            pass
        if not isinstance(answer, Written):
            raise ProtocolError("unexpected_message", type(answer).__name__)
        if not answer.ok:
            raise ProtocolError(answer.code, answer.message)

    def measure(self) -> Measured:
        """Copies some blocks to nowhere: how fast is the way?

        Raises:
            OSError, ProtocolError.
        """
        # The first of each kind pays for the memory that the blocks go to.
        block_s = min(self._measured([1]) for _ in range(3))
        most = min(MEASURE_BYTES // max(1, self._cache.block_bytes), self._cache.num_blocks - 1)
        count = max(1, min(most, int(MEASURE_S / block_s)))
        took = min(self._measured(list(range(1, count + 1))) for _ in range(2))
        return Measured(self.transport, self.reason, count * self._cache.block_bytes / took, block_s)

    def _measured(self, blocks: list[int]) -> float:
        frames = self._channels[0]
        started = time.monotonic()
        frames.send(Measure(blocks, self._cache.bytes_per_layer))
        if not self._reads:
            self._send_bytes(frames.sock, blocks, Pace(math.inf))
        self._until_written(frames)
        return time.monotonic() - started

    def close(self) -> None:
        for frames in self._channels:
            frames.close()
        if self._reader:
            memory.forbid_read(self._reader)
            self._reader = 0


def _send_pieces(sock: socket.socket, content: memoryview) -> None:
    """`sendall` for each piece: its deadline counts for all that it is given, however steadily that goes out."""
    for start in range(0, len(content), PIECE):
        sock.sendall(content[start : start + PIECE])
