"""Lists of migrations as pages show them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from migrations_app.choices import RequestOutcome
from migrations_app.models import MigrationJob, MigrationRequest
from migrations_app.selectors import percentile

__all__ = ["job_lines"]


def job_lines(jobs: Iterable[MigrationJob]) -> list[dict[str, Any]]:
    """`{job, rounds, bytes, gap_p50, gap_p99}` per job of `selectors.list_jobs`, gaps in ms, with one more query."""
    listed = list(jobs)
    gaps: dict[Any, list[float]] = defaultdict(list)
    moved = MigrationRequest.objects.filter(job__in=listed, outcome=RequestOutcome.MOVED, gap_ms__isnull=False)
    for job_id, gap in moved.values_list("job_id", "gap_ms"):
        if gap is not None:
            gaps[job_id].append(gap)
    return [
        {
            "job": job,
            "rounds": getattr(job, "round_count", None),
            "bytes": getattr(job, "bytes_total", None),
            "gap_p50": percentile(gaps[job.pk], 50),
            "gap_p99": percentile(gaps[job.pk], 99),
        }
        for job in listed
    ]
