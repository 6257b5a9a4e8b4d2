"""A standby without an engine, with a real child process that only plays `vllm serve`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.fakes import vllm_serve
from tests.unit.plugin.conftest import TOKEN
from tests.unit.plugin.test_registration import FakePanel
from vllm_plugin import compat, registration, standby
from vllm_plugin.engine_arguments import OwnArguments
from vllm_plugin.registration import InstanceFacts
from vllm_plugin.settings import PluginSettings, StandbyKind
from vllm_plugin.standby import Standby
from vllm_plugin.standby_listener import PortTaken

JOB = {"job": "j1", "attempt": 1}
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Running:
    """A standby on a real port, with a client for it."""

    def __init__(self, behaviour: str, instance_type: Any = "B", kind: StandbyKind | None = None) -> None:
        self.port = free_port()
        self.panel = FakePanel()
        parser = argparse.ArgumentParser()
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--tensor-parallel-size", type=int, default=1)
        parser.add_argument("--dtype", default="auto")
        own = OwnArguments(parser.parse_args([]), parser)
        self.standby = Standby(
            PluginSettings(instance_type, "127.0.0.1", 8002, TOKEN, standby=kind),
            own,
            InstanceFacts("127.0.0.1", self.port, "tiny", {"model": "tiny"}, {"tensor_parallel_size": 1}),
            [sys.executable, vllm_serve.__file__, behaviour, str(self.port)],
            httpx.MockTransport(self.panel),
        )
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", headers=HEADERS, trust_env=False)
        self.life = asyncio.ensure_future(self.standby.run())

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                if self.life.done() and self.life.exception():
                    self.life.result()
                await asyncio.sleep(0.02)

    async def listening(self) -> None:
        async with asyncio.timeout(30):
            while True:
                with suppress(httpx.TransportError):
                    await self.client.get("/health")
                    return
                await asyncio.sleep(0.02)

    async def status(self) -> dict[str, Any]:
        answer = await self.client.get("/vllm_hi/status")
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        return status

    async def call(self, name: str, **body: Any) -> httpx.Response:
        return await self.client.post(f"/vllm_hi/migration/{name}", json={**JOB, **body})

    async def bring_up(self, **body: Any) -> None:
        await self.listening()
        assert (await self.call("instantiate", **body)).status_code == 202
        await self.until(lambda: self.standby.state == "up")

    async def engine_says(self, path: str) -> dict[str, Any]:
        """Asks the engine: the port may still change hands."""
        async with asyncio.timeout(10):
            while True:
                with suppress(httpx.TransportError, ValueError, KeyError):
                    answer: dict[str, Any] = (await self.client.get(path)).json()
                    answer["pid"]
                    return answer
                await asyncio.sleep(0.02)

    async def end(self) -> int:
        """As SIGTERM does it."""
        self.standby._leave()
        async with asyncio.timeout(30):
            return await self.life


Start = Callable[..., Running]


@pytest.fixture
async def start(environment: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    environment.setattr(registration, "HEARTBEAT_S", 0.02)
    environment.setattr(compat, "missing_probes", list)
    environment.setattr(standby, "STOP_GRACE_S", 1.0)
    started: list[Running] = []

    def start(behaviour: str = "serves", *arguments: Any) -> Running:
        started.append(Running(behaviour, *arguments))
        return started[-1]

    yield start
    for running in started:
        if not running.life.done():
            await running.end()
        await running.client.aclose()


async def test_it_holds_its_port_and_says_what_it_is(start: Start):
    running = start()
    await running.listening()
    await running.until(lambda: running.panel.count("heartbeat"))
    call, body = running.panel.calls[0]
    assert (call, body["instance_type"], body["port"]) == ("register", "B", running.port)
    assert (body["engine"]["state"], body["factors"], body["control_port"]) == ("down", {}, 0)
    status = await running.status()
    assert (status["role"], status["vllm_hi_id"], status["engine"]["state"]) == ("standby", "a-1", "down")
    assert (await running.client.get("/vllm_hi/requests")).json() == {"requests": []}
    assert (await running.client.get("/health")).status_code == 200
    assert await running.end() == 0
    assert running.panel.calls[-1] == ("deregister", {"vllm_hi_id": "a-1"})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/", "/sleep"])
async def test_clients_hear_in_their_own_words_that_there_is_no_engine(start: Start, path: str):
    running = start()
    await running.listening()
    for answer in (await running.client.get(path), await running.client.post(path, json={"model": "tiny"})):
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        assert "standby" in error["message"]


async def test_calls_that_it_does_not_answer(start: Start):
    running = start()
    await running.listening()
    for name, body, status, code in (
        ("start", {}, 409, "engine_down"),
        ("instantiate", {"tensor_parallel_size": 0}, 400, "bad_field"),
        ("instantiate", {"engine_args": {"trust_remote_code": True}}, 400, "bad_field"),
        ("instantiate", {"tp": 2}, 400, "bad_field"),
    ):
        answer = await running.call(name, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), name
    for path in ("/vllm_hi/status", "/vllm_hi/migration/instantiate"):
        wrong = {"Authorization": "Bearer wrong"}
        answer = await running.client.request("POST" if "migration" in path else "GET", path, headers=wrong)
        assert answer.status_code == 401
    assert running.standby.state == "down"


async def test_the_engine_takes_over_port_and_registration(start: Start):
    running = start()
    await running.until(lambda: running.panel.count("heartbeat"))
    await running.bring_up(engine_args={"dtype": "float32"}, tensor_parallel_size=2, model="other/model")
    engine = await running.engine_says("/")
    assert engine["arguments"] == ["--dtype=float32", "--tensor-parallel-size=2", "--vllm-hi-type=B"]
    assert engine["environment"]["VLLM_HI_STANDBY_MODEL"] == "other/model"
    assert engine["environment"]["VLLM_HI_STANDBY_ID"] == "a-1"
    # Nobody but the engine listens, and nobody but the engine speaks to the panel.
    assert all([(await running.engine_says("/"))["pid"] == engine["pid"] for _ in range(20)])
    await asyncio.sleep(0.1)
    beats = running.panel.count("heartbeat")
    await asyncio.sleep(0.1)
    assert running.panel.count("heartbeat") == beats
    assert running.panel.count("deregister") == 0
    assert await running.end() == 0
    assert running.panel.count("deregister") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(engine["pid"], 0)


async def test_it_tells_how_far_the_start_is(start: Start):
    running = start("hangs")
    await running.listening()
    answer = await running.call("instantiate")
    assert (answer.status_code, answer.json()["engine"]["state"]) == (202, "instantiating")
    await running.until(lambda: running.standby.engine()["percent"] == 30)
    status = await running.status()
    assert status["engine"] == {"state": "instantiating", "percent": 30, "phase": "loading weights", "error": ""}
    await running.until(lambda: any(body.get("engine", {}).get("percent") == 30 for _, body in running.panel.calls))
    # Asked again by the same job it goes on; another one has to wait.
    assert (await running.call("instantiate")).json()["engine"]["percent"] == 30
    answer = await running.client.post("/vllm_hi/migration/instantiate", json={"job": "j2", "attempt": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "engine_busy")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("no_model", "Invalid repository ID"), ("no_memory", "Free memory on device"), ("killed", "it was killed")],
)
async def test_a_start_that_fails_says_why_and_may_be_tried_again(start: Start, behaviour: str, reason: str):
    running = start(behaviour)
    await running.listening()
    for attempt in (1, 2):
        assert (await running.call("instantiate", attempt=attempt)).status_code == 202
        await running.until(lambda: running.standby.state == "down")
        engine = (await running.status())["engine"]
        assert engine["error"].startswith(f"The engine did not come up: {reason}"), engine
    # The whole time it was the one who spoke to the panel.
    assert running.panel.count("register") == 1
    assert running.panel.count("deregister") == 0


async def test_an_abort_ends_the_start_and_all_that_belongs_to_it(start: Start):
    running = start("with_family")
    await running.listening()
    await running.call("instantiate")
    await running.until(lambda: running.standby.engine()["percent"] == 30)
    assert (await running.client.post("/vllm_hi/migration/abort", json={"job": "j2", "attempt": 1})).status_code == 200
    assert running.standby.state == "instantiating"
    assert (await running.call("abort")).json() == {"released": 0}
    await running.until(lambda: running.standby.state == "down")
    assert (await running.status())["engine"]["error"] == ""
    assert _children() == []
    # A worker that wakes up late does no harm.
    assert (await running.call("instantiate", attempt=2)).status_code == 202
    assert (await running.call("abort", attempt=1)).json()["error"]["code"] == "stale_attempt"
    assert running.standby.state == "instantiating"


async def test_a_start_that_takes_too_long_is_ended(start: Start):
    running = start("hangs")
    await running.listening()
    await running.call("instantiate", deadline_s=1)
    await running.until(lambda: running.standby.state == "down")
    error = (await running.status())["engine"]["error"]
    assert error.startswith("The engine was not up after 1 s, while ")


async def test_an_engine_that_dies_leaves_a_standby_that_says_so(start: Start):
    running = start()
    await running.bring_up()
    with suppress(httpx.TransportError):
        await running.engine_says("/die")
    await running.until(lambda: running.standby.state == "down")
    await running.listening()
    assert "ended by itself: the device is on fire" in (await running.status())["engine"]["error"]
    await running.until(lambda: running.panel.count("register") == 2)


async def test_an_engine_that_is_put_down_leaves_a_standby_on_the_port(start: Start):
    running = start()
    await running.bring_up()
    await running.engine_says("/say/put_down")
    await running.until(lambda: running.standby.state == "down")
    assert (await running.status())["engine"] == {"state": "down", "percent": 0, "phase": "", "error": ""}
    await running.until(lambda: running.panel.count("register") == 2)
    assert _children() == []
    await running.bring_up(attempt=2)


async def test_an_instance_that_was_destroyed_ends_with_its_engine(start: Start):
    running = start()
    await running.bring_up()
    pid = (await running.engine_says("/say/destroyed"))["pid"]
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(10):
        assert await running.life == 0
    assert running.panel.count("register") == 1


async def test_a_stubborn_engine_is_killed(start: Start):
    running = start("stubborn")
    await running.bring_up()
    pid = (await running.engine_says("/"))["pid"]
    assert await running.end() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_an_a_that_may_be_put_down_starts_with_its_engine(start: Start):
    running = start("serves", "A", "cold")
    await running.until(lambda: running.standby.state == "up")
    assert (await running.engine_says("/"))["arguments"] == ["--vllm-hi-type=A"]
    assert running.panel.calls == []
    await running.engine_says("/say/put_down")
    await running.until(lambda: running.panel.count("register"))
    assert running.panel.calls[0][1]["instance_type"] == "B"
    await running.until(lambda: running.standby.state == "down")
    await running.bring_up()
    assert (await running.engine_says("/"))["arguments"] == ["--vllm-hi-type=B"]


async def test_an_a_whose_engine_does_not_come_up_ends_like_vllm(start: Start):
    running = start("no_model", "A", "cold")
    async with asyncio.timeout(30):
        assert await running.life == 1


async def test_a_port_that_is_taken(environment: pytest.MonkeyPatch):
    environment.setattr(compat, "missing_probes", list)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        environment.setattr(sys.modules[__name__], "free_port", lambda: other.getsockname()[1])
        with pytest.raises(PortTaken, match="choose another --port"):
            await Running("serves").life


def test_facts_before_there_is_an_engine():
    settings = PluginSettings("B", "10.0.0.1", 8002, TOKEN, bind="10.0.0.5")
    args = SimpleNamespace(
        model_tag="org/tiny", model="default", served_model_name=None, host=None, port=8001, max_model_len=None,
        tensor_parallel_size=2, pipeline_parallel_size=1, gpu_memory_utilization=0.95,
    )  # fmt: skip
    facts = standby.facts(settings, args)  # type: ignore[arg-type]
    assert (facts.ip, facts.port, facts.served_model_name) == ("10.0.0.5", 8001, "org/tiny")
    assert facts.inference_params == {"model": "org/tiny", "served_model_names": ["org/tiny"]}
    assert facts.topology["tensor_parallel_size"] == 2
    assert facts.topology["device_count"] >= 1


def _children() -> list[str]:
    """Command lines of processes that play `vllm serve`, or belong to one, and still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "fakes/vllm_serve.py" in text or "signal.SIG_IGN); time.sleep(300)" in text:
                found.append(text)
    return found
