"""What the tests of whole migrations share: carrying one out, faults, and what must hold afterwards."""

from __future__ import annotations

import json
import time
from typing import Any

from controlplane.redis import ROUTING_KEY, connection
from migrations_app import selectors
from migrations_app.models import MigrationJob
from migrations_app.tasks import execute
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body, Refusal

BEFORE = {"hi-a": ("active", "A", True), "hi-b": ("standby", "B", False)}
SWAPPED = {"hi-a": ("standby", "B", False), "hi-b": ("active", "A", True)}


def carry_out(job: MigrationJob) -> MigrationJob:
    execute.run(str(job.id))
    return selectors.get_job(job.id)


def active() -> list[str]:
    table = json.loads(str(connection().get(ROUTING_KEY)))
    ids: list[str] = table["models"]["smollm2"]["active"]
    return ids


def states(job: MigrationJob) -> list[str]:
    return [event.data["state"] for event in job.events.filter(kind="state").order_by("seq")]


def outcomes(job: MigrationJob) -> dict[str, str]:
    return dict(job.request_rows.values_list("request_id", "outcome"))


def fail(status: int = 500, code: str = "engine_unavailable", message: str = "The engine could not do it.") -> Any:
    def fault(_: Body) -> None:
        raise Refusal(status, code, message)

    return fault


def hang(_: Body) -> None:
    time.sleep(1.0)


def at_round(number: int, fault: Any) -> Any:
    return lambda body: fault(body) if body["round"] == number else None


def assert_rolled_back(pair: Pair, job: MigrationJob, code: str) -> None:
    assert (job.state, job.error_code) == ("failed", code)
    assert pair.roles() == BEFORE
    assert active() == ["hi-a"]
    assert set(pair.a.requests) == {"r1", "r2"}
    assert not pair.b.requests
    assert "attached" not in outcomes(job).values()
    assert job.finished_at is not None
    assert job.lease_until is None
    assert selectors.seed_status(job)["status"] == "failed"
    # A new try may begin at once.
    assert not MigrationJob.objects.live_with("hi-a", "hi-b").exists()
