"""Everything that changes an instance. Each change that touches routing publishes the table after its commit."""

from __future__ import annotations

import itertools
import logging
import secrets
from datetime import datetime, timedelta
from typing import Any, Literal, NotRequired, TypedDict

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from instances.choices import InstanceStatus, InstanceType
from instances.models import Instance
from instances.routing import publish_on_commit, publish_routing_table
from vllm_plugin.wire import PROTOCOL_VERSION

__all__ = [
    "Heartbeat",
    "InstanceRefused",
    "Registration",
    "deregister",
    "hand_service_over",
    "heartbeat",
    "mark_silent_unreachable",
    "publish_routing_table",
    "register",
    "reserve_for_migration",
    "restore_after_migration",
    "retire_drained_source",
    "route_new_requests",
    "serve_beside",
]

logger = logging.getLogger(__name__)


class Registration(TypedDict):
    """Validated body of a registration; see docs/protocol.md, section 5."""

    ip: str
    port: int
    instance_type: str
    served_model_name: str
    inference_params: dict[str, Any]
    topology: dict[str, Any]
    data_port: int
    vllm_hi_id: NotRequired[str]
    control_port: NotRequired[int]
    protocol_version: NotRequired[int]
    plugin_version: NotRequired[str]
    factors: NotRequired[dict[str, Any]]
    capabilities: NotRequired[dict[str, Any]]
    adapters: NotRequired[list[str]]
    engine: NotRequired[dict[str, Any]]
    pid: NotRequired[int | None]


class Heartbeat(TypedDict):
    """Validated body of a heartbeat."""

    vllm_hi_id: str
    role: NotRequired[str]
    role_held_s: NotRequired[float]
    kv: NotRequired[dict[str, Any]]
    requests: NotRequired[dict[str, Any]]
    factors: NotRequired[dict[str, Any]]
    adapters: NotRequired[list[str]]
    engine: NotRequired[dict[str, Any]]
    control_port: NotRequired[int]


class InstanceRefused(Exception):
    """An instance is not in the state that the wish needs.

    `code` is machine-readable, `message` one sentence that names the instance and the remedy, `param` is "source" or
    "target" or the field, `status` the HTTP status it maps to.
    """

    def __init__(self, code: str, message: str, param: str | None = None, status: int = 409) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.status = status


# -- what instances tell us --------------------------------------------------------------------------------------------


def register(data: Registration) -> Instance:
    """Adds an instance, or brings the row of the same `ip:port` up to date and keeps its id.

    A new process (another pid) comes up in the role of its type: A active, B standby. The same process that registers
    again keeps the role that the panel gave it since.

    Raises:
        InstanceRefused: 409 `protocol_mismatch`.
    """
    protocol = data.get("protocol_version", PROTOCOL_VERSION)
    if protocol != PROTOCOL_VERSION:
        raise InstanceRefused(
            "protocol_mismatch",
            f"The plugin speaks protocol {protocol} and this panel {PROTOCOL_VERSION}: "
            "install the same release of vllm-hi-panel on both sides.",
            "protocol_version",
        )
    pid = data.get("pid")
    with transaction.atomic():
        instance = Instance.objects.select_for_update().filter(ip=data["ip"], port=data["port"]).first()
        if instance is None:
            instance = Instance(vllm_hi_id=_choose_id(data.get("vllm_hi_id")), ip=data["ip"], port=data["port"])
        new_process = (
            instance._state.adding or pid is None or instance.pid != pid or instance.status == InstanceStatus.DESTROYED
        )
        for name in ("served_model_name", "inference_params", "topology", "data_port"):
            setattr(instance, name, data[name])
        instance.control_port = data.get("control_port", 0)
        instance.protocol_version = protocol
        instance.plugin_version = data.get("plugin_version", "")
        instance.factors = data.get("factors", {})
        instance.adapters = data.get("adapters", [])
        instance.engine = data.get("engine", {})
        if "capabilities" in data:
            instance.capabilities = data["capabilities"]
        instance.pid = pid
        instance.registered_at = instance.last_heartbeat_at = timezone.now()
        if new_process:
            instance.kv, instance.requests = {}, {}
        if new_process and not instance.is_busy:
            instance.instance_type = data["instance_type"]
            instance.role_confirmed = False
            _take_role(instance, "active" if data["instance_type"] == InstanceType.A else "standby")
        elif instance.status == InstanceStatus.UNREACHABLE:
            instance.status = instance.resume_status or InstanceStatus.STANDBY
        # A process that restarts in the middle of a migration keeps its busy status: the job notices by itself.
        instance.save()
        publish_on_commit()
    logger.info("Instance %s registered from %s as %s", instance.vllm_hi_id, instance.address, instance.status)
    return instance


