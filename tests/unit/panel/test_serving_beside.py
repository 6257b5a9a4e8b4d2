"""An instance that serves beside another one: its name, who may migrate to whom, and every way back."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from controlplane.redis import ROUTING_KEY, connection
from instances.models import Instance
from instances.services import (
    InstanceRefused,
    deregister,
    hand_service_over,
    heartbeat,
    publish_routing_table,
    register,
    reserve_for_migration,
    restore_after_migration,
    route_new_requests,
    serve_beside,
)
from tests.unit.panel.factories import MODEL, make_instance, make_pair

pytestmark = pytest.mark.django_db(transaction=True)

OWN = f"{MODEL}@hi-b"


def models() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(connection().get(ROUTING_KEY)))["models"]
    return found


def active() -> dict[str, list[str]]:
    return {name: model["active"] for name, model in models().items()}


def reserve(source: str, target: str) -> None:
    with transaction.atomic():
        reserve_for_migration(source, target)


def beside() -> None:
    make_pair()
    reserve("hi-a", "hi-b")
    serve_beside("hi-a", "hi-b")


def row(vllm_hi_id: str) -> tuple[str, str, bool, str]:
    one = Instance.objects.get(pk=vllm_hi_id)
    return one.status, one.instance_type, one.routed, one.alias


def test_new_requests_stay_and_the_target_gets_a_name_of_its_own() -> None:
    beside()
    assert (row("hi-a"), row("hi-b")) == (("active", "A", True, ""), ("active", "A", False, "hi-b"))
    assert models() == {
        MODEL: {"max_model_len": 2048, "active": ["hi-a"], "parent": None},
        OWN: {"max_model_len": 2048, "active": ["hi-b"], "parent": None, "served_as": MODEL},
    }
    assert Instance.objects.get(pk="hi-b").alias_name == OWN


def test_adapters_have_such_names_too() -> None:
    beside()
    heartbeat({"vllm_hi_id": "hi-b", "adapters": ["fr"]})
    assert active() == {MODEL: ["hi-a"], "fr": ["hi-b"], OWN: ["hi-b"], "fr@hi-b": ["hi-b"]}
    assert (models()["fr@hi-b"]["parent"], models()["fr@hi-b"]["served_as"]) == (OWN, "fr")


def test_it_stands_in_while_nobody_else_serves_the_model() -> None:
    beside()
    Instance.objects.filter(pk="hi-a").update(status="unreachable")
    publish_routing_table()
    assert active() == {MODEL: ["hi-b"], OWN: ["hi-b"]}


def test_a_silent_one_is_known_and_served_by_nobody() -> None:
    beside()
    Instance.objects.filter(pk="hi-b").update(status="unreachable")
    publish_routing_table()
    assert active() == {MODEL: ["hi-a"], OWN: []}


def test_everything_goes_back_and_the_name_is_gone() -> None:
    beside()
    reserve("hi-b", "hi-a")
    assert active() == {MODEL: ["hi-a"], OWN: ["hi-b"]}
    route_new_requests("hi-b", "hi-a")
    assert active() == {MODEL: ["hi-a"]}
    hand_service_over("hi-b", "hi-a", "standby")
    assert (row("hi-a"), row("hi-b")) == (("active", "A", True, ""), ("standby", "B", False, ""))


def test_a_way_back_that_fails_leaves_both_as_they_were() -> None:
    beside()
    before = row("hi-a"), row("hi-b")
    reserve("hi-b", "hi-a")
    route_new_requests("hi-b", "hi-a")
    restore_after_migration("hi-b", "hi-a")
    assert (row("hi-a"), row("hi-b")) == before
    assert active() == {MODEL: ["hi-a"], OWN: ["hi-b"]}


def test_more_requests_may_follow_and_some_may_come_back_while_both_serve() -> None:
    beside()
    before = row("hi-a"), row("hi-b")
    for source, target in (("hi-a", "hi-b"), ("hi-b", "hi-a")):
        reserve(source, target)
        serve_beside(source, target)
        assert (row("hi-a"), row("hi-b")) == before


def test_the_first_one_may_give_everything_to_the_second() -> None:
    beside()
    reserve("hi-a", "hi-b")
    route_new_requests("hi-a", "hi-b")
    hand_service_over("hi-a", "hi-b", "destroyed")
    # Whoever uses the name that it has goes on using it.
    assert row("hi-b") == ("active", "A", True, "hi-b")
    assert active() == {MODEL: ["hi-b"], OWN: ["hi-b"]}


def test_a_standby_that_takes_over_takes_the_name_over() -> None:
    beside()
    make_instance("hi-c", instance_type="B")
    reserve("hi-b", "hi-c")
    route_new_requests("hi-b", "hi-c")
    assert active() == {MODEL: ["hi-a"], OWN: ["hi-c"]}
    hand_service_over("hi-b", "hi-c", "standby")
    assert row("hi-c") == ("active", "A", False, "hi-b")
    # The next time hi-b needs another name.
    reserve("hi-a", "hi-b")
    serve_beside("hi-a", "hi-b")
    assert Instance.objects.get(pk="hi-b").alias_name == f"{MODEL}@hi-b-2"


def test_what_has_moved_before_a_failure_is_served_where_it_is() -> None:
    make_pair()
    reserve("hi-a", "hi-b")
    restore_after_migration("hi-a", "hi-b", target_serves=True)
    assert (row("hi-a"), row("hi-b")) == (("active", "A", True, ""), ("active", "A", False, "hi-b"))


def test_two_that_have_nothing_to_do_with_each_other_do_not_mix() -> None:
    make_instance("hi-a")
    make_instance("hi-c")
    with pytest.raises(InstanceRefused) as refused:
        reserve("hi-a", "hi-c")
    assert refused.value.code == "target_not_standby"
    assert row("hi-a") == ("active", "A", True, "")


@pytest.mark.parametrize("end", ["restarts", "says goodbye"])
def test_an_end_of_the_process_ends_the_name(registration: dict[str, Any], end: str) -> None:
    beside()
    port = Instance.objects.get(pk="hi-b").port
    if end == "restarts":
        register(registration | {"port": port, "instance_type": "B", "served_model_name": MODEL, "pid": 9})  # type: ignore[typeddict-item]
        assert row("hi-b") == ("standby", "B", False, "")
    else:
        deregister("hi-b")
    publish_routing_table()
    assert active() == {MODEL: ["hi-a"]}


# -- roles that are given by hand --------------------------------------------------------------------------------------


def given(vllm_hi_id: str, seconds_ago: float) -> None:
    Instance.objects.filter(pk=vllm_hi_id).update(role_given_at=timezone.now() - timedelta(seconds=seconds_ago))


def test_a_role_given_by_hand_is_followed() -> None:
    make_pair()
    given("hi-a", 100)
    given("hi-b", 100)
    heartbeat({"vllm_hi_id": "hi-b", "role": "active", "role_held_s": 1.0})
    heartbeat({"vllm_hi_id": "hi-a", "role": "standby", "role_held_s": 0.5})
    assert (row("hi-a"), row("hi-b")) == (("standby", "B", False, ""), ("active", "A", True, ""))
    assert active() == {MODEL: ["hi-b"]}


@pytest.mark.parametrize("beat", [{"role_held_s": 100.0}, {}])
def test_a_heartbeat_from_before_the_panels_own_decision_changes_nothing(beat: dict[str, float]) -> None:
    make_pair()
    given("hi-b", 10)
    heartbeat({"vllm_hi_id": "hi-b", "role": "active", **beat})  # type: ignore[typeddict-item]
    assert row("hi-b") == ("standby", "B", False, "")


def test_a_role_given_during_a_migration_is_the_migrations_business() -> None:
    make_pair()
    given("hi-b", 100)
    reserve("hi-a", "hi-b")
    heartbeat({"vllm_hi_id": "hi-b", "role": "active", "role_held_s": 0.0})
    assert row("hi-b")[0] == "migrating"
