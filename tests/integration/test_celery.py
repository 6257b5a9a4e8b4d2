"""A real worker with a real broker carries a migration out, and its beat watches the instances."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from django.db import connection

from instances.models import Instance
from migrations_app.models import MigrationJob
from migrations_app.services import create_migration
from tests.integration.fake_vllm import FakeInstance
from tests.unit.panel.factories import make_instance

ROOT = Path(__file__).resolve().parent.parent.parent


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def database_url() -> str:
    row = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{row['NAME']}"
    return f"postgres://{row['USER']}:{row['PASSWORD']}@{row['HOST']}:{row['PORT']}/{row['NAME']}"


@pytest.fixture
def worker(transactional_db: None, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "controlplane.settings.test",
        "DATABASE_URL": database_url(),
        "REDIS_URL": django_settings.REDIS_URL,
    }
    schedule = str(tmp_path / "beat")
    command = [sys.executable, "-m", "celery", "-A", "controlplane.celery:app", "worker", "--beat", "-s", schedule]
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_a_worker_carries_a_migration_out(worker: subprocess.Popen[bytes]) -> None:
    a, b = FakeInstance("hi-a", "active"), FakeInstance("hi-b", "standby")
    a.peer, b.peer = b, a
    a.add_request("r1")
    make_instance("hi-a", port=a.port)
    make_instance("hi-b", port=b.port, instance_type="B")
    try:
        job = create_migration("hi-a", "hi-b", "preserve_source")
        ended = wait_until(lambda: MigrationJob.objects.get(id=job.id).is_terminal)
        job.refresh_from_db()
        assert ended, job.state
        assert (job.state, job.moved_requests) == ("done", 1)
        # Nobody sends heartbeats here: beat notices.
        assert wait_until(lambda: Instance.objects.filter(status="unreachable").count() == 2)
    finally:
        a.stop()
        b.stop()
    assert worker.poll() is None
