"""A's connection to B: calls, and the copying of blocks into B's windows.

It keeps one promise towards B: `Release` is said only when nobody writes into the window any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_plugin.errors import MigrationError
from vllm_plugin.link import Link
from vllm_plugin.messages import (
    Answer,
    FirstStep,
    Grown,
    OpenSession,
    Parked,
    Refusals,
    Release,
    SessionOpened,
    decode_peer,
)
from vllm_plugin.topology import TopologyRefused
from vllm_plugin.wire import FrameSocket, ProtocolError

if TYPE_CHECKING:
    from vllm_plugin.engine import MigrationEngine
    from vllm_plugin.workers import Blocks

__all__ = ["TargetConnection"]

ANSWER_DEADLINE_S = 5.0


class TargetConnection:
    """`peer`: {vllm_hi_id, host, control_port, base_url} of B. `broken`: a push failed, so B's worker may still be
    writing.

    Raises:
        MigrationError: 502 when B cannot be reached, 409 with B's reason when it refuses the session or speaks another
            protocol, and when blocks cannot be copied between the two.
    """

    def __init__(
        self,
        engine: MigrationEngine,
        peer: dict[str, Any],
        opening: Callable[[int], OpenSession],
        on_notice: Callable[[Parked | FirstStep], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._on_notice = on_notice
        self._on_lost = on_lost
        self.base_url = str(peer["base_url"])
        self.broken = False
        self._lock = threading.Lock()
        self._writing = False
        self._release_later: list[str] = []
        self._link = self._dial(str(peer["host"]), int(peer["control_port"]))
        opened = self._open(opening)
        self.session = opened.session
        try:
            self._routes = engine.workers.routes(opened.layout, opened.data_host, opened.data_ports)
        except TopologyRefused as error:
            self._link.close()
            raise MigrationError(409, "topology_unsupported", error.message) from error

    @property
    def lost(self) -> bool:
        return self._link.closed or self.broken

    def _dial(self, host: str, port: int) -> Link:
        try:
            frames = FrameSocket.dial(host, port, self._engine.settings.token, "peer", self._engine.name)
        except (OSError, ProtocolError) as error:
            if isinstance(error, ProtocolError) and error.code == "protocol_mismatch":
                text = f"The target does not understand the source: {error.message}; install the same release on both."
                raise MigrationError(409, error.code, text) from error
            text = f"The target at {host}:{port} does not answer: {error}."
            raise MigrationError(502, "target_unreachable", text) from error
        frames.sock.settimeout(None)
        answers = (Answer, SessionOpened, Grown, Refusals)
        return Link(frames, "target", decode_peer, answers, self._on_message, lambda _: self._on_lost()).start()

    def _open(self, opening: Callable[[int], OpenSession]) -> SessionOpened:
        try:
            opened = self.ask(opening)
        except ConnectionError as error:
            self._link.close()
            raise MigrationError(502, "target_unreachable", f"The target did not open a session: {error}.") from error
        if isinstance(opened, SessionOpened):
            return opened
        self._link.close()
        code, message = (
            (opened.code, opened.message) if isinstance(opened, Answer) else ("bad_frame", "Unexpected answer.")
        )
        raise MigrationError(409, code, message)

    def _on_message(self, _link: Link, message: Any) -> None:
        if isinstance(message, Parked | FirstStep):
            self._on_notice(message)

    def ask(self, build: Callable[[int], msgspec.Struct], timeout_s: float = ANSWER_DEADLINE_S) -> Any:
        """Calls B and waits. Raises: ConnectionError when the answer is lost or late."""
        try:
            return self._link.call(build).result(timeout_s)
        except FutureTimeout as error:
            raise ConnectionError("the target did not answer in time") from error

    def tell(self, message: msgspec.Struct) -> None:
        self._link.send(message)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around every push: what is rolled back from now on is released only at the end. So ask inside, and not
        before, which moves have ended already: their windows may be somebody else's by now."""
        with self._lock:
            self._writing = True
        try:
            yield
        finally:
            with self._lock:
                self._writing = False
                tickets, self._release_later = self._release_later, []
            self.release(tickets, "rolled back during a copy")

    def push(self, blocks: Blocks) -> tuple[int, dict[str, bytes]]:
        """Copies blocks and returns (bytes sent, generator state by request id). Only inside `writing`.

        Raises:
            ConnectionError: the connection is of no further use then, for B's worker may still be writing.
        """
        if not blocks.source and not blocks.open and not blocks.generators:
            return 0, {}
        try:
            return self._engine.workers.push(self.session, self._routes, blocks)
        except (OSError, ProtocolError) as error:
            self.broken = True
            raise ConnectionError(str(error)) from error

    def release(self, tickets: list[str], reason: str) -> None:
        """Tells B that nobody writes under these tickets any more; while that is not so, it waits for the end of
        the writing.

        After a broken push it is never said: B then frees the blocks at the end of the session, after its workers have
        revoked it.
        """
        with self._lock:
            if self._writing:
                self._release_later += tickets
                return
        if tickets and not self.broken:
            self._link.send(Release(tickets, reason))

    def close(self) -> None:
        self._link.close()
        self._engine.workers.revoke(self.session)
