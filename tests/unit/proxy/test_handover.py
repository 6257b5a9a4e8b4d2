"""A live request moves from A to B."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.answers import Shape, document, read_stream, usage
from tests.unit.proxy.conftest import (
    ANSWER,
    IDS,
    TEXT,
    TICKET,
    Rig,
    gone,
    stays_on_a,
)
from vllm_plugin.wire import (
    CloseLeg,
    Discarded,
    FirstToken,
    LegOpened,
    OpenLeg,
    Producing,
    Switched,
)


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("merged", [12, 15, len(ANSWER)])
async def test_a_stream_goes_on_where_it_was(rig: Rig, path: str, merged: int) -> None:
    wanted: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
    exchange = getattr(rig.client, path)(**wanted)
    roles = 1 if path == "chat" else 0
    (await rig.deliver(exchange, 5)).release(4 + roles)
    await exchange.contains("finish_reason", 10 + roles)
    on_a, on_b = await rig.attach()
    assert on_b.body == {**on_a.body, "vllm_xargs": {**on_a.body["vllm_xargs"], "vllm_hi_ticket": TICKET}}
    assert on_b.headers["x-request-id"] == f"{on_a.stream_id}-2"
    await rig.freeze(on_a)
    on_b.commit(merged)
    on_b.release()
    rig.produce(on_a, 12)
    got = read_stream(await exchange.end())
    assert (got.text, got.token_ids, got.finish_reasons, got.done) == (TEXT, IDS, ["length"], 1)
    assert len(got.logprobs) == len(ANSWER)
    assert got.usages == [usage(ANSWER)]
    assert got.ids == {f"chatcmpl-{on_a.stream_id}-1"}
    assert len(got.created) == 1
    assert (got.roles, got.prompts) == (roles, 1)
    assert not got.errors
    await gone(on_a)
    assert await rig.a.expect(Switched) == Switched(on_a.stream_id, TICKET, 10)
    first = await rig.a.expect(FirstToken)
    assert first.gap_ms > 0 and first.itl_ms > 0
    assert rig.a.received.index(first) > rig.a.received.index(rig.a.all(Switched)[0])
    assert not rig.a.all(Discarded)


async def test_the_stream_counts_for_b_after_the_switch(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    on_a, on_b = await rig.attach()
    assert rig.app.streams()[0]["legs"] == 2
    on_b.commit(3)
    rig.produce(on_a, 3)
    await rig.a.expect(Switched)
    (entry,) = rig.app.streams()
    assert (entry["instance"], entry["legs"], entry["tokens"]) == ("inst-b", 1, 3)
    assert +rig.app.routing.load == {"inst-b": 1}
    on_b.release()
    await exchange.end()


async def test_nothing_of_leg_two_is_forwarded_before_the_switch(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 5)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_b.commit(8)
    on_b.release(10)
    await asyncio.sleep(0.05)
    assert read_stream(exchange.body).text == "".join(t.text for t in ANSWER[:5])
    rig.produce(on_a, 8)
    on_b.release()
    assert read_stream(await exchange.end()).text == TEXT


async def test_stop_strings_hold_text_back_on_both_legs(rig: Rig) -> None:
    exchange = rig.client.chat(stop=["never"])
    await rig.deliver(exchange, 10)
    on_a, on_b = await rig.attach()
    on_b.commit(12, 1, 3)
    on_b.release()
    rig.produce(on_a, 12)
    assert read_stream(await exchange.end()).text == TEXT


async def test_before_the_first_event_leg_two_is_forwarded_whole(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a, on_b = await rig.attach()
    on_b.commit(2)
    on_b.release()
    rig.produce(on_a, 2)
    got = read_stream(await exchange.end())
    assert (got.text, got.roles, got.ids) == (TEXT, 1, {f"chatcmpl-{on_a.stream_id}-2"})


async def test_a_whole_answer_moves(rig: Rig) -> None:
    exchange = rig.client.chat(stream=False)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    rig.produce(on_a, 20)
    await gone(on_a)
    on_b.commit()
    on_b.release()
    await exchange.end()
    assert exchange.json() == document(ANSWER, Shape(), f"chatcmpl-{on_a.stream_id}-2")
    assert (await rig.a.expect(Switched)).tokens == 0
    assert not rig.a.all(FirstToken)


async def test_an_answer_that_b_completes_before_its_notice_arrives_is_kept(rig: Rig) -> None:
    exchange = rig.client.chat(stream=False)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_b.commit()
    on_b.release()
    await gone(on_b)
    await asyncio.sleep(0.05)
    rig.produce(on_a, 39)
    await exchange.end()
    assert exchange.json()["id"].endswith("-2")


async def test_a_stream_moves_twice(rig: Rig) -> None:
    exchange = rig.client.chat(return_token_ids=True)
    await rig.deliver(exchange, 5)
    on_a, on_b = await rig.attach()
    on_b.commit(7)
    rig.produce(on_a, 7)
    on_b.release(6)
    await exchange.contains("finish_reason", 11)
    rig.b.send(OpenLeg(9, on_a.stream_id, "ticket-2", rig.a.base_url))
    back_on_a = await rig.a.generation(1)
    assert (await rig.b.expect(LegOpened)).ok
    assert back_on_a.ticket == "ticket-2" and back_on_a.headers["x-request-id"].endswith("-3")
    back_on_a.commit(30)
    back_on_a.release()
    rig.a.send(Producing(on_a.stream_id, "ticket-2", 30))
    got = read_stream(await exchange.end())
    assert (got.text, got.token_ids, len(got.ids)) == (TEXT, IDS, 1)
    assert (await rig.b.expect(Switched)).ticket == "ticket-2"


# -- the second leg is not opened --------------------------------------------------------------------------------------


async def test_an_unknown_stream_gets_no_second_leg(rig: Rig) -> None:
    rig.a.send(OpenLeg(4, "nobody", TICKET, rig.b.base_url))
    opened = await rig.a.expect(LegOpened)
    assert (opened.call, opened.ok, opened.code) == (4, False, "unknown_stream")


async def test_there_is_only_one_second_leg(rig: Rig) -> None:
    rig.client.chat()
    on_a, _ = await rig.attach()
    rig.a.send(OpenLeg(2, on_a.stream_id, "other", rig.b.base_url))
    opened = await rig.a.expect(LegOpened, 1)
    assert (opened.call, opened.ok, opened.code) == (2, False, "leg_exists")
    rig.a.send(OpenLeg(3, on_a.stream_id, TICKET, rig.b.base_url))
    assert (await rig.a.expect(LegOpened, 2)).ok
    assert len(rig.b.generations) == 1


async def test_a_ticket_opens_one_leg_and_never_another(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a, on_b = await rig.attach()
    rig.a.send(CloseLeg(on_a.stream_id, TICKET, "abort"))
    await gone(on_b)
    rig.a.send(OpenLeg(2, on_a.stream_id, TICKET, rig.b.base_url))
    opened = await rig.a.expect(LegOpened, 1)
    assert (opened.call, opened.ok, opened.code) == (2, False, "ticket_used")
    assert len(rig.b.generations) == 1
    await stays_on_a(rig, exchange, on_a)


async def test_an_instance_that_cannot_be_reached_is_reported(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a = await rig.a.generation()
    await rig.b.stop_serving()
    rig.a.send(OpenLeg(1, on_a.stream_id, TICKET, rig.b.base_url))
    opened = await rig.a.expect(LegOpened)
    assert (opened.ok, opened.code) == (False, "connect_failed")
    assert not rig.a.all(Discarded)
    on_a.release()
    assert read_stream(await exchange.end()).text == TEXT


async def test_an_instance_that_could_not_give_notice_gets_no_leg(rig: Rig) -> None:
    rig.client.chat()
    on_a = await rig.a.generation()
    rig.app.routing.connected = lambda instance_id: instance_id != "inst-b"
    rig.a.send(OpenLeg(1, on_a.stream_id, TICKET, rig.b.base_url))
    opened = await rig.a.expect(LegOpened)
    assert (opened.ok, opened.code) == (False, "target_not_connected")
    assert not rig.b.generations


async def test_opened_means_written_not_answered(rig: Rig) -> None:
    rig.client.chat()
    on_a = await rig.a.generation()
    rig.b.body_gate.clear()
    rig.a.send(OpenLeg(1, on_a.stream_id, TICKET, rig.b.base_url))
    assert (await rig.a.expect(LegOpened)).ok
    assert not rig.b.generations
    rig.b.body_gate.set()
