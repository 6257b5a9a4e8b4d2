"""Cases in which several processes go for the same rows. Runs as a program of its own, so that it can fork:

    DATABASE_URL=... python -m tests.integration.races

prints one JSON object: case -> {"answers": what each process returned, "after": what the database says then}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import django

PROCESSES = 4


def claim_one_job() -> int:
    from migrations_app.executor import claim
    from migrations_app.models import MigrationJob

    job_id = str(MigrationJob.objects.get().id)
    return sum(claim(job_id, str(os.getpid())) for _ in range(20))


def after_claim() -> Any:
    from migrations_app.models import MigrationJob

    job = MigrationJob.objects.get()
    return [job.state, job.attempt, job.last_seq]


def write_events() -> int:
    from migrations_app.choices import EventKind
    from migrations_app.events import record
    from migrations_app.models import MigrationJob

    job = MigrationJob.objects.get()
    for number in range(50):
        record(job.id, EventKind.STEP, message=str(number))
    return 50


def after_events() -> Any:
    from migrations_app.models import MigrationEvent

    return list(MigrationEvent.objects.order_by("seq").values_list("seq", flat=True))


def want_the_same_instances() -> list[str]:
    """Returns the codes of the refusals, "" for a wish that was granted."""
    from migrations_app.services import MigrationRefused, create_migration

    pairs = [("hi-a", "hi-b"), ("hi-a", "hi-c"), ("hi-d", "hi-b"), ("hi-a", "hi-b")]
    codes = []
    for turn in range(20):
        try:
            create_migration(*pairs[(os.getpid() + turn) % 4], "preserve_source")
            codes.append("")
        except MigrationRefused as refusal:
            codes.append(refusal.code)
    return codes


def after_wishes() -> Any:
    from migrations_app.models import MigrationJob

    return [one for job in MigrationJob.objects.live() for one in (job.source_id, job.target_id)]


def publish() -> list[int]:
    from instances.routing import publish_routing_table

    return [publish_routing_table() for _ in range(15)]


def after_publish() -> Any:
    from instances.routing import published_version

    return published_version()


def beat_and_reserve() -> int:
    """A heartbeat that read the row before a reservation must not write the old status back."""
    from django.db import transaction

    from instances.models import Instance
    from instances.services import InstanceRefused, heartbeat, reserve_for_migration, restore_after_migration

    lost = 0
    for turn in range(25):
        heartbeat({"vllm_hi_id": "hi-a", "kv": {"free_blocks": turn}})
        try:
            with transaction.atomic():
                reserve_for_migration("hi-a", "hi-b")
        except InstanceRefused:
            continue
        heartbeat({"vllm_hi_id": "hi-a", "kv": {"free_blocks": turn}})
        lost += Instance.objects.get(pk="hi-a").status != "draining"
        restore_after_migration("hi-a", "hi-b")
    return lost


def after_beats() -> Any:
    from instances.models import Instance

    return list(Instance.objects.filter(pk__in=["hi-a", "hi-b"]).order_by("pk").values_list("status", flat=True))


#: case -> (whether a job waits, what every process does, what is looked at afterwards)
CASES: dict[str, tuple[bool, Callable[[], Any], Callable[[], Any]]] = {
    "claim": (True, claim_one_job, after_claim),
    "events": (True, write_events, after_events),
    "wishes": (False, want_the_same_instances, after_wishes),
    "versions": (False, publish, after_publish),
    "heartbeats": (False, beat_and_reserve, after_beats),
}


def _work(case: str, gate: Barrier, answers: multiprocessing.SimpleQueue[Any]) -> None:
    gate.wait(30)
    answers.put(CASES[case][1]())


def _race(case: str) -> dict[str, Any]:
    from django.core.management import call_command
    from django.db import connections

    from controlplane.redis import connection
    from migrations_app.services import create_migration
    from tests.unit.panel.factories import make_instance, make_pair

    call_command("flush", interactive=False, verbosity=0)
    connection().flushdb()
    make_pair()
    make_instance("hi-c", instance_type="B")
    make_instance("hi-d")
    if CASES[case][0]:
        create_migration("hi-a", "hi-b", "preserve_source")
    # A connection must not be shared with the children.
    connections.close_all()
    connection().close()
    fork = multiprocessing.get_context("fork")
    gate, answers = fork.Barrier(PROCESSES), fork.SimpleQueue()
    children = [fork.Process(target=_work, args=(case, gate, answers)) for _ in range(PROCESSES)]
    for child in children:
        child.start()
    found = [answers.get() for child in children if child.join(60) is None and child.exitcode == 0]
    return {"answers": found, "after": CASES[case][2]()}


def main() -> None:
    django.setup()
    from django.core.management import call_command

    from migrations_app import publisher, services

    # Neither pages nor workers are part of these cases.
    publisher._put = lambda *args, **kwargs: None
    services.enqueue = lambda job: None
    call_command("migrate", verbosity=0)
    json.dump({case: _race(case) for case in CASES}, sys.stdout)


if __name__ == "__main__":
    main()
