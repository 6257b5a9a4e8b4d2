"""Which instance a request goes to: the table, kept fresh from Redis, and the acknowledgement of its versions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from proxy.errors import model_not_found, no_instance
from proxy.settings import ProxySettings

__all__ = ["Instance", "Model", "Route", "Routing", "RoutingTable", "close_redis", "connect_redis"]

log = logging.getLogger(__name__)

REDIS_TIMEOUT_S = 5.0


class Model(msgspec.Struct, frozen=True):
    """One served name. `parent`: that of the model an adapter belongs to. `served_as`: what its instances call it."""

    max_model_len: int | None = None
    active: list[str] = []
    parent: str | None = None
    served_as: str | None = None


class Instance(msgspec.Struct, frozen=True):
    base_url: str
    control_host: str = ""
    control_port: int = 0
    served_model_name: str = ""
    role: str = ""


class RoutingTable(msgspec.Struct, frozen=True):
    """The document under `vllm_hi:routing`; docs/protocol.md section 6."""

    version: int = 0
    models: dict[str, Model] = {}
    instances: dict[str, Instance] = {}


class Route(msgspec.Struct, frozen=True):
    """Where one request goes, and the table version that said so."""

    instance_id: str
    base_url: str
    version: int


class Routing:
    """Holds the newest table, chooses instances, and knows which versions still have requests on their way."""

    def __init__(self, settings: ProxySettings, connected: Callable[[str], bool] = lambda instance_id: True) -> None:
        self.table = RoutingTable()
        self.load: Counter[str] = Counter()
        self._settings = settings
        self.connected = connected
        self._sending: Counter[int] = Counter()
        self._listeners: list[Callable[[RoutingTable], None]] = []
        self._wake = asyncio.Event()

    def on_change(self, listener: Callable[[RoutingTable], None]) -> None:
        self._listeners.append(listener)

    def install(self, table: RoutingTable) -> None:
        """Makes `table` the one that new requests are routed by."""
        self.table = table
        for listener in self._listeners:
            listener(table)

    def choose(self, model: str, tried: frozenset[str] = frozenset()) -> Route:
        """Picks the active instance with the fewest streams that is not in `tried`. The caller owes a `sent()` for it.

        Raises:
            ApiError: 404 unknown model; 503 nothing (left) to route to.
        """
        entry = self.table.models.get(model)
        if entry is None:
            raise model_not_found(model)
        candidates = [i for i in entry.active if i in self.table.instances and i not in tried]
        if not candidates:
            raise no_instance(model, self._settings.retry_after_s)
        # An instance whose control connection is down can serve, but not hand over: it comes last.
        best = min(candidates, key=lambda i: (not self.connected(i), self.load[i]))
        self._sending[self.table.version] += 1
        return Route(best, self.table.instances[best].base_url, self.table.version)

    def served_as(self, model: str) -> str:
        """Returns what the instances call a model: another name where it is asked for at one instance alone."""
        entry = self.table.models.get(model)
        return entry.served_as or model if entry is not None else model

    def instance_at(self, base_url: str) -> str | None:
        """Returns the id of the instance that answers at `base_url`, None if the table has none."""
        target = base_url.rstrip("/")
        return next((i for i, x in self.table.instances.items() if x.base_url.rstrip("/") == target), None)

    def sent(self, route: Route) -> None:
        """The request of `route` has been written to its instance, or never will be."""
        self._sending[route.version] -= 1
        if self._sending[route.version] <= 0:
            del self._sending[route.version]
            if route.version < self.table.version:
                self._wake.set()

    def acknowledged(self) -> int:
        """Returns the newest version under which, and under all older ones, nothing is still being sent."""
        return min([self.table.version, *self._sending])

    def models(self) -> list[dict[str, Any]]:
        """Returns OpenAI's model objects, one per served name."""
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "vllm",
                "root": model.served_as or name,
                "parent": model.parent,
                "max_model_len": model.max_model_len,
            }
            for name, model in sorted(self.table.models.items())
        ]

    # -- Redis ---------------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keeps the table fresh and the acknowledgement alive until cancelled. A lost Redis changes nothing here."""
        lost = False
        while True:
            client = connect_redis(self._settings.redis_url)
            pubsub = client.pubsub()
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    await pubsub.subscribe(f"{self._settings.key_prefix}routing")
                if lost:
                    log.info("redis is back")
                lost = False
                listen = asyncio.create_task(self._listen(pubsub))
                try:
                    await self._poll(client, listen)
                finally:
                    listen.cancel()
                    await asyncio.gather(listen, return_exceptions=True)
            except (RedisError, OSError, TimeoutError) as error:
                if not lost:
                    log.warning("redis is lost, serving with routing table version %d: %s", self.table.version, error)
                lost = True
            finally:
                await close_redis(pubsub)
                await close_redis(client)
            await asyncio.sleep(self._settings.poll_s)

    async def _listen(self, pubsub: Any) -> None:
        async for _ in pubsub.listen():
            self._wake.set()

    async def _poll(self, client: Any, listen: asyncio.Task[None]) -> None:
        while not listen.done():
            self._wake.clear()
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                raw = await client.get(f"{self._settings.key_prefix}routing")
                if raw is not None:
                    self._read(raw)
                ack = json.dumps({"version": self.acknowledged(), "seen_at": time.time()})
                await client.hset(f"{self._settings.key_prefix}routing:acks", self._settings.worker_id, ack)
            try:
                async with asyncio.timeout(self._settings.poll_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
        await listen

    def _read(self, raw: bytes) -> None:
        try:
            table = msgspec.json.decode(raw, type=RoutingTable)
        except msgspec.MsgspecError as error:
            log.error("the routing table in redis is unreadable, keeping version %d: %s", self.table.version, error)
            return
        if table != self.table:
            log.info("routing table version %d", table.version)
            self.install(table)


def connect_redis(url: str) -> redis.Redis:
    """Returns a client without a socket timeout; callers put `asyncio.timeout` around what they do.

    With one, redis-py uses `asyncio.wait_for`, which on Python 3.11 can swallow the cancellation of its caller.
    """
    return redis.from_url(url, socket_connect_timeout=2.0)


async def close_redis(client: Any) -> None:
    """Closes a client or a subscription; that Redis is away already is no error."""
    try:
        await client.aclose()
    except (RedisError, OSError, TimeoutError):
        pass
