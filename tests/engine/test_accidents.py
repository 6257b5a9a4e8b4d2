"""Things that go wrong in the middle: clients keep their streams, nothing leaks, and the job says what happened."""

from __future__ import annotations

from benchmarks.live_migration import Migration
from benchmarks.streams import Answer, mixed_requests
from controlplane.serving import Instance
from tests.engine.conftest import RunningStack


def _assert_failed_and_exact(
    stack: RunningStack, migration: Migration, target: Instance, answers: list[Answer], references: list[Answer]
) -> None:
    job = migration.job
    assert job["state"] == "failed", job
    assert job["error"].strip().endswith("."), job["error"]
    assert target.id in job["error"], job["error"]
    assert job["moved_requests"] == 0
    for verdict in stack.compared(references, answers, migration):
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"
        assert verdict.cut_at is None


def test_a_target_that_dies_before_the_handover(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    requests = mixed_requests(6, tokens=160, salt=41)
    references = stack.run(requests)
    free = stack.free_blocks(source)
    with stack.faults(source, hold_before_freeze_s=3.0):
        load = stack.load(requests)
        job = stack.migrate(source, target)
        stack.until(lambda: stack.status(target)["requests"]["parked"] == len(requests))
        stack.kill(target)
        migration = stack.finished(job)
        answers = load.result(120)

    _assert_failed_and_exact(stack, migration, target, answers, references)
    stack.until(lambda: stack.free_blocks(source) == free)
    assert stack.status(source)["session"] is None
    stack.restart(target)


def test_a_target_that_dies_between_freeze_and_commit(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    requests = mixed_requests(6, tokens=160, salt=42)
    references = stack.run(requests)
    free = stack.free_blocks(source)
    with stack.faults(source, hold_before_commit_s=2.5):
        load = stack.load(requests)
        job = stack.migrate(source, target)
        stack.until(lambda: stack.status(source)["requests"]["frozen"] > 0)
        stack.kill(target)
        migration = stack.finished(job)
        answers = load.result(120)

    _assert_failed_and_exact(stack, migration, target, answers, references)
    stack.until(lambda: stack.free_blocks(source) == free)
    assert stack.status(source)["requests"]["frozen"] == 0
    stack.restart(target)


def test_an_abort_leaves_everything_where_it_was(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    requests = mixed_requests(4, tokens=160, salt=43)
    references = stack.run(requests)
    free = stack.free_blocks(source), stack.free_blocks(target)
    with stack.faults(source, hold_before_freeze_s=2.0):
        load = stack.load(requests)
        job = stack.migrate(source, target)
        stack.until(lambda: stack.status(target)["requests"]["parked"] == len(requests))
        assert stack.post(f"/api/v1/migrations/{job}/abort", {}).status_code in (200, 202)
        migration = stack.finished(job)
        answers = load.result(120)

    assert migration.job["state"] == "aborted", migration.job
    assert all(verdict.exact and verdict.cut_at is None for verdict in stack.compared(references, answers, migration))
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)
    assert (stack.active().id, stack.standby().id) == (source.id, target.id)


def test_commits_that_are_refused_leave_the_requests_on_the_source(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    requests = mixed_requests(3, tokens=200, salt=44)
    references = stack.run(requests)
    free = stack.free_blocks(source), stack.free_blocks(target)
    with stack.faults(target, refuse_commit=True):
        load = stack.load(requests)
        migration = stack.finished(stack.migrate(source, target))
        answers = load.result(120)

    assert migration.job["moved_requests"] == 0
    assert {row["code"] for row in migration.requests} == {"refused_by_test"}
    assert all(verdict.exact and verdict.cut_at is None for verdict in stack.compared(references, answers, migration))
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)


def test_a_client_that_leaves_while_its_request_is_parked(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    free = stack.free_blocks(source), stack.free_blocks(target)
    requests = mixed_requests(2, tokens=400, salt=45)
    with stack.faults(source, hold_before_freeze_s=2.0):
        load = stack.load(requests)
        job = stack.migrate(source, target)
        stack.until(lambda: stack.status(target)["requests"]["parked"] == len(requests))
        load.cancel()
        stack.until(lambda: stack.status(source)["requests"]["running"] == 0)
        stack.until(lambda: stack.status(target)["requests"]["parked"] == 0)
        migration = stack.finished(job)

    assert migration.job["moved_requests"] == 0
    stack.until(lambda: all(stack.status(one)["requests"]["quarantined"] == 0 for one in (source, target)))
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)
