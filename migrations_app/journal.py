"""Writes down what instances answer during a migration: rounds, requests and the job's counters."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.db import transaction

from migrations_app import publisher
from migrations_app.choices import EventKind, MoveWay, RequestOutcome, RoundKind, Step
from migrations_app.events import record
from migrations_app.models import MigrationJob, MigrationRequest, MigrationRound

__all__ = [
    "note_attached",
    "note_gaps",
    "note_handed_over",
    "note_refused",
    "note_round",
    "note_round_begin",
    "settle_unmoved",
]

_ROUND_STEPS = {
    RoundKind.FULL: (Step.FULL_TRANSFER, Step.FULL_TRANSFER_DONE),
    RoundKind.INCREMENTAL: (Step.INCREMENTAL_TRANSFER, Step.INCREMENTAL_TRANSFER_DONE),
}


def note_round_begin(job_id: uuid.UUID, index: int, kind: RoundKind) -> None:
    record(job_id, EventKind.STEP, step=_ROUND_STEPS[kind][0], round_index=index, message=f"Round {index} begins")


def note_round(
    job_id: uuid.UUID, index: int, kind: RoundKind, started_at: datetime, answer: Mapping[str, Any]
) -> MigrationRound:
    """Stores one finished round with its event. A round that is already stored is only updated."""
    blocks, size = int(answer["blocks"]), int(answer["bytes"])
    way = f" by {answer['transport']}" if blocks and answer.get("transport") else ""
    with transaction.atomic():
        row, _ = MigrationRound.objects.update_or_create(
            job_id=job_id,
            round_index=index,
            defaults={
                "kind": kind,
                "blocks": blocks,
                "bytes": size,
                "hit_blocks": int(answer.get("hit_blocks") or 0),
                "dirty_blocks": int(answer.get("dirty_blocks") or 0),
                "duration_ms": float(answer.get("duration_s") or 0) * 1000,
                "started_at": started_at,
            },
        )
        record(
            job_id,
            EventKind.ROUND,
            step=_ROUND_STEPS[kind][1],
            round_index=index,
            data_size_bytes=size,
            block_count=blocks,
            message=f"Round {index}: {blocks} blocks{way}, {row.dirty_blocks} became ready meanwhile",
        )
        transaction.on_commit(lambda: publisher.round_recorded(row), robust=True)
    return row


def note_attached(job_id: uuid.UUID, rows: Iterable[Mapping[str, Any]]) -> None:
    """The target holds a place for these requests."""
    for row in rows:
        _store(
            job_id,
            str(row["request_id"]),
            stream_id=str(row.get("stream_id") or ""),
            prompt_tokens=int(row.get("prompt_tokens") or 0),
            output_tokens=int(row.get("output_tokens") or 0),
            kv_blocks=int(row.get("kv_blocks") or 0),
            outcome=RequestOutcome.ATTACHED,
            code="",
            message="",
        )
    _count(job_id)


def note_refused(job_id: uuid.UUID, rows: Iterable[Mapping[str, Any]], outcome: RequestOutcome) -> None:
    """These requests do not move, at least not now. `rows`: `{request_id, code, message}`, and what else is known."""
    for row in rows:
        fields: dict[str, Any] = {
            "outcome": outcome,
            "code": str(row.get("code") or "")[:64],
            "message": str(row.get("message") or ""),
        }
        for name in ("stream_id", "prompt_tokens", "output_tokens", "kv_blocks"):
            if row.get(name) is not None:
                fields[name] = row[name]
        _store(job_id, str(row["request_id"]), **fields)
    _count(job_id)


def note_ended(job_id: uuid.UUID, request_ids: Iterable[str]) -> None:
    """These had stayed, and have ended on the source by themselves; why they had stayed is kept."""
    for request_id in request_ids:
        _store(job_id, request_id, outcome=RequestOutcome.FINISHED)
    _count(job_id)


def note_handed_over(job_id: uuid.UUID, results: Iterable[Mapping[str, Any]]) -> None:
    """Stores the outcome of a handover. `output_tokens` becomes the number of tokens at the cut."""
    for result in results:
        outcome = RequestOutcome(str(result["outcome"]))
        fields: dict[str, Any] = {
            "outcome": outcome,
            "code": str(result.get("code") or "")[:64],
            "message": str(result.get("message") or ""),
            "tail_blocks": int(result.get("tail_blocks") or 0),
            "tail_bytes": int(result.get("tail_bytes") or 0),
            "gap_ms": result.get("gap_ms"),
            "itl_ms": result.get("itl_ms"),
            "stages": result.get("stages") or {},
            "way": _way(result) if outcome == RequestOutcome.MOVED else "",
        }
        if result.get("tokens") is not None:
            fields["output_tokens"] = int(result["tokens"])
        if result.get("stream_id"):
            fields["stream_id"] = str(result["stream_id"])
        row = _store(job_id, str(result["request_id"]), **fields)
        gap = f", its client waited {row.gap_ms:.0f} ms" if row.gap_ms is not None else ""
        reason = f": {row.message}" if row.message else ""
        how = f" ({row.get_way_display()})" if row.way not in ("", MoveWay.BLOCKS) else ""
        record(
            job_id,
            EventKind.REQUEST,
            message=f"Request {row.request_id} {outcome.label.lower()}{how}{gap}{reason}",
            data={"request_id": row.request_id, "outcome": outcome.value, "code": row.code, "way": row.way},
        )
    _count(job_id)


def note_gaps(job_id: uuid.UUID, rows: Iterable[Mapping[str, Any]]) -> None:
    """What clients saw whose requests waited on the target for room: known only after their handover's answer."""
    for row in rows:
        _store(job_id, str(row["request_id"]), gap_ms=row.get("gap_ms"), itl_ms=row.get("itl_ms"))


def _way(result: Mapping[str, Any]) -> MoveWay:
    if result.get("recomputed"):
        return MoveWay.RECOMPUTE
    return MoveWay.STAGED if result.get("staged") else MoveWay.BLOCKS


def settle_unmoved(job_id: uuid.UUID, listed: Iterable[str] | None) -> None:
    """At a rollback: what is still attached has stayed. `listed`: ids that the source still has, None if unknown."""
    known = None if listed is None else set(listed)
    for row in MigrationRequest.objects.filter(job_id=job_id, outcome=RequestOutcome.ATTACHED):
        if known is not None and row.request_id in known:
            code, message = "rolled_back", "The migration was rolled back; the request goes on where it was."
        else:
            code, message = "outcome_unknown", "The migration ended while this request was on its way."
        _store(job_id, row.request_id, outcome=RequestOutcome.STAYED, code=code, message=message)
    _count(job_id)


def _store(job_id: uuid.UUID, request_id: str, **fields: Any) -> MigrationRequest:
    with transaction.atomic():
        row, _ = MigrationRequest.objects.update_or_create(job_id=job_id, request_id=request_id[:255], defaults=fields)
        transaction.on_commit(lambda: publisher.request_changed(row), robust=True)
    return row


def _count(job_id: uuid.UUID) -> None:
    # What the source's filter keeps was never to move.
    rows = MigrationRequest.objects.filter(job_id=job_id).exclude(outcome=RequestOutcome.FILTERED)
    moved = rows.filter(outcome=RequestOutcome.MOVED).count()
    MigrationJob.objects.filter(id=job_id).update(total_requests=rows.count(), moved_requests=moved)
    transaction.on_commit(lambda: publisher.job_progressed(job_id), robust=True)
