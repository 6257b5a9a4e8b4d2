"""Migrations that are aborted, and several workers that want the same one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from instances.models import Instance
from migrations_app.models import MigrationJob
from migrations_app.services import request_abort
from migrations_app.tasks import execute
from tests.integration.carried_out import (
    BEFORE,
    active,
    at_round,
    carry_out,
)
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body, FakeInstance


@pytest.mark.parametrize("call", ["start", "attach", "round"])
def test_abort_between_two_steps(pair: Pair, call: str) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    job = pair.job()
    pair.a.faults[call] = lambda _: MigrationJob.objects.update(abort_requested=True) and None
    job = carry_out(job)
    assert (job.state, job.error_code) == ("aborted", "aborted")
    assert job.error == "The migration was aborted; all requests stayed on hi-a."
    assert pair.roles() == BEFORE
    assert active() == ["hi-a"]
    assert set(pair.a.requests) == {"r1", "r2"}


def test_abort_after_some_have_moved(pair: Pair) -> None:
    for number in range(5):
        pair.a.add_request(f"r{number}")
    job = pair.job()
    pair.a.faults["handover"] = lambda _: MigrationJob.objects.update(abort_requested=True) and None
    job = carry_out(job)
    assert job.state == "aborted"
    assert job.error.endswith("4 of 5 requests had moved and stay on hi-b, the others stayed on hi-a.")


def test_a_message_that_is_delivered_twice(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = pair.job()
    inside: list[int] = []

    def again(_: Body) -> None:
        execute.run(str(job.id))
        inside.append(1)

    pair.a.faults["attach"] = again
    done = carry_out(job)
    carry_out(job)
    assert (done.state, inside, done.attempt) == ("done", [1], 1)
    assert len(pair.a.named("start")) == 1


def test_a_worker_that_lost_its_job_touches_nothing_any_more(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = pair.job()
    pair.a.faults["round"] = lambda _: MigrationJob.objects.update(owner="reaper:1") and None
    carried = carry_out(job)
    # It is the new owner's now: no call, no change of state.
    assert carried.state == "copying"
    assert not pair.a.named("abort")
    assert not pair.a.named("handover")


def test_leases_are_renewed_while_a_call_blocks(pair: Pair) -> None:
    pair.a.add_request("r1")
    leases: list[Any] = []

    def slow(body: Body) -> None:
        for _ in range(2):
            leases.append(MigrationJob.objects.values_list("lease_until", flat=True).get())
            time.sleep(0.3)

    pair.a.faults["round"] = at_round(1, slow)
    assert carry_out(pair.job()).state == "done"
    assert leases[1] > leases[0]
    assert len(pair.a.named("lease")) >= 2


def test_only_operators_words_reach_the_trail(pair: Pair) -> None:
    """The trail alone tells what happened, in order."""
    pair.a.add_request("r1")
    job = carry_out(pair.job())
    seqs = list(job.events.order_by("seq").values_list("seq", flat=True))
    assert seqs == list(range(1, len(seqs) + 1)) and seqs[-1] == job.last_seq
    assert all(event.message for event in job.events.all())


def test_abort_by_the_service_while_it_runs(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = pair.job()
    pair.a.rounds = [9, 8, 7, 6, 5, 4, 3, 2]
    pair.a.faults["round"] = at_round(2, lambda _: request_abort(MigrationJob.objects.get(id=job.id)) and None)
    assert carry_out(job).state == "aborted"
    assert Instance.objects.get(pk="hi-b").status == "standby"


def test_the_fake_refuses_a_wrong_token() -> None:
    import httpx

    fake = FakeInstance("hi-x", "active")
    assert httpx.get(f"http://127.0.0.1:{fake.port}/vllm_hi/status", headers={"Authorization": "x"}).status_code == 401
    fake.stop()
