"""A request that was to move stays on A, and who asks is told so."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.answers import read_stream
from tests.unit.proxy.conftest import (
    TEXT,
    TICKET,
    Rig,
    gone,
    stays_on_a,
)
from vllm_plugin.wire import (
    CloseLeg,
    Discarded,
    Freezing,
    Resolve,
    Resolved,
    Switched,
)


@pytest.mark.parametrize("how", ["http error", "connection lost"])
async def test_a_second_leg_that_ends_early_is_discarded(rig: Rig, how: str) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    on_a, on_b = await rig.attach()
    on_b.refuse(400) if how == "http error" else on_b.die()
    discarded = await rig.a.expect(Discarded)
    assert (discarded.ticket, discarded.reason) == (TICKET, "http_400" if how == "http error" else "leg_lost")
    await rig.attach(call=2, ticket="ticket-2")
    await stays_on_a(rig, exchange, on_a)


async def test_a_second_leg_that_was_never_parked_is_discarded(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a, on_b = await rig.attach()
    on_b.commit()
    on_b.release()
    assert (await rig.a.expect(Discarded)).reason == "leg_lost"
    await stays_on_a(rig, exchange, on_a)


async def test_patience_ends(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    rig.lose_patience()
    on_a, on_b = await rig.attach()
    rig.a.send(Freezing(on_a.stream_id, TICKET))
    assert (await rig.a.expect(Discarded)).reason == "patience"
    await gone(on_b)
    rig.produce(on_a, 3)  # too late
    await stays_on_a(rig, exchange, on_a)


async def test_a_target_that_computes_first_gets_the_patience_that_a_asks_for(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    rig.lose_patience()
    on_a, on_b = await rig.attach()
    rig.a.send(Freezing(on_a.stream_id, TICKET, 60.0))
    await asyncio.sleep(0.5)
    assert not rig.a.all(Discarded)
    on_b.commit(3)
    rig.produce(on_a, 3)
    await rig.a.expect(Switched)
    on_b.release()
    assert read_stream(await exchange.end()).text == TEXT


async def test_close_leg_closes_leg_two_and_says_nothing(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    rig.a.send(CloseLeg(on_a.stream_id, "another", "abort"))
    rig.a.send(CloseLeg(on_a.stream_id, TICKET, "abort"))
    await gone(on_b)
    await stays_on_a(rig, exchange, on_a)
    assert not rig.a.all(Discarded)


async def test_close_leg_after_the_switch_closes_nothing(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    on_a, on_b = await rig.attach()
    on_b.commit(3)
    rig.produce(on_a, 3)
    await rig.a.expect(Switched)
    rig.a.send(CloseLeg(on_a.stream_id, TICKET, "rollback"))
    on_b.release()
    assert read_stream(await exchange.end()).text == TEXT


async def test_a_client_that_has_more_tokens_than_b_stays_on_a(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    rig.produce(on_a, 5)
    assert (await rig.a.expect(Discarded)).reason == "client_ahead"
    await gone(on_b)
    await stays_on_a(rig, exchange, on_a)


@pytest.mark.parametrize("streamed", [True, False])
async def test_leg_one_that_finishes_first_wins(rig: Rig, streamed: bool) -> None:
    exchange = rig.client.chat(stream=streamed)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_a.release()
    await exchange.end()
    assert (await rig.a.expect(Discarded)).reason == "finished"
    await gone(on_b)
    rig.produce(on_a, 40)
    rig.a.send(Resolve(5, on_a.stream_id, TICKET))
    assert (await rig.a.expect(Resolved)).outcome == "discarded"
    assert not rig.a.all(Switched)


# -- resolve -----------------------------------------------------------------------------------------------------------


async def test_resolve_before_the_switch_closes_leg_two_first(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    rig.a.send(Resolve(7, on_a.stream_id, TICKET))
    assert await rig.a.expect(Resolved) == Resolved(7, "discarded")
    await gone(on_b)
    rig.produce(on_a, 3)
    await stays_on_a(rig, exchange, on_a)


@pytest.mark.parametrize("ended", [False, True])
async def test_resolve_after_the_switch_says_so(rig: Rig, ended: bool) -> None:
    exchange = rig.client.chat()
    on_a, on_b = await rig.attach()
    on_b.commit(1)
    rig.produce(on_a, 1)
    await rig.a.expect(Switched)
    if ended:
        on_b.release()
        await exchange.end()
    rig.a.send(Resolve(8, on_a.stream_id, TICKET))
    assert await rig.a.expect(Resolved) == Resolved(8, "switched")
