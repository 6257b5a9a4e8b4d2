"""Standbys without an engine: a migration brings one up, and whatever goes wrong, the source never stops serving.

A product of its own with a tiny model, so that a start takes half a minute. The source's steps are slowed down, so that
streams that began before the start outlive it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.demo_models import tiny_model
from benchmarks.streams import mixed_requests
from controlplane.serving import Instance, InstanceOptions
from tests.engine.conftest import FIRST_PORT, FOLDER, Load, RunningStack

#: Eight minutes; the quick start (`test_quick_start.py`) brings an engine up, too.
pytestmark = pytest.mark.long

TINY = InstanceOptions(
    model="", served_model_name="tiny", kv_cache_bytes=128 * 1024**2, max_num_seqs=8, faults=True, standby=None
)
#: At ten tokens a second they last for two minutes.
TOKENS = 1200
SLOW_S = 0.1


def _stack(name: str, first_port: int, **options: Any) -> Iterator[RunningStack]:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    running = RunningStack(folder, replace(TINY, model=str(tiny_model()), **options), first_port)
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def cold() -> Iterator[RunningStack]:
    """A plain A, and a B as anybody starts it: without an engine."""
    yield from _stack("standby", FIRST_PORT + 20)


def _state(stack: RunningStack, instance: Instance) -> str:
    return next(str(row["state"]) for row in stack.rows() if row["vllm_hi_id"] == instance.id)


def _refused(stack: RunningStack, source: Instance, target: Instance, **wish: Any) -> tuple[int, dict[str, Any]]:
    answer = stack.post("/api/v1/migrations", {"source": source.id, "target": target.id, **wish})
    return answer.status_code, answer.json()["error"]


def _slow_load(stack: RunningStack, source: Instance, salt: int) -> tuple[list[Any], Load]:
    """The same requests undisturbed, and then once more under way and slow. Undone when the source is replaced."""
    requests = mixed_requests(4, tokens=TOKENS, salt=salt)
    references = stack.run(requests)
    assert stack.instance_post(source, "/vllm_hi/faults", {"step_delay_s": SLOW_S}).status_code == 200
    return references, stack.load(requests)


def _instantiating(stack: RunningStack, target: Instance) -> None:
    """Returns when the target says that it has begun, by its own status and in the panel."""
    stack.until(lambda: stack.status(target)["engine"]["percent"] > 0, 60)
    stack.until(lambda: _state(stack, target).startswith("instantiating "))


def test_a_cold_standby_holds_its_port_and_says_what_it_is(cold: RunningStack) -> None:
    source, target = cold.active(), cold.standby()
    assert (_state(cold, source), _state(cold, target)) == ("active", "standby")
    status = cold.status(target)
    assert (status["role"], status["engine"]["state"], status["factors"]) == ("standby", "down", {})
    assert httpx.get(target.base_url + "/health", trust_env=False).status_code == 200
    answer = httpx.post(target.base_url + "/v1/completions", json={"model": "tiny"}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
    assert cold.run(mixed_requests(1, tokens=8, salt=90))[0].error == ""
    pair = {"source": source.id, "target": target.id}
    preflight = cold.post("/api/v1/migrations/preflight", pair).json()
    assert preflight["level"] == "ok", preflight
    assert any(check["name"] == "target_engine" for check in preflight["checks"])


def test_wishes_that_cannot_come_true_are_refused_up_front(cold: RunningStack) -> None:
    source, target = cold.active(), cold.standby()
    status, error = _refused(cold, source, target, target_tp=3)
    assert (status, error["code"], error["param"]) == (422, "heads_not_divisible", "target_tp")
    status, error = _refused(cold, source, target, target_tp=4, target_pp=512)
    assert (status, error["param"]) == (422, "target_pp")
    status, error = _refused(cold, source, target, migration_type="explode")
    assert (status, error["param"]) == (400, "migration_type")
    assert cold.status(target)["engine"]["state"] == "down"


def test_an_engine_that_cannot_come_up_is_a_failed_job_and_nothing_else(cold: RunningStack) -> None:
    source, target = cold.remember_roles()
    references, load = _slow_load(cold, source, salt=91)
    job = cold.finished(cold.migrate(source, target, target_model="/no/such/model")).job
    assert (job["state"], job["error_code"]) == ("failed", "instantiate_failed"), job
    assert "/no/such/model" in job["error"] and "target_model" in job["error"], job["error"]
    assert cold.status(target)["engine"]["state"] == "down"
    cold.until(lambda: _state(cold, target) == "standby")
    # Once more, and this time somebody changes his mind.
    job_id = cold.migrate(source, target)
    _instantiating(cold, target)
    assert cold.post(f"/api/v1/migrations/{job_id}/abort", {}).status_code == 200
    job = cold.finished(job_id).job
    assert job["state"] == "aborted", job
    cold.until(lambda: cold.status(target)["engine"]["state"] == "down")
    assert cold.instance_post(source, "/vllm_hi/faults", {}).status_code == 200
    answers = load.result(300)
    for reference, answer in zip(references, answers, strict=True):
        assert answer.error == ""
        if answer.request.repeatable:
            assert answer.token_ids == reference.token_ids
    assert cold.active().id == source.id


def test_a_source_that_dies_meanwhile_is_a_failed_job_and_the_target_a_standby(cold: RunningStack) -> None:
    source, target = cold.remember_roles()
    job_id = cold.migrate(source, target)
    _instantiating(cold, target)
    cold.kill(source)
    job = cold.finished(job_id).job
    assert (job["state"], job["error_code"]) == ("failed", "source_unreachable"), job
    cold.until(lambda: cold.status(target)["engine"]["state"] == "down")
    cold.restart(source)
    cold.until(lambda: _state(cold, source) == "active")
    assert _state(cold, target) == "standby"


def test_a_migration_brings_the_engine_up_and_the_source_is_gone(cold: RunningStack) -> None:
    source, target = cold.remember_roles()
    references, load = _slow_load(cold, source, salt=92)
    job_id = cold.migrate(source, target, migration_type="destroy_source")
    _instantiating(cold, target)
    migration = cold.finished(job_id)
    assert migration.job["state"] == "done", migration.job
    verdicts = cold.compared(references, load.result(300), migration)
    assert [verdict.name for verdict in verdicts if not verdict.exact or verdict.cut_at is None] == []
    events = cold.get(f"/api/v1/migrations/{job_id}/events")["results"]
    told = [event["data"]["instantiating"] for event in events if "instantiating" in event["data"]]
    assert told == sorted(told) and len(told) >= 4, events
    # All of it before the first request was touched.
    steps = [event["step"] for event in events if event["step"]]
    assert steps.index("b_instantiate_done") < steps.index("full_transfer")
    assert cold.wait(source.process.wait(), 60) == 0
    assert _state(cold, target) == "active"
    assert cold.run(mixed_requests(1, tokens=8, salt=93))[0].error == ""
    assert _ids_of(cold)[source.id] == "destroyed"


def _ids_of(stack: RunningStack) -> dict[str, str]:
    return {one.id: str(stack.get(f"/api/v1/instances/{one.id}")["status"]) for one in stack.stack.instances.values()}


@pytest.fixture(scope="module")
def both_cold(cold: RunningStack) -> Iterator[RunningStack]:
    """Both give their engine up when they have become a standby. After the other one, for the sake of memory."""
    cold.kill(cold.stack.instances["B"])
    yield from _stack("standby-cold", FIRST_PORT + 40, standby="cold")


def test_there_and_back_with_one_engine_at_a_time(both_cold: RunningStack) -> None:
    first, second = both_cold.remember_roles()
    for source, target in ((first, second), (second, first)):
        references, load = _slow_load(both_cold, source, salt=94)
        migration = both_cold.finished(both_cold.migrate(source, target, migration_type="preserve_source"))
        assert migration.job["state"] == "done", migration.job
        verdicts = both_cold.compared(references, load.result(300), migration)
        assert [verdict.name for verdict in verdicts if not verdict.exact or verdict.cut_at is None] == []
        both_cold.until(lambda source=source: both_cold.status(source)["engine"]["state"] == "down")
        both_cold.until(lambda source=source: _state(both_cold, source) == "standby")
        assert _state(both_cold, target) == "active"


def test_logs_of_the_engine_are_in_the_log_of_the_standby(cold: RunningStack) -> None:
    log = Path(cold.stack.logs / "instance-b.log").read_text()
    assert "brings up the engine" in log
    assert "Loading weights took" in log
