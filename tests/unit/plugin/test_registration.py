from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from tests.unit.plugin.conftest import TOKEN, FakeEngineCore
from vllm_plugin import registration as module
from vllm_plugin.registration import InstanceFacts, Registration, gather_facts
from vllm_plugin.settings import PluginSettings
from vllm_plugin.wire import PROTOCOL_VERSION

SETTINGS = PluginSettings("A", "127.0.0.1", 8002, TOKEN)
FACTS = InstanceFacts("127.0.0.1", 8101, "tiny", {"max_model_len": 2048}, {"tensor_parallel_size": 1})


class FakePanel:
    """Answers like a panel; `mode` can be changed while it is in use."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.mode = "up"
        self.known = True
        self.changed = asyncio.Event()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.mode == "down":
            raise httpx.ConnectError("connection refused")
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        call, body = request.url.path.removeprefix("/vllm_hi/"), msgspec.json.decode(request.content)
        self.calls.append((call, body))
        self.changed.set()
        if self.mode == "refusing":
            error = {"code": "protocol_mismatch", "message": "The plugin speaks protocol 1.", "param": None}
            return httpx.Response(409, json={"error": error})
        if self.mode == "foreign":
            return httpx.Response(200, text="<html>somebody else</html>")
        if call == "register":
            self.known = True
            return httpx.Response(200, json={"success": True, "vllm_hi_id": "a-1", "error": None})
        if call == "heartbeat":
            return httpx.Response(200, json={"success": self.known, "known": self.known})
        return httpx.Response(200, json={"success": True})

    def count(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> FakePanel:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(module, "LISTENING_POLL_S", 0.01)
    monkeypatch.setattr(module, "BACKOFF_S", (0.01,))
    logging.getLogger("vllm").propagate = True
    return FakePanel()


@pytest.fixture
def status(engine_core: FakeEngineCore, panel: FakePanel) -> Callable[[], Any]:
    async def status() -> dict[str, Any]:
        panel.changed.set()
        answer: dict[str, Any] = (await engine_core.call_utility_async("vllm_hi", "status", {}))["ok"]
        return answer

    return status


def make(panel: FakePanel, status: Callable[[], Any], listening: Callable[[], bool] = lambda: True) -> Registration:
    return Registration(SETTINGS, FACTS, status, listening, httpx.MockTransport(panel))


async def test_registers_then_beats_then_says_goodbye(panel: FakePanel, status: Callable[[], Any]):
    registration = make(panel, status)
    registration.start()
    await panel.wait_for(lambda: panel.count("heartbeat") >= 2)
    await registration.stop()
    assert registration.vllm_hi_id == "a-1"
    call, body = panel.calls[0]
    assert call == "register"
    assert body == {
        "ip": "127.0.0.1",
        "port": 8101,
        "instance_type": "A",
        "served_model_name": "tiny",
        "inference_params": {"max_model_len": 2048},
        "topology": {"tensor_parallel_size": 1},
        "data_port": 9000,
        "control_port": 9001,
        "protocol_version": PROTOCOL_VERSION,
        "plugin_version": body["plugin_version"],
        "factors": {"dtype": "float32"},
        "capabilities": {"supported": True, "missing_probes": []},
        "adapters": ["fr"],
        "engine": {},
        "pid": os.getpid(),
    }
    call, body = panel.calls[1]
    assert call == "heartbeat"
    assert (body["vllm_hi_id"], body["role"], body["control_port"]) == ("a-1", "active", 9001)
    assert body["kv"]["free_blocks"] == 9
    assert body["requests"]["running"] == 1
    # Adapters come and go, and one of the factors says which they are.
    assert (body["adapters"], body["factors"]) == (["fr"], {"dtype": "float32"})
    assert panel.calls[-1] == ("deregister", {"vllm_hi_id": "a-1"})
    assert panel.count("register") == panel.count("deregister") == 1


async def test_registers_again_where_it_is_not_known(
    panel: FakePanel, status: Callable[[], Any], engine_core: FakeEngineCore
):
    registration = make(panel, status)
    registration.start()
    await panel.wait_for(lambda: panel.count("heartbeat") >= 1)
    engine_core.answers["status"]["ok"]["role"] = "standby"
    panel.known = False
    await panel.wait_for(lambda: panel.count("register") == 2)
    await registration.stop()
    body = [body for call, body in panel.calls if call == "register"][1]
    # It keeps its id, and registers as what it has become, not as what it was started as.
    assert (body["vllm_hi_id"], body["instance_type"]) == ("a-1", "B")


async def test_one_that_has_been_told_to_end_does_not_register_again(
    panel: FakePanel, status: Callable[[], Any], engine_core: FakeEngineCore
):
    registration = make(panel, status)
    registration.start()
    await panel.wait_for(lambda: panel.count("heartbeat") >= 1)
    # A heartbeat from before is under way when the panel writes the instance off.
    engine_core.answers["status"]["ok"]["role"] = "destroyed"
    panel.known = False
    beats = panel.count("heartbeat")
    await panel.wait_for(lambda: panel.count("heartbeat") > beats)
    await asyncio.sleep(0.1)
    await registration.stop()
    assert panel.count("register") == 1


async def test_a_silent_panel_costs_one_line_and_is_tried_for_ever(
    panel: FakePanel, status: Callable[[], Any], engine_core: FakeEngineCore, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    panel.mode = "down"
    registration = make(panel, status)
    registration.start()
    await panel.wait_for(lambda: len(engine_core.calls) >= 5)
    panel.mode = "up"
    await panel.wait_for(lambda: panel.count("heartbeat") >= 1)
    panel.mode = "down"
    seen = len(engine_core.calls)
    await panel.wait_for(lambda: len(engine_core.calls) >= seen + 5)
    await registration.stop()
    lines = [record.message for record in caplog.records if record.message.startswith("vLLM-HI")]
    assert [("does not answer" in line, "registered" in line) for line in lines[:3]] == [
        (True, False), (False, True), (True, False)
    ]  # fmt: skip
    # The fourth says that the goodbye was not heard.
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("refusing", "The plugin speaks protocol 1. (HTTP 409)"), ("foreign", "is not of this protocol")],
)
async def test_a_refusal_is_told_and_tried_again(
    panel: FakePanel, status: Callable[[], Any], caplog: pytest.LogCaptureFixture, mode: str, reason: str
):
    panel.mode = mode
    registration = make(panel, status)
    registration.start()
    await panel.wait_for(lambda: panel.count("register") >= 3)
    panel.mode = "up"
    await panel.wait_for(lambda: panel.count("heartbeat") >= 1)
    await registration.stop()
    assert sum(reason in record.message for record in caplog.records) == 1


async def test_nothing_is_announced_before_the_server_listens(panel: FakePanel, status: Callable[[], Any]):
    listening = False
    registration = make(panel, status, lambda: listening)
    registration.start()
    await asyncio.sleep(0.1)
    assert panel.calls == []
    listening = True
    await panel.wait_for(lambda: panel.count("register") == 1)
    await registration.stop()


async def test_the_panel_hears_nothing_from_a_dead_engine(
    panel: FakePanel, status: Callable[[], Any], engine_core: FakeEngineCore
):
    registration = make(panel, status)
    registration.start()
    await panel.wait_for(lambda: panel.count("heartbeat") >= 1)
    engine_core.answers["status"] = RuntimeError("engine dead")
    seen = len(engine_core.calls)
    await panel.wait_for(lambda: len(engine_core.calls) >= seen + 2)
    beats = panel.count("heartbeat")
    await asyncio.sleep(0.1)
    assert panel.count("heartbeat") == beats
    await registration.stop()
    assert panel.count("deregister") == 1


async def test_a_busy_engine_is_asked_one_question_at_a_time(panel: FakePanel, monkeypatch: pytest.MonkeyPatch):
    questions = 0
    release = asyncio.Event()
    answer = FakeEngineCore().answers["status"]["ok"]

    async def status() -> dict[str, Any]:
        nonlocal questions
        questions += 1
        if questions > 1:
            await release.wait()
        return answer

    registration = make(panel, status)
    registration.start()
    # The engine answers once and then works on a long step: the panel goes on hearing the last status ...
    await panel.wait_for(lambda: panel.count("heartbeat") >= 5)
    assert questions == 2
    # ... but not for ever.
    monkeypatch.setattr(module, "STALE_STATUS_S", 0.0)
    await asyncio.sleep(0.05)
    beats = panel.count("heartbeat")
    await asyncio.sleep(0.1)
    assert panel.count("heartbeat") == beats
    release.set()
    await panel.wait_for(lambda: panel.count("heartbeat") > beats)
    await registration.stop()


async def test_survives_an_answer_that_makes_no_sense(panel: FakePanel, caplog: pytest.LogCaptureFixture):
    answers: list[Any] = [{"nonsense": True}, FakeEngineCore().answers["status"]["ok"]]

    async def status() -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    registration = make(panel, status)
    registration.start()
    await panel.wait_for(lambda: panel.count("register") == 1)
    await registration.stop()
    assert "an exchange with the panel failed" in caplog.text


async def test_stopping_before_anything_happened(panel: FakePanel, status: Callable[[], Any]):
    registration = make(panel, status, lambda: False)
    await registration.stop()
    assert panel.calls == []


@pytest.mark.parametrize(
    ("host", "ip"), [(None, "10.0.0.5"), ("0.0.0.0", "10.0.0.5"), ("::", "10.0.0.5"), ("127.0.0.1", "127.0.0.1")]
)
def test_facts(engine_client: SimpleNamespace, host: str | None, ip: str):
    settings = PluginSettings("A", "10.0.0.1", 8002, TOKEN, bind="10.0.0.5")
    args = argparse.Namespace(host=host, port=8101, model="org/tiny", served_model_name=None)
    facts = gather_facts(settings, args, engine_client.vllm_config)
    assert (facts.ip, facts.port, facts.served_model_name) == (ip, 8101, "org/tiny")
    assert facts.inference_params["max_model_len"] == 2048
    assert facts.inference_params["dtype"] == "float32"
    assert facts.topology == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "visible_gpu_ids": facts.topology["visible_gpu_ids"],
        "device_kind": facts.topology["device_kind"],
        "device_count": facts.topology["device_count"],
    }
    assert facts.inference_params["engine_args"]["dtype"] == "float32"
    assert facts.inference_params["start_s"] > 0
