"""Websockets over a real Redis: who may listen, and what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from channels.testing import WebsocketCommunicator
from django.contrib.auth.models import User
from django.test import Client

from controlplane.routing import websocket_urlpatterns
from migrations_app import journal
from migrations_app.choices import EventKind, MigrationState, RoundKind
from migrations_app.events import record
from migrations_app.models import MigrationJob
from migrations_app.state import advance
from tests.unit.panel.factories import make_job

pytestmark = pytest.mark.django_db(transaction=True)

application = AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns)))


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return sync_to_async(function)(*args, **kwargs)


def socket(path: str, cookie: str = "", origin: str = "http://testserver") -> WebsocketCommunicator:
    headers = [(b"origin", origin.encode()), (b"host", b"testserver")]
    if cookie:
        headers.append((b"cookie", f"sessionid={cookie}".encode()))
    return WebsocketCommunicator(application, path, headers=headers)


def _session() -> str:
    user = User.objects.create_user("vera", password="a-long-password")
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client.cookies["sessionid"].value


@pytest.fixture
async def job(monkeypatch: pytest.MonkeyPatch) -> MigrationJob:
    monkeypatch.setattr("migrations_app.tasks.execute.delay", lambda job_id: None)
    return await in_thread(make_job)  # type: ignore[no-any-return]


@pytest.fixture
async def session(transactional_db: None) -> str:
    return await in_thread(_session)  # type: ignore[no-any-return]


async def next_of(communicator: WebsocketCommunicator, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            message = await communicator.receive_json_from(timeout=10)
            if message["type"] == kind:
                return message  # type: ignore[no-any-return]


@pytest.mark.parametrize("cookie", ["", "made-up"])
async def test_strangers_are_turned_away(job: MigrationJob, cookie: str) -> None:
    for path in (f"/ws/migrations/{job.id}/", "/ws/dashboard/"):
        connected, code = await socket(path, cookie).connect()
        assert (connected, code) == (False, 4401)


async def test_another_site_cannot_listen(job: MigrationJob, session: str) -> None:
    connected, _ = await socket(f"/ws/migrations/{job.id}/", session, origin="http://evil.example").connect()
    assert not connected


async def test_an_unknown_migration(session: str) -> None:
    connected, code = await socket("/ws/migrations/00000000-0000-0000-0000-000000000000/", session).connect()
    assert (connected, code) == (False, 4404)


async def test_what_happens_to_a_job_arrives(job: MigrationJob, session: str) -> None:
    communicator = socket(f"/ws/migrations/{job.id}/", session)
    dashboard = socket("/ws/dashboard/", session)
    for one in (communicator, dashboard):
        connected, _ = await one.connect()
        assert connected
    first = await next_of(communicator, "job")
    assert (first["job"]["id"], first["job"]["state"]) == (str(job.id), "pending")

    await in_thread(advance, job.id, MigrationState.PENDING, MigrationState.PREFLIGHT)
    assert (await next_of(communicator, "job"))["job"]["state"] == "preflight"
    assert await next_of(dashboard, "changed") == {"type": "changed"}

    event = await in_thread(record, job.id, EventKind.STEP, message="hello")
    while (message := await next_of(communicator, "event"))["event"]["message"] != "hello":
        pass
    assert message["event"]["seq"] == event.seq

    answer = {"blocks": 7, "bytes": 70, "duration_s": 0.5}
    await in_thread(journal.note_round, job.id, 0, RoundKind.FULL, event.created_at, answer)
    shown = (await next_of(communicator, "round"))["round"]
    assert (shown["round_index"], shown["blocks"], shown["duration_ms"]) == (0, 7, 500)

    moved = {"request_id": "r1", "outcome": "moved", "tokens": 9, "gap_ms": 40}
    await in_thread(journal.note_handed_over, job.id, [moved])
    request = (await next_of(communicator, "request"))["request"]
    assert (request["request_id"], request["outcome"], request["gap_ms"]) == ("r1", "moved", 40)
    for one in (communicator, dashboard):
        await one.disconnect()


async def test_another_jobs_events_do_not_arrive(job: MigrationJob, session: str) -> None:
    other = await in_thread(MigrationJob.objects.create, source_id=job.source_id, target_id=job.target_id, state="done")
    communicator = socket(f"/ws/migrations/{other.id}/", session)
    await communicator.connect()
    await next_of(communicator, "job")
    await in_thread(record, job.id, EventKind.STEP, message="not for you")
    assert await communicator.receive_nothing(timeout=1)
    await communicator.disconnect()


async def test_a_burst_is_thinned_out_but_every_state_arrives(job: MigrationJob, session: str) -> None:
    def burst() -> None:
        for number in range(100):
            record(job.id, EventKind.STEP, message=str(number))
        for from_, to in (
            (MigrationState.PENDING, MigrationState.PREFLIGHT),
            (MigrationState.PREFLIGHT, MigrationState.ATTACHING),
            (MigrationState.ATTACHING, MigrationState.COPYING),
            (MigrationState.COPYING, MigrationState.FAILED),
        ):
            advance(job.id, from_, to)

    communicator = socket(f"/ws/migrations/{job.id}/", session)
    await communicator.connect()
    await next_of(communicator, "job")
    await in_thread(burst)
    states = [(await next_of(communicator, "job"))["job"]["state"] for _ in range(4)]
    assert states == ["preflight", "attaching", "copying", "failed"]
    await communicator.disconnect()


async def test_the_trail_does_not_depend_on_redis(job: MigrationJob, settings: Any) -> None:
    settings.CHANNEL_LAYERS = {
        "default": {
            "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
            "CONFIG": {"hosts": ["redis://127.0.0.1:1/0"]},
        }
    }
    assert await in_thread(advance, job.id, MigrationState.PENDING, MigrationState.PREFLIGHT)
    assert await in_thread(job.events.count) == 2
