"""Celery's entry points for the inventory."""

from __future__ import annotations

from celery import shared_task

from instances.routing import republish_if_stale
from instances.services import mark_silent_unreachable

__all__ = ["watch_heartbeats"]


@shared_task(name="instances.tasks.watch_heartbeats")
def watch_heartbeats() -> None:
    mark_silent_unreachable()
    republish_if_stale()
