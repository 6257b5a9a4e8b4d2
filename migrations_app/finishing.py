"""The end of a migration whose requests have all moved: the target takes over, the source follows its policy.

Every call may be repeated: when a worker dies in the middle of this, the reaper does all of it again.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

from django.db import transaction

from instances.client import InstanceClient, InstanceError
from instances.models import Instance
from instances.services import hand_service_over, serve_beside
from migrations_app import journal
from migrations_app.choices import EventKind, MigrationState, MigrationType, Step
from migrations_app.events import record
from migrations_app.models import MigrationEvent, MigrationJob
from migrations_app.rollback import MigrationStopped, blame
from migrations_app.state import advance

__all__ = ["complete", "complete_partly"]

logger = logging.getLogger(__name__)

#: A client that hangs up, or a response on its last byte, keeps the source busy for a moment after the last handover.
CONVERT_TRIES = 10
CONVERT_PAUSE_S = 0.5


def complete(job: MigrationJob, attempt: int, owner: str) -> None:
    """From `finishing` to `done`; to `partial` when the source is gone before it became what it should.

    Raises:
        MigrationStopped: the target cannot take over.
    """
    with InstanceClient.of(job.source) as source, InstanceClient.of(job.target) as target:
        _close_session(source, job, attempt)
        _activate(target, job, attempt)
        _once(job, Step.HANDLE_SOURCE, f"{job.get_migration_type_display()}")
        trouble = None if _keeps_source(job) else _apply_policy(source, job, attempt)
    becomes: Literal["standby", "destroyed"] = (
        "destroyed" if job.migration_type == MigrationType.DESTROY_SOURCE else "standby"
    )
    with transaction.atomic():
        if trouble is None:
            ended = advance(
                job.id,
                MigrationState.FINISHING,
                MigrationState.DONE,
                held_by=owner,
                new_active_instance_id=job.target_id,
            )
        else:
            ended = _end_partly(job, owner, trouble)
        if ended:
            _settle(job, becomes)
            if trouble is None:
                record(job.id, EventKind.STEP, step=Step.DONE, message=_who_serves(job))


def complete_partly(job: MigrationJob, attempt: int, owner: str, stopped: MigrationStopped) -> None:
    """From `draining` to `partial`: the target takes over, the source keeps what could not move until that ends.

    Raises:
        MigrationStopped: the target cannot take over.
    """
    with InstanceClient.of(job.source) as source, InstanceClient.of(job.target) as target:
        _close_session(source, job, attempt)
        _activate(target, job, attempt)
    with transaction.atomic():
        if _end_partly(job, owner, stopped):
            _settle(job, "draining")


def _keeps_source(job: MigrationJob) -> bool:
    return job.migration_type == MigrationType.KEEP_SOURCE_ACTIVE


def _settle(job: MigrationJob, source_becomes: Literal["standby", "destroyed", "draining"]) -> None:
    if _keeps_source(job):
        serve_beside(job.source_id, job.target_id)
    else:
        hand_service_over(job.source_id, job.target_id, source_becomes)


def _who_serves(job: MigrationJob) -> str:
    if not _keeps_source(job):
        return f"{job.target_id} serves now"
    name = Instance.objects.get(pk=job.target_id).alias_name
    return f"{job.target_id} serves what has moved" + (f"; new requests reach it as {name}" if name else "")


def _end_partly(job: MigrationJob, owner: str, stopped: MigrationStopped) -> bool:
    where = f"stay on {job.source_id}" if _keeps_source(job) else f"go to {job.target_id}"
    sentence = f"{stopped.cause}; new requests {where}."
    ended = advance(
        job.id,
        [MigrationState.DRAINING, MigrationState.FINISHING],
        MigrationState.PARTIAL,
        held_by=owner,
        message=sentence,
        error_code=stopped.code,
        error=sentence,
        new_active_instance_id=job.target_id,
    )
    if ended:
        record(job.id, EventKind.ERROR, message=sentence, data={"code": stopped.code})
    return ended


def _close_session(source: InstanceClient, job: MigrationJob, attempt: int) -> None:
    try:
        journal.note_gaps(job.id, source.finish(str(job.id), attempt).get("gaps") or [])
    except InstanceError as error:
        # Nothing hangs on it: the requests have moved, and the session ends with its lease.
        logger.warning("Migration %s: finish: %s", job.id, error.message)


def _activate(target: InstanceClient, job: MigrationJob, attempt: int) -> None:
    _once(job, Step.SWITCH_SERVICE, f"{job.target_id} takes over")
    try:
        target.activate(str(job.id), attempt)
    except InstanceError as error:
        raise blame(error, job, "it was taking over") from error
    _once(job, Step.SWITCH_SERVICE_DONE, f"{job.target_id} is active")


def _apply_policy(source: InstanceClient, job: MigrationJob, attempt: int) -> MigrationStopped | None:
    """Makes of the source what the policy says; returns why it could not."""
    destroy = job.migration_type == MigrationType.DESTROY_SOURCE
    call = source.destroy if destroy else source.convert_to_b
    for remaining in range(CONVERT_TRIES, 0, -1):
        try:
            call(str(job.id), attempt)
            return None
        except InstanceError as error:
            if destroy and error.gone:
                # Gone is what it should be.
                return None
            if error.code != "requests_in_flight" or remaining == 1:
                return blame(error, job, "its role was being changed after all requests had moved")
            time.sleep(CONVERT_PAUSE_S)
    return None


def _once(job: MigrationJob, step: Step, message: str) -> None:
    """Records a step unless an earlier attempt did."""
    if not MigrationEvent.objects.filter(job=job, step=step).exists():
        record(job.id, EventKind.STEP, step=step, message=message)
