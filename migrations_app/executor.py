"""Carries a migration out, step by step. The order is the one of docs/protocol.md; each step is one function, and the
requests are moved by `moving`.

Between two steps it is checked whether somebody asked to abort, whether the job still belongs to this worker and
whether both instances still answer. Whatever goes wrong ends in `rollback`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from django.conf import settings
from django.db import connection
from django.db.models import F
from django.utils import timezone

from instances.client import InstanceClient, InstanceError
from instances.routing import wait_for_acks
from instances.services import route_new_requests
from migrations_app import finishing
from migrations_app.choices import EventKind, HandoverMode, MigrationState, Step
from migrations_app.chosen import Chosen
from migrations_app.events import record
from migrations_app.instantiation import bring_up
from migrations_app.lease import MISSES, RECOMPUTE_MISSES, LeaseKeeper
from migrations_app.models import MigrationJob
from migrations_app.moving import Moving
from migrations_app.preflight import run_preflight
from migrations_app.rollback import MigrationStopped, blame, roll_back, silence
from migrations_app.state import advance

__all__ = ["claim", "run"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClaimLost(Exception):
    """The job belongs to somebody else by now: touch nothing any more."""


def run(job_id: str) -> None:
    """Claims the job and carries it out. Does nothing if another worker has it, or it is over."""
    owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    if claim(job_id, owner):
        try:
            Execution(job_id, owner).run()
        finally:
            connection.close()


def claim(job_id: str, owner: str) -> bool:
    """Takes a pending job. Of several workers that try, one succeeds."""
    now = timezone.now()
    return advance(
        uuid.UUID(job_id),
        MigrationState.PENDING,
        MigrationState.PREFLIGHT,
        owner=owner,
        attempt=F("attempt") + 1,
        lease_until=now + timedelta(seconds=settings.VLLM_HI_JOB_LEASE_S),
        started_at=now,
    )


class Execution:
    """One attempt at one job."""

    def __init__(self, job_id: str, owner: str) -> None:
        self.job = MigrationJob.objects.select_related("source", "target").get(id=job_id)
        self.owner = owner
        self.attempt = self.job.attempt
        self.source = InstanceClient.of(self.job.source)
        self.target = InstanceClient.of(self.job.target)
        misses = RECOMPUTE_MISSES if self.job.mode == HandoverMode.RECOMPUTE else MISSES
        self.keeper = LeaseKeeper(self.job.id, self.attempt, owner, self.job.source, self.job.target, misses)
        self.chosen = Chosen(self.job)

    def run(self) -> None:
        """Never raises: every end of the job is a state of the job."""
        try:
            with self.source, self.target, self.keeper:
                self._migrate()
        except ClaimLost:
            logger.warning("Migration %s was taken away from %s", self.job.id, self.owner)
        except MigrationStopped as stopped:
            self._stop(stopped)
        except InstanceError as error:
            self._stop(blame(error, self.job, "the migration was running"))
        except Exception:
            logger.exception("Migration %s failed", self.job.id)
            self._stop(MigrationStopped("internal_error", "The control plane failed; its worker's log has the details"))

    def _stop(self, stopped: MigrationStopped) -> None:
        try:
            roll_back(self.job, self.attempt, self.owner, stopped)
        except Exception:
            # The lease runs out and the reaper tries once more.
            logger.exception("Migration %s could not be rolled back", self.job.id)

    def _migrate(self) -> None:
        target_status = self._validate()
        if self.chosen.everything:
            self._switch_route()
        self._open_session(target_status)
        moving = Moving(self)
        stuck = moving.everything() or self.chosen.stayed()
        self.check()
        if stuck and not self.chosen.everything and not moving.moved:
            raise stuck
        self.keeper.session_open.clear()
        if stuck:
            finishing.complete_partly(self.job, self.attempt, self.owner, stuck)
        else:
            self.advance(MigrationState.DRAINING, MigrationState.FINISHING)
            finishing.complete(self.job, self.attempt, self.owner)

    # -- before anything moves -----------------------------------------------------------------------------------------

    def _validate(self) -> dict[str, Any]:
        """Pre-flight; returns the target's status."""
        self.step(Step.VALIDATE, "Compares both instances")
        bring_up(self.job, self.attempt, self.target, self.check)
        preflight = run_preflight(
            self.job.source,
            self.job.target,
            self.job.mode,
            selection=self.chosen.selection,
            drain_deadline_s=self.job.drain_deadline_s,
        )
        MigrationJob.objects.filter(id=self.job.id).update(preflight=preflight.as_dict())
        problem = preflight.first_error()
        if problem is not None:
            shown = [value for value in (problem.source_value, problem.target_value) if value]
            raise MigrationStopped(
                f"preflight_{problem.name}"[:64],
                f"The pre-flight check {problem.name} failed ({', '.join(shown)}): {problem.remedy.rstrip('.')}",
            )
        for check in preflight.checks:
            if check.level == "warning":
                record(self.job.id, EventKind.STEP, message=f"Warning, {check.name}: {check.remedy}")
        self.advance(MigrationState.PREFLIGHT, MigrationState.ATTACHING)
        return self.ask(self.target.status, "it was asked for its status")

    def _switch_route(self) -> None:
        """New requests go to the target before the copying starts, so that the source only gets emptier."""
        self.check()
        version = route_new_requests(self.job.source_id, self.job.target_id)
        missing = wait_for_acks(version, settings.VLLM_HI_ROUTE_ACK_S)
        behind = f"; no answer yet from {', '.join(missing)}" if missing else ""
        record(
            self.job.id,
            EventKind.STEP,
            message=f"New requests go to {self.job.target_id} (routing table {version}{behind})",
            data={"routing_version": version, "not_acknowledged": missing},
        )

    def _open_session(self, target_status: dict[str, Any]) -> None:
        self.check()
        peer = {
            "vllm_hi_id": self.job.target_id,
            "host": self.job.target.ip,
            "control_port": target_status.get("control_port") or self.job.target.control_port,
            "base_url": self.job.target.base_url,
        }
        lease = settings.VLLM_HI_SESSION_LEASE_S
        self.ask(
            lambda: self.source.start(str(self.job.id), self.attempt, peer, lease), "the migration was being started"
        )
        self.keeper.session_open.set()

    # -- between steps -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ClaimLost, or MigrationStopped when the job must not go on."""
        held = MigrationJob.objects.live().filter(id=self.job.id, owner=self.owner)
        abort_requested = held.values_list("abort_requested", flat=True).first()
        if abort_requested is None or self.keeper.lost.is_set():
            raise ClaimLost
        if abort_requested:
            raise MigrationStopped("aborted", "The migration was aborted", aborted=True)
        if self.keeper.trouble is not None:
            raise blame(self.keeper.trouble, self.job, "requests were on their way")

    def ask(self, call: Callable[[], T], phase: str) -> T:
        """Makes one plugin call. Raises MigrationStopped that says who is to blame."""
        try:
            return call()
        except InstanceError as error:
            raise blame(error, self.job, phase) from error

    def target_must_answer(self, phase: str) -> None:
        """Requests that do not move may be the first sign that the target is gone."""
        error = silence(self.job.target)
        if error is not None:
            raise blame(error, self.job, phase)

    def advance(self, from_: MigrationState, to: MigrationState) -> None:
        if not advance(self.job.id, from_, to, held_by=self.owner):
            raise ClaimLost

    def step(self, step: Step, message: str, **sizes: int) -> None:
        record(self.job.id, EventKind.STEP, step=step, message=message, **sizes)  # type: ignore[arg-type]
