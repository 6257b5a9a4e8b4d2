"""Whole jobs of `keep_source_active` against instances that answer over real HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.redis import ROUTING_KEY, connection
from instances.routing import publish_routing_table
from migrations_app import presentation, selectors
from migrations_app.choices import RequestOutcome
from migrations_app.models import MigrationJob
from migrations_app.moving import HANDOVER_TRIES
from migrations_app.selection import Selection
from migrations_app.services import create_migration
from tests.integration.carried_out import BEFORE, active, carry_out, fail, outcomes, states
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body

BESIDE = {"hi-a": ("active", "A", True), "hi-b": ("active", "A", False)}


def keep(pair: Pair, **conditions: Any) -> MigrationJob:
    return pair.job(migration_type="keep_source_active", selection=Selection.of(conditions))


def names() -> dict[str, list[str]]:
    table = json.loads(str(connection().get(ROUTING_KEY)))
    return {name: model["active"] for name, model in table["models"].items()}


def test_only_what_is_selected_moves(pair: Pair) -> None:
    for number, blocks in enumerate((5, 90, 5, 80)):
        pair.a.add_request(f"r{number}", blocks=blocks)
    publish_routing_table()
    seen: list[list[str]] = []
    for call in ("start", "round", "handover"):
        pair.a.faults[call] = lambda _: seen.append(active())
    job = carry_out(keep(pair, min_kv_blocks=80))
    assert (job.state, job.error, outcomes(job)) == ("done", "", {"r1": "moved", "r3": "moved"})
    assert set(pair.a.requests) == {"r0", "r2"}
    assert pair.roles() == BESIDE
    # The route for new requests was never switched.
    assert len(seen) >= 3 and all(ids == ["hi-a"] for ids in seen)
    assert names() == {"smollm2": ["hi-a"], "smollm2@hi-b": ["hi-b"]}
    assert (pair.a.role, pair.b.role) == ("active", "active")
    assert not pair.a.named("convert_to_b") and not pair.a.named("destroy")
    assert [body["request_ids"] for body in pair.a.named("attach")] == [["r1", "r3"]]
    assert states(job)[-3:] == ["draining", "finishing", "done"]
    assert job.events.filter(message__contains="new requests reach it as smollm2@hi-b").exists()
    sentence = presentation.result(job, presentation.numbers([], selectors.request_rows(job)))["sentence"]
    assert "hi-a goes on with the others" in sentence
    assert selectors.seed_status(job)["status"] == "success"


def test_requests_that_come_later_are_not_followed(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.faults["handover"] = lambda _: pair.a.add_request("later")
    job = carry_out(keep(pair))
    assert (job.state, outcomes(job)) == ("done", {"r1": "moved"})
    assert set(pair.a.requests) == {"later"}


def test_and_back(pair: Pair) -> None:
    for number in range(3):
        pair.a.add_request(f"r{number}")
    assert carry_out(keep(pair, request_ids=["s-r0", "r2"])).state == "done"
    assert set(pair.b.requests) == {"r0", "r2"}
    some = create_migration("hi-b", "hi-a", "keep_source_active", selection=Selection(request_ids=("r0",)))
    assert carry_out(some).state == "done"
    assert (set(pair.b.requests), pair.roles()) == ({"r2"}, BESIDE)
    back = carry_out(create_migration("hi-b", "hi-a", "preserve_source"))
    assert (back.state, set(pair.a.requests)) == ("done", {"r0", "r1", "r2"})
    assert pair.roles() == BEFORE
    assert names() == {"smollm2": ["hi-a"]}


def test_what_cannot_move_is_said_and_not_waited_for(pair: Pair, settings: Any) -> None:
    settings.VLLM_HI_DRAIN_DEADLINE_S = 60.0
    pair.a.add_request("r1")
    pair.a.add_request("stuck", reason=("multimodal", "Multimodal requests are not moved yet."))
    job = carry_out(keep(pair))
    assert (job.state, job.error_code) == ("partial", "requests_stayed")
    assert job.error == (
        "1 of the selected requests stays on hi-a (Multimodal requests are not moved yet); new requests stay on hi-a."
    )
    assert outcomes(job) == {"r1": "moved", "stuck": "refused"}
    assert pair.roles() == BESIDE
    assert names() == {"smollm2": ["hi-a"], "smollm2@hi-b": ["hi-b"]}


def test_one_that_stays_whenever_it_is_tried_does_not_hold_up_the_job(pair: Pair, settings: Any) -> None:
    settings.VLLM_HI_DRAIN_DEADLINE_S = 60.0
    pair.a.add_request("r1")
    row = {"request_id": "r1", "outcome": "stayed", "code": "no_slot", "message": "B has no free slot."}
    pair.a.do_handover = lambda body: {"results": [row]}  # type: ignore[method-assign]
    job = carry_out(keep(pair))
    # Nothing moved: nothing has changed.
    assert (job.state, job.error_code, outcomes(job)) == ("failed", "requests_stayed", {"r1": "stayed"})
    assert len(pair.a.named("handover")) == HANDOVER_TRIES
    assert pair.roles() == BEFORE


def test_what_the_request_filter_keeps_was_never_to_move(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("kept", reason=("filtered", "The request filter m.C keeps the request here."))
    job = carry_out(keep(pair))
    assert (job.state, outcomes(job)) == ("done", {"r1": "moved", "kept": RequestOutcome.FILTERED})
    assert (job.moved_requests, job.total_requests) == (1, 1)
    assert presentation.numbers([], selectors.request_rows(job))["others"] == "1 kept by the filter"


def test_with_another_policy_it_holds_up_the_drain(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("kept", reason=("filtered", "The request filter m.C keeps the request here."))
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("partial", "drain_deadline")
    assert (outcomes(job), job.request_rows.get(request_id="kept").code) == (
        {"r1": "moved", "kept": "refused"}, "filtered",
    )  # fmt: skip


@pytest.mark.parametrize("reason", ["filtered", None])
def test_a_choice_of_nothing_fails_before_anything_is_touched(pair: Pair, reason: str | None) -> None:
    pair.a.add_request("r1", reason=(reason, "The request filter m.C keeps the request here.") if reason else None)
    job = carry_out(keep(pair) if reason else keep(pair, min_kv_blocks=1000))
    expected = "nothing_selected" if reason else "preflight_selection"
    assert (job.state, job.error_code) == ("failed", expected)
    assert not pair.a.named("attach")
    assert pair.roles() == BEFORE


def test_a_request_filter_that_does_not_work_fails_the_job_first(pair: Pair) -> None:
    pair.a.add_request(
        "r1", reason=("request_filter_failed", "m.C.should_migrate failed: KeyError. Correct the class.")
    )
    pair.a.do_status = lambda body, ask=pair.a.do_status: ask(body) | {"request_filter": "m.C"}  # type: ignore[method-assign, misc]
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("failed", "preflight_request_filter")
    assert "Correct the class" in job.error
    assert not pair.a.named("start")
    assert pair.roles() == BEFORE


def test_an_id_that_has_ended_is_written_down(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = carry_out(keep(pair, request_ids=["r1", "gone"]))
    assert (job.state, outcomes(job)) == ("done", {"r1": "moved", "gone": "finished"})
    assert job.request_rows.get(request_id="gone").code == "unknown_request"


def test_an_empty_source_makes_the_target_reachable(pair: Pair) -> None:
    job = carry_out(keep(pair))
    assert (job.state, job.total_requests, pair.roles()) == ("done", 0, BESIDE)


def test_an_abort_before_anything_moved(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.faults["round"] = lambda _: MigrationJob.objects.update(abort_requested=True) and None
    job = carry_out(keep(pair))
    assert (job.state, pair.roles(), names()) == ("aborted", BEFORE, {"smollm2": ["hi-a"]})


def test_an_abort_after_some_have_moved_leaves_them_reachable(pair: Pair) -> None:
    for number in range(6):
        pair.a.add_request(f"r{number}")

    def after_the_first_wave(_: Body) -> None:
        if len(pair.a.named("handover")) == 1:
            MigrationJob.objects.update(abort_requested=True)

    pair.a.faults["handover"] = after_the_first_wave
    job = carry_out(keep(pair))
    assert (job.state, job.moved_requests) == ("aborted", 4)
    assert pair.roles() == BESIDE
    assert pair.b.role == "active"
    assert names() == {"smollm2": ["hi-a"], "smollm2@hi-b": ["hi-b"]}
    # And they can come back.
    assert carry_out(create_migration("hi-b", "hi-a", "preserve_source")).state == "done"
    assert (len(pair.a.requests), pair.roles()) == (6, BEFORE)


def test_a_failure_of_the_way_back_changes_nothing(pair: Pair) -> None:
    pair.a.add_request("r1")
    assert carry_out(keep(pair)).state == "done"
    pair.b.faults["round"] = fail()
    job = carry_out(create_migration("hi-b", "hi-a", "preserve_source"))
    assert (job.state, pair.roles(), set(pair.b.requests)) == ("failed", BESIDE, {"r1"})
    assert names() == {"smollm2": ["hi-a"], "smollm2@hi-b": ["hi-b"]}
