"""The routing table that the proxies follow (docs/protocol.md, section 6).

The database is the truth; Redis holds a copy. Versions only ever grow, also when Redis or the database starts afresh.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import redis
from django.db import transaction
from django.db.models import F

from controlplane.redis import ACKS_KEY, ROUTING_CHANNEL, ROUTING_KEY, connection
from instances.choices import InstanceStatus
from instances.models import Instance, RoutingVersion, alias_name

__all__ = [
    "build_table",
    "publish_on_commit",
    "publish_routing_table",
    "published_version",
    "republish_if_stale",
    "wait_for_acks",
]

logger = logging.getLogger(__name__)

#: Seconds. A proxy worker that has been silent for longer is gone, and is not waited for.
WORKER_SILENT_S = 10.0

#: Statuses in which an instance may be given new requests, if it is `routed`.
_SERVING = frozenset({InstanceStatus.ACTIVE, InstanceStatus.MIGRATING, InstanceStatus.DRAINING})

#: Two publishers may reach Redis in the wrong order: an older table never replaces a newer one.
_SET_IF_NEWER = """
local current = redis.call('GET', KEYS[1])
if current and cjson.decode(current)['version'] >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
"""


def build_table(version: int) -> dict[str, Any]:
    """Returns `{version, models: {name: {max_model_len, active: [id], parent}}, instances: {id: {base_url, ...}}}`.

    An adapter is a model of its own: requests for it go where it is loaded; `parent` is the model that it belongs to.
    A model without an instance that can serve it stays in the table with an empty `active` as long as one is known:
    "nobody can serve it now" is another answer than "unknown model". An instance with an alias is reached by names of
    its own, too; `served_as` is then what it calls the model itself.
    """
    models: dict[str, dict[str, Any]] = {}
    instances: dict[str, dict[str, Any]] = {}
    known = Instance.objects.exclude(status__in=[InstanceStatus.DESTROYED, InstanceStatus.REGISTERING])
    for instance in known.order_by("vllm_hi_id"):
        serving = instance.routed and instance.status in _SERVING
        base = instance.served_model_name
        for name, parent in [(base, None), *((name, base) for name in instance.adapters if name != base)]:
            model = models.setdefault(name, {"max_model_len": None, "active": [], "parent": parent})
            if model["max_model_len"] is None:
                model["max_model_len"] = instance.inference_params.get("max_model_len")
            if serving:
                model["active"].append(instance.vllm_hi_id)
        instances[instance.vllm_hi_id] = {
            "base_url": instance.base_url,
            "control_host": instance.ip,
            "control_port": instance.control_port,
            "served_model_name": instance.served_model_name,
            "role": "active" if serving or instance.alias else "standby",
        }
    for instance in known.exclude(alias="").order_by("vllm_hi_id"):
        _add_aliases(models, instance)
    return {"version": version, "models": models, "instances": instances}


def _add_aliases(models: dict[str, dict[str, Any]], instance: Instance) -> None:
    """Adds an instance's own names, and lets it stand in where nobody else is left for the model."""
    base = instance.served_model_name
    active = [instance.vllm_hi_id] if instance.status in _SERVING else []
    for name in dict.fromkeys([base, *instance.adapters]):
        own = alias_name(name, instance.alias)
        parent = None if name == base else alias_name(base, instance.alias)
        # A name that somebody really serves stays theirs.
        models.setdefault(own, {**models[name], "active": active, "parent": parent, "served_as": name})
        models[name]["active"] = models[name]["active"] or active


def published_version() -> int | None:
    """Version of the table in Redis; None when there is none, or Redis is away."""
    try:
        text = connection().get(ROUTING_KEY)
    except redis.RedisError:
        return None
    return int(json.loads(str(text))["version"]) if text else None


def publish_routing_table() -> int:
    """Writes the table under a new version and tells the proxies. Returns the version.

    Call it after the commit of what changed. When Redis is away the version counts on, a line is logged, and
    `republish_if_stale` catches up.
    """
    in_redis = published_version() or 0
    with transaction.atomic():
        RoutingVersion.objects.get_or_create(id=1)
        RoutingVersion.objects.filter(id=1, version__lt=in_redis).update(version=in_redis)
        # The row stays locked until the table is read: a higher version never holds older content.
        RoutingVersion.objects.filter(id=1).update(version=F("version") + 1)
        version = RoutingVersion.objects.values_list("version", flat=True).get(id=1)
        table = build_table(version)
    try:
        connection().eval(_SET_IF_NEWER, 1, ROUTING_KEY, str(version), json.dumps(table), ROUTING_CHANNEL)
    except redis.RedisError as error:
        logger.warning("Routing table %d could not be written to Redis: %s", version, error)
    return version


def publish_on_commit() -> None:
    """Publishes once the running transaction is committed, at once if there is none."""
    transaction.on_commit(publish_routing_table, robust=True)


def republish_if_stale() -> bool:
    """Publishes again when Redis lost the table or holds an older one. Returns whether it did."""
    in_redis = published_version()
    wanted = RoutingVersion.objects.filter(id=1).values_list("version", flat=True).first()
    if in_redis is not None and (wanted is None or in_redis >= wanted):
        return False
    publish_routing_table()
    return True


def wait_for_acks(version: int, timeout_s: float, poll_s: float = 0.05) -> list[str]:
    """Waits until every live proxy worker has acknowledged `version` or a later one.

    Returns:
        The workers that have not when the time is over; empty is success. Without Redis nobody can be asked: empty.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        missing = _not_acknowledged(version)
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(poll_s)


def _not_acknowledged(version: int) -> list[str]:
    try:
        acks: Any = connection().hgetall(ACKS_KEY)
    except redis.RedisError as error:
        logger.warning("Acknowledgements of the routing table cannot be read: %s", error)
        return []
    missing = []
    for worker, text in acks.items():
        try:
            ack = json.loads(text)
            silent = time.time() - float(ack["seen_at"]) > WORKER_SILENT_S
            behind = int(ack["version"]) < version
        except (ValueError, KeyError, TypeError):
            continue
        if behind and not silent:
            missing.append(str(worker))
    return sorted(missing)
