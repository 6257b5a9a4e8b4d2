"""The audit trail: the only place that adds events."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import transaction
from django.db.models import F

from migrations_app import publisher
from migrations_app.choices import EventKind, Step
from migrations_app.models import MigrationEvent, MigrationJob

__all__ = ["record"]


def record(
    job_id: uuid.UUID,
    kind: EventKind,
    *,
    step: Step | str = "",
    round_index: int | None = None,
    data_size_bytes: int | None = None,
    block_count: int | None = None,
    message: str = "",
    data: dict[str, Any] | None = None,
) -> MigrationEvent:
    """Appends an event under the job's next number and publishes it after the commit."""
    with transaction.atomic():
        # The update locks the job's row: numbers are handed out one by one, without a hole.
        MigrationJob.objects.filter(id=job_id).update(last_seq=F("last_seq") + 1)
        event = MigrationEvent.objects.create(
            job_id=job_id,
            seq=MigrationJob.objects.values_list("last_seq", flat=True).get(id=job_id),
            kind=kind,
            step=step,
            round_index=round_index,
            data_size_bytes=data_size_bytes,
            block_count=block_count,
            message=message,
            data=data or {},
        )
        transaction.on_commit(lambda: publisher.event_recorded(event), robust=True)
    return event
