"""Somebody dies, leaves or falls silent while a request moves."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.answers import event, read_stream
from tests.unit.proxy.conftest import (
    IDS,
    TEXT,
    WORKER,
    Rig,
    gone,
    stays_on_a,
    table,
    until_frozen,
)
from vllm_plugin.wire import (
    Discarded,
    Switched,
)


@pytest.mark.parametrize("how", ["connection", "error event"])
async def test_a_dies_after_the_commit_and_b_goes_on(rig: Rig, how: str) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_b.commit(8)
    on_b.release()
    if how == "connection":
        on_a.die()
    else:
        on_a.insert(event('{"error":{"message":"EngineDeadError"}}'))
    await asyncio.sleep(0.05)
    rig.produce(on_a, 8)
    got = read_stream(await exchange.end())
    assert (got.text, got.errors, got.done) == (TEXT, [], 1)


@pytest.mark.parametrize("how", ["connection", "error event"])
async def test_a_dies_with_its_notice_still_on_the_way_and_b_goes_on(rig: Rig, how: str) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    if how == "connection":
        on_a.die()
    else:
        on_a.insert(event('{"error":{"message":"EngineDeadError"}}'))
    await until_frozen(rig, on_a)
    on_b.commit(8)
    on_b.release()
    rig.produce(on_a, 8)
    got = read_stream(await exchange.end())
    assert (got.text, got.errors, got.done) == (TEXT, [], 1)


async def test_a_dies_while_it_copies_and_the_client_is_told_after_the_patience(rig: Rig) -> None:
    rig.lose_patience()
    exchange = rig.client.chat()
    await rig.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    on_a.die()
    got = read_stream(await exchange.end())
    assert [error["code"] for error in got.errors] == ["upstream_lost"] and got.done == 0
    await gone(on_b)


async def test_a_whole_answer_starts_anew_elsewhere_when_a_dies_while_it_copies(rig: Rig) -> None:
    rig.lose_patience()
    rig.app.routing.install(table(2, ["inst-a", "inst-b"], rig.a, rig.b))
    exchange = rig.client.chat(stream=False)
    on_a, on_b = await rig.attach()
    on_a.die()
    await gone(on_b)
    anew = await rig.b.generation(1)
    assert anew.ticket is None
    anew.release()
    await exchange.end()
    assert exchange.status == 200


async def test_a_second_leg_that_nobody_speaks_of_is_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.second.LEG_S", 1.0)
    exchange = rig.client.chat()
    on_a, on_b = await rig.attach()
    assert (await rig.a.expect(Discarded)).reason == "patience"
    await gone(on_b)
    await stays_on_a(rig, exchange, on_a)


async def test_a_dies_frozen_and_b_never_produces(rig: Rig) -> None:
    rig.lose_patience()
    exchange = rig.client.chat()
    await rig.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_a.die()
    got = read_stream(await exchange.end())
    assert [error["code"] for error in got.errors] == ["upstream_lost"] and got.done == 0
    await gone(on_b)


async def test_when_a_is_dead_b_has_longer_than_the_patience(rig: Rig) -> None:
    """Giving up would be the end of the answer, and B may own it."""
    rig.lose_patience(orphaned=False)
    exchange = rig.client.chat()
    await rig.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_a.die()
    await asyncio.sleep(0.5)
    on_b.commit(8)
    on_b.release()
    rig.produce(on_a, 8)
    got = read_stream(await exchange.end())
    assert (got.text, got.errors, got.done) == (TEXT, [], 1)


async def test_a_whole_answer_survives_the_death_of_a(rig: Rig) -> None:
    exchange = rig.client.chat(stream=False)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_a.die()
    await asyncio.sleep(0.02)
    rig.produce(on_a, 8)
    on_b.commit()
    on_b.release()
    await exchange.end()
    assert (exchange.status, exchange.json()["id"][-2:]) == (200, "-2")


@pytest.mark.parametrize("streamed", [True, False])
async def test_b_dies_after_the_switch(rig: Rig, streamed: bool) -> None:
    exchange = rig.client.chat(stream=streamed)
    if streamed:
        await rig.deliver(exchange, 3)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    rig.produce(on_a, 3)
    await rig.a.expect(Switched)
    on_b.die()
    await exchange.end()
    if streamed:
        got = read_stream(exchange.body)
        assert ([error["code"] for error in got.errors], got.done) == (["upstream_lost"], 0)
    else:
        assert (exchange.status, exchange.json()["error"]["code"]) == (502, "upstream_lost")


@pytest.mark.parametrize("begun", [True, False])
async def test_b_answers_with_an_error_after_the_switch(rig: Rig, begun: bool) -> None:
    exchange = rig.client.chat()
    if begun:
        await rig.deliver(exchange, 3)
    on_a, on_b = await rig.attach()
    rig.produce(on_a, 3)
    await rig.a.expect(Switched)
    on_b.refuse(500)
    await exchange.end()
    if begun:
        got = read_stream(exchange.body)
        assert ([error["code"] for error in got.errors], got.done) == (["upstream_lost"], 0)
    elif exchange.status == 200:  # the head of leg one was with the client already
        assert len(read_stream(exchange.body).errors) == 1
    else:
        assert exchange.status == 500


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_closes_both_legs(rig: Rig, streamed: bool, switched: bool) -> None:
    exchange = rig.client.chat(stream=streamed)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    if switched:
        on_b.commit(1)
        rig.produce(on_a, 1)
        await rig.a.expect(Switched)
    exchange.leave()
    await exchange.end()
    await gone(on_a)
    await gone(on_b)
    assert rig.app.streams() == []
    assert +rig.app.routing.load == {}


async def test_a_client_that_reads_slowly_is_switched_in_the_middle_of_a_write(rig: Rig) -> None:
    exchange = rig.client.chat(return_token_ids=True)
    on_a = await rig.deliver(exchange, 3)
    _, on_b = await rig.attach()
    exchange.accepting.clear()
    on_a.release(4)
    await asyncio.sleep(0.05)
    on_b.commit(9)
    on_b.release()
    rig.produce(on_a, 9)
    await gone(on_a)
    exchange.accepting.set()
    got = read_stream(await exchange.end())
    assert (got.text, got.token_ids) == (TEXT, IDS)


async def test_notices_survive_a_lost_control_connection(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    on_a, on_b = await rig.attach()
    rig.a.hang_up()
    await rig.a.disconnected()
    on_b.commit(3)
    rig.produce(on_a, 3)
    await rig.a.connected(2)
    assert (await rig.a.expect(Switched)).tokens == 3
    assert rig.a.connections[-1].name == WORKER
    on_b.release()
    await exchange.end()
