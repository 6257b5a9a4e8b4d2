"""`destroy_source`: when the last request has left, the source ends. Runs last, for it takes an instance away."""

from __future__ import annotations

from pathlib import Path

from benchmarks.streams import mixed_requests
from benchmarks.there_and_back import resident_mb
from tests.engine.conftest import RunningStack


def test_the_source_ends_itself_after_its_requests_have_left(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    run = stack.migrate_under_load(mixed_requests(3, tokens=160, salt=71), migration_type="destroy_source")

    assert run.migration.job["state"] == "done", run.migration.job
    assert all(verdict.exact and verdict.cut_at is not None for verdict in run.verdicts), run.verdicts
    pid = source.process.pid
    stack.until(lambda: not source.process.running)
    # All of its processes are gone, and their memory with them.
    stack.until(lambda: not source.process.relatives() and not Path(f"/proc/{pid}").exists())
    assert resident_mb(source.process) == 0
    assert stack.active().id == target.id
    assert stack.get(f"/api/v1/instances/{source.id}")["status"] == "destroyed"
    assert not stack.run(mixed_requests(1, tokens=12, salt=72))[0].error
