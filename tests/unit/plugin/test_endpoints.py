from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.plugins.endpoint_plugins.interface import (
    EndpointPlugin,
    attach_endpoint_plugins,
    init_endpoint_plugins_state,
)

from tests.unit.plugin.conftest import TOKEN, FakeEngineCore
from vllm_plugin import calls, compat, endpoints
from vllm_plugin.wire import PROTOCOL_VERSION

ARGS = argparse.Namespace(host="127.0.0.1", port=8101, model="tiny", served_model_name=["tiny-chat"])
JOB = {"job": "j1", "attempt": 1}
PEER = {"vllm_hi_id": "b", "host": "127.0.0.1", "control_port": 9001, "base_url": "http://127.0.0.1:8102"}

Build = Callable[..., Any]


@pytest.fixture
def build(environment: pytest.MonkeyPatch, engine_client: SimpleNamespace) -> Build:
    """Builds the app as vLLM does: the plugin is found by its entry point, then gets its state."""
    environment.setenv("VLLM_HI_TYPE", "A")
    environment.setenv("VLLM_HI_HOST", "127.0.0.1:1")
    environment.setenv("VLLM_PLUGINS", "vllm_hi_endpoints")
    environment.setattr(compat, "missing_probes", list)

    async def build(token: str | None = TOKEN, api_key: str | None = None) -> httpx.AsyncClient:
        app = FastAPI()
        attach_endpoint_plugins(app, ("generate",))
        await init_endpoint_plugins_state(engine_client, app.state, ARGS)
        if api_key:
            app.add_middleware(AuthenticationMiddleware, tokens=[api_key])
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://instance", headers=headers)
        client.app = app  # type: ignore[attr-defined]
        return client

    return build


def test_satisfies_vllms_protocol(environment: pytest.MonkeyPatch):
    assert isinstance(endpoints.create(), EndpointPlugin)


async def test_status_says_who_it_is_and_what_the_engine_says(build: Build, engine_core: FakeEngineCore):
    client = await build()
    answer = await client.get("/vllm_hi/status")
    assert answer.status_code == 200
    status = answer.json()
    assert status["instance_type"] == "A"
    assert status["served_model_name"] == "tiny-chat"
    assert status["protocol_version"] == PROTOCOL_VERSION
    assert status["vllm_hi_id"] is None
    assert (status["data_port"], status["control_port"], status["kv"]["free_blocks"]) == (9000, 9001, 9)
    [(method, operation, told)] = engine_core.calls
    assert (method, operation) == ("vllm_hi", "status")
    # The engine is told what only the API server knows.
    assert told["front_end"]["adapters"] == {}
    assert told["front_end"].keys() >= {"tokenizer", "tool_parser", "reasoning_parser"}


async def test_adapters_that_come_and_go_are_told(build: Build, engine_core: FakeEngineCore, tmp_path: Path):
    client = await build()
    (tmp_path / "adapter_config.json").write_text("{}")
    assert (await client.get("/vllm_hi/status")).json()["adapters"] == []
    loaded = client.app.state.openai_serving_models = SimpleNamespace(lora_requests={})
    loaded.lora_requests["fr"] = SimpleNamespace(lora_path=str(tmp_path))
    assert (await client.get("/vllm_hi/status")).json()["adapters"] == ["fr"]
    assert list(engine_core.calls[-1][2]["front_end"]["adapters"]) == ["fr"]
    loaded.lora_requests.clear()
    assert (await client.get("/vllm_hi/status")).json()["adapters"] == []


@pytest.mark.parametrize("token", [None, "wrong", "", "join-tokén", TOKEN[:-1], TOKEN + "x"])
async def test_wrong_token_is_refused_and_never_reaches_the_engine(
    build: Build, engine_core: FakeEngineCore, token: str | None
):
    client = await build(token=None)
    headers = {} if token is None else {"Authorization": b"Bearer " + token.encode()}
    for method, path in [
        ("GET", "/vllm_hi/status"),
        ("GET", "/vllm_hi/requests"),
        ("POST", "/vllm_hi/migration/start"),
    ]:
        answer = await client.request(method, path, headers=headers)
        assert answer.status_code == 401, (method, path)
        assert answer.json()["error"]["code"] == "wrong_token"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert TOKEN not in answer.text
    assert engine_core.calls == []


