"""Jobs whose worker is gone are ended by somebody else, once, and the instances are told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from instances.models import Instance
from migrations_app.choices import MigrationState
from migrations_app.models import MigrationJob
from migrations_app.reaper import reap_jobs
from migrations_app.tasks import execute
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body, Refusal


def left_behind(pair: Pair, state: str, *, lease_s: float = -1) -> MigrationJob:
    """A job as a killed worker leaves it."""
    job = pair.job()
    MigrationJob.objects.filter(id=job.id).update(
        state=state,
        owner="host:1:dead",
        attempt=1,
        started_at=timezone.now(),
        lease_until=timezone.now() + timedelta(seconds=lease_s),
    )
    Instance.objects.filter(pk="hi-a").update(routed=False)
    Instance.objects.filter(pk="hi-b").update(routed=True)
    job.refresh_from_db()
    return job


@pytest.mark.parametrize("state", ["preflight", "attaching", "copying", "handing_over", "draining"])
def test_an_expired_job_is_rolled_back(pair: Pair, state: str) -> None:
    pair.a.add_request("r1")
    job = left_behind(pair, state)
    reap_jobs()
    job.refresh_from_db()
    assert (job.state, job.error_code) == ("failed", "worker_lost")
    assert job.error == "The worker that ran the migration stopped without a word; all requests stayed on hi-a."
    # A later attempt: if the worker wakes up after all, the instances refuse it.
    for instance in (pair.a, pair.b):
        assert [body["attempt"] for body in instance.named("abort")] == [2]
    assert pair.roles() == {"hi-a": ("active", "A", True), "hi-b": ("standby", "B", False)}


def test_a_job_that_is_renewed_is_left_alone(pair: Pair) -> None:
    job = left_behind(pair, "copying", lease_s=20)
    reap_jobs()
    job.refresh_from_db()
    assert (job.state, job.owner) == ("copying", "host:1:dead")
    assert not pair.a.calls


def test_reaping_twice_tells_nobody_twice(pair: Pair) -> None:
    left_behind(pair, "copying")
    reap_jobs()
    reap_jobs()
    assert len(pair.a.named("abort")) == 1


def test_a_job_whose_requests_have_all_moved_is_completed(pair: Pair) -> None:
    job = left_behind(pair, "finishing")
    reap_jobs()
    job.refresh_from_db()
    assert (job.state, job.error, job.new_active_instance_id) == ("done", "", "hi-b")
    assert pair.roles() == {"hi-a": ("standby", "B", False), "hi-b": ("active", "A", True)}
    assert not pair.a.named("abort")


def test_dead_instances_do_not_stop_the_reaper(pair: Pair) -> None:
    job = left_behind(pair, "copying")
    pair.a.stop()
    pair.b.stop()
    reap_jobs()
    job.refresh_from_db()
    assert job.state == "failed"
    assert job.error.endswith("the requests of hi-a cannot be reached.")


def test_a_lost_message_is_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr("migrations_app.tasks.execute.delay", sent.append)
    job = pair.job()
    assert sent == [str(job.id)]
    reap_jobs()
    assert len(sent) == 1
    MigrationJob.objects.update(created_at=timezone.now() - timedelta(seconds=11))
    reap_jobs()
    assert sent == [str(job.id)] * 2


def test_a_broker_that_is_away_does_not_refuse_the_wish(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(job_id: str) -> None:
        raise ConnectionError("no broker")

    monkeypatch.setattr("migrations_app.tasks.execute.delay", away)
    job = pair.job()
    assert MigrationJob.objects.get(id=job.id).state == MigrationState.PENDING


@pytest.mark.parametrize(("policy", "status"), [("preserve_source", "standby"), ("destroy_source", "destroyed")])
def test_a_drained_source_follows_its_policy_later(pair: Pair, policy: str, status: str) -> None:
    pair.a.add_request("stuck", reason=("lora", "Not yet."))
    job = pair.job(migration_type=policy)
    execute.run(str(job.id))
    job.refresh_from_db()
    assert job.state == "partial"

    def heartbeat(running: int) -> None:
        numbers = {"running": running, "waiting": 0, "parked": 0, "frozen": 0}
        Instance.objects.filter(pk="hi-a").update(requests=numbers, last_heartbeat_at=timezone.now())

    heartbeat(1)
    reap_jobs()
    assert Instance.objects.get(pk="hi-a").status == "draining"
    pair.a.requests.clear()
    heartbeat(0)
    reap_jobs()
    assert Instance.objects.get(pk="hi-a").status == status


def test_a_source_that_is_busy_after_all_stays_draining(pair: Pair) -> None:
    pair.a.add_request("stuck", reason=("lora", "Not yet."))
    execute.run(str(pair.job().id))
    Instance.objects.filter(pk="hi-a").update(requests={"running": 0}, last_heartbeat_at=timezone.now())
    reap_jobs()
    assert Instance.objects.get(pk="hi-a").status == "draining"


def test_a_worker_that_wakes_up_late_does_no_harm(pair: Pair) -> None:
    """The reaper judges while the worker's call blocks: instances refuse its next call, the state is the reaper's."""
    pair.a.add_request("r1")
    job = pair.job()
    seen: list[Any] = []

    def sleep_over_the_lease(_: Body) -> None:
        if seen:
            return
        seen.append(1)
        MigrationJob.objects.update(owner="asleep", lease_until=timezone.now() - timedelta(seconds=1))
        reap_jobs()

    pair.a.faults["round"] = sleep_over_the_lease
    execute.run(str(job.id))
    job.refresh_from_db()
    assert (job.state, job.error_code, job.attempt) == ("failed", "worker_lost", 2)
    assert pair.a.seen_attempt[str(job.id)] == 2
    with pytest.raises(Refusal, match="later attempt"):
        pair.a.answer("handover", {"job": str(job.id), "attempt": 1, "request_ids": ["r1"]})
