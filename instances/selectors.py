"""Everything that is read about instances."""

from __future__ import annotations

import json
import logging
from typing import Any

import redis
from django.db.models import QuerySet

from controlplane.redis import STREAMS_PREFIX, connection
from instances.choices import InstanceStatus
from instances.models import Instance
from instances.services import refusal_to_migrate

__all__ = ["count_by_status", "find_instance", "get_instance", "list_instances", "live_streams", "migration_targets"]

logger = logging.getLogger(__name__)


def list_instances(*, include_destroyed: bool = False) -> QuerySet[Instance]:
    """All instances that are not shut down, by model, role and id."""
    instances = Instance.objects.all()
    return instances if include_destroyed else instances.exclude(status=InstanceStatus.DESTROYED)


def get_instance(vllm_hi_id: str) -> Instance:
    """Raises Instance.DoesNotExist."""
    return Instance.objects.get(vllm_hi_id=vllm_hi_id)


def find_instance(vllm_hi_id: str) -> Instance | None:
    return Instance.objects.filter(vllm_hi_id=vllm_hi_id).first()


def migration_targets(instance: Instance) -> list[tuple[Instance, str | None]]:
    """Every other instance with the reason, one sentence, why `instance` cannot migrate to it; None if it can."""
    targets: list[tuple[Instance, str | None]] = []
    for other in list_instances().exclude(vllm_hi_id=instance.vllm_hi_id):
        refusal = refusal_to_migrate(other, "target", instance)
        reason = refusal.message if refusal else None
        if reason is None and other.served_model_name != instance.served_model_name:
            reason = f"It serves {other.served_model_name}, not {instance.served_model_name}."
        targets.append((other, reason))
    targets.sort(key=lambda pair: pair[1] is not None)
    return targets


def count_by_status() -> dict[str, int]:
    counts: dict[str, int] = {}
    for status in list_instances().values_list("status", flat=True):
        counts[status] = counts.get(status, 0) + 1
    return counts


def live_streams() -> list[dict[str, Any]]:
    """What the proxies relay now: `{stream_id, model, instance, tokens, age_s, last_token_age_s, legs, worker}`.

    Empty when Redis is away: it is a view, nothing depends on it.
    """
    streams: list[dict[str, Any]] = []
    try:
        client = connection()
        keys = sorted(str(key) for key in client.scan_iter(f"{STREAMS_PREFIX}*", count=200))
        values: Any = client.mget(keys) if keys else []
    except redis.RedisError as error:
        logger.warning("Live streams cannot be read: %s", error)
        return streams
    for key, text in zip(keys, values, strict=True):
        if not text:
            continue
        try:
            rows = json.loads(text)
        except ValueError:
            continue
        worker = key.removeprefix(STREAMS_PREFIX)
        streams.extend({**row, "worker": worker} for row in rows if isinstance(row, dict))
    return streams