async def test_join_token_opens_our_routes_and_nothing_else_when_vllm_has_an_api_key(build: Build):
    client = await build(api_key="sk-vllm")
    assert (await client.get("/vllm_hi/status")).status_code == 200
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/vllm_hi/status", headers={"Authorization": "Bearer sk-vllm"})).status_code == 401


@pytest.mark.parametrize(
    ("operation", "body", "passed_on"),
    [
        ("start", JOB | {"peer": PEER, "lease_s": 12}, JOB | {"peer": PEER, "lease_s": 12.0}),
        ("start", JOB | {"peer": PEER}, JOB | {"peer": PEER, "lease_s": 30.0}),
        ("attach", JOB | {"request_ids": ["r1"]}, JOB | {"request_ids": ["r1"]}),
        ("attach", JOB, JOB | {"request_ids": None}),
        ("round", JOB | {"round": 0}, JOB | {"round": 0, "slow_source": False}),
        ("handover", JOB | {"wave": 2}, JOB | {"request_ids": None, "wave": 2, "mode": "rolling"}),
        ("handover", JOB | {"mode": "recompute"}, JOB | {"request_ids": None, "wave": 4, "mode": "recompute"}),
        ("probe", {"host": "10.0.0.2", "data_ports": [9000]}, {"host": "10.0.0.2", "data_ports": [9000]}),
        ("lease", JOB | {"lease_s": 30}, JOB | {"lease_s": 30.0}),
        ("finish", JOB, JOB),
        ("abort", JOB, JOB),
        ("activate", JOB, JOB),
        ("convert_to_b", JOB, JOB),
        (
            "collect",
            JOB | {"mode": "full", "peer": PEER},
            JOB | {"mode": "full", "peer": PEER, "request_ids": None, "lease_s": 120.0},
        ),
        ("pause", JOB, JOB | {"deadline_s": 5.0}),
        ("resume", JOB, JOB),
    ],
)
async def test_calls_go_to_the_engine(
    build: Build, engine_core: FakeEngineCore, operation: str, body: dict[str, Any], passed_on: dict[str, Any]
):
    client = await build()
    answer = await client.post(f"/vllm_hi/migration/{operation}", json=body)
    assert (answer.status_code, answer.json()) == (200, {"operation": operation})
    assert engine_core.calls == [("vllm_hi", operation, passed_on)]


