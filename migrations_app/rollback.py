"""What happens when a migration does not reach its end: instances are told, the route restored, people informed."""

from __future__ import annotations

import logging

from django.db import transaction

from instances.client import InstanceClient, InstanceError
from instances.models import Instance
from instances.services import restore_after_migration
from migrations_app import journal
from migrations_app.choices import LIVE_STATES, EventKind, MigrationState, MigrationType
from migrations_app.events import record
from migrations_app.models import MigrationJob
from migrations_app.state import TRANSITIONS, advance

__all__ = ["MigrationStopped", "blame", "roll_back"]

logger = logging.getLogger(__name__)


class MigrationStopped(Exception):
    """Why a migration cannot go on. `cause`: a sentence without its full stop, to which the consequence is added."""

    def __init__(self, code: str, cause: str, *, aborted: bool = False) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause
        self.aborted = aborted


def blame(error: InstanceError, job: MigrationJob, phase: str) -> MigrationStopped:
    """Finds out which instance is the reason for `error`, which came up while `phase`, and says so.

    The source reports the loss of the target in many ways: so the target is asked itself.
    """
    if not (error.instance == job.target_id and error.gone):
        silent = silence(job.target)
        if silent is not None:
            error = silent
    side, instance = ("target", job.target) if error.instance == job.target_id else ("source", job.source)
    name = f"The {side} {instance.vllm_hi_id} ({instance.address})"
    if error.gone:
        return MigrationStopped(f"{side}_unreachable", f"{name} stopped answering while {phase}")
    reason = error.message.strip().rstrip(".") or error.code
    return MigrationStopped(error.code, f"{name} refused while {phase}: {reason}")


def silence(instance: Instance) -> InstanceError | None:
    """Asks an instance for its status; returns the error if it does not answer at all."""
    try:
        with InstanceClient.of(instance) as client:
            client.status()
    except InstanceError as error:
        return error if error.gone else None
    return None


def roll_back(job: MigrationJob, attempt: int, owner: str, stopped: MigrationStopped) -> bool:
    """Undoes what has not moved and ends the job as failed, aborted or, if requests have moved already, partial.

    Returns False if the job does not belong to `owner` any more; then only the instances were told.
    """
    for instance in (job.source, job.target):
        _abort_on(instance, str(job.id), attempt)
    listed = _listed(job.source)
    journal.settle_unmoved(job.id, listed)
    job.refresh_from_db()
    moved, total = job.moved_requests, job.total_requests
    # Where the source was to go on, what has moved is served where it is now.
    beside = bool(moved) and job.migration_type == MigrationType.KEEP_SOURCE_ACTIVE
    if beside:
        _activate(job, attempt)
    unwanted = MigrationState.PARTIAL if moved else MigrationState.FAILED
    state = MigrationState.ABORTED if stopped.aborted else unwanted
    sentence = f"{stopped.cause}; {_consequence(job, moved, total, source_lives=listed is not None)}."
    with transaction.atomic():
        origins = [origin for origin in LIVE_STATES if state in TRANSITIONS[origin]]
        if not advance(
            job.id, origins, state, held_by=owner, message=sentence, error_code=stopped.code, error=sentence
        ):
            return False
        record(job.id, EventKind.ERROR, message=sentence, data={"code": stopped.code})
        restore_after_migration(job.source_id, job.target_id, target_serves=beside)
    logger.warning("Migration %s %s: %s", job.id, state, sentence)
    return True


def _abort_on(instance: Instance, job_id: str, attempt: int) -> None:
    try:
        with InstanceClient.of(instance) as client:
            client.abort(job_id, attempt)
    except InstanceError as error:
        # It undoes everything by itself when its leases run out.
        logger.warning("Migration %s: abort on %s: %s", job_id, instance.vllm_hi_id, error.message)


def _activate(job: MigrationJob, attempt: int) -> None:
    try:
        with InstanceClient.of(job.target) as client:
            client.activate(str(job.id), attempt)
    except InstanceError as error:
        logger.warning("Migration %s: activate on %s: %s", job.id, job.target_id, error.message)


def _listed(source: Instance) -> list[str] | None:
    try:
        with InstanceClient.of(source) as client:
            return [str(row.get("request_id")) for row in client.requests()]
    except InstanceError:
        return None


def _consequence(job: MigrationJob, moved: int, total: int, *, source_lives: bool) -> str:
    source, target = job.source_id, job.target_id
    if not source_lives:
        if moved:
            return f"{moved} of {total} requests had moved to {target}, the others ended with {source}"
        return f"the requests of {source} cannot be reached"
    if moved:
        return f"{moved} of {total} requests had moved and stay on {target}, the others stayed on {source}"
    return f"all requests stayed on {source}"
