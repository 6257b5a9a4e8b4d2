"""Responses and messages move as chats do; their streams are recordings of a real vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.client import Exchange
from tests.fakes.instance import Generation
from tests.fakes.readers import read
from tests.fakes.recording import Recording
from tests.unit.proxy.conftest import Rig
from vllm_plugin.wire import Discarded, FirstToken, Switched

ROUTES = ["responses", "messages"]


class Case:
    """A streamed request that both instances answer with a recording."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig = rig
        self.recording = Recording(name)
        answers = (self.recording.fine, self.recording.coarse)
        rig.a.recorded[self.recording.path] = rig.b.recorded[self.recording.path] = answers

    def post(self, **fields: Any) -> Exchange:
        return self.rig.client.post(self.recording.path, {**self.recording.body, **fields})

    async def deliver(self, exchange: Exchange, events: int) -> Generation:
        on_a = await self.rig.a.generation()
        on_a.release(events)
        await exchange.contains("event: ", events)
        return on_a

    def read(self, data: bytes) -> Any:
        return read(self.recording.path, data)

    @property
    def whole(self) -> Any:
        return self.read(b"".join(self.recording.fine))


@pytest.mark.parametrize("name", ROUTES)
async def test_a_stream_goes_on_where_it_was(rig: Rig, name: str) -> None:
    case = Case(rig, name)
    exchange = case.post()
    await case.deliver(exchange, 9)
    before = exchange.body
    on_a, on_b = await rig.attach()
    assert on_b.body == {**on_a.body, "vllm_xargs": {**on_a.body["vllm_xargs"], "vllm_hi_ticket": "ticket-1"}}
    assert "return_token_ids" not in on_b.body
    await rig.freeze(on_a)
    on_b.commit()
    rig.produce(on_a, 8)
    assert (await rig.a.expect(Switched)).tokens > 0
    on_b.release()
    after = await exchange.end()
    assert after.startswith(before)
    assert case.read(after) == case.whole
    assert (await rig.a.expect(FirstToken)).gap_ms > 0


@pytest.mark.parametrize("name", ROUTES)
async def test_a_whole_answer_moves(rig: Rig, name: str) -> None:
    case = Case(rig, name)
    exchange = case.post(stream=False)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    rig.produce(on_a, 20)
    on_b.commit()
    on_b.release()
    await exchange.end()
    assert exchange.json()["body"]["vllm_xargs"]["vllm_hi_ticket"] == "ticket-1"
    assert not rig.a.all(FirstToken)


@pytest.mark.parametrize("name", ROUTES)
async def test_a_notice_with_fewer_tokens_than_the_client_has_events_is_believed(rig: Rig, name: str) -> None:
    # Events are not tokens: nobody may conclude from their number that A had gone on.
    case = Case(rig, name)
    exchange = case.post()
    await case.deliver(exchange, 12)
    on_a, on_b = await rig.attach()
    on_b.commit()
    on_b.release()
    rig.produce(on_a, 1)
    assert case.read(await exchange.end()) == case.whole
    assert not rig.a.all(Discarded)


@pytest.mark.parametrize("name", ROUTES)
async def test_leg_one_that_finishes_first_wins(rig: Rig, name: str) -> None:
    case = Case(rig, name)
    exchange = case.post()
    on_a, _ = await rig.attach()
    await rig.freeze(on_a)
    on_a.release()
    assert await exchange.end() == b"".join(case.recording.fine)
    assert (await rig.a.expect(Discarded)).reason == "finished"


@pytest.mark.parametrize("name", ROUTES)
async def test_b_dies_after_the_switch_and_the_client_is_told_in_its_own_protocol(rig: Rig, name: str) -> None:
    case = Case(rig, name)
    exchange = case.post()
    await case.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    on_b.commit()
    rig.produce(on_a, 6)
    await rig.a.expect(Switched)
    on_b.die()
    last = (await exchange.end()).split(b"\n\n")[-2].decode()
    assert last.startswith("event: error\ndata: ")
    event = json.loads(last.partition("data: ")[2])
    assert event["type"] == "error"
    if name == "messages":
        assert event["error"]["type"] == "api_error" and event["error"]["message"]
    else:
        assert (event["code"], event["sequence_number"]) == ("upstream_lost", 6)


@pytest.mark.parametrize("name", ROUTES)
async def test_an_error_of_a_frozen_instance_is_kept_back(rig: Rig, name: str) -> None:
    case = Case(rig, name)
    exchange = case.post()
    await case.deliver(exchange, 6)
    on_a, on_b = await rig.attach()
    await rig.freeze(on_a)
    on_a.insert(b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"dead"}}\n\n')
    await asyncio.sleep(0.05)
    assert b"dead" not in exchange.body
    on_b.commit()
    on_b.release()
    rig.produce(on_a, 6)
    assert case.read(await exchange.end()) == case.whole


@pytest.mark.parametrize("name", ROUTES)
async def test_a_leg_that_tells_another_story_ends_the_answer_with_an_error(rig: Rig, name: str) -> None:
    case = Case(rig, name)
    exchange = case.post()
    await case.deliver(exchange, 9)
    other = {"responses": "responses_required", "messages": "messages_any"}[name]
    rig.b.recorded[case.recording.path] = (case.recording.fine, Recording(other).coarse)
    on_a, on_b = await rig.attach()
    on_b.commit()
    on_b.release()
    rig.produce(on_a, 8)
    body = await exchange.end()
    assert body.count(b"event: error") == 1
    assert body.split(b"\n\n")[-2].startswith(b"event: error")


async def test_errors_of_the_proxy_itself_have_the_shape_of_the_route(rig: Rig) -> None:
    message = rig.client.post("/v1/messages", {"model": "nope", "messages": [], "max_tokens": 1})
    response = rig.client.post("/v1/responses", {"model": "nope", "input": "a"})
    await message.end()
    await response.end()
    assert (message.status, message.json()["type"], message.json()["error"]["type"]) == (
        404,
        "error",
        "not_found_error",
    )
    assert (response.status, response.json()["error"]["code"]) == (404, "model_not_found")
