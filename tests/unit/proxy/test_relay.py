"""What passes through the proxy when nothing moves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.answers import Shape, document, events, read_stream
from tests.fakes.instance import FakeInstance
from tests.unit.proxy.conftest import ANSWER, WORKER, Rig, table, until


async def test_a_stream_reaches_a_client_that_asked_for_token_ids_byte_by_byte(rig: Rig) -> None:
    exchange = rig.client.chat(return_token_ids=True, logprobs=True, stream_options={"include_usage": True})
    on_a = await rig.a.generation()
    on_a.release()
    body = await exchange.end()
    answer_id = f"chatcmpl-{on_a.headers['x-request-id']}"
    shape = Shape(ids=True, logprobs=True, usage=True)
    assert body == b"".join(events(ANSWER, [1] * len(ANSWER), shape, answer_id, created=1))
    assert exchange.status == 200
    assert exchange.header("content-type") == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize("path", ["chat", "complete"])
async def test_token_ids_are_asked_for_upstream_and_kept_from_the_client(rig: Rig, path: str) -> None:
    exchange = getattr(rig.client, path)()
    on_a = await rig.a.generation()
    on_a.release()
    body = await exchange.end()
    assert on_a.body["return_token_ids"] is True
    assert "stream_options" not in on_a.body
    assert b"token_ids" not in body
    got = read_stream(body)
    assert (got.text, got.finish_reasons, got.done) == ("".join(t.text for t in ANSWER), ["length"], 1)


async def test_events_are_forwarded_one_by_one(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 3)
    assert not exchange.complete
    assert len(read_stream(exchange.body).token_ids) == 0
    assert read_stream(exchange.body).text == "".join(t.text for t in ANSWER[:3])
    assert rig.app.streams()[0]["tokens"] == 3
    assert exchange.header("x-vllm-hi-stream") == rig.app.streams()[0]["stream_id"]


async def test_a_whole_answer_is_untouched_and_token_ids_are_not_asked_for(rig: Rig) -> None:
    exchange = rig.client.chat(stream=False)
    on_a = await rig.a.generation()
    on_a.release()
    await exchange.end()
    assert "return_token_ids" not in on_a.body
    assert exchange.json() == document(ANSWER, Shape(), f"chatcmpl-{on_a.headers['x-request-id']}")
    assert exchange.header("content-length") == str(len(exchange.body))


async def test_requests_are_tagged_and_a_clients_own_tags_removed(rig: Rig) -> None:
    rig.client.chat(vllm_xargs={"vllm_hi_stream": "x/y", "vllm_hi_ticket": "stolen", "mine": 1})
    on_a = await rig.a.generation()
    extra = on_a.body["vllm_xargs"]
    stream_id = rig.app.streams()[0]["stream_id"]
    assert extra == {"mine": 1, "vllm_hi_stream": f"{WORKER}/{stream_id}"}
    assert on_a.headers["x-request-id"] == f"{stream_id}-1"


async def test_headers_that_are_none_of_the_instances_business_stay_here(rig: Rig) -> None:
    body = {"model": "tiny", "messages": [], "stream": False}
    exchange = rig.client.post(
        "/v1/chat/completions",
        body,
        authorization="Bearer key",
        cookie="sessionid=secret",
        x_request_id="mine-1",
        connection="x-hop",
        x_hop="1",
        accept_encoding="gzip",
    )
    on_a = await rig.a.generation()
    on_a.release()
    await exchange.end()
    assert on_a.headers["authorization"] == "Bearer key"
    assert not {"x-hop", "cookie"} & set(on_a.headers)
    assert on_a.headers["accept-encoding"] == "identity"
    assert on_a.headers["x-request-id"] != "mine-1"
    assert exchange.header("x-request-id") == "mine-1"


async def test_upstream_errors_pass_unchanged(rig: Rig) -> None:
    exchange = rig.client.chat(max_tokens=-1)
    await exchange.end()
    assert exchange.status == 400
    assert exchange.json()["error"]["message"] == "max_tokens must be positive"
    assert exchange.header("x-upstream") == "inst-a"
    assert exchange.header("content-type") == "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b'{"model": "nope", "messages": []}', 404, "model", "model_not_found"),
        (b'{"model": "tiny"', 400, None, "invalid_json"),
        (b"[1]", 400, None, "invalid_json"),
        (b"\xff", 400, None, "invalid_json"),
        (b"{}", 400, "model", "invalid_model"),
        (b'{"model": 3}', 400, "model", "invalid_model"),
        (b'{"model": "tiny", "vllm_xargs": 3}', 400, "vllm_xargs", "invalid_value"),
    ],
)
async def test_bad_requests(rig: Rig, body: bytes, status: int, param: str | None, code: str) -> None:
    exchange = rig.client.request("POST", "/v1/chat/completions", body)
    await exchange.end()
    error = exchange.json()["error"]
    assert (exchange.status, error["param"], error["code"]) == (status, param, code)
    assert error["message"] and error["type"]
    assert not rig.a.generations and not rig.app.streams()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("GET", "/v1/models/nope", 404),
    ],
)
async def test_paths_that_are_not_there(rig: Rig, method: str, path: str, status: int) -> None:
    exchange = rig.client.request(method, path)
    await exchange.end()
    assert exchange.status == status
    assert set(exchange.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_that_is_too_large_is_refused(rig: Rig) -> None:
    object.__setattr__(rig.app.settings, "max_body_bytes", 100)
    exchange = rig.client.chat(messages=["x" * 200])
    await exchange.end()
    assert (exchange.status, exchange.json()["error"]["code"]) == (413, "body_too_large")


async def test_models_are_those_of_the_routing_table(rig: Rig) -> None:
    exchange = rig.client.request("GET", "/v1/models")
    await exchange.end()
    (model,) = exchange.json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 2048)
    one = rig.client.request("GET", "/v1/models/tiny")
    await one.end()
    assert one.json() == model


async def test_other_paths_are_relayed_without_tags(rig: Rig) -> None:
    exchange = rig.client.post("/v1/embeddings?x=1", {"model": "tiny", "vllm_xargs": {"vllm_hi_ticket": "t"}})
    await exchange.end()
    assert exchange.status == 200
    assert exchange.json() == {"path": "/v1/embeddings", "body": {"model": "tiny", "vllm_xargs": {}}}
    assert rig.app.routing.acknowledged() == 1
    assert not rig.app.routing.load["inst-a"]


async def test_the_least_loaded_instance_is_chosen(rig: Rig) -> None:
    rig.app.routing.install(table(2, ["inst-a", "inst-b"], rig.a, rig.b))
    for _ in range(4):
        rig.client.chat()
    await rig.a.generation(1)
    await rig.b.generation(1)
    assert (len(rig.a.generations), len(rig.b.generations)) == (2, 2)


async def test_no_active_instance_is_503_with_retry_after(rig: Rig) -> None:
    rig.app.routing.install(table(2, [], rig.a, rig.b))
    exchange = rig.client.chat()
    await exchange.end()
    assert (exchange.status, exchange.json()["error"]["code"]) == (503, "no_instance_available")
    assert exchange.header("retry-after") == "2"


async def test_an_instance_that_does_not_answer_is_passed_over(rig: Rig) -> None:
    await rig.a.stop_serving()
    exchange = rig.client.chat()
    await exchange.end()
    assert (exchange.status, exchange.header("retry-after")) == (503, "2")
    rig.app.routing.install(table(2, ["inst-a", "inst-b"], rig.a, rig.b))
    exchange = rig.client.chat()
    (await rig.b.generation()).release()
    assert read_stream(await exchange.end()).done == 1
    assert rig.app.routing.acknowledged() == 2
    assert +rig.app.routing.load == {}


async def test_an_instance_that_hangs_up_before_any_byte_is_502(rig: Rig) -> None:
    exchange = rig.client.chat(stream=False)
    (await rig.a.generation()).die()
    await exchange.end()
    assert (exchange.status, exchange.json()["error"]["code"]) == (502, "upstream_lost")


async def test_a_stream_that_breaks_ends_with_an_error_event(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a = await rig.deliver(exchange, 5)
    on_a.die()
    got = read_stream(await exchange.end())
    assert [error["code"] for error in got.errors] == ["upstream_lost"]
    assert (got.done, got.text) == (0, "".join(t.text for t in ANSWER[:5]))
    assert exchange.complete


async def test_an_error_event_of_the_instance_passes(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a = await rig.deliver(exchange, 2)
    on_a.insert(b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n')
    await exchange.contains("EngineDeadError")
    on_a.release()
    await exchange.end()
    assert exchange.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_stops_the_instance(rig: Rig, streamed: bool) -> None:
    exchange = rig.client.chat(stream=streamed)
    on_a = await rig.a.generation()
    if streamed:
        await rig.deliver(exchange, 2)
    exchange.leave()
    await exchange.end()
    async with asyncio.timeout(5):
        await on_a.gone.wait()
    assert rig.app.streams() == []
    assert +rig.app.routing.load == {}


async def test_a_client_that_leaves_while_it_does_not_read_stops_the_instance(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a = await rig.deliver(exchange, 2)
    exchange.accepting.clear()
    on_a.release(5)
    await asyncio.sleep(0.05)
    exchange.leave()
    await exchange.end()
    async with asyncio.timeout(5):
        await on_a.gone.wait()


async def test_a_client_that_does_not_read_holds_a_bounded_amount(rig: Rig) -> None:
    exchange = rig.client.chat()
    on_a = await rig.deliver(exchange, 1)
    exchange.accepting.clear()
    filler = b": " + b"x" * 65536 + b"\n\n"
    for _ in range(1000):
        on_a.insert(filler)
    (stream,) = rig.app.live._streams.values()
    leg: Any = stream._leg
    limit = rig.app.settings.max_buffered_bytes
    await until(lambda: leg._buffered >= limit)
    await asyncio.sleep(0.1)
    assert leg._buffered <= 2 * limit
    assert len(on_a.extra) > 500  # the instance feels it


async def test_the_live_list_names_what_the_panel_shows(rig: Rig) -> None:
    exchange = rig.client.chat()
    await rig.deliver(exchange, 4)
    (entry,) = rig.app.streams()
    assert json.loads(json.dumps(entry)) == entry
    assert (entry["model"], entry["instance"], entry["tokens"], entry["legs"]) == ("tiny", "inst-a", 4, 1)
    assert entry["age_s"] >= entry["last_token_age_s"] >= 0


async def test_a_request_is_not_acknowledged_under_a_new_table_while_it_is_on_its_way(
    rig: Rig, b: FakeInstance
) -> None:
    routing = rig.app.routing
    route = routing.choose("tiny")
    routing.install(table(2, ["inst-b"], rig.a, b))
    assert routing.acknowledged() == 1
    routing.sent(route)
    assert routing.acknowledged() == 2
