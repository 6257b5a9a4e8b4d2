"""The state machine of a migration: one table, and one function that moves a job along it.

A move is a conditional UPDATE plus an event in one short transaction. Of two workers that try the same move, one wins;
the other learns it from the return value and goes away. Nothing is published before the commit.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.utils import timezone

from migrations_app import publisher
from migrations_app.choices import TERMINAL_STATES, EventKind, MigrationState
from migrations_app.events import record
from migrations_app.models import MigrationJob

__all__ = ["TRANSITIONS", "IllegalTransitionError", "advance"]

_S = MigrationState

#: Where a job may go from each state. From the terminal ones it goes nowhere.
TRANSITIONS: dict[MigrationState, frozenset[MigrationState]] = {
    _S.PENDING: frozenset({_S.PREFLIGHT, _S.FAILED, _S.ABORTED}),
    _S.PREFLIGHT: frozenset({_S.ATTACHING, _S.FAILED, _S.ABORTED}),
    # Nothing to attach, or only requests that cannot move: straight to draining.
    _S.ATTACHING: frozenset({_S.COPYING, _S.DRAINING, _S.PARTIAL, _S.FAILED, _S.ABORTED}),
    _S.COPYING: frozenset({_S.HANDING_OVER, _S.DRAINING, _S.PARTIAL, _S.FAILED, _S.ABORTED}),
    _S.HANDING_OVER: frozenset({_S.DRAINING, _S.PARTIAL, _S.FAILED, _S.ABORTED}),
    # Late requests are attached, copied and handed over like the first ones.
    _S.DRAINING: frozenset({_S.ATTACHING, _S.FINISHING, _S.PARTIAL, _S.FAILED, _S.ABORTED}),
    # The requests have moved: from here on there is nothing left to abort.
    _S.FINISHING: frozenset({_S.DONE, _S.PARTIAL, _S.FAILED}),
    _S.DONE: frozenset(),
    _S.PARTIAL: frozenset(),
    _S.FAILED: frozenset(),
    _S.ABORTED: frozenset(),
}


class IllegalTransitionError(ValueError):
    """The table has no such move: a mistake in the program, not a lost race."""


def advance(
    job_id: uuid.UUID,
    from_: MigrationState | Iterable[MigrationState],
    to: MigrationState,
    *,
    held_by: str | None = None,
    message: str = "",
    data: dict[str, Any] | None = None,
    **fields: Any,
) -> bool:
    """Moves a job from `from_` (one state, or any of several) to `to` and sets `fields` in the same statement.

    Args:
        held_by: move only if the job belongs to this worker.
        message: sentence of the event; the state's label if empty.

    Returns:
        False if the job is in another state by now, or belongs to somebody else: nothing was changed.

    Raises:
        IllegalTransitionError: `TRANSITIONS` has no such move.
    """
    origins = [from_] if isinstance(from_, MigrationState) else list(from_)
    for origin in origins:
        if to not in TRANSITIONS[origin]:
            raise IllegalTransitionError(f"no transition from {origin} to {to}")
    if to in TERMINAL_STATES:
        fields.setdefault("finished_at", timezone.now())
        fields.setdefault("lease_until", None)
    with transaction.atomic():
        jobs = MigrationJob.objects.filter(id=job_id, state__in=origins)
        if held_by is not None:
            jobs = jobs.filter(owner=held_by)
        if not jobs.update(state=to, **fields):
            return False
        record(job_id, EventKind.STATE, message=message or to.label, data={"state": to.value, **(data or {})})
        transaction.on_commit(lambda: publisher.job_changed(job_id), robust=True)
    return True
