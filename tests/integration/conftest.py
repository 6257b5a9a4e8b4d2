from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from controlplane.redis import connection
from instances.models import Instance
from migrations_app.models import MigrationJob
from migrations_app.services import create_migration
from tests.integration.fake_vllm import FakeInstance
from tests.unit.panel.factories import make_instance


@pytest.fixture(autouse=True)
def clean_redis() -> Iterator[None]:
    connection().flushdb()
    yield
    connection().flushdb()


@dataclass
class Pair:
    """Two fake instances and their rows."""

    a: FakeInstance
    b: FakeInstance

    def job(self, **wish: Any) -> MigrationJob:
        return create_migration("hi-a", "hi-b", wish.pop("migration_type", "preserve_source"), **wish)

    def roles(self) -> dict[str, tuple[str, str, bool]]:
        rows = Instance.objects.values_list("pk", "status", "instance_type", "routed")
        return {pk: (status, kind, routed) for pk, status, kind, routed in rows}


@pytest.fixture
def pair(transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    settings.VLLM_HI_JOB_RENEW_S = 0.1
    settings.VLLM_HI_ROUTE_ACK_S = 0.3
    settings.VLLM_HI_DRAIN_DEADLINE_S = 1.0
    monkeypatch.setattr("migrations_app.moving.DRAIN_POLL_S", 0.02)
    monkeypatch.setattr("migrations_app.finishing.CONVERT_PAUSE_S", 0.02)
    # Nobody takes the job from the queue: the tests run it themselves.
    monkeypatch.setattr("migrations_app.tasks.execute.delay", lambda job_id: None)
    a, b = FakeInstance("hi-a", "active"), FakeInstance("hi-b", "standby")
    a.peer, b.peer = b, a
    make_instance("hi-a", port=a.port)
    make_instance("hi-b", port=b.port, instance_type="B")
    yield Pair(a, b)
    a.stop()
    b.stop()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances that hang are given up after a fraction of a second."""
    from instances import client

    monkeypatch.setattr(client, "TIMEOUTS", dict.fromkeys(client.TIMEOUTS, 0.4))
