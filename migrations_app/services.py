"""What people and programs may do with migrations: create one, ask one to stop."""

from __future__ import annotations

import logging
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db import IntegrityError, transaction

from instances.client import InstanceClient, InstanceError
from instances.life import needs_engine
from instances.models import Instance
from instances.selectors import find_instance
from instances.services import InstanceRefused, refusal_to_migrate, reserve_for_migration, restore_after_migration
from migrations_app.choices import MAX_DRAIN_DEADLINE_S, EventKind, HandoverMode, MigrationState, MigrationType
from migrations_app.events import record
from migrations_app.models import MigrationJob
from migrations_app.selection import Selection
from migrations_app.state import advance
from migrations_app.wishes import Wishes, problem

__all__ = ["MigrationRefused", "create_migration", "request_abort"]

logger = logging.getLogger(__name__)

User = AbstractBaseUser | AnonymousUser | None

#: From here on every request has moved, and stopping would undo nothing.
NOT_ABORTABLE = frozenset({MigrationState.FINISHING})


class MigrationRefused(Exception):
    """A wish that cannot be fulfilled; nothing was changed.

    `code` is machine-readable, `message` one sentence with the remedy, `param` the field, `status` the HTTP status.
    """

    def __init__(self, code: str, message: str, param: str | None, status: int) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = status


def create_migration(
    source_id: str,
    target_id: str,
    migration_type: str = MigrationType.DESTROY_SOURCE,
    user: User = None,
    *,
    mode: str = HandoverMode.ROLLING,
    tn: int = 2,
    drain_deadline_s: float | None = None,
    target_tp: int | None = None,
    target_pp: int | None = None,
    target_gpu_memory_utilization: float | None = None,
    target_model: str = "",
    selection: Selection | None = None,
) -> MigrationJob:
    """Creates a job, takes both instances for it and hands it to a worker after the commit.

    Args:
        drain_deadline_s: how long requests without room on the target wait for it; None: as the settings say.

    Raises:
        MigrationRefused: 404 `unknown_instance`, 400 `same_instance`, `invalid_request`, 409 `model_mismatch`,
            `migration_in_progress`, `source_not_active`, `target_not_standby`, `instance_unreachable`,
            `instance_destroyed`, 400 `bad_selection`, `api_keys_off`, 422 `selection_needs_keep_source_active`,
            `topology_change_unsupported`, and for a target without an engine 400 `invalid_request`, 422
            `too_few_devices`, `heads_not_divisible`, `too_few_layers`, `shared_accelerator`.
    """
    source, target = check_pair(source_id, target_id)
    _check_wishes(migration_type, mode, tn, target, target_tp, target_pp, target_model)
    wrong = problem(source, target, Wishes(target_tp, target_pp, target_gpu_memory_utilization, target_model))
    if wrong is not None:
        status = 400 if wrong.code == "invalid_request" else 422
        raise MigrationRefused(wrong.code, wrong.message, wrong.param, status)
    selection = selection or Selection()
    _check_selection(source, migration_type, selection)
    _check_deadline(drain_deadline_s)
    try:
        with transaction.atomic():
            reserve_for_migration(source_id, target_id)
            # After the reservation: its row locks make two creators wait for each other, so both cannot miss the other.
            if MigrationJob.objects.live_with(source_id, target_id).exists():
                raise InstanceRefused(
                    "migration_in_progress",
                    f"Instance {source_id} or {target_id} is already in a migration; wait for its end or abort it.",
                    "source",
                )
            job = MigrationJob.objects.create(
                source=source,
                target=target,
                migration_type=migration_type,
                mode=mode,
                tn=tn,
                max_increment_rounds=settings.VLLM_HI_MAX_INCR_ROUNDS,
                stall_rounds=settings.VLLM_HI_INCR_STALL_ROUNDS,
                drain_deadline_s=settings.VLLM_HI_DRAIN_DEADLINE_S if drain_deadline_s is None else drain_deadline_s,
                target_tp=target_tp,
                target_pp=target_pp,
                target_gpu_memory_utilization=target_gpu_memory_utilization,
                target_model=target_model,
                selection=selection.as_json(),
                created_by_id=user.pk if user is not None and user.is_authenticated else None,
            )
            record(
                job.id,
                EventKind.STATE,
                message=f"Migration from {source_id} to {target_id} requested",
                data={"state": MigrationState.PENDING.value, "user": str(user) if user else ""},
            )
            transaction.on_commit(lambda: enqueue(job), robust=True)
            transaction.on_commit(lambda: _tell_pages(job), robust=True)
    except InstanceRefused as refusal:
        raise MigrationRefused(refusal.code, refusal.message, refusal.param, refusal.status) from refusal
    except IntegrityError as error:
        raise MigrationRefused(
            "migration_in_progress",
            f"Instance {source_id} or {target_id} is already in a migration; wait for its end or abort it.",
            "source",
            409,
        ) from error
    job.refresh_from_db()
    return job


