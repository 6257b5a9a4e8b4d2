"""The REST API: who may call it, what it answers, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from instances.models import Instance
from migrations_app.choices import EventKind, Step
from migrations_app.events import record
from migrations_app.models import MigrationJob, MigrationRequest, MigrationRound
from tests.unit.panel.factories import make_instance, make_job, make_pair

pytestmark = pytest.mark.django_db

PAIR = {"source": "hi-a", "target": "hi-b"}
SEED_PAIR = {"src_vllm_hi_id": "hi-a", "dst_vllm_hi_id": "hi-b"}


def snapshot() -> Any:
    return list(Instance.objects.order_by("pk").values()), list(MigrationJob.objects.values())


# -- who may ----------------------------------------------------------------------------------------------------------

READS = [
    "/api/v1/instances",
    "/api/v1/instances/hi-a",
    "/api/v1/migrations",
    "/api/schema?format=json",
    "/vllm_hi/status",
    "/vllm_hi/instances",
    "/vllm_hi/migration/x/status",
]
WRITES = [("/api/v1/migrations", PAIR), ("/api/v1/migrations/preflight", PAIR), ("/vllm_hi/migrate", SEED_PAIR)]


@pytest.mark.parametrize("url", READS)
def test_reading_needs_a_login(anonymous_api: APIClient, viewer_api: APIClient, url: str) -> None:
    make_pair()
    response = anonymous_api.get(url)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "not_authenticated"
    assert viewer_api.get(url).status_code in (200, 404)


@pytest.mark.parametrize(("url", "body"), WRITES)
def test_writing_needs_an_operator(
    anonymous_api: APIClient, viewer_api: APIClient, instance_api: APIClient, url: str, body: dict[str, str]
) -> None:
    make_pair()
    before = snapshot()
    assert anonymous_api.post(url, body, format="json").status_code == 401
    # The join token is no operator's token.
    assert instance_api.post(url, body, format="json").status_code == 401
    refused = viewer_api.post(url, body, format="json")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "permission_denied"
    assert snapshot() == before


def test_a_session_works_and_needs_a_csrf_token(operator: User) -> None:
    make_pair()
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(operator, backend="django.contrib.auth.backends.ModelBackend")
    assert client.get("/api/v1/instances").status_code == 200
    assert client.post("/api/v1/migrations", PAIR, format="json").status_code == 403
    assert not MigrationJob.objects.exists()


def test_health_needs_no_login(anonymous_api: APIClient, settings: Any) -> None:
    assert anonymous_api.get("/healthz").json() == {"status": "ok"}
    assert anonymous_api.get("/readyz").json() == {"status": "ok", "database": True, "redis": True}
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    response = anonymous_api.get("/readyz")
    assert (response.status_code, response.json()["redis"]) == (503, False)


def test_tokens(anonymous_api: APIClient, viewer: User) -> None:
    answer = anonymous_api.post("/api/v1/tokens", {"username": "vera", "password": "a-long-password"}, format="json")
    assert answer.status_code == 201
    anonymous_api.credentials(HTTP_AUTHORIZATION=f"Bearer {answer.json()['token']}")
    assert anonymous_api.get("/api/v1/instances").status_code == 200
    anonymous_api.credentials(HTTP_AUTHORIZATION="Bearer wrong")
    response = anonymous_api.get("/api/v1/instances")
    assert (response.status_code, response.json()["error"]["code"]) == (401, "wrong_token")


def test_guessing_passwords_is_locked_out(anonymous_api: APIClient, viewer: User) -> None:
    bad = {"username": "vera", "password": "guess"}
    codes = [anonymous_api.post("/api/v1/tokens", bad, format="json").json()["error"]["code"] for _ in range(6)]
    assert codes[0] == "wrong_credentials"
    assert codes[-1] == "locked_out"
    right = {"username": "vera", "password": "a-long-password"}
    assert anonymous_api.post("/api/v1/tokens", right, format="json").status_code == 429


# -- starting a migration ---------------------------------------------------------------------------------------------


def test_an_operator_starts_a_migration(operator_api: APIClient) -> None:
    make_pair()
    wish = PAIR | {"migration_type": "preserve_source", "mode": "atomic"}
    response = operator_api.post("/api/v1/migrations", wish, format="json")
    assert response.status_code == 201
    job = response.json()
    assert job["mode"] == "atomic"
    assert (job["state"], job["source"], job["target"], job["created_by"]) == ("pending", "hi-a", "hi-b", "otto")
    assert Instance.objects.get(pk="hi-a").status == "draining"
    assert Instance.objects.get(pk="hi-b").status == "migrating"
    # Still routed to A: that changes when a worker begins.
    assert Instance.objects.get(pk="hi-a").routed
    assert operator_api.get(f"/api/v1/migrations/{job['id']}").json()["last_seq"] == 1


def change(pk: str, **fields: Any) -> None:
    Instance.objects.filter(pk=pk).update(**fields)


BAD = [
    # what is wrong, pair, status, code, param
    ({}, ("hi-x", "hi-b"), 404, "unknown_instance", "source"),
    ({}, ("hi-a", "hi-x"), 404, "unknown_instance", "target"),
    ({}, ("hi-a", "hi-a"), 400, "same_instance", "target"),
    ({"hi-b": {"served_model_name": "other"}}, ("hi-a", "hi-b"), 409, "model_mismatch", "target"),
    ({"hi-a": {"status": "draining"}}, ("hi-a", "hi-b"), 409, "migration_in_progress", "source"),
    ({"hi-b": {"status": "migrating"}}, ("hi-a", "hi-b"), 409, "migration_in_progress", "target"),
    ({}, ("hi-b", "hi-a"), 409, "source_not_active", "source"),
    ({"hi-b": {"status": "active"}}, ("hi-a", "hi-b"), 409, "target_not_standby", "target"),
    ({"hi-b": {"status": "unreachable", "resume_status": "standby"}}, ("hi-a", "hi-b"), 409, "instance_unreachable",
     "target"),
    ({"hi-a": {"status": "unreachable", "resume_status": "active"}}, ("hi-a", "hi-b"), 409, "instance_unreachable",
     "source"),
    ({"hi-b": {"status": "destroyed"}}, ("hi-a", "hi-b"), 409, "instance_destroyed", "target"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "pair", "status", "code", "param"), BAD)
def test_bad_wishes(
    operator_api: APIClient,
    changes: dict[str, dict[str, Any]],
    pair: tuple[str, str],
    status: int,
    code: str,
    param: str,
) -> None:
    make_pair()
    for pk, fields in changes.items():
        change(pk, **fields)
    before = snapshot()

    response = operator_api.post("/api/v1/migrations", {"source": pair[0], "target": pair[1]}, format="json")
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"].endswith(".")

    body = {"src_vllm_hi_id": pair[0], "dst_vllm_hi_id": pair[1]}
    response = operator_api.post("/vllm_hi/migrate", body, format="json")
    assert response.status_code == status
    seed = response.json()
    assert (seed["status"], seed["migration_id"]) == ("failed", None)
    assert seed["error"] == f"{code}: {error['message']}"
    assert seed["param"] == {"source": "src_vllm_hi_id", "target": "dst_vllm_hi_id"}[param]

    assert snapshot() == before


def test_an_instance_takes_part_in_one_migration_only(operator_api: APIClient) -> None:
    make_job()
    make_instance("hi-c", instance_type="B")
    make_instance("hi-d")
    for pair in (("hi-a", "hi-c"), ("hi-d", "hi-b"), ("hi-b", "hi-c"), ("hi-d", "hi-a")):
        response = operator_api.post("/api/v1/migrations", {"source": pair[0], "target": pair[1]}, format="json")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "migration_in_progress"), pair
    assert MigrationJob.objects.count() == 1


def test_even_if_its_status_was_lost(operator_api: APIClient) -> None:
    """The rows of the live jobs decide, whatever the inventory says."""
    make_job()
    change("hi-a", status="standby")
    change("hi-b", status="active")
    response = operator_api.post("/api/v1/migrations", {"source": "hi-b", "target": "hi-a"}, format="json")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "migration_in_progress")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"source": "hi-a"}, 400, "invalid_request", "target"),
        (PAIR | {"migration_type": "explode"}, 400, "invalid_request", "migration_type"),
        (PAIR | {"mode": "magic"}, 400, "invalid_request", "mode"),
        (PAIR | {"selection": {"min_tokens": 1}}, 422, "selection_needs_keep_source_active", "selection"),
        (PAIR | {"tn": 0}, 400, "invalid_request", "tn"),
        (PAIR | {"tn": "many"}, 400, "invalid_request", "tn"),
        (PAIR | {"drain_deadline_s": -1}, 400, "invalid_request", "drain_deadline_s"),
        (PAIR | {"drain_deadline_s": 86401}, 400, "invalid_request", "drain_deadline_s"),
        (PAIR | {"drain_deadline_s": "soon"}, 400, "invalid_request", "drain_deadline_s"),
        (["hi-a"], 400, "invalid_request", None),
    ],
)
def test_bad_bodies(operator_api: APIClient, body: Any, status: int, code: str, param: str | None) -> None:
    make_pair()
    before = snapshot()
    response = operator_api.post("/api/v1/migrations", body, format="json")
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert snapshot() == before


@pytest.mark.parametrize(
    ("wish", "deadline"), [({}, 77.0), ({"drain_deadline_s": None}, 77.0), ({"drain_deadline_s": 0}, 0)]
)
def test_the_deadline_for_what_finds_no_room(
    operator_api: APIClient, settings: Any, wish: dict[str, Any], deadline: float
) -> None:
    settings.VLLM_HI_DRAIN_DEADLINE_S = 77.0
    make_pair()
    response = operator_api.post("/api/v1/migrations", PAIR | wish, format="json")
    assert (response.status_code, response.json()["drain_deadline_s"]) == (201, deadline)


def test_a_body_that_is_no_json(operator_api: APIClient) -> None:
    response = operator_api.post("/api/v1/migrations", data="{", content_type="application/json")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("wish", "status", "code"),
    [
        ({"target_tp": 2}, 422, "topology_change_unsupported"),
        ({"target_pp": 2}, 422, "topology_change_unsupported"),
        ({"target_model": "other"}, 409, "model_mismatch"),
        ({"target_tp": 1, "target_pp": 1, "target_gpu_memory_utilization": 0.9, "target_model": "smollm2"}, 200, None),
    ],
)
def test_wishes_of_the_seed(operator_api: APIClient, wish: dict[str, Any], status: int, code: str | None) -> None:
    make_pair()
    response = operator_api.post("/vllm_hi/migrate", SEED_PAIR | wish, format="json")
    assert response.status_code == status
    assert response.json().get("code") == code


# -- looking at it ----------------------------------------------------------------------------------------------------


def test_the_seeds_calls_from_start_to_status(operator_api: APIClient) -> None:
    make_pair()
    assert operator_api.get("/vllm_hi/status").json() == {
        "active": True, "package": "vllm-hi", "role": "scheduler", "instances": 2,
    }  # fmt: skip
    listed = operator_api.get("/vllm_hi/instances").json()
    assert [(row["vllm_hi_id"], row["instance_type"], row["status"]) for row in listed] == [
        ("hi-a", "A", "active"),
        ("hi-b", "B", "standby"),
    ]
    assert set(listed[0]) == {
        "vllm_hi_id", "ip", "port", "instance_type", "served_model_name", "inference_params", "status",
        "registered_at", "topology", "data_port",
    }  # fmt: skip
    started = operator_api.post("/vllm_hi/migrate", SEED_PAIR, format="json").json()
    assert (started["status"], started["error"]) == ("in_progress", None)
    job = MigrationJob.objects.get(id=started["migration_id"])
    assert (job.migration_type, job.tn) == ("destroy_source", 2)
    record(job.id, EventKind.STEP, step=Step.VALIDATE)
    record(job.id, EventKind.ROUND, step=Step.FULL_TRANSFER_DONE, round_index=0, data_size_bytes=4096, block_count=2)
    status = operator_api.get(f"/vllm_hi/migration/{job.id}/status").json()
    assert set(status) == {
        "migration_id", "status", "start_time", "end_time", "duration", "new_active_instance", "error", "current_step",
        "step_history", "moved_requests", "total_requests", "requests",
    }  # fmt: skip
    assert status["current_step"] == "full_transfer_done"
    assert set(status["step_history"][0]) == {"step", "timestamp"}
    full = status["step_history"][1]
    assert (full["round_idx"], full["data_size_bytes"], full["block_count"]) == (0, 4096, 2)


@pytest.mark.parametrize("migration_id", ["x", "00000000-0000-0000-0000-000000000000"])
def test_an_unknown_migration(operator_api: APIClient, migration_id: str) -> None:
    response = operator_api.get(f"/vllm_hi/migration/{migration_id}/status")
    assert (response.status_code, response.json()) == (404, {"error": "migration_not_found"})
    response = operator_api.get("/api/v1/migrations/00000000-0000-0000-0000-000000000000")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_events_rounds_and_requests(viewer_api: APIClient) -> None:
    job = make_job()
    for number in range(3):
        record(job.id, EventKind.STEP, message=str(number))
    MigrationRound.objects.create(job=job, round_index=0, kind="full", blocks=7, bytes=70, duration_ms=5)
    MigrationRequest.objects.create(
        job=job, request_id="r1", outcome="moved", gap_ms=30, itl_ms=10, tail_bytes=5, kv_blocks=7
    )
    base = f"/api/v1/migrations/{job.id}"
    assert [event["seq"] for event in viewer_api.get(f"{base}/events").json()["results"]] == [1, 2, 3, 4]
    assert [event["seq"] for event in viewer_api.get(f"{base}/events?after=3").json()["results"]] == [4]
    refused = viewer_api.get(f"{base}/events?after=x")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    assert [row["blocks"] for row in viewer_api.get(f"{base}/rounds").json()["results"]] == [7]
    assert [row["request_id"] for row in viewer_api.get(f"{base}/requests").json()["results"]] == ["r1"]
    detail = viewer_api.get(base).json()
    assert (detail["bytes_total"], detail["round_count"]) == (75, 1)
    assert detail["gaps"] == {"gap_ms_p50": 30, "gap_ms_p99": 30, "gap_in_itl_p50": 3, "gap_in_itl_p99": 3}


def test_lists_cost_a_constant_number_of_queries(viewer_api: APIClient, django_assert_num_queries: Any) -> None:
    def jobs(count: int) -> None:
        for _ in range(count):
            MigrationJob.objects.create(source_id="hi-a", target_id="hi-b", state="done")

    make_pair()
    jobs(1)
    viewer_api.get("/api/v1/migrations")
    with django_assert_num_queries(4):
        assert viewer_api.get("/api/v1/migrations").json()["count"] == 1
    jobs(5)
    with django_assert_num_queries(4):
        assert len(viewer_api.get("/api/v1/migrations?state=done&instance=hi-a").json()["results"]) == 6
    assert viewer_api.get("/api/v1/migrations?state=failed").json()["count"] == 0


def test_an_instance_that_does_not_answer(viewer_api: APIClient) -> None:
    make_instance("hi-a", port=1)
    response = viewer_api.get("/api/v1/instances/hi-a/requests")
    assert (response.status_code, response.json()["error"]["code"]) == (502, "unreachable")


# -- stopping it ------------------------------------------------------------------------------------------------------


def test_a_pending_migration_is_aborted_at_once(operator_api: APIClient) -> None:
    job = make_job()
    answer = operator_api.post(f"/api/v1/migrations/{job.id}/abort").json()
    assert (answer["state"], answer["error_code"]) == ("aborted", "aborted")
    assert Instance.objects.get(pk="hi-a").status == "active"
    assert Instance.objects.get(pk="hi-b").status == "standby"
    again = operator_api.post(f"/api/v1/migrations/{job.id}/abort")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "migration_over")


def test_a_running_migration_is_asked_to_stop(operator_api: APIClient, viewer_api: APIClient) -> None:
    job = make_job()
    MigrationJob.objects.update(state="copying", owner="somebody")
    assert viewer_api.post(f"/api/v1/migrations/{job.id}/abort").status_code == 403
    for _ in range(2):
        answer = operator_api.post(f"/api/v1/migrations/{job.id}/abort").json()
        assert (answer["state"], answer["abort_requested"]) == ("copying", True)
    assert job.events.filter(message="Abort requested by otto").count() == 1


def test_the_end_cannot_be_aborted(operator_api: APIClient) -> None:
    job = make_job()
    MigrationJob.objects.update(state="finishing", owner="somebody")
    response = operator_api.post(f"/api/v1/migrations/{job.id}/abort")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "past_point_of_no_return")
    job.refresh_from_db()
    assert not job.abort_requested


def test_an_error_of_the_panel_tells_no_details(operator_api: APIClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("instances.selectors.list_instances", burst)
    response = operator_api.get("/vllm_hi/instances")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.content.decode()
