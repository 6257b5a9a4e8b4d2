"""The engine core's connections to the data servers of its own workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm_plugin.data_messages import AllowSession, Probe, Probed, Push, Pushed, RevokeSession, decode_data
from vllm_plugin.topology import Cut, Layout, TopologyRefused, cuts, plan
from vllm_plugin.wire import FrameSocket

__all__ = ["Blocks", "Route", "Workers"]

#: Pairs of ranks that copy at the same time; more wait for their turn.
MOST_ROUTES = 32


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


@dataclass(frozen=True)
class Route:
    """One worker of ours to one of the target's, at `host:port`, and what of each block goes there."""

    host: str
    port: int
    cut: Cut


class Workers:
    """`infos`: what `MigrationWorker.vllm_hi_start` returned, by rank. `layout`: what of a block lies on which of them.
    `transport`: what carried blocks last.

    Pushes and session control use separate connections, so that a push that hangs can be revoked; each route of a
    worker has its own, so that all copy at the same time.
    """

    def __init__(self, infos: list[dict[str, Any]], layout: Layout, host: str, token: str) -> None:
        self.infos = infos
        self.layout = layout
        self.transport = ""
        self._host = host
        self._token = token
        self._numbers = count(1)
        self._control = [_Connection(self, info["data_port"]) for info in infos]
        self._pushes: dict[tuple[int, int], _Connection] = {}
        self._pool = ThreadPoolExecutor(MOST_ROUTES, thread_name_prefix="vllm-hi-push")

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers and ranks; heads that several ranks hold count once."""
        return self.layout.block_bytes

    @property
    def keep_generators(self) -> bool:
        """Whether a seeded request has a generator of its own here (V1 runner), whose state must travel along."""
        return any(info["rng"].endswith("-generator") for info in self.infos)

    @property
    def sampler(self) -> int:
        """The rank whose generators draw the tokens: the last stage of the pipeline samples, and there all tensor
        parallel ranks alike (v1/worker/gpu_model_runner.py, `sample_tokens`)."""
        last = max(info["pp_rank"] for info in self.infos)
        return next(rank for rank, info in enumerate(self.infos) if (info["pp_rank"], info["tp_rank"]) == (last, 0))

    def allow(self, session: str) -> None:
        for connection in self._control:
            connection.ask(AllowSession(next(self._numbers), session))

    def revoke(self, session: str) -> None:
        """Returns when no worker sends or writes blocks of the session any more."""
        for connection in self._control:
            connection.ask(RevokeSession(next(self._numbers), session))

    def routes(self, target: Layout, host: str, ports: list[int]) -> list[Route]:
        """What goes where to an instance whose workers listen at these ports, by rank.

        Raises:
            TopologyRefused: blocks cannot be copied there.
        """
        if len(ports) != len(target.ranks):
            raise TopologyRefused(f"The target has {len(target.ranks)} ranks and {len(ports)} data ports.")
        found = cuts(self.layout, target, plan(self.layout, target))
        return [Route(host, ports[cut.target_rank], cut) for cut in found]

    def push(self, session: str, routes: Sequence[Route], blocks: Blocks) -> tuple[int, dict[str, bytes]]:
        """Sends blocks on all routes at once and reads generator states; returns (bytes sent, state by request id).

        Raises:
            ConnectionError: a worker could not deliver; nothing is known about the blocks on the other side.
        """
        asked = list(routes) if blocks.source or blocks.open else []
        sampler = self.sampler
        reader = next((route for route in asked if route.cut.source_rank == sampler), None)
        if blocks.generators and reader is None:
            # That rank has nothing to send, and is only asked.
            reader = Route("", 0, Cut(sampler, 0))
            asked.append(reader)
        messages = []
        turns: Counter[int] = Counter()
        for route in asked:
            rank = route.cut.source_rank
            message = self._push_message(session, route, blocks, blocks.generators if route is reader else [])
            messages.append((self._push_connection(rank, turns[rank]), message))
            turns[rank] += 1
        sent = 0
        states: dict[str, bytes] = {}
        for answer in self._ask_all(messages):
            if not isinstance(answer, Pushed) or not answer.ok:
                reason = answer.message if isinstance(answer, Pushed) else "unexpected answer of the worker"
                raise ConnectionError(f"KV blocks could not be delivered: {reason}")
            sent += answer.sent_bytes
            self.transport = answer.transport or self.transport
            states.update(answer.generators)
        return sent, states

    def _push_message(self, session: str, route: Route, blocks: Blocks, generators: list[str]) -> Push:
        if not route.port:
            return Push(next(self._numbers), session, "", 0, [], [], generators)
        return Push(
            next(self._numbers),
            *(session, route.host, route.port),
            *(blocks.source, blocks.target, generators),
            *(blocks.owners, blocks.urgent, blocks.open),
            *(route.cut.source, route.cut.target),
        )

    def _push_connection(self, rank: int, turn: int = 0) -> _Connection:
        if (rank, turn) not in self._pushes:
            self._pushes[rank, turn] = _Connection(self, self.infos[rank]["data_port"])
        return self._pushes[rank, turn]

    def _ask_all(self, messages: Sequence[tuple[_Connection, Push]]) -> list[Any]:
        """Asks several workers at once; returns, or raises, when all have answered."""
        if len(messages) == 1:
            return [connection.ask(message) for connection, message in messages]
        asked = [self._pool.submit(connection.ask, message) for connection, message in messages]
        wait(asked)
        return [one.result() for one in asked]

    def probe(self, host: str, ports: list[int]) -> Probed:
        """Measures the way to the target's workers; the slowest pair of ranks stands for all.

        Raises:
            ConnectionError: a worker of the target cannot be reached.
        """
        if not ports:
            raise ConnectionError("the target names no data ports")
        found: list[Probed] = []
        for rank in range(max(len(self.infos), len(ports))):
            # One pair after the other: what one rank can do, whatever the others are doing.
            connection = self._push_connection(rank % len(self.infos))
            answer = connection.ask(Probe(next(self._numbers), host, ports[rank % len(ports)]))
            if not isinstance(answer, Probed) or not answer.ok:
                reason = answer.message if isinstance(answer, Probed) else "unexpected answer of the worker"
                raise ConnectionError(f"the way to the target could not be measured: {reason}")
            found.append(answer)
        return min(found, key=lambda one: one.bytes_per_s)

    def dial(self, port: int) -> FrameSocket:
        frames = FrameSocket.dial(self._host, port, self._token, "engine", "engine-core")
        # A push over a slow link takes its time; the worker itself notices when nothing goes on.
        frames.sock.settimeout(None)
        return frames


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
