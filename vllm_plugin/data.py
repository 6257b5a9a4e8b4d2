"""The data server of one worker: does what its engine core asks, and takes blocks from other workers.

Every connection is authenticated; blocks are accepted only for sessions that this worker's own engine core has allowed.
No connection is ever shared by two sessions (interleaved frames would corrupt both).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial

from vllm_plugin.data_messages import AllowSession, Probe, Probed, Push, Pushed, RevokeSession, decode_data
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.messages import Answer
from vllm_plugin.receiving import Receiver
from vllm_plugin.sending import Sender
from vllm_plugin.switching import SWITCHING
from vllm_plugin.topology import Place
from vllm_plugin.wire import FrameSocket, ProtocolError

__all__ = ["DEFAULT_BYTES_PER_S", "DataServer"]

logger = logging.getLogger("vllm.vllm_hi.data")

DEFAULT_BYTES_PER_S = 1.5e9


class DataServer:
    """Listens on the data port; serves this worker's engine core and other workers.

    `read_generator(request_id)` returns the state of the request's random generator, or None if it has none. `backend`:
    transport that the operator wants, "" for the fastest. `bytes_per_s`: limit while requests are decoded.
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
        backend: str = "",
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
    ) -> None:
        self._cache = cache
        self._read_generator = read_generator
        self._token = token
        self._name = name
        self._cpus = cpus
        self._backend = backend
        self._bytes_per_s = bytes_per_s
        self._receiver = Receiver(cache, backend, bytes_per_s)
        self._lock = threading.Lock()
        #: By session, and host and port of the worker that takes the blocks.
        self._senders: dict[tuple[str, str, int], Sender] = {}
        #: What a block took on the way to a worker (host, port) when that was measured.
        self._block_s: dict[tuple[str, int], float] = {}
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
                self._receiver.serve(frames)
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
            elif isinstance(message, Probe):
                frames.send(self._probe(message))
            elif isinstance(message, AllowSession):
                SWITCHING.hold(message.session)
                self._receiver.allow(message.session)
                frames.send(Answer(message.call, True))
            elif isinstance(message, RevokeSession):
                self._drop_senders(message.session)
                self._receiver.revoke(message.session)
                SWITCHING.release(message.session)
                frames.send(Answer(message.call, True))
            else:
                raise ProtocolError("unexpected_message", type(message).__name__)

    def _push(self, push: Push) -> Pushed:
        sent, transport = 0, ""
        try:
            self._cache.check([*push.source_blocks, *(block for block, _, _ in push.open)])
            generators = {rid: state for rid in push.generators if (state := self._read_generator(rid)) is not None}
            if push.source_blocks or push.open:
                sender = self._sender(push)
                sent = sender.send(push.source_blocks, push.target_blocks, push.owners, push.urgent, push.open)
                transport = sender.transport
        except (OSError, ProtocolError) as error:
            # Only its own: those to other workers may be in the middle of something. The session ends with it.
            self._drop_senders(push.session, push.host, push.port)
            return Pushed(push.call, False, message=str(error) or type(error).__name__)
        return Pushed(push.call, True, sent, generators, transport=transport)

    def _sender(self, push: Push) -> Sender:
        key = push.session, push.host, push.port
        with self._lock:
            sender = self._senders.get(key)
        if sender is None:
            sender = self._dialled(*key, push.source_places, push.target_places)
            sender.block_s = self._block_s.get((push.host, push.port), 0.0)
            SWITCHING.hold(push.session)
            with self._lock:
                self._senders[key] = sender
            logger.info("session %s: blocks travel by %s %s", push.session, sender.transport, sender.reason)
        return sender

    def _dialled(
        self,
        session: str,
        host: str,
        port: int,
        source: tuple[Place, ...] = (),
        target: tuple[Place, ...] = (),
    ) -> Sender:
        dial = partial(FrameSocket.dial, host, port, self._token, "worker", self._name)
        return Sender(self._cache.cut(source), dial, session, self._backend, self._bytes_per_s, target)

    def _drop_senders(self, *which: str | int) -> None:
        """Those of a session, or the one to a host and port."""
        with self._lock:
            dropped = [self._senders.pop(key) for key in list(self._senders) if key[: len(which)] == which]
        for sender in dropped:
            sender.close()

    def _probe(self, probe: Probe) -> Probed:
        try:
            sender = self._dialled("", probe.host, probe.port)
            try:
                found = sender.measure()
            finally:
                sender.close()
        except (OSError, ProtocolError) as error:
            return Probed(probe.call, False, message=str(error) or type(error).__name__)
        self._block_s[probe.host, probe.port] = found.block_s
        return Probed(probe.call, True, found.transport, found.reason, found.bytes_per_s, found.block_s)
