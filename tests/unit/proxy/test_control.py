"""Control connections: who is dialled, who is believed, and what happens when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from proxy.app import ProxyApp, create_proxy
from proxy.settings import ProxySettings
from tests.fakes.client import Client
from tests.fakes.instance import FakeInstance
from tests.unit.proxy.conftest import ANSWER, TOKEN, WORKER, Rig, settings, table
from vllm_plugin.wire import LegOpened, OpenLeg, Resolve


@pytest.fixture
async def app() -> AsyncIterator[ProxyApp]:
    app = create_proxy(settings())
    await app.start()
    yield app
    await app.stop()


async def test_active_and_standby_instances_are_dialled(app: ProxyApp, a: FakeInstance, b: FakeInstance) -> None:
    app.routing.install(table(1, ["inst-a"], a, b))
    await a.connected()
    await b.connected()
    assert (a.connections[0].role, a.connections[0].name) == ("proxy", WORKER)


async def test_a_wrong_join_token_is_refused_and_requests_still_pass(a: FakeInstance) -> None:
    app = create_proxy(settings(join_token="another"))
    await app.start()
    app.routing.install(table(1, ["inst-a"], a))
    await a._until(lambda: a.refused)
    assert a.refused[0] == "wrong_token"
    assert not app.links.connected("inst-a") and not a.connections
    exchange = Client(app).chat()
    (await a.generation()).release()
    await exchange.end()
    assert exchange.status == 200
    await app.stop()


async def test_an_impostor_that_does_not_know_the_token_is_not_believed(app: ProxyApp) -> None:
    impostor = FakeInstance("inst-a", "another", ANSWER)
    await impostor.start()
    app.routing.install(table(1, ["inst-a"], impostor))
    await impostor._until(lambda: impostor.refused)
    assert not app.links.connected("inst-a")
    await impostor.stop()


async def test_a_lost_connection_is_dialled_again(app: ProxyApp, a: FakeInstance) -> None:
    app.routing.install(table(1, ["inst-a"], a))
    await a.connected()
    a.hang_up()
    await a.connected(2)


async def test_an_instance_that_leaves_the_table_is_hung_up(app: ProxyApp, a: FakeInstance) -> None:
    app.routing.install(table(1, ["inst-a"], a))
    await a.connected()
    app.routing.install(table(2, []))
    await a.disconnected()


async def test_an_instance_with_our_streams_stays_connected_until_they_end(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a = await rig.a.generation()
    rig.app.routing.install(table(2, ["inst-b"], rig.b))
    rig.a.send(Resolve(1, on_a.stream_id, "unknown"))
    await rig.a._until(lambda: rig.a.received)
    on_a.release()
    await exchange.end()
    await rig.a.disconnected()


async def test_an_instance_that_moved_is_dialled_at_its_new_address(app: ProxyApp, a: FakeInstance) -> None:
    app.routing.install(table(1, ["inst-a"], a))
    await a.connected()
    other = FakeInstance("inst-a", TOKEN, ANSWER)
    await other.start()
    app.routing.install(table(2, ["inst-a"], other))
    await other.connected()
    await a.disconnected()
    await other.stop()


async def test_garbage_on_the_control_connection_costs_only_the_connection(app: ProxyApp, a: FakeInstance) -> None:
    app.routing.install(table(1, ["inst-a"], a))
    await a.connected()
    a._writers[-1].write(b"\x04\x00\x00\x00junk")
    await a.connected(2)


async def test_one_slow_second_leg_does_not_hold_up_other_notices(rig: Rig) -> None:
    for _ in range(2):
        rig.client.chat()
    first, second = await rig.a.generation(0), await rig.a.generation(1)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, backlog=1)
    port = server.sockets[0].getsockname()[1]
    rig.a.send(OpenLeg(1, first.stream_id, "t1", f"http://127.0.0.1:{port}"))  # accepts and never answers
    rig.a.send(OpenLeg(2, second.stream_id, "t2", rig.b.base_url))
    rig.a.send(OpenLeg(3, "nobody", "t3", rig.b.base_url))
    await rig.a.expect(LegOpened, 2)
    answers = {message.call: (message.ok, message.code) for message in rig.a.all(LegOpened)}
    assert answers == {1: (True, ""), 2: (True, ""), 3: (False, "unknown_stream")}
    server.close()


@pytest.mark.parametrize(("token", "worker"), [("", "w"), ("t", ""), ("t", "a/b"), ("t", "x" * 65)])
def test_settings_that_cannot_work_are_refused(token: str, worker: str) -> None:
    with pytest.raises(ValueError, match=r"join_token|worker_id"):
        ProxySettings(redis_url="redis://127.0.0.1", join_token=token, worker_id=worker)


async def test_only_http_is_served(app: ProxyApp) -> None:
    with pytest.raises(ValueError, match="websocket"):
        await app({"type": "websocket"}, None, None)  # type: ignore[arg-type]