@pytest.mark.parametrize(
    ("operation", "body", "param"),
    [
        ("attach", {"attempt": 1}, "job"),
        ("attach", {"job": "j1"}, "attempt"),
        ("attach", {"job": "j1", "attempt": 0}, "attempt"),
        ("attach", {"job": "j1", "attempt": True}, "attempt"),
        ("attach", {"job": 7, "attempt": 1}, "job"),
        ("attach", JOB | {"request_ids": "r1"}, "request_ids"),
        ("attach", JOB | {"request_ids": ["r1", 2]}, "request_ids[1]"),
        ("attach", JOB | {"requests": []}, "requests"),
        ("start", JOB, "peer"),
        ("start", JOB | {"peer": PEER | {"control_port": 0}}, "peer.control_port"),
        ("start", JOB | {"peer": {"host": "127.0.0.1"}}, "peer.vllm_hi_id"),
        ("start", JOB | {"peer": PEER | {"base_url": "file:///etc/passwd"}}, "peer.base_url"),
        ("round", JOB | {"round": -1}, "round"),
        ("round", JOB, "round"),
        ("handover", JOB | {"wave": 0}, "wave"),
        ("handover", JOB | {"mode": "magic"}, "mode"),
        ("probe", {"host": "10.0.0.2", "data_ports": []}, "data_ports"),
        ("lease", JOB | {"lease_s": 1e9}, "lease_s"),
        ("collect", JOB | {"mode": "some"}, "mode"),
        ("collect", JOB, "mode"),
        ("pause", JOB | {"deadline_s": 0}, "deadline_s"),
        ("pause", JOB | {"deadline_s": 61}, "deadline_s"),
        ("receive", JOB | {"peer": PEER}, "peer"),
        ("finish", [], None),
    ],
)
async def test_a_bad_field_is_named(
    build: Build, engine_core: FakeEngineCore, operation: str, body: Any, param: str | None
):
    client = await build()
    answer = await client.post(f"/vllm_hi/migration/{operation}", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("bad_field", param)
    assert engine_core.calls == []


async def test_a_body_that_is_no_json_or_too_large(build: Build, engine_core: FakeEngineCore):
    client = await build()
    answer = await client.post("/vllm_hi/migration/finish", content=b"{")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_field")
    answer = await client.post("/vllm_hi/migration/finish", content=b" " * (calls.MAX_BODY + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert engine_core.calls == []


async def test_the_engines_error_keeps_its_status_and_shape(build: Build, engine_core: FakeEngineCore):
    error = {"code": "stale_attempt", "message": "Attempt 2 was seen.", "param": "attempt"}
    engine_core.answers["round"] = {"error": error | {"status": 409}}
    client = await build()
    answer = await client.post("/vllm_hi/migration/round", json=JOB | {"round": 1})
    assert (answer.status_code, answer.json()) == (409, {"error": error})


async def test_a_failing_engine_is_a_sentence_without_its_insides(build: Build, engine_core: FakeEngineCore):
    engine_core.answers["requests"] = RuntimeError("KeyError: 'secret inside'")
    client = await build()
    answer = await client.get("/vllm_hi/requests")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "secret inside" not in answer.text


async def test_unsupported_vllm_answers_501_with_the_probe_and_still_has_a_status(
    build: Build, environment: pytest.MonkeyPatch, engine_core: FakeEngineCore
):
    environment.setattr(compat, "missing_probes", lambda: ["scheduler.schedule"])
    client = await build()
    answer = await client.post("/vllm_hi/migration/attach", json=JOB)
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("migration_unsupported", "scheduler.schedule")
    status = (await client.get("/vllm_hi/status")).json()
    assert status["migration"] == {"supported": False, "missing_probes": ["scheduler.schedule"]}
    assert status["role"] == "active"
    assert engine_core.calls == []


async def test_an_engine_that_is_up_needs_not_be_brought_up(build: Build, engine_core: FakeEngineCore):
    client = await build()
    answer = await client.post("/vllm_hi/migration/instantiate", json=JOB | {"tensor_parallel_size": 1})
    assert (answer.status_code, answer.json()["engine"]["state"]) == (200, "up")
    answer = await client.post("/vllm_hi/migration/instantiate", json=JOB | {"tensor_parallel_size": 2})
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("engine_up", "tensor_parallel_size")
    answer = await client.post("/vllm_hi/migration/instantiate", json=JOB | {"tensor_parallel_size": "2"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tensor_parallel_size")
    assert engine_core.calls == []


@pytest.mark.parametrize(("kind", "told"), [("cold", [b"put_down"]), ("", [])])
async def test_a_standby_that_stays_cold_is_told_to_put_its_engine_down(
    build: Build, environment: pytest.MonkeyPatch, engine_core: FakeEngineCore, kind: str, told: list[bytes]
):
    reading, writing = os.pipe()
    environment.setenv("VLLM_HI_STANDBY", kind)
    environment.setenv("VLLM_HI_STANDBY_PIPE", str(writing))
    environment.setenv("VLLM_HI_STANDBY_ID", "b-1")
    client = await build()
    status = (await client.get("/vllm_hi/status")).json()
    # Until the panel knows it, it is not up.
    assert (status["vllm_hi_id"], status["engine"]["state"]) == ("b-1", "instantiating")
    refusal = {"code": "requests_in_flight", "message": "2 requests are left.", "param": None, "status": 409}
    engine_core.answers["convert_to_b"] = {"error": refusal}
    assert (await client.post("/vllm_hi/migration/convert_to_b", json=JOB)).status_code == 409
    engine_core.answers["convert_to_b"] = {"ok": {"role": "standby"}}
    assert (await client.post("/vllm_hi/migration/convert_to_b", json=JOB)).status_code == 200
    # Whoever comes now would find an engine that is about to go.
    answer = await client.post("/vllm_hi/migration/instantiate", json=JOB)
    assert answer.status_code == (409 if told else 200)
    os.close(writing)
    said = os.read(reading, 4096)
    os.close(reading)
    assert [event for event in (b"put_down", b"destroyed") if event in said] == told


async def test_receive_says_how_to_reach_the_instance(build: Build, engine_core: FakeEngineCore):
    engine_core.answers["receive"] = {"ok": {"peer": {"host": "127.0.0.1", "control_port": 9001}, "parked": []}}
    client = await build()
    peer = (await client.post("/vllm_hi/migration/receive", json=JOB)).json()["peer"]
    assert peer.keys() == PEER.keys()
    # What it answers is what `collect` on a source takes.
    answer = await client.post("/vllm_hi/migration/collect", json=JOB | {"mode": "full", "peer": peer})
    assert answer.status_code == 200, answer.text


async def test_faults_exist_only_with_the_switch(
    build: Build, environment: pytest.MonkeyPatch, engine_core: FakeEngineCore
):
    client = await build()
    assert (await client.post("/vllm_hi/faults", json={"skip_tail": True})).status_code == 404
    environment.setenv("VLLM_HI_ENABLE_FAULTS", "1")
    client = await build()
    assert (await client.post("/vllm_hi/faults", json={"skip_tail": True})).status_code == 200
    assert engine_core.calls == [("vllm_hi", "faults", {"skip_tail": True})]


async def test_destroy_ends_the_server_after_a_good_answer_only(
    build: Build, environment: pytest.MonkeyPatch, engine_core: FakeEngineCore
):
    killed: list[tuple[int, int]] = []
    environment.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    client = await build()
    refusal = {"code": "requests_in_flight", "message": "2 requests are left.", "param": None, "status": 409}
    engine_core.answers["destroy"] = {"error": refusal}
    assert (await client.post("/vllm_hi/migration/destroy", json=JOB)).status_code == 409
    assert killed == []
    engine_core.answers["destroy"] = {"ok": {"role": "destroyed"}}
    answer = await client.post("/vllm_hi/migration/destroy", json=JOB)
    assert (answer.status_code, answer.json()) == (200, {"role": "destroyed"})
    assert killed == [(os.getpid(), signal.SIGTERM)]


async def test_without_a_type_no_route_is_added(build: Build, environment: pytest.MonkeyPatch):
    environment.delenv("VLLM_HI_TYPE")
    client = await build()
    assert (await client.get("/vllm_hi/status")).status_code == 404


async def test_wrong_settings_are_logged_and_vllm_serves(
    build: Build, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    environment.delenv("VLLM_HI_TOKEN")
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.ERROR):
        client = await build()
    assert (await client.get("/vllm_hi/status")).status_code == 404
    assert "VLLM_HI_TOKEN is not set" in caplog.text


async def test_registration_lives_as_long_as_the_server(build: Build, environment: pytest.MonkeyPatch):
    seen: list[str] = []

    class FakeRegistration:
        vllm_hi_id = "a-1"
        facts = SimpleNamespace(served_model_name="tiny")

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def start(self) -> None:
            seen.append("start")

        async def stop(self, goodbye: bool | None = None) -> None:
            seen.append("stop")

    environment.setattr(endpoints, "Registration", FakeRegistration)
    client = await build()
    app = client.app
    async with app.router.lifespan_context(app):
        assert seen == ["start"]
        assert (await client.get("/vllm_hi/status")).json()["vllm_hi_id"] == "a-1"
    assert seen == ["start", "stop"]
