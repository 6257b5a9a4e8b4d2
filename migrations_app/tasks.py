"""Celery's entry points; the work is in `executor` and `reaper`. All of them may run twice."""

from __future__ import annotations

import threading
from typing import Any

from celery import shared_task

__all__ = ["execute", "reap"]

#: Jobs that one worker process runs at once. Two of its eight threads always stay free for what judges those jobs.
_slots = threading.BoundedSemaphore(6)
RETRY_S = 2


@shared_task(bind=True, name="migrations_app.tasks.execute", max_retries=None)
def execute(self: Any, job_id: str) -> None:
    from migrations_app.executor import run

    if not _slots.acquire(blocking=False):
        raise self.retry(countdown=RETRY_S)
    try:
        run(job_id)
    finally:
        _slots.release()


@shared_task(name="migrations_app.tasks.reap")
def reap() -> None:
    from migrations_app.reaper import reap_jobs

    reap_jobs()
