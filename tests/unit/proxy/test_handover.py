"""A live request moves from A to B, or stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.answers import Shape, document, event, read_stream, usage
from tests.fakes.instance import Generation
from tests.unit.proxy.conftest import ANSWER, TICKET, WORKER, Rig, table, until
from vllm_plugin.wire import (
    CloseLeg,
    Discarded,
    FirstToken,
    Freezing,
    LegOpened,
    OpenLeg,
    Producing,
    Resolve,
    Resolved,
    Switched,
)

TEXT = "".join(token.text for token in ANSWER)
IDS = [token.id for token in ANSWER]


async def until_frozen(rig: Rig, on_a: Generation) -> None:
    stream = rig.app.live.get(on_a.stream_id)
    assert stream is not None
    await until(lambda: stream._may_move)


async def gone(generation: Generation) -> None:
    async with asyncio.timeout(5):
        await generation.gone.wait()


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


# -- the request stays on A --------------------------------------------------------------------------------------------


async def stays_on_a(rig: Rig, exchange: Any, on_a: Generation) -> None:
    on_a.release()
    got = read_stream(await exchange.end())
    assert (got.text, got.finish_reasons, got.done, got.errors) == (TEXT, ["length"], 1, [])
    assert not rig.a.all(Switched)


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


# -- trouble -----------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr("proxy.second.LEG_S", 0.05)
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