def heartbeat(beat: Heartbeat) -> bool:
    """Records that an instance lives. Returns False when it is not known and has to register again."""
    with transaction.atomic():
        instance = Instance.objects.select_for_update().filter(vllm_hi_id=beat["vllm_hi_id"]).first()
        if instance is None or instance.status == InstanceStatus.DESTROYED:
            # One that is on its way out after a migration must not come back by registering again.
            return instance is not None and beat.get("role") == "destroyed"
        before = _routed_facts(instance)
        instance.last_heartbeat_at = timezone.now()
        instance.kv = beat.get("kv", instance.kv)
        instance.requests = beat.get("requests", instance.requests)
        instance.factors = beat.get("factors", instance.factors)
        instance.adapters = beat.get("adapters", instance.adapters)
        instance.engine = beat.get("engine", instance.engine)
        instance.control_port = beat.get("control_port", instance.control_port)
        if instance.status == InstanceStatus.UNREACHABLE:
            instance.status = instance.resume_status or InstanceStatus.STANDBY
        role = beat.get("role")
        if not instance.role_confirmed and role in ("active", "standby"):
            # After a restart the process knows best; later on the panel does, for it gave the role.
            if not instance.is_busy:
                _take_role(instance, role)
            instance.role_confirmed = True
        elif role in ("active", "standby") and _changed_by_hand(instance, role, beat.get("role_held_s")):
            logger.info("Instance %s was made %s by hand", instance.vllm_hi_id, role)
            _take_role(instance, role)
        instance.save(
            update_fields=[
                "last_heartbeat_at", "kv", "requests", "factors", "adapters", "engine", "control_port", "status",
                "instance_type", "routed", "alias", "role_given_at", "role_confirmed",
            ]
        )  # fmt: skip
        if before != _routed_facts(instance):
            publish_on_commit()
    return True


def deregister(vllm_hi_id: str) -> bool:
    """A clean stop: the instance leaves the routing table, its row stays. Returns False when it is not known."""
    with transaction.atomic():
        changed = Instance.objects.filter(vllm_hi_id=vllm_hi_id).update(
            status=InstanceStatus.DESTROYED, resume_status="", routed=False, alias=""
        )
        publish_on_commit()
    return changed == 1


def mark_silent_unreachable(now: datetime | None = None) -> list[str]:
    """Marks instances without a recent heartbeat. Returns their ids."""
    limit = (now or timezone.now()) - timedelta(seconds=settings.VLLM_HI_HEARTBEAT_TIMEOUT_S)
    silent = Q(last_heartbeat_at__lt=limit) | Q(last_heartbeat_at__isnull=True, registered_at__lt=limit)
    marked = []
    skipped = [InstanceStatus.DESTROYED, InstanceStatus.UNREACHABLE]
    for vllm_hi_id, status in (
        Instance.objects.filter(silent).exclude(status__in=skipped).values_list("vllm_hi_id", "status")
    ):
        # Conditional: a heartbeat that arrives between the two statements wins.
        if Instance.objects.filter(silent, vllm_hi_id=vllm_hi_id, status=status).update(
            status=InstanceStatus.UNREACHABLE, resume_status=status
        ):
            marked.append(vllm_hi_id)
    if marked:
        logger.warning("No heartbeat from %s", ", ".join(marked))
        publish_on_commit()
    return marked


# -- what migrations do to instances -----------------------------------------------------------------------------------


