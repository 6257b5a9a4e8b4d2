"""Everything that is read about migrations."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db.models import Count, IntegerField, OuterRef, QuerySet, Subquery, Sum, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from instances import selectors as instance_selectors
from migrations_app.choices import EventKind, MigrationState, RequestOutcome
from migrations_app.models import MigrationEvent, MigrationJob, MigrationRequest, MigrationRound

__all__ = [
    "dashboard_summary",
    "events_after",
    "gap_summary",
    "get_job",
    "list_jobs",
    "percentile",
    "request_rows",
    "rounds",
    "seed_status",
    "step_history",
]


def list_jobs(filters: dict[str, Any] | None = None) -> QuerySet[MigrationJob]:
    """Jobs, newest first, with `bytes_total`, `round_count` and both instances in a constant number of queries.

    `filters`: `state`, `instance` (source or target), `live` (bool), `created_after`, `created_before`; others are
    ignored, so that a page may pass its query string.
    """
    filters = filters or {}
    jobs = MigrationJob.objects.all()
    if filters.get("state"):
        jobs = jobs.filter(state=filters["state"])
    if filters.get("instance"):
        jobs = jobs.filter(source_id=filters["instance"]) | jobs.filter(target_id=filters["instance"])
    if filters.get("live"):
        jobs = jobs.live()
    if filters.get("created_after"):
        jobs = jobs.filter(created_at__gte=filters["created_after"])
    if filters.get("created_before"):
        jobs = jobs.filter(created_at__lte=filters["created_before"])
    return _with_totals(jobs).order_by("-created_at")


def get_job(job_id: uuid.UUID | str) -> MigrationJob:
    """Raises MigrationJob.DoesNotExist."""
    return _with_totals(MigrationJob.objects.all()).get(id=job_id)


def _with_totals(jobs: QuerySet[MigrationJob]) -> QuerySet[MigrationJob]:
    rows = MigrationRound.objects.filter(job=OuterRef("pk")).order_by().values("job")
    tails = MigrationRequest.objects.filter(job=OuterRef("pk")).order_by().values("job")
    zero = Value(0, output_field=IntegerField())
    return jobs.select_related("source", "target", "created_by").annotate(
        bytes_total=Coalesce(Subquery(rows.annotate(n=Sum("bytes")).values("n")), zero)
        + Coalesce(Subquery(tails.annotate(n=Sum("tail_bytes")).values("n")), zero),
        round_count=Coalesce(Subquery(rows.annotate(n=Count("id")).values("n")), zero),
    )


def events_after(job: MigrationJob, seq: int = 0, limit: int = 500) -> list[MigrationEvent]:
    """Events with a number above `seq`, in order, at most `limit`."""
    return list(job.events.filter(seq__gt=seq).order_by("seq")[:limit])


def rounds(job: MigrationJob) -> list[MigrationRound]:
    return list(job.round_rows.order_by("round_index"))


def request_rows(job: MigrationJob) -> list[MigrationRequest]:
    return list(job.request_rows.order_by("id"))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest-rank percentile, None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def gap_summary(job: MigrationJob) -> dict[str, float | None]:
    """`{gap_ms_p50, gap_ms_p99, gap_in_itl_p50, gap_in_itl_p99}` over the requests that moved."""
    moved = job.request_rows.filter(outcome=RequestOutcome.MOVED, gap_ms__isnull=False)
    pairs = list(moved.values_list("gap_ms", "itl_ms"))
    gaps = [gap for gap, _ in pairs if gap is not None]
    ratios = [gap / itl for gap, itl in pairs if gap is not None and itl]
    return {
        "gap_ms_p50": percentile(gaps, 50),
        "gap_ms_p99": percentile(gaps, 99),
        "gap_in_itl_p50": percentile(ratios, 50),
        "gap_in_itl_p99": percentile(ratios, 99),
    }


def dashboard_summary() -> dict[str, Any]:
    """Numbers for the dashboard: `{instances: {total, by_status}, streams: [...], running: [job], recent: [job],
    recent_events: [event], gap_ms_p95_24h, moved_24h}`."""
    counts = instance_selectors.count_by_status()
    day = timezone.now() - timedelta(days=1)
    moved = MigrationRequest.objects.filter(outcome=RequestOutcome.MOVED, job__created_at__gte=day)
    gaps = [gap for gap in moved.values_list("gap_ms", flat=True) if gap is not None]
    return {
        "instances": {"total": sum(counts.values()), "by_status": counts},
        "streams": instance_selectors.live_streams(),
        "running": list(list_jobs({"live": True})),
        "recent": list(list_jobs()[:5]),
        "recent_events": list(
            MigrationEvent.objects.filter(kind__in=[EventKind.STATE, EventKind.ERROR])
            .select_related("job")
            .order_by("-created_at", "-seq")[:10]
        ),
        "gap_ms_p95_24h": percentile(gaps, 95),
        "gap_ms_mean_24h": statistics.fmean(gaps) if gaps else None,
        "moved_24h": moved.count(),
    }


# -- the seed's view of a migration ------------------------------------------------------------------------------------

_SEED_STATUS = {
    MigrationState.DONE: "success",
    MigrationState.PARTIAL: "partial",
    MigrationState.FAILED: "failed",
    MigrationState.ABORTED: "failed",
}


def step_history(job: MigrationJob) -> list[dict[str, Any]]:
    """Entries `{step, timestamp, round_idx?, data_size_bytes?, block_count?}`, derived from the events."""
    history = []
    for event in job.events.exclude(step="").order_by("seq"):
        entry: dict[str, Any] = {"step": event.step, "timestamp": event.created_at.timestamp()}
        if event.round_index is not None:
            entry["round_idx"] = event.round_index
        if event.data_size_bytes is not None:
            entry["data_size_bytes"] = event.data_size_bytes
        if event.block_count is not None:
            entry["block_count"] = event.block_count
        history.append(entry)
    return history


def seed_status(job: MigrationJob) -> dict[str, Any]:
    """The migration result as programs of the seed expect it; times are Unix times, durations seconds."""
    history = step_history(job)
    return {
        "migration_id": str(job.id),
        "status": _SEED_STATUS.get(MigrationState(job.state), "in_progress"),
        "start_time": (job.started_at or job.created_at).timestamp(),
        "end_time": job.finished_at.timestamp() if job.finished_at else None,
        "duration": job.duration_s,
        "new_active_instance": job.new_active_instance_id,
        "error": f"{job.error_code}: {job.error}" if job.error_code else None,
        "current_step": history[-1]["step"] if history else None,
        "step_history": history,
        "moved_requests": job.moved_requests,
        "total_requests": job.total_requests,
        "requests": [
            {
                "request_id": row.request_id,
                "outcome": row.outcome,
                "code": row.code or None,
                "message": row.message or None,
                "gap_ms": row.gap_ms,
            }
            for row in request_rows(job)
        ],
    }
