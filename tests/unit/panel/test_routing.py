"""The routing table in a real Redis: content, versions that only grow, acknowledgements."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from django.db import transaction

from controlplane.redis import ACKS_KEY, ROUTING_CHANNEL, ROUTING_KEY, connection
from instances import routing
from instances.models import Instance, RoutingVersion
from instances.services import (
    deregister,
    hand_service_over,
    heartbeat,
    publish_routing_table,
    restore_after_migration,
    route_new_requests,
)
from tests.unit.panel.factories import MODEL, make_instance, make_pair


def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(connection().get(ROUTING_KEY)))
    return found


def active() -> list[str]:
    ids: list[str] = table()["models"][MODEL]["active"]
    return ids


@pytest.mark.django_db
def test_the_table_has_the_shape_of_the_protocol() -> None:
    make_pair()
    version = publish_routing_table()
    assert table() == {
        "version": version,
        "models": {MODEL: {"max_model_len": 2048, "active": ["hi-a"], "parent": None}},
        "instances": {
            "hi-a": {
                "base_url": "http://127.0.0.1:20000",
                "control_host": "127.0.0.1",
                "control_port": 9100,
                "served_model_name": MODEL,
                "role": "active",
            },
            "hi-b": {
                "base_url": "http://127.0.0.1:20001",
                "control_host": "127.0.0.1",
                "control_port": 9100,
                "served_model_name": MODEL,
                "role": "standby",
            },
        },
    }


@pytest.mark.django_db(transaction=True)
def test_an_adapter_is_a_model_on_the_instances_that_have_it() -> None:
    make_pair()
    for vllm_hi_id, adapters in (("hi-a", ["fr"]), ("hi-b", ["fr", "it"])):
        assert heartbeat({"vllm_hi_id": vllm_hi_id, "adapters": adapters})
    assert table()["models"] == {
        MODEL: {"max_model_len": 2048, "active": ["hi-a"], "parent": None},
        "fr": {"max_model_len": 2048, "active": ["hi-a"], "parent": MODEL},
        # Loaded on the standby only: known, and served by nobody yet.
        "it": {"max_model_len": 2048, "active": [], "parent": MODEL},
    }
    Instance.objects.filter(pk="hi-b").update(status="migrating")
    route_new_requests("hi-a", "hi-b")
    assert {name: model["active"] for name, model in table()["models"].items()} == {
        MODEL: ["hi-b"], "fr": ["hi-b"], "it": ["hi-b"],
    }  # fmt: skip
    version = table()["version"]
    assert heartbeat({"vllm_hi_id": "hi-b", "adapters": ["fr", "it"]})
    assert table()["version"] == version
    assert heartbeat({"vllm_hi_id": "hi-b", "adapters": ["fr"]})
    assert table()["models"].keys() == {MODEL, "fr"}


@pytest.mark.django_db
def test_the_new_version_is_announced() -> None:
    subscriber = connection().pubsub(ignore_subscribe_messages=True)
    subscriber.subscribe(ROUTING_CHANNEL)
    subscriber.get_message(timeout=1)
    version = publish_routing_table()
    message = subscriber.get_message(timeout=2)
    subscriber.close()
    assert message is not None
    assert message["data"] == str(version)


@pytest.mark.django_db(transaction=True)
def test_a_migration_moves_the_route() -> None:
    make_pair()
    Instance.objects.filter(pk="hi-a").update(status="draining")
    Instance.objects.filter(pk="hi-b").update(status="migrating")
    publish_routing_table()
    assert active() == ["hi-a"]
    version = route_new_requests("hi-a", "hi-b")
    assert (active(), table()["version"]) == (["hi-b"], version)
    restore_after_migration("hi-a", "hi-b")
    assert active() == ["hi-a"]
    route_new_requests("hi-a", "hi-b")
    hand_service_over("hi-a", "hi-b", "standby")
    assert active() == ["hi-b"]
    assert table()["instances"]["hi-a"]["role"] == "standby"
    assert set(table()["instances"]) == {"hi-a", "hi-b"}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("status", ["unreachable", "destroyed", "registering", "standby"])
def test_who_cannot_serve_gets_nothing(status: str) -> None:
    make_instance("hi-a", status=status)
    publish_routing_table()
    # The model is known as long as somebody may come back with it.
    known = status in ("unreachable", "standby")
    assert table()["models"] == ({MODEL: {"max_model_len": 2048, "active": [], "parent": None}} if known else {})
    assert list(table()["instances"]) == (["hi-a"] if known else [])


@pytest.mark.django_db(transaction=True)
def test_nothing_is_published_before_the_commit() -> None:
    make_pair()
    first = publish_routing_table()
    with transaction.atomic():
        deregister("hi-b")
        assert table()["version"] == first
    assert table()["version"] == first + 1
    assert list(table()["instances"]) == ["hi-a"]


@pytest.mark.django_db
def test_versions_grow_over_the_loss_of_redis_and_of_the_database() -> None:
    first = publish_routing_table()
    connection().flushdb()
    second = publish_routing_table()
    assert second > first
    RoutingVersion.objects.all().delete()
    assert publish_routing_table() > second


@pytest.mark.django_db
def test_an_older_table_never_replaces_a_newer_one() -> None:
    connection().set(ROUTING_KEY, json.dumps({"version": 10}))
    assert connection().eval(routing._SET_IF_NEWER, 1, ROUTING_KEY, "9", "{}", ROUTING_CHANNEL) == 0
    assert table() == {"version": 10}


@pytest.mark.django_db
def test_a_lost_table_is_published_again() -> None:
    publish_routing_table()
    assert routing.republish_if_stale() is False
    connection().flushdb()
    assert routing.republish_if_stale() is True
    assert routing.published_version() == 2


@pytest.mark.django_db
def test_without_redis_the_version_counts_on(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert publish_routing_table() == 1
    assert publish_routing_table() == 2
    assert routing.wait_for_acks(2, 0.1) == []


def acknowledge(worker: str, version: int, age_s: float = 0) -> None:
    connection().hset(ACKS_KEY, worker, json.dumps({"version": version, "seen_at": time.time() - age_s}))


def test_acknowledgements() -> None:
    assert routing.wait_for_acks(5, 0.0) == []
    acknowledge("new", 5)
    acknowledge("newer", 6)
    acknowledge("silent", 1, age_s=11)
    connection().hset(ACKS_KEY, "broken", "not json")
    assert routing.wait_for_acks(5, 0.0) == []
    acknowledge("behind", 4)
    assert routing.wait_for_acks(5, 0.1) == ["behind"]
