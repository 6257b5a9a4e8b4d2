"""The engine core's connections to the data servers of its own workers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm_plugin.data_messages import AllowSession, Probe, Probed, Push, Pushed, RevokeSession, decode_data
from vllm_plugin.wire import FrameSocket

__all__ = ["Blocks", "Workers"]


@dataclass
class Blocks:
    """What one push has to do (`vllm_plugin.data_messages.Push`): lists of block ids of A and of B, and the rest."""

    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    open: list[tuple[int, int, int]] = field(default_factory=list)
    generators: list[str] = field(default_factory=list)
    urgent: bool = False

    def add(self, source: list[int], target: list[int], owner: int) -> None:
        """Blocks of one request, or of one choice of it."""
        self.source += source
        self.target += target
        self.owners += [owner] * len(source)


class Workers:
    """`infos`: what `MigrationWorker.vllm_hi_start` returned, by rank. `transport`: what carried blocks last.

    Pushes and session control use separate connections, so that a push that hangs can be revoked.
    """

    def __init__(self, infos: list[dict[str, Any]], host: str, token: str) -> None:
        self.infos = infos
        self.transport = ""
        self._host = host
        self._token = token
        self._numbers = count(1)
        self._control = [_Connection(self, info["data_port"]) for info in infos]
        self._pushes = [_Connection(self, info["data_port"]) for info in infos]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers and ranks."""
        return sum(info["block_bytes"] for info in self.infos)

    @property
    def keep_generators(self) -> bool:
        """Whether a seeded request has a generator of its own here (V1 runner), whose state must travel along."""
        return any(info["rng"].endswith("-generator") for info in self.infos)

    def allow(self, session: str) -> None:
        for connection in self._control:
            connection.ask(AllowSession(next(self._numbers), session))

    def revoke(self, session: str) -> None:
        """Returns when no worker sends or writes blocks of the session any more."""
        for connection in self._control:
            connection.ask(RevokeSession(next(self._numbers), session))

    def push(self, session: str, host: str, ports: list[int], blocks: Blocks) -> tuple[int, dict[str, bytes]]:
        """Sends blocks rank to rank and reads generator states; returns (bytes sent, state by request id).

        Raises:
            ConnectionError: a worker could not deliver; nothing is known about the blocks on the other side.
        """
        sent = 0
        states: dict[str, bytes] = {}
        for connection, port in zip(self._pushes, ports, strict=True):
            message = Push(
                next(self._numbers),
                *(session, host, port),
                *(blocks.source, blocks.target, blocks.generators),
                *(blocks.owners, blocks.urgent, blocks.open),
            )
            answer = connection.ask(message)
            if not isinstance(answer, Pushed) or not answer.ok:
                reason = answer.message if isinstance(answer, Pushed) else "unexpected answer of the worker"
                raise ConnectionError(f"KV blocks could not be delivered: {reason}")
            sent += answer.sent_bytes
            self.transport = answer.transport or self.transport
            states.update(answer.generators)
        return sent, states

    def probe(self, host: str, ports: list[int]) -> Probed:
        """Measures the way to the target's workers; the slowest pair of ranks stands for all.

        Raises:
            ConnectionError: a worker of the target cannot be reached.
        """
        found: list[Probed] = []
        for connection, port in zip(self._pushes, ports, strict=True):
            answer = connection.ask(Probe(next(self._numbers), host, port))
            if not isinstance(answer, Probed) or not answer.ok:
                reason = answer.message if isinstance(answer, Probed) else "unexpected answer of the worker"
                raise ConnectionError(f"the way to the target could not be measured: {reason}")
            found.append(answer)
        return min(found, key=lambda one: one.bytes_per_s)

    def dial(self, port: int) -> FrameSocket:
        return FrameSocket.dial(self._host, port, self._token, "engine", "engine-core")


class _Connection:
    """One question at a time; dialled at first use and again after a failure."""

    def __init__(self, workers: Workers, port: int) -> None:
        self._workers = workers
        self._port = port
        self._lock = threading.Lock()
        self._frames: FrameSocket | None = None

    def ask(self, message: AllowSession | RevokeSession | Push | Probe) -> Any:
        with self._lock:
            if self._frames is None:
                self._frames = self._workers.dial(self._port)
            try:
                self._frames.send(message)
                return decode_data(self._frames.receive_body())
            except BaseException:
                self._frames.close()
                self._frames = None
                raise
