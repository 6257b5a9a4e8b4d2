"""Words of a migration: its states with the tone of their badges, policies, kinds of rounds and events, outcomes."""

from __future__ import annotations

from django.db import models

__all__ = [
    "LIVE_STATES",
    "MAX_DRAIN_DEADLINE_S",
    "OUTCOME_TONES",
    "PRECOPY_MODES",
    "STATE_TONES",
    "TERMINAL_STATES",
    "EventKind",
    "HandoverMode",
    "MigrationState",
    "MigrationType",
    "MoveWay",
    "RequestOutcome",
    "RoundKind",
    "Step",
]


#: A day: a job holds both instances as long as it waits.
MAX_DRAIN_DEADLINE_S = 86400


class MigrationType(models.TextChoices):
    """What becomes of the source when the requests have left it that are to move."""

    DESTROY_SOURCE = "destroy_source", "Destroy the source"
    PRESERVE_SOURCE = "preserve_source", "Keep the source as warm standby"
    KEEP_SOURCE_ACTIVE = "keep_source_active", "Keep the source active"


class HandoverMode(models.TextChoices):
    """How requests change over."""

    ROLLING = "rolling", "Rolling: a few at a time"
    SLOWED = "slowed", "Rolling, and the source is slowed down until copying keeps pace"
    ATOMIC = "atomic", "Atomic: all with one cut"
    STOP_AND_COPY = "stop_and_copy", "Stop and copy: all are paused while their KV is copied"
    RECOMPUTE = "recompute", "Recompute: the target computes the KV again"


#: Modes whose KV is copied while the source goes on.
PRECOPY_MODES = frozenset({HandoverMode.ROLLING, HandoverMode.SLOWED, HandoverMode.ATOMIC})


class MigrationState(models.TextChoices):
    PENDING = "pending", "Pending"
    PREFLIGHT = "preflight", "Pre-flight"
    ATTACHING = "attaching", "Attaching"
    COPYING = "copying", "Copying"
    HANDING_OVER = "handing_over", "Handing over"
    DRAINING = "draining", "Draining"
    FINISHING = "finishing", "Finishing"
    DONE = "done", "Done"
    PARTIAL = "partial", "Partial"
    FAILED = "failed", "Failed"
    ABORTED = "aborted", "Aborted"


TERMINAL_STATES = frozenset(
    {MigrationState.DONE, MigrationState.PARTIAL, MigrationState.FAILED, MigrationState.ABORTED}
)
LIVE_STATES = frozenset(MigrationState) - TERMINAL_STATES

#: Tone of the badge: one of ok, info, busy, warning, error, muted.
STATE_TONES: dict[str, str] = {
    MigrationState.PENDING: "muted",
    MigrationState.PREFLIGHT: "info",
    MigrationState.ATTACHING: "busy",
    MigrationState.COPYING: "busy",
    MigrationState.HANDING_OVER: "busy",
    MigrationState.DRAINING: "busy",
    MigrationState.FINISHING: "busy",
    MigrationState.DONE: "ok",
    MigrationState.PARTIAL: "warning",
    MigrationState.FAILED: "error",
    MigrationState.ABORTED: "warning",
}


class RoundKind(models.TextChoices):
    FULL = "full", "Full"
    INCREMENTAL = "incremental", "Incremental"
    FINAL = "final", "Final"


class RequestOutcome(models.TextChoices):
    ATTACHED = "attached", "Attached"
    MOVED = "moved", "Moved"
    FINISHED = "finished", "Finished by itself"
    STAYED = "stayed", "Stayed"
    REFUSED = "refused", "Not movable"
    FILTERED = "filtered", "Kept by the request filter"


class MoveWay(models.TextChoices):
    """How the KV of a request that moved came to the target."""

    BLOCKS = "blocks", "KV blocks copied"
    STAGED = "staged", "KV blocks kept in host memory until there was room"
    RECOMPUTE = "recompute", "KV computed again"


OUTCOME_TONES: dict[str, str] = {
    RequestOutcome.ATTACHED: "busy",
    RequestOutcome.MOVED: "ok",
    RequestOutcome.FINISHED: "muted",
    RequestOutcome.STAYED: "warning",
    RequestOutcome.REFUSED: "warning",
    RequestOutcome.FILTERED: "muted",
}


class EventKind(models.TextChoices):
    STATE = "state", "State"
    STEP = "step", "Step"
    ROUND = "round", "Round"
    REQUEST = "request", "Request"
    ERROR = "error", "Error"


class Step(models.TextChoices):
    """Step names of `step_history`; programs rely on them."""

    VALIDATE = "validate"
    B_INSTANTIATE = "b_instantiate"
    B_INSTANTIATE_DONE = "b_instantiate_done"
    FULL_TRANSFER = "full_transfer"
    FULL_TRANSFER_DONE = "full_transfer_done"
    INCREMENTAL_TRANSFER = "incremental_transfer"
    INCREMENTAL_TRANSFER_DONE = "incremental_transfer_done"
    PAUSE_A = "pause_a"
    PAUSE_A_DONE = "pause_a_done"
    FINAL_INCREMENTAL = "final_incremental"
    FINAL_INCREMENTAL_DONE = "final_incremental_done"
    SWITCH_SERVICE = "switch_service"
    SWITCH_SERVICE_DONE = "switch_service_done"
    HANDLE_SOURCE = "handle_source"
    DONE = "done"
