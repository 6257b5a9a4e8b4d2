"""The Celery application: which queues exist, what beat does, and why tasks may safely run twice."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_ready

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings.dev")

app = Celery("controlplane")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.update(
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    # A worker that dies leaves its message in the queue; every task is written to run twice.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_track_started=True,
    # Threads: a migration waits for instances nearly all of its time, and holds no processor.
    worker_pool="threads",
    worker_concurrency=8,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    # Longer than any migration: an unacknowledged message is delivered again after this time, in seconds.
    broker_transport_options={
        "visibility_timeout": 6 * 3600,
        "socket_connect_timeout": 2,
        "global_keyprefix": "vllm_hi_celery:",
    },
    task_publish_retry_policy={"max_retries": 2, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
    beat_schedule={
        "watch-heartbeats": {"task": "instances.tasks.watch_heartbeats", "schedule": 2.0, "options": {"expires": 4}},
        "reap-migrations": {"task": "migrations_app.tasks.reap", "schedule": 15.0, "options": {"expires": 30}},
    },
)
app.autodiscover_tasks()


@worker_ready.connect
def _reap_at_start(**_: Any) -> None:
    # Jobs whose worker died with the machine should not wait for the first tick of beat.
    app.send_task("migrations_app.tasks.reap")
    app.send_task("instances.tasks.watch_heartbeats")
