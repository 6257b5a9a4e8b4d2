"""A migration and its audit trail. The job row is the truth; events are only ever added."""

from __future__ import annotations

import uuid
from typing import Any, NoReturn

from django.conf import settings
from django.db import models
from django.utils import timezone

from instances.models import Instance
from migrations_app.choices import (
    LIVE_STATES,
    OUTCOME_TONES,
    STATE_TONES,
    TERMINAL_STATES,
    EventKind,
    HandoverMode,
    MigrationState,
    MigrationType,
    MoveWay,
    RequestOutcome,
    RoundKind,
    Step,
)

__all__ = ["AppendOnlyError", "MigrationEvent", "MigrationJob", "MigrationRequest", "MigrationRound"]

_LIVE = models.Q(state__in=sorted(LIVE_STATES))


class AppendOnlyError(TypeError):
    """Somebody tried to change or remove a recorded event."""


class MigrationJobQuerySet(models.QuerySet["MigrationJob"]):
    def live(self) -> MigrationJobQuerySet:
        return self.filter(_LIVE)

    def live_with(self, *instance_ids: str) -> MigrationJobQuerySet:
        """Live jobs that any of these instances takes part in, as source or as target."""
        return self.live().filter(models.Q(source_id__in=instance_ids) | models.Q(target_id__in=instance_ids))


