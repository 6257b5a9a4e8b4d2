"""Carries a migration out, step by step. The order is the one of docs/protocol.md; each step is one function.

Between two steps it is checked whether somebody asked to abort, whether the job still belongs to this worker and
whether both instances still answer. Whatever goes wrong ends in `rollback`.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.db import connection
from django.db.models import F
from django.utils import timezone

from instances.client import InstanceClient, InstanceError
from instances.routing import wait_for_acks
from instances.services import route_new_requests
from migrations_app import finishing, journal
from migrations_app.choices import (
    PRECOPY_MODES,
    EventKind,
    HandoverMode,
    MigrationState,
    RequestOutcome,
    RoundKind,
    Step,
)
from migrations_app.chosen import Chosen
from migrations_app.convergence import stop_reason
from migrations_app.events import record
from migrations_app.instantiation import bring_up
from migrations_app.lease import MISSES, RECOMPUTE_MISSES, LeaseKeeper
from migrations_app.models import MigrationJob
from migrations_app.preflight import run_preflight
from migrations_app.refusals import LASTING_REFUSALS, TRANSIENT_REASONS, Refused
from migrations_app.rollback import MigrationStopped, blame, roll_back, silence
from migrations_app.state import advance

__all__ = ["claim", "run"]

logger = logging.getLogger(__name__)

#: How often a request that stayed at its handover is tried again; each try costs its client a short pause.
HANDOVER_TRIES = 3
DRAIN_POLL_S = 0.25

Rows = list[dict[str, Any]]
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
        self.round_index = 0
        self.handover_tries: dict[str, int] = {}
        self.refused: dict[str, Refused] = {}
        self.moved: set[str] = set()
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
        stuck = self._move_everything() or self.chosen.stayed()
        self._check()
        if stuck and not self.chosen.everything and not self.moved:
            raise stuck
        self.keeper.session_open.clear()
        if stuck:
            finishing.complete_partly(self.job, self.attempt, self.owner, stuck)
        else:
            self._advance(MigrationState.DRAINING, MigrationState.FINISHING)
            finishing.complete(self.job, self.attempt, self.owner)

    # -- before anything moves -----------------------------------------------------------------------------------------

    def _validate(self) -> dict[str, Any]:
        """Pre-flight; returns the target's status."""
        self._step(Step.VALIDATE, "Compares both instances")
        bring_up(self.job, self.attempt, self.target, self._check)
        preflight = run_preflight(self.job.source, self.job.target, self.job.mode, selection=self.chosen.selection)
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
        self._advance(MigrationState.PREFLIGHT, MigrationState.ATTACHING)
        return self._ask(self.target.status, "it was asked for its status")

    def _switch_route(self) -> None:
        """New requests go to the target before the copying starts, so that the source only gets emptier."""
        self._check()
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
        self._check()
        peer = {
            "vllm_hi_id": self.job.target_id,
            "host": self.job.target.ip,
            "control_port": target_status.get("control_port") or self.job.target.control_port,
            "base_url": self.job.target.base_url,
        }
        lease = settings.VLLM_HI_SESSION_LEASE_S
        self._ask(
            lambda: self.source.start(str(self.job.id), self.attempt, peer, lease), "the migration was being started"
        )
        self.keeper.session_open.set()

    # -- the requests --------------------------------------------------------------------------------------------------

    def _move_everything(self) -> MigrationStopped | None:
        """Moves what can move until all that is to leave the source has. Returns why some has not when the deadline for
        that is over."""
        state = MigrationState.ATTACHING
        stuck_since: float | None = None
        while True:
            self._check()
            rows: Rows = self._ask(self.source.requests, "its requests were being listed")
            rows = self.chosen.still_to_go(rows, self._given_up, self.moved)
            movable = [row for row in rows if row.get("migratable") and self._may_try(str(row["request_id"]))]
            if movable:
                if state == MigrationState.DRAINING:
                    self._advance(MigrationState.DRAINING, MigrationState.ATTACHING)
                progress = self._move(movable)
                state = MigrationState.DRAINING
                if progress:
                    continue
            elif state == MigrationState.ATTACHING:
                self._advance(MigrationState.ATTACHING, MigrationState.DRAINING)
                state = MigrationState.DRAINING
            waiting = [row for row in rows if str(row["request_id"]) not in self.moved]
            if not rows:
                return None
            self._note_unmovable(waiting)
            stuck_since = stuck_since or time.monotonic()
            if time.monotonic() - stuck_since > settings.VLLM_HI_DRAIN_DEADLINE_S:
                return self._stuck(waiting or rows)
            time.sleep(DRAIN_POLL_S)

    def _given_up(self, request_id: str) -> bool:
        refused = self.refused.get(request_id)
        return self.handover_tries.get(request_id, 0) >= HANDOVER_TRIES or (refused is not None and refused.lasting)

    def _may_try(self, request_id: str) -> bool:
        if request_id in self.moved or self.handover_tries.get(request_id, 0) >= HANDOVER_TRIES:
            return False
        refused = self.refused.get(request_id)
        return refused is None or time.monotonic() >= refused.until

    def _move(self, rows: Rows) -> bool:
        """Attaches, copies and hands over; from `attaching` to `draining`. Returns whether any request left."""
        ids = [str(row["request_id"]) for row in rows]
        attached = self._attach(ids)
        if not attached:
            self._advance(MigrationState.ATTACHING, MigrationState.DRAINING)
            return False
        self._advance(MigrationState.ATTACHING, MigrationState.COPYING)
        remaining = self._copy(attached) if self.job.mode in PRECOPY_MODES else attached
        if not remaining:
            self._advance(MigrationState.COPYING, MigrationState.DRAINING)
            return True
        self._advance(MigrationState.COPYING, MigrationState.HANDING_OVER)
        progress = self._hand_over(remaining)
        self._advance(MigrationState.HANDING_OVER, MigrationState.DRAINING)
        return progress

    def _attach(self, ids: list[str]) -> list[str]:
        """Returns the ids that have a place on the target now."""
        self._check()
        answer = self._ask(
            lambda: self.source.attach(str(self.job.id), self.attempt, ids), "requests were being attached"
        )
        attached, refused = answer.get("attached") or [], answer.get("refused") or []
        journal.note_attached(self.job.id, attached)
        journal.note_refused(self.job.id, refused, RequestOutcome.REFUSED)
        finished = [{"request_id": one} for one in answer.get("finished") or []]
        journal.note_refused(self.job.id, finished, RequestOutcome.FINISHED)
        for row in refused:
            self.refused.setdefault(str(row["request_id"]), Refused()).again(str(row.get("code") or ""))
        if refused:
            self._target_must_answer("requests were being attached")
        return [str(row["request_id"]) for row in attached]

    def _copy(self, ids: list[str]) -> list[str]:
        """Rounds until a stop rule fires. Returns the ids that are still to be handed over."""
        remaining = list(ids)
        blocks: list[int] = []
        while remaining:
            self._check()
            index, self.round_index = self.round_index, self.round_index + 1
            kind = RoundKind.INCREMENTAL if blocks else RoundKind.FULL
            journal.note_round_begin(self.job.id, index, kind)
            started = timezone.now()
            slow = self.job.mode == HandoverMode.SLOWED
            answer = self._ask(
                partial(self.source.round, str(self.job.id), self.attempt, index, slow),
                f"round {index} was being copied",
            )
            row = journal.note_round(self.job.id, index, kind, started, answer)
            blocks.append(row.blocks)
            remaining = self._without_lost(remaining, answer, f"round {index} was being copied")
            reason = stop_reason(
                blocks,
                tn=self.job.tn,
                max_increments=self.job.max_increment_rounds,
                stall_rounds=self.job.stall_rounds,
            )
            if reason is not None:
                record(
                    self.job.id, EventKind.STEP, message=f"Copying ends: {reason.value}", data={"reason": reason.value}
                )
                break
        return remaining

    def _without_lost(self, ids: list[str], answer: dict[str, Any], phase: str) -> list[str]:
        finished = [str(request_id) for request_id in answer.get("finished") or []]
        failed: Rows = answer.get("failed") or []
        journal.note_refused(self.job.id, [{"request_id": one} for one in finished], RequestOutcome.FINISHED)
        journal.note_refused(self.job.id, failed, RequestOutcome.STAYED)
        for row in failed:
            self._tried(str(row["request_id"]))
        if failed:
            self._target_must_answer(phase)
        gone = {*finished, *(str(row["request_id"]) for row in failed)}
        return [one for one in ids if one not in gone]

    def _hand_over(self, ids: list[str]) -> bool:
        """Small waves: each costs its clients one short pause. Returns whether any request left the source."""
        size = len(ids)
        if self.job.mode == HandoverMode.RECOMPUTE:
            # The target computes a whole context in one step, and its clients wait for no other.
            size = 1
        elif self.job.mode in (HandoverMode.ROLLING, HandoverMode.SLOWED):
            size = max(1, settings.VLLM_HI_HANDOVER_WAVE)
        waves = [ids[start : start + size] for start in range(0, len(ids), size)]
        results: Rows = []
        for number, wave in enumerate(waves):
            self._check()
            if number == 0:
                self._step(Step.PAUSE_A, "The first requests are handed over")
            if number == len(waves) - 1:
                self._step(Step.FINAL_INCREMENTAL, "The last requests are handed over")
            results += self._hand_over_wave(wave)
            if number == 0:
                self._step(Step.PAUSE_A_DONE, "The first requests were handed over")
        self._step(
            Step.FINAL_INCREMENTAL_DONE,
            f"{sum(row.get('outcome') == RequestOutcome.MOVED for row in results)} of {len(ids)} requests moved",
            data_size_bytes=sum(int(row.get("tail_bytes") or 0) for row in results),
            block_count=sum(int(row.get("tail_blocks") or 0) for row in results),
        )
        return any(row.get("outcome") != RequestOutcome.STAYED for row in results)

    def _hand_over_wave(self, wave: list[str]) -> Rows:
        one = f"request {wave[0]} was" if len(wave) == 1 else f"{len(wave)} requests were"
        phase = f"{one} being handed over"
        way = HandoverMode.ROLLING if self.job.mode in PRECOPY_MODES else self.job.mode
        answer = self._ask(lambda: self.source.handover(str(self.job.id), self.attempt, wave, len(wave), way), phase)
        results: Rows = answer.get("results") or []
        journal.note_handed_over(self.job.id, results)
        stayed = [row for row in results if row.get("outcome") == RequestOutcome.STAYED]
        self.moved |= {str(row["request_id"]) for row in results if row.get("outcome") == RequestOutcome.MOVED}
        for row in stayed:
            self._tried(str(row["request_id"]))
            if row.get("code") in LASTING_REFUSALS:
                self.refused.setdefault(str(row["request_id"]), Refused()).again(str(row["code"]))
        if stayed:
            self._target_must_answer(phase)
        return results

    def _tried(self, request_id: str) -> None:
        self.handover_tries[request_id] = self.handover_tries.get(request_id, 0) + 1

    def _note_unmovable(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes down, once each, which requests hold the source up and why."""
        lasting = []
        for row in rows:
            reason = row.get("reason") or {}
            if not row.get("migratable") and reason.get("code") not in TRANSIENT_REASONS:
                lasting.append({**row, "code": reason.get("code"), "message": reason.get("message")})
        known = set(self.job.request_rows.values_list("request_id", flat=True))
        journal.note_refused(
            self.job.id, [row for row in lasting if str(row["request_id"]) not in known], RequestOutcome.REFUSED
        )

    def _stuck(self, rows: Sequence[dict[str, Any]]) -> MigrationStopped:
        reason = next((row["reason"]["message"] for row in rows if row.get("reason")), "they did not move when tried")
        count = "1 request" if len(rows) == 1 else f"{len(rows)} requests"
        return MigrationStopped(
            "drain_deadline",
            f"{count} could not move within {settings.VLLM_HI_DRAIN_DEADLINE_S:g} s and go on on {self.job.source_id} "
            f"until they end ({str(reason).rstrip('.')})",
        )

    # -- between steps -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises ClaimLost, or MigrationStopped when the job must not go on."""
        held = MigrationJob.objects.live().filter(id=self.job.id, owner=self.owner)
        abort_requested = held.values_list("abort_requested", flat=True).first()
        if abort_requested is None or self.keeper.lost.is_set():
            raise ClaimLost
        if abort_requested:
            raise MigrationStopped("aborted", "The migration was aborted", aborted=True)
        if self.keeper.trouble is not None:
            raise blame(self.keeper.trouble, self.job, "requests were on their way")

    def _ask(self, call: Callable[[], T], phase: str) -> T:
        """Makes one plugin call. Raises MigrationStopped that says who is to blame."""
        try:
            return call()
        except InstanceError as error:
            raise blame(error, self.job, phase) from error

    def _target_must_answer(self, phase: str) -> None:
        """Requests that do not move may be the first sign that the target is gone."""
        error = silence(self.job.target)
        if error is not None:
            raise blame(error, self.job, phase)

    def _advance(self, from_: MigrationState, to: MigrationState) -> None:
        if not advance(self.job.id, from_, to, held_by=self.owner):
            raise ClaimLost

    def _step(self, step: Step, message: str, **sizes: int) -> None:
        record(self.job.id, EventKind.STEP, step=step, message=message, **sizes)  # type: ignore[arg-type]
