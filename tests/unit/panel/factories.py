"""Rows for tests."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from instances.models import Instance
from migrations_app.models import MigrationJob
from migrations_app.services import create_migration
from vllm_plugin.wire import PROTOCOL_VERSION

MODEL = "smollm2"
FACTORS = {"vllm_version": "0.32.0", "model": "smollm2", "dtype": "float32", "block_size": 16, "max_model_len": 2048}


def make_instance(vllm_hi_id: str, **fields: Any) -> Instance:
    """An instance as it is after its registration and first heartbeat; active if its type is A."""
    kind = fields.pop("instance_type", "A")
    defaults: dict[str, Any] = {
        "ip": "127.0.0.1",
        "port": 20000 + Instance.objects.count(),
        "instance_type": kind,
        "status": "active" if kind == "A" else "standby",
        "routed": kind == "A",
        "served_model_name": MODEL,
        "inference_params": {"max_model_len": 2048},
        "topology": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "control_port": 9100,
        "protocol_version": PROTOCOL_VERSION,
        "factors": dict(FACTORS),
        "role_confirmed": True,
        "pid": 100,
        "last_heartbeat_at": timezone.now(),
    }
    return Instance.objects.create(vllm_hi_id=vllm_hi_id, **(defaults | fields))


def make_pair() -> tuple[Instance, Instance]:
    return make_instance("hi-a"), make_instance("hi-b", instance_type="B")


def make_job(**wish: Any) -> MigrationJob:
    """A pending job between a fresh pair; nothing carries it out."""
    make_pair()
    return create_migration("hi-a", "hi-b", wish.pop("migration_type", "preserve_source"), **wish)
