"""The routing table comes from Redis, and its versions are acknowledged there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.app import ProxyApp, create_proxy
from tests.fakes.answers import read_stream
from tests.fakes.broker import Broker
from tests.fakes.client import Client
from tests.fakes.instance import FakeInstance
from tests.unit.proxy.conftest import settings, table, until


@pytest.fixture
async def app(broker: Broker) -> AsyncIterator[ProxyApp]:
    app = create_proxy(settings(redis_url=broker.url))
    await app.start()
    yield app
    await app.stop()


async def test_the_table_is_read_followed_and_acknowledged(app: ProxyApp, broker: Broker, a: FakeInstance) -> None:
    broker.publish(table(1, ["inst-a"], a))
    await until(lambda: broker.acknowledged() == 1)
    await a.connected()
    broker.publish(table(2, [], a))
    await until(lambda: broker.acknowledged() == 2)
    assert app.routing.table.models["tiny"].active == []
    assert abs(broker.ack()["seen_at"] - time.time()) < 60


async def test_a_change_is_noticed_before_the_next_poll(broker: Broker, a: FakeInstance) -> None:
    app = create_proxy(settings(redis_url=broker.url, poll_s=3600.0))
    await app.start()
    subscribers: Any = broker.client.pubsub_numsub
    await until(lambda: subscribers("vllm_hi:routing")[0][1])
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
    await until(broker.streams)
    assert broker.streams()[0]["instance"] == "inst-a"
    assert 0 < broker.client.ttl(f"vllm_hi:streams:{broker.worker}") <= 5  # type: ignore[operator]
    await client.close()
