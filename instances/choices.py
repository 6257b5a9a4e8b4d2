"""States of an instance, each with the tone of its badge."""

from __future__ import annotations

from django.db import models

__all__ = ["BUSY_STATUSES", "STATUS_TONES", "InstanceStatus", "InstanceType"]


class InstanceType(models.TextChoices):
    """A serves, B stands by. The two swap when a migration is done."""

    A = "A", "A (serving)"
    B = "B", "B (standby)"


class InstanceStatus(models.TextChoices):
    REGISTERING = "registering", "Registering"
    ACTIVE = "active", "Active"
    STANDBY = "standby", "Standby"
    MIGRATING = "migrating", "Migrating"
    DRAINING = "draining", "Draining"
    UNREACHABLE = "unreachable", "Unreachable"
    DESTROYED = "destroyed", "Destroyed"


#: The instance takes part in a migration: as its target (migrating) or as its source (draining).
BUSY_STATUSES = frozenset({InstanceStatus.MIGRATING, InstanceStatus.DRAINING})

#: Tone of the badge: one of ok, info, busy, warning, error, muted.
STATUS_TONES: dict[str, str] = {
    InstanceStatus.REGISTERING: "muted",
    InstanceStatus.ACTIVE: "ok",
    InstanceStatus.STANDBY: "info",
    InstanceStatus.MIGRATING: "busy",
    InstanceStatus.DRAINING: "busy",
    InstanceStatus.UNREACHABLE: "error",
    InstanceStatus.DESTROYED: "muted",
}
