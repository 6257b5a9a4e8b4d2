"""Rows that a migration leaves behind, made through the same functions that the executor uses."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import Group, User
from django.utils import timezone

from controlplane.permissions import OPERATOR_GROUP
from instances.models import Instance
from migrations_app import publisher
from migrations_app.choices import EventKind, MigrationState, RoundKind, Step
from migrations_app.events import record
from migrations_app.models import MigrationJob, MigrationRequest, MigrationRound
from migrations_app.state import advance
from tests.browser.stand_in_instance import FACTORS
from vllm_plugin.wire import PROTOCOL_VERSION

PASSWORD = "a-password-for-tests"
BYTES_PER_BLOCK = 737_280
S = MigrationState


def user(username: str = "operator", *, operator: bool = True) -> User:
    person = User.objects.create_user(username, password=PASSWORD)
    if operator:
        person.groups.add(Group.objects.get_or_create(name=OPERATOR_GROUP)[0])
    return person


def instance(vllm_hi_id: str, *, port: int = 8100, status: str = "active", **fields: Any) -> Instance:
    defaults: dict[str, Any] = {
        "ip": "127.0.0.1",
        "port": port,
        "instance_type": "A" if status in ("active", "draining") else "B",
        "status": status,
        "role_confirmed": True,
        "routed": status == "active",
        "served_model_name": "smollm2",
        "topology": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "gpu_memory_utilization": 0.9},
        "data_port": port + 1000,
        "control_port": port + 2000,
        "protocol_version": PROTOCOL_VERSION,
        "plugin_version": "0.1.0",
        "factors": FACTORS,
        "capabilities": {"supported": True, "missing_probes": []},
        "kv": {"total_blocks": 1024, "free_blocks": 611, "block_size": 16, "bytes_per_block": BYTES_PER_BLOCK},
        "requests": {"running": 8, "waiting": 1, "parked": 0, "frozen": 0},
        # Alive for as long as a test runs, without a heartbeat.
        "last_heartbeat_at": timezone.now() + timedelta(minutes=30),
    }
    return Instance.objects.create(vllm_hi_id=vllm_hi_id, **{**defaults, **fields})


def job(source: Instance, target: Instance, **fields: Any) -> MigrationJob:
    created = MigrationJob.objects.create(
        source=source, target=target, **{"migration_type": "preserve_source", **fields}
    )
    record(
        created.id,
        EventKind.STATE,
        message=f"Migration from {source.pk} to {target.pk} requested",
        data={"state": "pending"},
    )
    return created


def move(migration: MigrationJob, *states: MigrationState, **fields: Any) -> None:
    """Takes a job along the given states; `fields` are set with the last one."""
    for index, state in enumerate(states):
        migration.refresh_from_db()
        extra = fields if index == len(states) - 1 else {}
        if state == S.PREFLIGHT:
            extra = {**extra, "started_at": timezone.now(), "attempt": 1}
        assert advance(migration.id, MigrationState(migration.state), state, **extra)


def copied(
    migration: MigrationJob, index: int, blocks: int, *, dirty: int, hit: int = 0, ms: float = 80, kind: str = ""
) -> MigrationRound:
    """One finished round with its events."""
    row = MigrationRound.objects.create(
        job=migration,
        round_index=index,
        kind=kind or (RoundKind.FULL if index == 0 else RoundKind.INCREMENTAL),
        blocks=blocks,
        bytes=blocks * BYTES_PER_BLOCK,
        hit_blocks=hit,
        dirty_blocks=dirty,
        duration_ms=ms,
    )
    record(
        migration.id,
        EventKind.ROUND,
        step=Step.FULL_TRANSFER_DONE if index == 0 else Step.INCREMENTAL_TRANSFER_DONE,
        round_index=index,
        data_size_bytes=row.bytes,
        block_count=blocks,
        message=f"Round {index}: {blocks} blocks sent, {dirty} became ready meanwhile",
    )
    publisher.round_recorded(row)
    return row


def attached(migration: MigrationJob, count: int, *, seed: int = 7) -> list[MigrationRequest]:
    chance = random.Random(seed)
    rows = []
    for index in range(count):
        row = MigrationRequest.objects.create(
            job=migration,
            request_id=f"chatcmpl-{chance.randrange(16**12):012x}",
            stream_id=f"s-{index}",
            prompt_tokens=chance.randrange(100, 600),
            output_tokens=chance.randrange(20, 140),
            kv_blocks=chance.randrange(10, 44),
        )
        publisher.request_changed(row)
        rows.append(row)
    MigrationJob.objects.filter(id=migration.id).update(total_requests=count)
    publisher.job_changed(migration.id)
    return rows


def moved(row: MigrationRequest, *, gap_ms: float, itl_ms: float = 38.0) -> None:
    row.outcome = "moved"
    row.gap_ms, row.itl_ms = gap_ms, itl_ms
    row.output_tokens += 12
    row.tail_blocks, row.tail_bytes = 1, BYTES_PER_BLOCK
    row.stages = {"freeze": gap_ms * 0.12, "tail": gap_ms * 0.2, "commit": gap_ms * 0.1, "first_token": gap_ms * 0.58}
    row.save()
    record(row.job_id, EventKind.REQUEST, message=f"{row.request_id} moved, the client waited {gap_ms:.0f} ms")
    publisher.request_changed(row)
    migration = MigrationJob.objects.get(id=row.job_id)
    MigrationJob.objects.filter(id=row.job_id).update(moved_requests=migration.moved_requests + 1)
    publisher.job_changed(row.job_id)


def finished_job(source: Instance, target: Instance, *, requests: int = 8) -> MigrationJob:
    """A migration that went well, as history has it."""
    migration = job(source, target)
    move(migration, S.PREFLIGHT, S.ATTACHING)
    rows = attached(migration, requests)
    move(migration, S.COPYING)
    for index, (blocks, dirty) in enumerate([(212, 31), (31, 9), (9, 3), (3, 1)]):
        copied(migration, index, blocks, dirty=dirty, hit=40 if index == 0 else 0, ms=20 + blocks * 1.6)
    move(migration, S.HANDING_OVER)
    for index, row in enumerate(rows):
        moved(row, gap_ms=56 + 4.5 * index)
    move(migration, S.DRAINING, S.FINISHING)
    move(migration, S.DONE, new_active_instance=target)
    migration.refresh_from_db()
    return migration