def reserve_for_migration(source_id: str, target_id: str) -> None:
    """Takes both instances for one migration: source becomes draining, target migrating. Call inside a transaction.

    Both statements are conditional: of two migrations that want the same instance, one gets it.

    Raises:
        InstanceRefused: the caller's transaction must be rolled back.
    """
    source, target = _locked(source_id, target_id)
    refusal = refusal_to_migrate(source, "source") or refusal_to_migrate(target, "target", source)
    if refusal is not None:
        raise refusal
    for instance, busy, param in (
        (source, InstanceStatus.DRAINING, "source"),
        (target, InstanceStatus.MIGRATING, "target"),
    ):
        vllm_hi_id = instance.vllm_hi_id
        taken = Instance.objects.filter(vllm_hi_id=vllm_hi_id, status=instance.status).update(
            status=busy, resume_status=instance.status, resume_routed=F("routed"), resume_alias=F("alias")
        )
        if not taken:
            # It changed between the two statements; the next try will see it settled.
            raise InstanceRefused(
                "migration_in_progress", f"Instance {vllm_hi_id} is just being taken by another migration.", param
            )


def _locked(source_id: str, target_id: str) -> tuple[Instance, Instance]:
    """Both rows, locked in an order that is the same for everybody: two instances may migrate to each other."""
    rows = Instance.objects.select_for_update().filter(vllm_hi_id__in=[source_id, target_id]).order_by("vllm_hi_id")
    found = {instance.vllm_hi_id: instance for instance in rows}
    return found[source_id], found[target_id]


def refusal_to_migrate(
    instance: Instance, side: Literal["source", "target"], other: Instance | None = None
) -> InstanceRefused | None:
    """Why an instance cannot be the source or target of a new migration; None if it can.

    A target is a standby, or serves beside its `other` since a migration that kept its source active: then more
    requests may go to it, and those that it has may come back.
    """
    name = f"Instance {instance.vllm_hi_id}"
    if instance.is_busy:
        return InstanceRefused(
            "migration_in_progress", f"{name} is already in a migration; wait for its end or abort it.", side
        )
    if instance.status == InstanceStatus.DESTROYED:
        return InstanceRefused("instance_destroyed", f"{name} has been shut down; start it again.", side)
    if instance.status == InstanceStatus.UNREACHABLE:
        return InstanceRefused(
            "instance_unreachable", f"{name} ({instance.address}) does not answer; check its process.", side
        )
    if side == "source" and instance.status != InstanceStatus.ACTIVE:
        return InstanceRefused(
            "source_not_active", f"{name} is {instance.status} and serves nothing that could move.", side
        )
    beside = instance.status == InstanceStatus.ACTIVE and bool(instance.alias or (other is not None and other.alias))
    if side == "target" and instance.status != InstanceStatus.STANDBY and not beside:
        return InstanceRefused(
            "target_not_standby", f"{name} is {instance.status}; choose a standby instance as target.", side
        )
    return None


def route_new_requests(source_id: str, target_id: str) -> int:
    """New requests go to the target from now on. Returns the version of the table that says so.

    A standby that takes over takes the source's alias, too; an instance that serves already keeps its own names.
    """
    with transaction.atomic():
        source, target = _locked(source_id, target_id)
        serves = target.routed or bool(target.alias)
        Instance.objects.filter(vllm_hi_id=target_id).update(
            routed=target.routed or source.routed, alias=target.alias if serves else source.alias
        )
        Instance.objects.filter(vllm_hi_id=source_id).update(routed=False, alias="")
    return publish_routing_table()


def restore_after_migration(source_id: str, target_id: str, *, target_serves: bool = False) -> None:
    """Undoes the reservation and the route switch: the source serves again, the target is what it was.

    `target_serves`: requests have moved to it that belong to nobody else, so it is reachable beside the source.
    """
    with transaction.atomic():
        source, target = _locked(source_id, target_id)
        routed = source.resume_routed or not source.resume_alias
        _settle(source_id, InstanceStatus.ACTIVE, InstanceType.A, routed=routed, alias=source.resume_alias)
        if target_serves or target.resume_routed or target.resume_alias:
            _set_beside(target)
        else:
            _settle(target_id, InstanceStatus.STANDBY, InstanceType.B, routed=False)
        publish_on_commit()