class MigrationJob(models.Model):
    """One migration from `source` to `target`. `state` changes only through `migrations_app.state.advance`."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    source = models.ForeignKey(Instance, on_delete=models.PROTECT, related_name="migrations_as_source")
    target = models.ForeignKey(Instance, on_delete=models.PROTECT, related_name="migrations_as_target")
    migration_type = models.CharField(max_length=20, choices=MigrationType, default=MigrationType.DESTROY_SOURCE)
    mode = models.CharField(max_length=16, choices=HandoverMode, default=HandoverMode.ROLLING)
    tn = models.PositiveSmallIntegerField(default=2)
    max_increment_rounds = models.PositiveSmallIntegerField(default=8)
    stall_rounds = models.PositiveSmallIntegerField(default=2)
    #: Seconds that requests without room on the target wait for it, before they move in another way or the job ends.
    drain_deadline_s = models.FloatField(default=120)
    target_tp = models.PositiveSmallIntegerField(null=True, blank=True)
    target_pp = models.PositiveSmallIntegerField(null=True, blank=True)
    target_gpu_memory_utilization = models.FloatField(null=True, blank=True)
    target_model = models.CharField(max_length=255, blank=True, default="")
    #: Which requests move, as `selection.Selection.as_json` writes it; empty: all.
    selection = models.JSONField(default=dict, blank=True)

    state = models.CharField(max_length=16, choices=MigrationState, default=MigrationState.PENDING)
    attempt = models.PositiveIntegerField(default=0)
    owner = models.CharField(max_length=128, blank=True, default="")
    lease_until = models.DateTimeField(null=True, blank=True)
    abort_requested = models.BooleanField(default=False)
    #: Number of the last event; the source of `MigrationEvent.seq`.
    last_seq = models.PositiveIntegerField(default=0)

    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True, related_name="+"
    )
    created_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    error_code = models.CharField(max_length=64, blank=True, default="")
    error = models.TextField(blank=True, default="")
    total_requests = models.PositiveIntegerField(default=0)
    moved_requests = models.PositiveIntegerField(default=0)
    preflight = models.JSONField(default=dict, blank=True)
    new_active_instance = models.ForeignKey(Instance, on_delete=models.PROTECT, null=True, blank=True, related_name="+")

    objects = MigrationJobQuerySet.as_manager()

    class Meta:
        verbose_name = "live migration"
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(fields=["source"], condition=_LIVE, name="one_live_migration_per_source"),
            models.UniqueConstraint(fields=["target"], condition=_LIVE, name="one_live_migration_per_target"),
            models.CheckConstraint(condition=~models.Q(source=models.F("target")), name="source_is_not_target"),
        ]
        indexes = [
            models.Index(fields=["state", "lease_until"], name="migration_state_lease"),
            models.Index(fields=["-created_at"], name="migration_created"),
        ]

    def __str__(self) -> str:
        return f"{self.source_id} → {self.target_id} ({self.state})"

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def state_tone(self) -> str:
        return STATE_TONES.get(self.state, "muted")

    @property
    def duration_s(self) -> float | None:
        """Seconds from the claim to the end, or until now; None before a worker took the job."""
        if self.started_at is None:
            return None
        return ((self.finished_at or timezone.now()) - self.started_at).total_seconds()


class MigrationRound(models.Model):
    """One round of copying over all requests that were attached at that time. `blocks` were sent, `bytes` on the wire,
    `hit_blocks` the target had in its prefix cache, `dirty_blocks` became ready on the source meanwhile."""

    job = models.ForeignKey(MigrationJob, on_delete=models.PROTECT, related_name="round_rows")
    round_index = models.PositiveIntegerField()
    kind = models.CharField(max_length=16, choices=RoundKind)
    blocks = models.PositiveIntegerField(default=0)
    bytes = models.PositiveBigIntegerField(default=0)
    hit_blocks = models.PositiveIntegerField(default=0)
    dirty_blocks = models.PositiveIntegerField(default=0)
    duration_ms = models.FloatField(default=0)
    started_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["job", "round_index"]
        constraints = [models.UniqueConstraint(fields=["job", "round_index"], name="one_row_per_round")]

    def __str__(self) -> str:
        return f"round {self.round_index} ({self.kind}): {self.blocks} blocks"


class MigrationRequest(models.Model):
    """What happened to one request. `gap_ms` is what its client saw, `itl_ms` its median time between tokens before."""

    job = models.ForeignKey(MigrationJob, on_delete=models.PROTECT, related_name="request_rows")
    request_id = models.CharField(max_length=255)
    stream_id = models.CharField(max_length=255, blank=True, default="")
    prompt_tokens = models.PositiveIntegerField(default=0)
    output_tokens = models.PositiveIntegerField(default=0)
    kv_blocks = models.PositiveIntegerField(default=0)
    outcome = models.CharField(max_length=16, choices=RequestOutcome, default=RequestOutcome.ATTACHED)
    #: How it moved; empty as long as it has not.
    way = models.CharField(max_length=16, choices=MoveWay, blank=True, default="")
    code = models.CharField(max_length=64, blank=True, default="")
    message = models.TextField(blank=True, default="")
    tail_blocks = models.PositiveIntegerField(default=0)
    tail_bytes = models.PositiveBigIntegerField(default=0)
    gap_ms = models.FloatField(null=True, blank=True)
    itl_ms = models.FloatField(null=True, blank=True)
    stages = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["job", "id"]
        constraints = [models.UniqueConstraint(fields=["job", "request_id"], name="one_row_per_request")]

    def __str__(self) -> str:
        return f"{self.request_id}: {self.outcome}"

    @property
    def outcome_tone(self) -> str:
        return OUTCOME_TONES.get(self.outcome, "muted")


class MigrationEventQuerySet(models.QuerySet["MigrationEvent"]):
    """Refuses what would change history. Events are created one by one, by `migrations_app.events.record`."""

    def update(self, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError("Events of a migration cannot be changed.")

    def delete(self) -> NoReturn:
        raise AppendOnlyError("Events of a migration cannot be removed.")

    def bulk_update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError("Events of a migration cannot be changed.")


class MigrationEvent(models.Model):
    """One entry of the audit trail; `seq` counts from 1 within its job, without a hole."""

    job = models.ForeignKey(MigrationJob, on_delete=models.PROTECT, related_name="events")
    seq = models.PositiveIntegerField()
    created_at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=16, choices=EventKind)
    step = models.CharField(max_length=32, choices=Step, blank=True, default="")
    round_index = models.PositiveIntegerField(null=True, blank=True)
    data_size_bytes = models.PositiveBigIntegerField(null=True, blank=True)
    block_count = models.PositiveIntegerField(null=True, blank=True)
    message = models.TextField(blank=True, default="")
    data = models.JSONField(default=dict, blank=True)

    objects = MigrationEventQuerySet.as_manager()

    class Meta:
        ordering = ["job", "seq"]
        constraints = [models.UniqueConstraint(fields=["job", "seq"], name="event_seq_unique_per_job")]

    def __str__(self) -> str:
        return f"{self.seq} {self.kind}: {self.message}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnlyError("Events of a migration cannot be changed.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError("Events of a migration cannot be removed.")
