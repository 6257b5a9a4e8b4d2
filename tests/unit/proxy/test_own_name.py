"""A model that is asked for at one instance by a name of its own: the instance itself knows another one."""

from __future__ import annotations

import json

import msgspec

from proxy.routing import RoutingTable
from tests.fakes.answers import read_stream
from tests.unit.proxy.conftest import TEXT, Rig

OWN = "tiny@inst-b"


def install(rig: Rig, version: int, *, own: bool = True) -> None:
    models = {"tiny": {"active": ["inst-a"], "max_model_len": 2048}}
    if own:
        models[OWN] = {"active": ["inst-b"], "max_model_len": 2048, "served_as": "tiny"}  # type: ignore[dict-item]
    instances = {x.name: x.row() for x in (rig.a, rig.b)}
    document = {"version": version, "models": models, "instances": instances}
    rig.app.routing.install(msgspec.convert(document, RoutingTable))


async def test_it_reaches_that_instance_under_the_name_it_knows(rig: Rig) -> None:
    install(rig, 2)
    exchange = rig.client.chat(model=OWN, temperature=0.5)
    on_b = await rig.b.generation()
    assert on_b.body["model"] == "tiny"
    assert on_b.body["temperature"] == 0.5
    assert rig.app.streams()[0]["model"] == OWN
    on_b.release()
    assert read_stream(await exchange.end()).text == TEXT
    usual = rig.client.chat()
    on_a = await rig.a.generation()
    on_a.release()
    await usual.end()
    assert len(rig.b.generations) == 1


async def test_what_is_only_relayed_is_renamed_too(rig: Rig) -> None:
    install(rig, 2)
    answer = rig.client.post("/v1/tokenize", {"model": OWN, "prompt": "hi"})
    on_b = await rig.b.generation()
    on_b.release()
    await answer.end()
    assert answer.json()["body"] == {"model": "tiny", "prompt": "hi"}


async def test_the_list_of_models_says_what_it_is(rig: Rig) -> None:
    install(rig, 2)
    listed = rig.client.request("GET", "/v1/models")
    await listed.end()
    assert {model["id"]: model["root"] for model in listed.json()["data"]} == {"tiny": "tiny", OWN: "tiny"}
    one = rig.client.request("GET", f"/v1/models/{OWN}")
    await one.end()
    assert one.json()["id"] == OWN


async def test_a_stream_that_came_by_it_moves_when_the_name_is_gone(rig: Rig) -> None:
    install(rig, 2)
    exchange = rig.client.chat(model=OWN)
    on_b = await rig.b.generation()
    on_b.release(4)
    await exchange.contains("finish_reason", 4)
    install(rig, 3, own=False)
    rig.a, rig.b = rig.b, rig.a
    on_first, on_second = await rig.attach()
    assert (on_first, on_second.body["model"]) == (on_b, "tiny")
    gone = rig.client.chat(model=OWN)
    await gone.end()
    assert (gone.status, json.loads(gone.body)["error"]["code"]) == (404, "model_not_found")
