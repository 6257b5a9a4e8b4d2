"""One authenticated control connection to each instance, kept up as long as the instance is in the routing table."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

import msgspec

from proxy.routing import Instance
from proxy.settings import ProxySettings
from vllm_plugin.wire import Ping, ProtocolError, ProxyMessage, decode_frame, dial_async, encode_frame, read_frame_async

__all__ = ["ControlLink", "ControlLinks"]

log = logging.getLogger(__name__)

PING_EVERY_S = 5.0
BACKOFF_S = (0.1, 0.25, 0.5, 1.0, 2.0)
#: How long a message waits for a lost connection to come back: longer than A's last-resort lease it would only confuse.
KEEP_UNSENT_S = 10.0


class ControlLink:
    """The connection to one instance. `handle` gets its messages in their order and must not block."""

    def __init__(
        self,
        instance_id: str,
        instance: Instance,
        settings: ProxySettings,
        handle: Callable[[ControlLink, ProxyMessage], None],
    ) -> None:
        self.instance_id = instance_id
        self.address = (instance.control_host, instance.control_port)
        self._settings = settings
        self._handle = handle
        self._writer: asyncio.StreamWriter | None = None
        self._was_up = False
        self._unsent: deque[tuple[float, msgspec.Struct]] = deque(maxlen=1000)
        self._task = asyncio.create_task(self._run(), name=f"control {instance_id}")

    @property
    def connected(self) -> bool:
        return self._writer is not None

    def send(self, message: msgspec.Struct) -> None:
        """Sends `message`, or keeps it for a short while until the connection is back."""
        if self._writer is None:
            self._unsent.append((time.monotonic(), message))
        else:
            self._writer.write(encode_frame(message))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._connection()
                failures = 0
            except (OSError, EOFError, ProtocolError) as error:
                # One line per outage, not one per attempt.
                log.log(
                    logging.DEBUG if failures else logging.WARNING,
                    "control connection to %s at %s:%d: %s",
                    self.instance_id,
                    *self.address,
                    str(error) or type(error).__name__,
                )
                failures = 1 if self._was_up else failures + 1
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])

    async def _connection(self) -> None:
        self._was_up = False
        reader, writer = await dial_async(*self.address, self._settings.join_token, "proxy", self._settings.worker_id)
        self._was_up = True
        _detect_half_open(writer)
        log.info("control connection to %s at %s:%d is up", self.instance_id, *self.address)
        self._writer = writer
        ping = asyncio.create_task(self._keep_alive(writer))
        try:
            self._send_unsent()
            while True:
                message = decode_frame(await read_frame_async(reader))
                try:
                    self._handle(self, message)
                except Exception:  # one stream's trouble must not cost all others their notices
                    log.exception("%s from %s", type(message).__name__, self.instance_id)
        finally:
            self._writer = None
            ping.cancel()
            writer.close()

    def _send_unsent(self) -> None:
        oldest = time.monotonic() - KEEP_UNSENT_S
        while self._unsent:
            at, message = self._unsent.popleft()
            if at >= oldest:
                self.send(message)

    async def _keep_alive(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S)
            writer.write(encode_frame(Ping()))


def _detect_half_open(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # with the pings: a peer that vanished is noticed within 15 s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)


class ControlLinks:
    """All control connections of this worker."""

    def __init__(self, settings: ProxySettings, handle: Callable[[ControlLink, ProxyMessage], None]) -> None:
        self._settings = settings
        self._handle = handle
        self._links: dict[str, ControlLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def connected(self, instance_id: str) -> bool:
        link = self._links.get(instance_id)
        return link is not None and link.connected

    def follow(self, instances: Mapping[str, Instance], in_use: Collection[str]) -> None:
        """Dials what is new in the table; hangs up what left it, unless one of our streams is still there."""
        for instance_id, instance in instances.items():
            link = self._links.get(instance_id)
            if link is not None and link.address != (instance.control_host, instance.control_port):
                self._hang_up(instance_id)
                link = None
            if link is None and instance.control_host and instance.control_port:
                self._links[instance_id] = ControlLink(instance_id, instance, self._settings, self._handle)
        for instance_id in [i for i in self._links if i not in instances and i not in in_use]:
            self._hang_up(instance_id)

    async def close(self) -> None:
        for instance_id in list(self._links):
            self._hang_up(instance_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _hang_up(self, instance_id: str) -> None:
        task = asyncio.create_task(self._links.pop(instance_id).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
