"""The proxy behind the server that carries it: Daphne cancels nothing when a client leaves, and has no lifespan."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.fakes.answers import read_stream
from tests.fakes.broker import Broker
from tests.fakes.instance import FakeInstance
from tests.unit.proxy.conftest import ANSWER, TOKEN, WORKER, table
from vllm_plugin.wire import LegOpened, OpenLeg, Producing, Switched

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = "".join(token.text for token in ANSWER)


@pytest.fixture
async def server(broker: Broker, a: FakeInstance, b: FakeInstance) -> AsyncIterator[aiohttp.ClientSession]:
    """Daphne with the proxy on a free port, A active and B in standby; yields a session with that base URL."""
    broker.publish(table(1, ["inst-a"], a, b))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "daphne", "-b", "127.0.0.1", "-p", "0", "-v", "1", "tests.fakes.served:application"),
        env={**os.environ, "REDIS_URL": broker.url, "VLLM_HI_TOKEN": TOKEN, "WORKER_ID": WORKER},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while (line := await process.stderr.readline()).find(b"Listening on TCP address") < 0:
            assert line, "daphne ended"
    port = int(line.decode().rsplit(":", 1)[1])
    drain = asyncio.create_task(process.stderr.read())
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/v1/models") as response:
            assert response.status == 200
        await a.connected()
        await b.connected()
        yield session
    process.terminate()
    await process.wait()
    await drain


async def test_a_stream_arrives_event_by_event_and_survives_a_handover(
    server: aiohttp.ClientSession, a: FakeInstance, b: FakeInstance
) -> None:
    request = asyncio.create_task(server.post("/v1/chat/completions", json=CHAT))
    on_a = await a.generation()
    on_a.release(4)
    async with await request as response:
        body = b""
        while body.count(b"\n\n") < 4:
            body += await response.content.readany()
        a.send(OpenLeg(1, on_a.stream_id, "ticket", b.base_url))
        assert (await a.expect(LegOpened)).ok
        on_b = await b.generation()
        on_b.commit(5)
        on_b.release()
        b.send(Producing(on_a.stream_id, "ticket", 5))
        assert (await a.expect(Switched)).tokens == 3
        body += await response.content.read()
    got = read_stream(body)
    assert (got.text, got.done, got.errors) == (TEXT, 1, [])


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_stops_both_instances_at_once(
    server: aiohttp.ClientSession, a: FakeInstance, b: FakeInstance, streamed: bool
) -> None:
    request = asyncio.create_task(server.post("/v1/chat/completions", json={**CHAT, "stream": streamed}))
    on_a = await a.generation()
    a.send(OpenLeg(1, on_a.stream_id, "ticket", b.base_url))
    on_b = await b.generation()
    if streamed:
        on_a.release(2)
        (await request).close()
    else:
        request.cancel()
    async with asyncio.timeout(5):  # Daphne itself would take ten
        await on_a.gone.wait()
        await on_b.gone.wait()
