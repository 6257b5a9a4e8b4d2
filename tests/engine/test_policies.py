"""`keep_source_active`: what is selected moves, the source goes on, and everything can come back."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.exactness import compare
from benchmarks.streams import Answer, Request, run_requests, sized_request
from controlplane.serving import Instance
from tests.engine.conftest import Load, RunningStack
from tests.engine.request_filters import rule

KINDS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0, "logprobs": 2}]


def _requests(name: str, tokens: int, salt: int) -> list[Request]:
    return [sized_request(f"{name}-{number}", 200, tokens, salt + number, kind) for number, kind in enumerate(KINDS)]


def _models(stack: RunningStack) -> dict[str, Any]:
    return {model["id"]: model for model in stack.get("/v1/models")["data"]}


def _exact(references: list[Answer], load: Load) -> None:
    for reference, answer in zip(references, load.result(180), strict=True):
        verdict = compare(reference, answer)
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"


def _statuses(stack: RunningStack, *instances: Instance) -> list[tuple[str, bool]]:
    rows = {row["vllm_hi_id"]: row for row in stack.rows()}
    return [(rows[one.id]["status"], rows[one.id]["routed"]) for one in instances]


def test_what_is_selected_moves_and_comes_back(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    free = [stack.free_blocks(one) for one in (source, target)]
    requests = _requests("selected", 500, 9100)
    references = stack.run(requests)
    new = [sized_request("new", 60, 40, 9150, {"temperature": 0}), sized_request("by-name", 60, 40, 9151, {"seed": 3})]
    new_references = stack.run(new)
    with stack.faults(source, step_delay_s=0.04), stack.faults(target, step_delay_s=0.04):
        load = stack.load(requests)
        ids = [answer.stream_id for answer in load.live]
        migration = stack.finished(
            stack.migrate(
                source, target, migration_type="keep_source_active", selection={"request_ids": [ids[0], ids[2]]}
            )
        )
        assert migration.job["state"] == "done", migration.job
        assert {row["stream_id"]: row["outcome"] for row in migration.requests} == {ids[0]: "moved", ids[2]: "moved"}
        assert stack.streams_on(target) == {ids[0], ids[2]}
        assert stack.streams_on(source) == {ids[1]}
        assert _statuses(stack, source, target) == [("active", True), ("active", False)]

        # New requests stay on the source; the target has a name of its own.
        own = f"{stack.model}@{target.id}"
        assert _models(stack).keys() == {stack.model, own}
        assert _models(stack)[own]["root"] == stack.model
        usual = stack.load([new[0]], tokens=3)
        assert usual.live[0].stream_id in stack.streams_on(source)
        named: list[Answer] = []
        other = stack.begin(run_requests(stack.url, own, [new[1]], progress=named.extend))
        stack.until(lambda: bool(named) and len(named[0].token_ids) >= 3)
        assert named[0].stream_id in stack.streams_on(target)
        _exact([new_references[0]], usual)
        assert compare(new_references[1], other.result(60)[0]).exact

        # And back: the other one of the pair is still at work, and becomes a standby.
        back = stack.finished(stack.migrate(target, source, migration_type="preserve_source"))
        assert back.job["state"] == "done", back.job
        assert {row["stream_id"]: row["outcome"] for row in back.requests} == {ids[0]: "moved", ids[2]: "moved"}
        assert stack.streams_on(source) == set(ids)
    assert _statuses(stack, source, target) == [("active", True), ("standby", False)]
    assert _models(stack).keys() == {stack.model}
    _exact(references, load)
    stack.until(lambda: [stack.free_blocks(one) for one in (source, target)] == free)


def test_the_request_filter_keeps_what_it_does_not_let_go(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    requests = _requests("kept", 300, 9200)
    references = stack.run(requests)
    with stack.faults(source, step_delay_s=0.04), stack.faults(target, step_delay_s=0.04):
        load = stack.load(requests)
        ids = [answer.stream_id for answer in load.live]
        with rule(keeps=[ids[1]]):
            rows = stack.instance_get(source, "/vllm_hi/requests")["requests"]
            reasons = {row["stream_id"]: (row["reason"] or {}).get("code") for row in rows}
            assert reasons == {ids[0]: None, ids[1]: "filtered", ids[2]: None}
            migration = stack.finished(stack.migrate(source, target, migration_type="keep_source_active"))
        assert migration.job["state"] == "done", migration.job
        assert {row["stream_id"]: row["outcome"] for row in migration.requests} == {
            ids[0]: "moved", ids[1]: "filtered", ids[2]: "moved",
        }  # fmt: skip
        assert (migration.job["moved_requests"], migration.job["total_requests"]) == (2, 2)
        assert stack.streams_on(source) == {ids[1]}
        back = stack.finished(stack.migrate(target, source, migration_type="preserve_source"))
        assert back.job["state"] == "done", back.job
    _exact(references, load)


def test_a_request_filter_that_fails_stops_a_migration_before_anything_is_frozen(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    (request,) = [sized_request("fails", 100, 120, 9300, {"temperature": 0})]
    references = stack.run([request])
    with stack.faults(source, step_delay_s=0.04):
        load = stack.load([request])
        with rule(fails_with="no such tenant"):
            migration = stack.finished(stack.migrate(source, target))
            peer = {"vllm_hi_id": target.id, "host": "127.0.0.1", "control_port": 1, "base_url": target.base_url}
            started = stack.instance_post(
                source, "/vllm_hi/migration/start", {"job": "filter", "attempt": 1, "peer": peer}
            )
    assert (migration.job["state"], migration.job["error_code"]) == ("failed", "preflight_request_filter")
    assert "no such tenant" in migration.job["error"]
    assert "Correct the class" in migration.job["error"]
    error = started.json()["error"]
    assert (started.status_code, error["code"], error["param"]) == (
        422, "request_filter_failed", "VLLM_HI_REQUEST_FILTER",
    )  # fmt: skip
    assert not migration.requests and not migration.rounds
    assert _statuses(stack, source, target) == [("active", True), ("standby", False)]
    _exact(references, load)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"migration_type": "keep_it"}, 400, "invalid_request", "migration_type"),
        ({"selection": {"min_tokens": 1}}, 422, "selection_needs_keep_source_active", "selection"),
        ({"selection": {"min_token": 1}}, 400, "invalid_request", "selection.min_token"),
        (
            {"selection": {"api_key": "k"}, "migration_type": "keep_source_active"},
            400,
            "api_keys_off",
            "selection.api_key",
        ),
    ],
)
def test_a_wish_that_makes_no_sense_changes_nothing(
    stack: RunningStack, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    source, target = stack.remember_roles()
    answer = stack.post("/api/v1/migrations", {"source": source.id, "target": target.id, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), answer.text
    # The sentence says what to do instead.
    assert any(word in error["message"] for word in ("use ", "there are ", "leave ")), error["message"]
    assert _statuses(stack, source, target) == [("active", True), ("standby", False)]
