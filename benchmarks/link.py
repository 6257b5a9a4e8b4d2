"""A slow link between two instances of one machine: a relay that limits the rate and delays each byte.

All that goes from instance to instance passes it, control and blocks; clients and proxies do not. It makes the two look
like different hosts to each other, so that they do not read each other's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from vllm_plugin.data_messages import Reach, decode_data
from vllm_plugin.messages import SessionOpened, decode_peer
from vllm_plugin.wire import encode_frame

__all__ = ["Link", "slow_link"]

HOST = "127.0.0.1"
CHUNK = 16 * 1024
LENGTH_BYTES = 4

#: Takes the body of a frame; returns the frame to send in its place, or None for one that does not matter.
Change = Callable[[bytes], Awaitable[bytes | None]]


async def _chunks(reader: asyncio.StreamReader, change: Change | None) -> AsyncIterator[bytes]:
    """What comes in; frame by frame until `change` has seen the one that matters, then as it comes."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while change is not None:
            head = await reader.readexactly(LENGTH_BYTES)
            body = await reader.readexactly(int.from_bytes(head, "little"))
            changed = await change(body)
            yield head + body if changed is None else changed
            if changed is not None:
                break
        while chunk := await reader.read(CHUNK):
            yield chunk


@dataclass
class Link:
    """One direction of the link, shared by all connections. `bytes_per_s`, `delay_s`: its rate and its latency."""

    bytes_per_s: float
    delay_s: float
    carried: int = 0
    _free_at: float = 0.0

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Change | None = None
    ) -> None:
        """Carries one direction of a connection until it ends."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        delivering = asyncio.create_task(self._deliver(on_the_way, writer))
        try:
            async for chunk in _chunks(reader, change):
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(chunk) / self.bytes_per_s
                self.carried += len(chunk)
                await asyncio.sleep(max(0.0, self._free_at - now))
                await on_the_way.put((self._free_at + self.delay_s, chunk))
        finally:
            await on_the_way.put((0.0, b""))
            await delivering

    @staticmethod
    async def _deliver(on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        gone = False
        while True:
            when, chunk = await on_the_way.get()
            if not chunk:
                writer.close()
                return
            await asyncio.sleep(max(0.0, when - time.monotonic()))
            try:
                if not gone:
                    writer.write(chunk)
                    await writer.drain()
            except ConnectionError:
                # What is still on the way has to be taken all the same.
                gone = True


@dataclass
class _Relay:
    """Doors of one's own for the target's ports."""

    there: Link
    back: Link
    doors: dict[int, int] = field(default_factory=dict)
    servers: list[asyncio.Server] = field(default_factory=list)

    async def door(self, port: int, *, there: Change | None = None, back: Change | None = None) -> int:
        """A port that leads to `port` over the link."""
        if port not in self.doors:

            async def join(near: asyncio.StreamReader, far: asyncio.StreamWriter) -> None:
                reader, writer = await asyncio.open_connection(HOST, port)
                both = self.there.carry(near, writer, there), self.back.carry(reader, far, back)
                await asyncio.gather(*both, return_exceptions=True)

            server = await asyncio.start_server(join, HOST, 0)
            self.servers.append(server)
            self.doors[port] = server.sockets[0].getsockname()[1]
        return self.doors[port]

    async def readdressed(self, body: bytes) -> bytes | None:
        """B names its data ports: the source gets doors to them."""
        message = _decoded(decode_peer, body)
        if not isinstance(message, SessionOpened):
            return None
        message.data_ports = [await self.door(port, there=_from_another_host) for port in message.data_ports]
        return encode_frame(message)


async def _from_another_host(body: bytes) -> bytes | None:
    """The first message after the handshake, if it says where the source is."""
    message = _decoded(decode_data, body)
    if message is None:
        return None
    if isinstance(message, Reach):
        message.host = "another host"
    return encode_frame(message)


def _decoded(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except Exception:
        return None  # Of the handshake.


@asynccontextmanager
async def slow_link(control_port: int, bytes_per_s: float, rtt_s: float) -> AsyncIterator[tuple[int, Link]]:
    """Yields the port at which an instance's control port is reached over a slow link, its data ports with it, and the
    link's way there."""
    there, back = Link(bytes_per_s, rtt_s / 2), Link(bytes_per_s, rtt_s / 2)
    relay = _Relay(there, back)
    try:
        yield await relay.door(control_port, back=relay.readdressed), there
    finally:
        for server in relay.servers:
            server.close()
