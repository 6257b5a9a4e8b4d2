"""What instances tell the panel, and what it makes of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from instances.models import Instance
from instances.services import mark_silent_unreachable, register
from tests.unit.panel.factories import make_instance, make_job

pytestmark = pytest.mark.django_db


def post(api: APIClient, call: str, body: Any) -> Any:
    return api.post(f"/vllm_hi/{call}", body, format="json")


@pytest.mark.parametrize(("kind", "status", "routed"), [("A", "active", True), ("B", "standby", False)])
def test_the_type_decides_the_first_role(
    instance_api: APIClient, registration: dict[str, Any], kind: str, status: str, routed: bool
) -> None:
    response = post(instance_api, "register", registration | {"instance_type": kind})
    assert response.status_code == 200
    answer = response.json()
    assert (answer["success"], answer["error"]) == (True, None)
    instance = Instance.objects.get(pk=answer["vllm_hi_id"])
    assert (instance.status, instance.instance_type, instance.routed) == (status, kind, routed)
    assert instance.base_url == "http://127.0.0.1:8000"
    assert instance.capabilities == {"supported": True, "missing_probes": []}


def test_the_same_address_keeps_its_id(instance_api: APIClient, registration: dict[str, Any]) -> None:
    first = post(instance_api, "register", registration).json()["vllm_hi_id"]
    again = post(instance_api, "register", registration | {"pid": 5000, "served_model_name": "other"}).json()
    other = post(instance_api, "register", registration | {"port": 8001}).json()["vllm_hi_id"]
    assert again["vllm_hi_id"] == first != other
    assert Instance.objects.get(pk=first).served_model_name == "other"


def test_the_seed_fields_are_enough(instance_api: APIClient, registration: dict[str, Any]) -> None:
    names = ["ip", "port", "instance_type", "served_model_name", "inference_params", "topology", "data_port"]
    response = post(instance_api, "register", {name: registration[name] for name in names})
    assert response.json()["success"] is True


def test_an_id_survives_the_loss_of_the_panels_rows(instance_api: APIClient, registration: dict[str, Any]) -> None:
    assert post(instance_api, "register", registration | {"vllm_hi_id": "hi-old"}).json()["vllm_hi_id"] == "hi-old"
    # Somebody else's id is not given away.
    taken = post(instance_api, "register", registration | {"vllm_hi_id": "hi-old", "port": 8001}).json()["vllm_hi_id"]
    assert taken != "hi-old"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"port": 0}, "port"),
        ({"port": 70000}, "port"),
        ({"port": "x"}, "port"),
        ({"ip": "a b"}, "ip"),
        ({"ip": "http://x/"}, "ip"),
        ({"instance_type": "C"}, "instance_type"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"topology": "x"}, "topology"),
        ({"vllm_hi_id": "../x"}, "vllm_hi_id"),
    ],
)
def test_bad_fields_are_named(
    instance_api: APIClient, registration: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    response = post(instance_api, "register", registration | change)
    assert response.status_code == 400
    answer = response.json()
    assert answer["success"] is False
    assert list(answer["fields"]) == [field]
    assert field in answer["error"]
    assert not Instance.objects.exists()


def test_a_missing_field_is_named(instance_api: APIClient, registration: dict[str, Any]) -> None:
    del registration["served_model_name"]
    assert list(post(instance_api, "register", registration).json()["fields"]) == ["served_model_name"]


def test_another_protocol_is_refused(instance_api: APIClient, registration: dict[str, Any]) -> None:
    response = post(instance_api, "register", registration | {"protocol_version": 1})
    assert response.status_code == 409
    assert response.json()["error"].startswith("protocol_mismatch: ")
    assert not Instance.objects.exists()


@pytest.mark.parametrize("header", ["", "Bearer wrong", "Bearer ", "Token join-token-for-tests", "Bearer töken"])
@pytest.mark.parametrize("call", ["register", "heartbeat", "deregister"])
def test_a_wrong_token(anonymous_api: APIClient, registration: dict[str, Any], header: str, call: str) -> None:
    if header:
        anonymous_api.credentials(HTTP_AUTHORIZATION=header)
    response = post(anonymous_api, call, registration)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "wrong_token"
    assert not Instance.objects.exists()


def test_without_a_configured_token_nobody_gets_in(
    anonymous_api: APIClient, registration: dict[str, Any], settings: Any
) -> None:
    settings.VLLM_HI_TOKEN = ""
    anonymous_api.credentials(HTTP_AUTHORIZATION="Bearer ")
    assert post(anonymous_api, "register", registration).status_code == 401


def test_an_operators_token_does_not_register(operator_api: APIClient, registration: dict[str, Any]) -> None:
    assert post(operator_api, "register", registration).status_code == 401


def test_heartbeats_bring_numbers(instance_api: APIClient) -> None:
    make_instance("hi-a")
    body = {"vllm_hi_id": "hi-a", "role": "active", "kv": {"total_blocks": 10, "free_blocks": 4}, "control_port": 77}
    assert post(instance_api, "heartbeat", body).json() == {"success": True, "known": True}
    instance = Instance.objects.get(pk="hi-a")
    assert (instance.kv_used_fraction, instance.control_port, instance.is_alive) == (0.6, 77, True)


def test_heartbeats_bring_adapters(instance_api: APIClient, registration: dict[str, Any]) -> None:
    instance = register(registration | {"adapters": ["fr"]})  # type: ignore[arg-type]
    assert instance.adapters == ["fr"]
    body = {"vllm_hi_id": instance.pk, "adapters": ["fr", "it"], "factors": {"lora": "fr=aa11, it=bb22"}}
    assert post(instance_api, "heartbeat", body).json()["known"]
    instance.refresh_from_db()
    assert (instance.adapters, instance.factors) == (["fr", "it"], {"lora": "fr=aa11, it=bb22"})
    # An older plugin says nothing about them.
    post(instance_api, "heartbeat", {"vllm_hi_id": instance.pk})
    instance.refresh_from_db()
    assert instance.adapters == ["fr", "it"]
    assert post(instance_api, "heartbeat", body | {"adapters": "fr"}).status_code == 400


def test_an_unknown_instance_shall_register_again(instance_api: APIClient) -> None:
    make_instance("hi-gone", status="destroyed")
    for vllm_hi_id in ("hi-never", "hi-gone"):
        assert post(instance_api, "heartbeat", {"vllm_hi_id": vllm_hi_id}).json()["known"] is False


def test_an_instance_on_its_way_out_does_not_come_back(instance_api: APIClient) -> None:
    make_instance("hi-a", status="destroyed", routed=False)
    beat = {"vllm_hi_id": "hi-a", "role": "destroyed"}
    assert post(instance_api, "heartbeat", beat).json() == {"success": True, "known": True}
    assert Instance.objects.get(pk="hi-a").status == "destroyed"


def test_deregistering_takes_an_instance_out(instance_api: APIClient) -> None:
    make_instance("hi-a")
    assert post(instance_api, "deregister", {"vllm_hi_id": "hi-a"}).json() == {"success": True}
    instance = Instance.objects.get(pk="hi-a")
    assert (instance.status, instance.routed) == ("destroyed", False)


def test_the_panels_view_of_the_role_stands_within_a_process(registration: dict[str, Any]) -> None:
    """A became a standby by a migration and registers again, for the panel had been away."""
    instance = register(registration)  # type: ignore[arg-type]
    Instance.objects.update(instance_type="B", status="standby", routed=False, role_confirmed=True)
    register(registration)  # type: ignore[arg-type]
    instance.refresh_from_db()
    assert (instance.instance_type, instance.status, instance.routed) == ("B", "standby", False)


def test_a_new_process_comes_up_in_its_type_and_its_first_heartbeat_wins(
    instance_api: APIClient, registration: dict[str, Any]
) -> None:
    instance = register(registration)  # type: ignore[arg-type]
    Instance.objects.update(instance_type="B", status="standby", routed=False, role_confirmed=True)
    register(registration | {"pid": 1})  # type: ignore[arg-type]
    instance.refresh_from_db()
    assert (instance.instance_type, instance.status) == ("A", "active")
    for role in ("standby", "active"):
        post(instance_api, "heartbeat", {"vllm_hi_id": instance.pk, "role": role})
        instance.refresh_from_db()
        # Only the first one counts.
        assert (instance.instance_type, instance.status, instance.routed) == ("B", "standby", False)


def test_a_process_that_restarts_in_a_migration_stays_reserved(registration: dict[str, Any]) -> None:
    job = make_job()
    Instance.objects.filter(pk="hi-a").update(ip="127.0.0.1", port=8000)
    register(registration | {"pid": 99999})  # type: ignore[arg-type]
    job.source.refresh_from_db()
    assert (job.source.status, job.source.pid) == ("draining", 99999)


def test_silence_makes_unreachable_and_a_heartbeat_brings_back(instance_api: APIClient) -> None:
    old = timezone.now() - timedelta(seconds=7)
    for vllm_hi_id, status in (("hi-a", "active"), ("hi-b", "standby"), ("hi-m", "migrating")):
        make_instance(vllm_hi_id, status=status, last_heartbeat_at=old)
    make_instance("hi-fresh")
    make_instance("hi-gone", status="destroyed", last_heartbeat_at=old)
    assert sorted(mark_silent_unreachable()) == ["hi-a", "hi-b", "hi-m"]
    assert mark_silent_unreachable() == []
    assert Instance.objects.get(pk="hi-m").is_busy
    for vllm_hi_id, status in (("hi-a", "active"), ("hi-b", "standby"), ("hi-m", "migrating")):
        assert not Instance.objects.get(pk=vllm_hi_id).is_alive
        post(instance_api, "heartbeat", {"vllm_hi_id": vllm_hi_id, "role": "active"})
        assert Instance.objects.get(pk=vllm_hi_id).status == status