def hand_service_over(
    source_id: str, target_id: str, source_becomes: Literal["standby", "destroyed", "draining"]
) -> None:
    """The end of a migration: the target serves, and the source is what the policy made of it.

    "draining" is a source that still has requests which could not move; nothing new is routed to it.
    """
    with transaction.atomic():
        _, target = _locked(source_id, target_id)
        # Where it serves beside another instance, new requests for the model go on going there.
        routed = target.routed or not target.alias
        _settle(target_id, InstanceStatus.ACTIVE, InstanceType.A, routed=routed, alias=target.alias)
        source_type = InstanceType.B if source_becomes == "standby" else None
        _settle(source_id, InstanceStatus(source_becomes), source_type, routed=False)
        publish_on_commit()


def serve_beside(source_id: str, target_id: str) -> None:
    """The end of a migration that kept its source active: new requests still go where they went, and the target is
    reachable under a name of its own."""
    restore_after_migration(source_id, target_id, target_serves=True)


def retire_drained_source(vllm_hi_id: str) -> None:
    """A source that a migration left draining has become empty, and a warm standby."""
    with transaction.atomic():
        _settle(vllm_hi_id, InstanceStatus.STANDBY, InstanceType.B, routed=False)
        publish_on_commit()


def _set_beside(target: Instance) -> None:
    alias = target.resume_alias
    if not alias and not target.resume_routed:
        alias = _free_alias(target)
    _settle(target.vllm_hi_id, InstanceStatus.ACTIVE, InstanceType.A, routed=target.resume_routed, alias=alias)


def _free_alias(target: Instance) -> str:
    """Its id, unless another instance has taken that over with the requests of an earlier migration."""
    taken = set(Instance.objects.exclude(vllm_hi_id=target.vllm_hi_id).values_list("alias", flat=True))
    names = itertools.chain([target.vllm_hi_id], (f"{target.vllm_hi_id}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _settle(
    vllm_hi_id: str, status: InstanceStatus, instance_type: InstanceType | None, *, routed: bool, alias: str = ""
) -> None:
    fields: dict[str, Any] = {"routed": routed, "alias": alias, "resume_routed": False, "resume_alias": ""}
    fields["role_given_at"] = timezone.now()
    if instance_type is not None:
        fields["instance_type"] = instance_type
    row = Instance.objects.filter(vllm_hi_id=vllm_hi_id)
    if status == InstanceStatus.DESTROYED:
        row.update(status=status, resume_status="", **fields)
        return
    # Who does not answer stays unreachable and takes the status when the next heartbeat comes.
    if not row.filter(status=InstanceStatus.UNREACHABLE).update(resume_status=status, **fields):
        row.exclude(status=InstanceStatus.DESTROYED).update(status=status, resume_status="", **fields)


def _routed_facts(instance: Instance) -> tuple[object, ...]:
    """What the routing table says about an instance and a heartbeat may change."""
    return instance.status, instance.routed, instance.alias, instance.control_port, instance.adapters


def _changed_by_hand(instance: Instance, role: str, held_s: float | None) -> bool:
    """Whether somebody has called `activate` or `convert_to_b` since the panel last gave a role. Durations only: the
    clocks of two hosts differ."""
    settled = instance.status in (InstanceStatus.ACTIVE, InstanceStatus.STANDBY)
    if not settled or instance.status == role or held_s is None or instance.role_given_at is None:
        return False
    return timezone.now() - timedelta(seconds=held_s) > instance.role_given_at


def _take_role(instance: Instance, role: Literal["active", "standby"] | str) -> None:
    active = role == "active"
    instance.instance_type = InstanceType.A if active else InstanceType.B
    instance.status = InstanceStatus.ACTIVE if active else InstanceStatus.STANDBY
    instance.resume_status = ""
    instance.routed = active
    instance.alias = ""
    instance.role_given_at = timezone.now()


def _choose_id(proposed: str | None) -> str:
    """The id that an instance had before the panel lost its rows, if it is free; else a new one."""
    if proposed and not Instance.objects.filter(vllm_hi_id=proposed).exists():
        return proposed
    return f"hi-{secrets.token_hex(4)}"
