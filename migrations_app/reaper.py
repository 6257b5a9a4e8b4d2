"""Ends migrations whose worker died, and what such migrations left behind. Runs next to the jobs, never behind them."""

from __future__ import annotations

import logging
import secrets
from datetime import timedelta

from django.conf import settings
from django.db.models import F
from django.utils import timezone

from instances.choices import InstanceStatus
from instances.client import InstanceClient, InstanceError
from instances.models import Instance
from instances.services import deregister, retire_drained_source
from migrations_app import finishing
from migrations_app.choices import MigrationState, MigrationType
from migrations_app.models import MigrationJob
from migrations_app.rollback import MigrationStopped, roll_back
from migrations_app.services import enqueue

__all__ = ["reap_jobs"]

logger = logging.getLogger(__name__)

#: A job that nobody claimed for so long was lost on its way to the workers.
LOST_MESSAGE_S = 10


def reap_jobs() -> None:
    """One pass. May run at any time and any number of times at once."""
    for job in _expired():
        _end(job)
    _send_again()
    _settle_drained_sources()


def _expired() -> list[MigrationJob]:
    jobs = MigrationJob.objects.live().filter(lease_until__lt=timezone.now())
    return list(jobs.select_related("source", "target"))


def _end(job: MigrationJob) -> None:
    owner = f"reaper:{secrets.token_hex(4)}"
    now = timezone.now()
    # The condition is the claim: of two reapers one wins, and a worker that renews just now keeps its job.
    taken = MigrationJob.objects.live().filter(id=job.id, lease_until__lt=now)
    lease = now + timedelta(seconds=settings.VLLM_HI_JOB_LEASE_S)
    if not taken.update(owner=owner, attempt=F("attempt") + 1, lease_until=lease):
        return
    job.refresh_from_db()
    stopped = MigrationStopped("worker_lost", "The worker that ran the migration stopped without a word")
    if job.state == MigrationState.FINISHING:
        # Everything has moved: going on is safe, going back is not.
        try:
            finishing.complete(job, job.attempt, owner)
            return
        except MigrationStopped as error:
            stopped = error
    roll_back(job, job.attempt, owner, stopped)


def _send_again() -> None:
    limit = timezone.now() - timedelta(seconds=LOST_MESSAGE_S)
    for job in MigrationJob.objects.filter(state=MigrationState.PENDING, created_at__lt=limit):
        logger.info("Migration %s was not taken by any worker; it is sent again", job.id)
        enqueue(job)


def _settle_drained_sources() -> None:
    """A source that kept requests which could not move becomes what its policy says once they have ended."""
    for source in Instance.objects.filter(status=InstanceStatus.DRAINING):
        last = MigrationJob.objects.filter(source=source).order_by("-created_at").first()
        if last is None or not last.is_terminal or not source.is_alive or any(source.requests.values()):
            continue
        destroy = last.migration_type == MigrationType.DESTROY_SOURCE
        try:
            with InstanceClient.of(source) as client:
                (client.destroy if destroy else client.convert_to_b)(str(last.id), last.attempt)
        except InstanceError as error:
            logger.info("Instance %s is not settled yet: %s", source.vllm_hi_id, error.message)
            continue
        if destroy:
            deregister(source.vllm_hi_id)
        else:
            retire_drained_source(source.vllm_hi_id)
