"""A proxy worker in front of two fake instances, A active and B in standby."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest

from proxy.app import ProxyApp, create_proxy
from proxy.routing import RoutingTable
from proxy.settings import ProxySettings
from tests.fakes.answers import make_tokens
from tests.fakes.client import Client, Exchange
from tests.fakes.instance import FakeInstance, Generation
from vllm_plugin.wire import Freezing, LegOpened, OpenLeg, Producing

TOKEN = "join-me"
WORKER = "worker-1"
TICKET = "ticket-1"
ANSWER = make_tokens(40)


def settings(**changes: object) -> ProxySettings:
    fields = {
        # Nobody listens on port 1: these tests do without Redis, and so must the proxy.
        "redis_url": "redis://127.0.0.1:1/0",
        "join_token": TOKEN,
        "worker_id": WORKER,
        "patience_s": 0.3,
        "poll_s": 0.05,
        **changes,
    }
    return msgspec.convert(fields, ProxySettings)


def table(version: int, active: list[str], *instances: FakeInstance) -> RoutingTable:
    return msgspec.convert(
        {
            "version": version,
            "models": {"tiny": {"max_model_len": 2048, "active": active}},
            "instances": {x.name: x.row("active" if x.name in active else "standby") for x in instances},
        },
        RoutingTable,
    )


@dataclass
class Rig:
    app: ProxyApp
    client: Client
    a: FakeInstance
    b: FakeInstance

    async def attach(self, call: int = 1, ticket: str = TICKET, number: int = 0) -> tuple[Generation, Generation]:
        """Opens the second leg of A's request `number`; returns the generations on A and B."""
        on_a = await self.a.generation(number)
        legs, answers = len(self.b.generations), len(self.a.all(LegOpened))
        self.a.send(OpenLeg(call, on_a.stream_id, ticket, self.b.base_url))
        on_b = await self.b.generation(legs)
        assert await self.a.expect(LegOpened, answers) == LegOpened(call, True)
        return on_a, on_b

    async def deliver(self, exchange: Exchange, tokens: int) -> Generation:
        """Lets A generate `tokens` tokens of a chat and waits until the client has them."""
        on_a = await self.a.generation()
        on_a.release(tokens + 1)  # the first event announces the role; a text completion has one token more instead
        await exchange.contains("finish_reason", tokens + 1)
        return on_a

    def freeze(self, on_a: Generation, ticket: str = TICKET) -> None:
        self.a.send(Freezing(on_a.stream_id, ticket))

    def produce(self, on_a: Generation, tokens: int, ticket: str = TICKET) -> None:
        self.b.send(Producing(on_a.stream_id, ticket, tokens))


@pytest.fixture
async def a() -> AsyncIterator[FakeInstance]:
    instance = FakeInstance("inst-a", TOKEN, ANSWER)
    await instance.start()
    yield instance
    await instance.stop()


@pytest.fixture
async def b() -> AsyncIterator[FakeInstance]:
    instance = FakeInstance("inst-b", TOKEN, ANSWER)
    await instance.start()
    yield instance
    await instance.stop()


@pytest.fixture
async def rig(a: FakeInstance, b: FakeInstance) -> AsyncIterator[Rig]:
    app = create_proxy(settings())
    await app.start()
    app.routing.install(table(1, ["inst-a"], a, b))
    await a.connected()
    await b.connected()
    rig = Rig(app, Client(app), a, b)
    yield rig
    await rig.client.close()
    await app.stop()
