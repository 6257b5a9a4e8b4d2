"""The inventory: one row per vLLM process that ever registered, and the version counter of the routing table."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone

from instances import life
from instances.choices import BUSY_STATUSES, InstanceStatus, InstanceType

__all__ = ["Instance", "RoutingVersion", "alias_name"]


class Instance(models.Model):
    """A vLLM process with the plugin. The id is kept when it registers again from the same `ip:port`.

    `status` is the panel's view. While an instance is unreachable or busy with a migration, `resume_status` says what
    it becomes afterwards. `routed` says whether new requests for its model are sent to it. With an `alias` new requests
    reach it under a name of its own as well (`alias_name`), or, where it is not `routed`, under that name alone.
    `resume_routed` and `resume_alias`: what they were before a migration took the instance.
    """

    vllm_hi_id = models.CharField(primary_key=True, max_length=64)
    ip = models.CharField(max_length=255)
    port = models.PositiveIntegerField()
    instance_type = models.CharField(max_length=1, choices=InstanceType)
    status = models.CharField(max_length=16, choices=InstanceStatus, default=InstanceStatus.REGISTERING)
    resume_status = models.CharField(max_length=16, choices=InstanceStatus, blank=True, default="")
    routed = models.BooleanField(default=False)
    alias = models.CharField(max_length=80, blank=True, default="")
    resume_routed = models.BooleanField(default=False)
    resume_alias = models.CharField(max_length=80, blank=True, default="")
    #: When the panel has last said what the instance is; what it was told itself after that counts more.
    role_given_at = models.DateTimeField(null=True, blank=True)

    served_model_name = models.CharField(max_length=255)
    inference_params = models.JSONField(default=dict, blank=True)
    topology = models.JSONField(default=dict, blank=True)
    data_port = models.PositiveIntegerField(default=0)
    control_port = models.PositiveIntegerField(default=0)
    protocol_version = models.PositiveIntegerField(default=0)
    plugin_version = models.CharField(max_length=64, blank=True, default="")
    factors = models.JSONField(default=dict, blank=True)
    capabilities = models.JSONField(default=dict, blank=True)
    kv = models.JSONField(default=dict, blank=True)
    requests = models.JSONField(default=dict, blank=True)
    #: Names of the LoRA adapters that it serves beside its model; they come and go while it runs.
    adapters = models.JSONField(default=list, blank=True)
    #: `{state, percent, phase, error}`: whether it has an engine, and how far that is; empty: it has.
    engine = models.JSONField(default=dict, blank=True)

    pid = models.PositiveBigIntegerField(null=True, blank=True)
    #: False from the registration of a new process until its first heartbeat told which role it really has.
    role_confirmed = models.BooleanField(default=False)
    registered_at = models.DateTimeField(default=timezone.now)
    last_heartbeat_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["served_model_name", "instance_type", "vllm_hi_id"]
        constraints = [models.UniqueConstraint(fields=["ip", "port"], name="instance_address_unique")]
        indexes = [models.Index(fields=["status"], name="instance_status")]

    def __str__(self) -> str:
        return f"{self.vllm_hi_id} ({self.address})"

    @property
    def address(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"http://{self.address}"

    @property
    def is_alive(self) -> bool:
        """True if it sent a heartbeat within the timeout and was not destroyed."""
        if self.status in (InstanceStatus.DESTROYED, InstanceStatus.UNREACHABLE) or self.last_heartbeat_at is None:
            return False
        age = timezone.now() - self.last_heartbeat_at
        return age <= timedelta(seconds=settings.VLLM_HI_HEARTBEAT_TIMEOUT_S)

    @property
    def is_busy(self) -> bool:
        """True while it is part of a migration, also while it is unreachable."""
        return self.status in BUSY_STATUSES or (
            self.status == InstanceStatus.UNREACHABLE and self.resume_status in BUSY_STATUSES
        )

    @property
    def state(self) -> str:
        """For people; see `instances.life`."""
        return life.shown_state(self)

    @property
    def alias_name(self) -> str:
        """The served name that nobody else has, "" without an alias."""
        return alias_name(self.served_model_name, self.alias) if self.alias else ""

    @property
    def status_tone(self) -> str:
        return life.shown_tone(self)

    @property
    def kv_used_fraction(self) -> float | None:
        """0 to 1, or None before the first heartbeat."""
        total = _number(self.kv, "total_blocks")
        return (total - _number(self.kv, "free_blocks")) / total if total else None


def alias_name(model: str, alias: str) -> str:
    """Under which name a model (or an adapter) is asked for at the one instance that has the alias."""
    return f"{model}@{alias}"


def _number(values: dict[str, Any], name: str) -> float:
    value = values.get(name, 0)
    return float(value) if isinstance(value, (int, float)) else 0.0


class RoutingVersion(models.Model):
    """One row: the version that the routing table had last. In the database so that it survives the loss of Redis."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    version = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"routing table version {self.version}"
