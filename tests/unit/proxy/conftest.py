"""A proxy worker in front of two fake instances, A active and B in standby."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.app import ProxyApp, create_proxy
from proxy.routing import RoutingTable
from proxy.settings import ProxySettings
from tests.fakes.answers import make_tokens, read_stream
from tests.fakes.broker import Broker
from tests.fakes.client import Client, Exchange
from tests.fakes.instance import FakeInstance, Generation
from vllm_plugin.wire import Freezing, LegOpened, OpenLeg, Producing, Switched

TOKEN = "join-me"
WORKER = "worker-1"
TICKET = "ticket-1"
ANSWER = make_tokens(40)
TEXT = "".join(token.text for token in ANSWER)
IDS = [token.id for token in ANSWER]


def settings(**changes: object) -> ProxySettings:
    fields = {
        # Nobody listens on port 1: these tests do without Redis, and so must the proxy.
        "redis_url": "redis://127.0.0.1:1/0",
        "join_token": TOKEN,
        "worker_id": WORKER,
        "patience_s": 30.0,
        "orphan_patience_s": 30.0,
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


async def until(condition: Callable[[], Any]) -> None:
    """Waits for what nobody can be asked to announce."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


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

    async def freeze(self, on_a: Generation, ticket: str = TICKET) -> None:
        """Announces a handover and waits until the proxy knows."""
        self.a.send(Freezing(on_a.stream_id, ticket))
        stream = self.app.live.get(on_a.stream_id)
        await until(lambda: stream is None or stream._second is None or stream._may_move)

    def lose_patience(self, *, orphaned: bool = True) -> None:
        object.__setattr__(self.app.settings, "patience_s", 0.2)
        if orphaned:
            object.__setattr__(self.app.settings, "orphan_patience_s", 0.2)

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


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "valkey.log", WORKER)
    yield broker
    broker.stop()


async def until_frozen(rig: Rig, on_a: Generation) -> None:
    stream = rig.app.live.get(on_a.stream_id)
    assert stream is not None
    await until(lambda: stream._may_move)


async def gone(generation: Generation) -> None:
    async with asyncio.timeout(5):
        await generation.gone.wait()


async def stays_on_a(rig: Rig, exchange: Any, on_a: Generation) -> None:
    on_a.release()
    got = read_stream(await exchange.end())
    assert (got.text, got.finish_reasons, got.done, got.errors) == (TEXT, ["length"], 1, [])
    assert not rig.a.all(Switched)
