"""What the panel knows of standbys without an engine, and what it refuses to wish of them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from rest_framework.test import APIClient

from instances import services
from instances.models import Instance
from migrations_app.models import MigrationJob
from migrations_app.wishes import Wishes, problem, shown
from tests.unit.panel.factories import make_instance

DOWN = {"state": "down", "percent": 0, "phase": "", "error": ""}


def cold_pair(target: dict[str, Any] | None = None, **topology: Any) -> tuple[Instance, Instance]:
    facts = {"max_model_len": 2048, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 16}
    source = make_instance("hi-a", inference_params=facts)
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "device_kind": "cpu", "device_count": 8}
    fields: dict[str, Any] = {"instance_type": "B", "engine": DOWN, "factors": {}, "topology": {**sizes, **topology}}
    return source, make_instance("hi-b", **{**fields, **(target or {})})


@pytest.mark.parametrize(
    ("status", "engine", "shown"),
    [
        ("standby", DOWN, "standby"),
        ("standby", {}, "ready"),
        ("standby", {"state": "up"}, "ready"),
        ("standby", {"state": "instantiating", "percent": 40}, "instantiating 40 %"),
        ("migrating", {"state": "instantiating", "percent": 40}, "instantiating 40 %"),
        ("migrating", {"state": "up"}, "migrating"),
        ("standby", {"state": "stopping"}, "standby"),
        ("active", {"state": "up"}, "active"),
        ("draining", {"state": "up"}, "draining"),
        ("unreachable", {"state": "instantiating", "percent": 40}, "unreachable"),
    ],
)
def test_what_people_see(status: str, engine: dict[str, Any], shown: str) -> None:
    assert Instance(status=status, engine=engine).state == shown


def test_registration_and_heartbeats_tell_of_the_engine(
    db: None, instance_api: APIClient, operator_api: APIClient, registration: dict[str, Any]
) -> None:
    body = registration | {"instance_type": "B", "factors": {}, "engine": DOWN, "control_port": 0}
    vllm_hi_id = instance_api.post("/vllm_hi/register", body, format="json").json()["vllm_hi_id"]
    row = operator_api.get(f"/api/v1/instances/{vllm_hi_id}").json()
    assert (row["status"], row["state"], row["engine"]) == ("standby", "standby", DOWN)
    beat = {"vllm_hi_id": vllm_hi_id, "role": "standby", "engine": {"state": "instantiating", "percent": 60}}
    assert instance_api.post("/vllm_hi/heartbeat", beat, format="json").json()["known"]
    assert operator_api.get(f"/api/v1/instances/{vllm_hi_id}").json()["state"] == "instantiating 60 %"
    # The engine's process registers in the place of the standby.
    body |= {"pid": 4712, "engine": {"state": "up"}, "control_port": 9100}
    assert instance_api.post("/vllm_hi/register", body, format="json").json()["vllm_hi_id"] == vllm_hi_id
    assert operator_api.get(f"/api/v1/instances/{vllm_hi_id}").json()["state"] == "ready"


def test_an_engine_that_registers_in_a_migration_keeps_its_place_in_it(db: None, registration: dict[str, Any]) -> None:
    cold_pair({"status": "migrating", "resume_status": "standby", "port": 8000})
    services.register(registration | {"instance_type": "B", "pid": 4712})  # type: ignore[typeddict-item]
    target = Instance.objects.get(vllm_hi_id="hi-b")
    assert (target.status, target.resume_status, target.pid) == ("migrating", "standby", 4712)


@pytest.mark.parametrize(
    ("wishes", "code", "param", "sentence"),
    [
        (Wishes(tp=5), "heads_not_divisible", "target_tp", "choose a target_tp that divides 12 (1, 2, 3, 4, 6, 12)"),
        (Wishes(tp=3), "heads_not_divisible", "target_tp", "4 key-value heads, which 3 workers cannot share"),
        (Wishes(tp=12), "too_few_devices", "target_tp", "needs 12 cores and instance hi-b has 8"),
        (Wishes(tp=4, pp=4), "too_few_devices", "target_tp", "TP 4 x PP 4 needs 16 cores"),
        (Wishes(pp=9), "too_few_devices", "target_pp", "needs 9 cores"),
        (Wishes(tp=0), "invalid_request", "target_tp", "from 1 to 1024"),
        (Wishes(gpu_memory_utilization=0.0), "invalid_request", "target_gpu_memory_utilization", "above 0"),
        (Wishes(gpu_memory_utilization=float("nan")), "invalid_request", "target_gpu_memory_utilization", "above 0"),
        (Wishes(model="--trust-remote-code"), "invalid_request", "target_model", "may not begin with a dash"),
    ],
)
def test_wishes_that_cannot_come_true(db: None, wishes: Wishes, code: str, param: str, sentence: str) -> None:
    found = problem(*cold_pair(), wishes)
    assert found is not None
    assert (found.code, found.param) == (code, param)
    assert sentence in found.message and found.message.endswith(".")


def test_too_many_stages(db: None) -> None:
    found = problem(*cold_pair(device_count=64), Wishes(pp=17))
    assert found is not None
    assert (found.code, found.param) == ("too_few_layers", "target_pp")


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(tp=2), Wishes(tp=4, pp=2), Wishes(model="org/other")])
def test_wishes_that_can(db: None, wishes: Wishes) -> None:
    assert problem(*cold_pair(), wishes) is None


def test_sizes_are_wished_or_its_own_or_the_sources(db: None) -> None:
    source, target = cold_pair()
    source.topology["tensor_parallel_size"] = 2
    assert shown(source, target, Wishes()) == "TP 2, PP 1"
    assert shown(source, target, Wishes(tp=1, pp=2)) == "TP 1, PP 2"
    target.topology["tensor_parallel_size"] = 4
    assert shown(source, target, Wishes()) == "TP 4, PP 1"


def _on_gpus(ids_a: list[int], ids_b: list[int], memory: float) -> tuple[Instance, Instance]:
    gpus = {"device_kind": "cuda", "device_count": 2, "gpu_memory_utilization": memory}
    source, target = cold_pair(**gpus, visible_gpu_ids=ids_b)
    source.topology |= {**gpus, "visible_gpu_ids": ids_a}
    source.inference_params["start_s"] = 44.4
    source.requests = {"running": 3, "waiting": 1}
    return source, target


def test_one_accelerator_for_two_engines(db: None) -> None:
    found = problem(*_on_gpus([0], [0], 0.95), Wishes())
    assert found is not None
    assert (found.code, found.param) == ("shared_accelerator", "target")
    for part in ("hi-a and hi-b share GPU 0", "1.90", "about 44 s", "4 requests", "CUDA_VISIBLE_DEVICES"):
        assert part in found.message


def test_accelerators_that_are_not_in_the_way(db: None) -> None:
    source, target = _on_gpus([0], [1], 0.95)
    assert problem(source, target, Wishes()) is None
    target.topology["visible_gpu_ids"] = [0]
    target.ip = "10.0.0.9"
    assert problem(source, target, Wishes()) is None
    target.ip = source.ip
    assert problem(source, target, Wishes(gpu_memory_utilization=0.05)) is None
    source.topology["gpu_memory_utilization"] = 0.4
    assert problem(source, target, Wishes(gpu_memory_utilization=0.5)) is None


@pytest.mark.parametrize(
    ("wish", "status", "code", "param"),
    [
        ({"target_tp": 5}, 422, "heads_not_divisible", "target_tp"),
        ({"target_tp": 12}, 422, "too_few_devices", "target_tp"),
        ({"target_tp": 0}, 400, "invalid_request", "target_tp"),
        ({"target_tp": "two"}, 400, "invalid_request", "target_tp"),
        ({"target_pp": 100_000}, 400, "invalid_request", "target_pp"),
        ({"target_gpu_memory_utilization": 0}, 400, "invalid_request", "target_gpu_memory_utilization"),
        ({"target_gpu_memory_utilization": 1.5}, 400, "invalid_request", "target_gpu_memory_utilization"),
        ({"target_model": "-x"}, 400, "invalid_request", "target_model"),
        ({"migration_type": "explode"}, 400, "invalid_request", "migration_type"),
    ],
)
def test_bad_wishes_change_nothing(
    operator_api: APIClient, wish: dict[str, Any], status: int, code: str, param: str
) -> None:
    cold_pair()
    answer = operator_api.post("/api/v1/migrations", {"source": "hi-a", "target": "hi-b", **wish}, format="json")
    assert answer.status_code == status, answer.json()
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    seed = {"src_vllm_hi_id": "hi-a", "dst_vllm_hi_id": "hi-b", **wish}
    answer = operator_api.post("/vllm_hi/migrate", seed, format="json")
    assert (answer.status_code, answer.json()["code"], answer.json()["param"]) == (status, code, param)
    assert not MigrationJob.objects.exists()
    assert set(Instance.objects.values_list("status", flat=True)) == {"active", "standby"}


def test_good_wishes_are_kept_with_the_job(operator_api: APIClient) -> None:
    cold_pair()
    wish = {"target_tp": 2, "target_pp": 1, "target_gpu_memory_utilization": 0.5, "target_model": "org/other"}
    answer = operator_api.post("/api/v1/migrations", {"source": "hi-a", "target": "hi-b", **wish}, format="json")
    assert answer.status_code == 201, answer.json()
    job = MigrationJob.objects.get()
    assert (job.target_tp, job.target_pp, job.target_gpu_memory_utilization, job.target_model) == (
        2, 1, 0.5, "org/other",
    )  # fmt: skip


def test_wishes_of_a_target_with_an_engine_are_still_refused(operator_api: APIClient) -> None:
    cold_pair({"engine": {"state": "up"}})
    wish = {"source": "hi-a", "target": "hi-b", "target_tp": 2}
    answer = operator_api.post("/api/v1/migrations", wish, format="json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "topology_change_unsupported")


def test_the_form_asks_how_the_engine_shall_be(client: Client, operator: User) -> None:
    cold_pair()
    client.force_login(operator)
    page = reverse("migrate", args=["hi-a"])
    assert "target_tp" in client.get(page).content.decode()
    wish = {"target": "hi-b", "migration_type": "preserve_source", "mode": "rolling", "tn": 2, "action": "start"}
    answer = client.post(page, {**wish, "target_tp": 5})
    assert answer.status_code == 422
    assert "choose a target_tp that divides 12" in answer.content.decode()
    assert not MigrationJob.objects.exists()
    assert client.post(page, {**wish, "target_tp": 2, "target_gpu_memory_utilization": ""}).status_code == 302
    job = MigrationJob.objects.get()
    assert (job.target_tp, job.target_pp, job.target_gpu_memory_utilization) == (2, None, None)


def test_the_form_does_not_ask_where_all_have_an_engine(client: Client, operator: User) -> None:
    cold_pair({"engine": {"state": "up"}})
    client.force_login(operator)
    assert "target_tp" not in client.get(reverse("migrate", args=["hi-a"])).content.decode()