def check_pair(source_id: str, target_id: str) -> tuple[Instance, Instance]:
    """Returns both instances if they can migrate now.

    Raises:
        MigrationRefused: as in `create_migration`.
    """
    pair = []
    for param, vllm_hi_id in (("source", source_id), ("target", target_id)):
        instance = find_instance(vllm_hi_id)
        if instance is None:
            raise MigrationRefused(
                "unknown_instance",
                f"There is no instance {vllm_hi_id!r}; GET /api/v1/instances lists those that are registered.",
                param,
                404,
            )
        pair.append(instance)
    source, target = pair
    if source == target:
        raise MigrationRefused(
            "same_instance", f"Instance {source_id} cannot migrate to itself; choose another target.", "target", 400
        )
    if source.served_model_name != target.served_model_name:
        raise MigrationRefused(
            "model_mismatch",
            f"Instance {target_id} serves {target.served_model_name} and not {source.served_model_name}; "
            "choose a target with the source's model.",
            "target",
            409,
        )
    for refusal in (refusal_to_migrate(source, "source"), refusal_to_migrate(target, "target", source)):
        if refusal is not None:
            raise MigrationRefused(refusal.code, refusal.message, refusal.param, refusal.status)
    return source, target


def request_abort(job: MigrationJob, user: User = None) -> MigrationJob:
    """Asks the worker to stop between two steps; a job that nobody has taken yet ends at once. May be called twice.

    Raises:
        MigrationRefused: 409 `migration_over` or `past_point_of_no_return`.
    """
    job.refresh_from_db()
    if job.is_terminal:
        raise MigrationRefused("migration_over", f"The migration is already {job.state}.", None, 409)
    if job.state in NOT_ABORTABLE:
        raise MigrationRefused(
            "past_point_of_no_return", "All requests have moved; migrate back instead of aborting.", None, 409
        )
    live = MigrationJob.objects.filter(id=job.id, state=job.state, abort_requested=False)
    with transaction.atomic():
        if live.update(abort_requested=True):
            record(job.id, EventKind.STEP, message=f"Abort requested by {user}" if user else "Abort requested")
        if advance(
            job.id,
            MigrationState.PENDING,
            MigrationState.ABORTED,
            error_code="aborted",
            error="Aborted before it started; nothing was moved.",
        ):
            restore_after_migration(job.source_id, job.target_id)
    job.refresh_from_db()
    return job


def enqueue(job: MigrationJob) -> None:
    """Hands the job to a worker. When the broker is away, the reaper does it again later."""
    from migrations_app.tasks import execute

    execute.delay(str(job.id))


def _tell_pages(job: MigrationJob) -> None:
    from migrations_app import publisher

    publisher.job_changed(job.id)


def _check_selection(source: Instance, migration_type: str, selection: Selection) -> None:
    if not selection:
        return
    if migration_type != MigrationType.KEEP_SOURCE_ACTIVE:
        raise MigrationRefused(
            "selection_needs_keep_source_active",
            f"A selection leaves requests on the source, and {migration_type} would end or retire it; "
            "use keep_source_active, or leave the selection out.",
            "selection",
            422,
        )
    if (problem := selection.problem()) is not None:
        raise MigrationRefused("bad_selection", problem[1], f"selection.{problem[0]}", 400)
    if selection.api_key is not None and not _knows_keys(source):
        raise MigrationRefused(
            "api_keys_off",
            f"No request of {source.vllm_hi_id} came with an API key that the proxy knows; "
            "leave api_key out and select by something else.",
            "selection.api_key",
            400,
        )


def _check_deadline(drain_deadline_s: float | None) -> None:
    if drain_deadline_s is not None and not 0 <= drain_deadline_s <= MAX_DRAIN_DEADLINE_S:
        raise MigrationRefused(
            "invalid_request",
            f"drain_deadline_s must be a number of seconds from 0 to {MAX_DRAIN_DEADLINE_S}.",
            "drain_deadline_s",
            400,
        )


def _knows_keys(source: Instance) -> bool:
    try:
        with InstanceClient.of(source) as client:
            return any("api_key" in row for row in client.requests())
    except InstanceError:
        # The pre-flight check will say so.
        return True


def _check_wishes(
    migration_type: str, mode: str, tn: int, target: Instance, tp: int | None, pp: int | None, target_model: str
) -> None:
    if migration_type not in MigrationType.values:
        raise MigrationRefused(
            "invalid_request",
            f"migration_type must be one of {', '.join(MigrationType.values)}.",
            "migration_type",
            400,
        )
    if mode not in HandoverMode.values:
        raise MigrationRefused("invalid_request", f"mode must be one of {', '.join(HandoverMode.values)}.", "mode", 400)
    if tn < 1:
        raise MigrationRefused("invalid_request", "tn must be 1 or more.", "tn", 400)
    if needs_engine(target):
        # It is brought up as wished.
        return
    real: dict[str, Any] = target.topology
    for param, wish, name in (
        ("target_tp", tp, "tensor_parallel_size"),
        ("target_pp", pp, "pipeline_parallel_size"),
    ):
        if wish is not None and wish != real.get(name, 1):
            raise MigrationRefused(
                "topology_change_unsupported",
                f"{param} is {wish} but instance {target.vllm_hi_id} runs with {real.get(name, 1)}; "
                "start the target with the topology you want and leave the field out.",
                param,
                422,
            )
    if target_model and target_model != target.served_model_name:
        raise MigrationRefused(
            "model_mismatch",
            f"target_model is {target_model} but instance {target.vllm_hi_id} serves {target.served_model_name}.",
            "target_model",
            409,
        )
