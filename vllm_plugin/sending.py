"""A's side of the data plane: one session's way to one worker of B."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from vllm_plugin import memory
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.messages import Measure, Memory, Reach, Reached, Write, Written, decode_data
from vllm_plugin.pacing import Pace
from vllm_plugin.wire import FrameSocket, ProtocolError

__all__ = ["Measured", "Sender"]

#: Buffers per sendmsg call; Linux allows 1024 (IOV_MAX).
VECTOR = 256
TRANSFER_TIMEOUT_S = 10.0
#: TCP connections between two hosts: one alone fills neither a long nor a fast link.
STREAMS = 4
#: A measurement copies for about that long, and no more than so many bytes.
MEASURE_S = 0.2
MEASURE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Measured:
    """What a measurement of the way to one worker found: the transport in use, why no better one, bytes per second
    and the seconds that one block takes."""

    transport: str
    reason: str
    bytes_per_s: float
    block_s: float


class Sender:
    """Sends blocks of `cache` to one worker of B. One transfer at a time.

    Attributes:
        transport: what is really in use. reason: why it is not the fastest one, "" where it is.

    Args:
        dial: opens an authenticated connection to the worker.
        backend: transport that the operator wants, "" for the fastest.

    Raises:
        OSError, ProtocolError: B's worker cannot be reached, or refuses the session.
    """

    def __init__(
        self, cache: KVCache, dial: Callable[[], FrameSocket], session: str, backend: str, bytes_per_s: float
    ) -> None:
        self._cache = cache
        self._session = session
        self._bytes_per_s = bytes_per_s
        self._dial = dial
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
        host = memory.host_identity() if self._cache.on_host else ""
        reached = self._ask(frames, Reach(self._session, host, os.getpid(), backend, self._bytes_per_s))
        if reached.transport == "memory":
            memory.let_read(reached.pid)
            # B reads this once: whoever reads it right can read the blocks too.
            check = secrets.token_bytes(32)
            held = np.frombuffer(bytearray(check), np.uint8)
            reached = self._ask(
                frames, Memory(int(held.ctypes.data), check, self._cache.addresses, self._cache.bytes_per_layer)
            )
        self.transport, self.reason, self._same_host = reached.transport, reached.message, reached.same_host

    @staticmethod
    def _ask(frames: FrameSocket, message: Reach | Memory) -> Reached:
        frames.send(message)
        answer = decode_data(frames.receive_body())
        if isinstance(answer, Written):
            raise ProtocolError(answer.code, answer.message)
        if not isinstance(answer, Reached):
            raise ProtocolError("unexpected_message", type(answer).__name__)
        return answer

    def send(self, source: list[int], target: list[int], urgent: bool = False) -> int:
        """Copies blocks and returns the number of bytes once they are in place.

        Args:
            urgent: without pacing; somebody waits for just these.

        Raises:
            OSError, ProtocolError: nothing is known about the blocks on the other side.
        """
        bytes_per_s = math.inf if urgent else self._bytes_per_s
        parts = self._shares(len(source))
        if len(parts) == 1:
            self._write(self._channels[0], source, target, bytes_per_s)
        else:
            while len(self._channels) < len(parts):
                self._channels.append(self._connect())
            share = bytes_per_s / len(parts)
            written = [
                self._pool.submit(self._write, channel, source[part], target[part], share)
                for channel, part in zip(self._channels, parts, strict=False)
            ]
            for one in written:
                one.result()
        return len(source) * self._cache.block_bytes

    def _shares(self, count: int) -> list[slice]:
        """Which blocks go over which connection."""
        streams = 1 if self.transport == "memory" or self._same_host else min(STREAMS, count)
        size = -(-count // streams)
        return [slice(start, start + size) for start in range(0, count, size)]

    def _write(self, frames: FrameSocket, source: list[int], target: list[int], bytes_per_s: float) -> None:
        size = len(source) * self._cache.block_bytes
        by_memory = self.transport == "memory"
        frames.send(Write(self._session, target, size, source if by_memory else [], math.isinf(bytes_per_s)))
        if not by_memory:
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
        answer = decode_data(frames.receive_body())
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
        frames.send(Measure(blocks))
        if self.transport != "memory":
            self._send_bytes(frames.sock, blocks, Pace(math.inf))
        self._until_written(frames)
        return time.monotonic() - started

    def close(self) -> None:
        for frames in self._channels:
            frames.close()
