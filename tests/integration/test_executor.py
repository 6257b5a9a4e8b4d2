"""Whole migrations that end well, against instances that answer over real HTTP."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from controlplane.redis import ACKS_KEY, ROUTING_KEY, connection
from migrations_app import moving, selectors
from tests.integration.carried_out import (
    BEFORE,
    SWAPPED,
    active,
    carry_out,
    outcomes,
    states,
)
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body


def test_everything_moves(pair: Pair) -> None:
    for number in range(6):
        pair.a.add_request(f"r{number}")
    job = carry_out(pair.job())
    assert (job.state, job.error) == ("done", "")
    assert (job.total_requests, job.moved_requests) == (6, 6)
    assert states(job) == [
        "pending", "preflight", "attaching", "copying", "handing_over", "draining", "finishing", "done",
    ]  # fmt: skip
    assert [(row.kind, row.blocks, row.bytes, row.dirty_blocks) for row in selectors.rounds(job)] == [
        ("full", 40, 40960, 2),
        ("incremental", 6, 6144, 2),
        ("incremental", 1, 1024, 2),
    ]
    assert job.bytes_total == 47 * 1024 + 6 * 1024  # type: ignore[attr-defined]
    assert [len(body["request_ids"]) for body in pair.a.named("handover")] == [4, 2]
    assert {row.output_tokens for row in selectors.request_rows(job)} == {33}
    assert selectors.gap_summary(job)["gap_in_itl_p99"] == 2
    assert pair.roles() == SWAPPED
    assert active() == ["hi-b"]
    assert (pair.a.role, pair.b.role) == ("standby", "active")
    assert job.preflight["level"] == "ok"


@pytest.mark.parametrize(
    ("mode", "rounds", "waves", "way"),
    [
        ("rolling", 3, [4, 2], "rolling"),
        ("slowed", 3, [4, 2], "rolling"),
        ("atomic", 3, [6], "rolling"),
        ("stop_and_copy", 0, [6], "stop_and_copy"),
        ("recompute", 0, [1] * 6, "recompute"),
    ],
)
def test_the_ways_of_handing_over(pair: Pair, mode: str, rounds: int, waves: list[int], way: str) -> None:
    for number in range(6):
        pair.a.add_request(f"r{number}")
    job = carry_out(pair.job(mode=mode))
    assert (job.state, job.moved_requests, job.mode) == ("done", 6, mode)
    assert len(selectors.rounds(job)) == rounds
    calls = pair.a.named("handover")
    assert [len(body["request_ids"]) for body in calls] == waves
    assert {body["mode"] for body in calls} == {way}
    assert all(body["slow_source"] == (mode == "slowed") for body in pair.a.named("round"))


def test_the_seeds_view_of_it(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = carry_out(pair.job())
    status = selectors.seed_status(job)
    assert (status["status"], status["error"], status["new_active_instance"]) == ("success", None, "hi-b")
    assert (status["moved_requests"], status["total_requests"]) == (1, 1)
    assert status["end_time"] >= status["start_time"]
    history = status["step_history"]
    assert [entry["step"] for entry in history] == [
        "validate", "b_instantiate", "b_instantiate_done",
        "full_transfer", "full_transfer_done",
        "incremental_transfer", "incremental_transfer_done",
        "incremental_transfer", "incremental_transfer_done",
        "pause_a", "final_incremental", "pause_a_done", "final_incremental_done",
        "switch_service", "switch_service_done", "handle_source", "done",
    ]  # fmt: skip
    rounds = [entry for entry in history if entry["step"].endswith("transfer_done")]
    assert [(entry["round_idx"], entry["data_size_bytes"], entry["block_count"]) for entry in rounds] == [
        (0, 40960, 40), (1, 6144, 6), (2, 1024, 1),
    ]  # fmt: skip
    final = next(entry for entry in history if entry["step"] == "final_incremental_done")
    assert (final["data_size_bytes"], final["block_count"]) == (1024, 1)
    assert [row["outcome"] for row in status["requests"]] == ["moved"]


def test_an_empty_source(pair: Pair) -> None:
    job = carry_out(pair.job())
    assert (job.state, job.total_requests) == ("done", 0)
    assert states(job) == ["pending", "preflight", "attaching", "draining", "finishing", "done"]
    assert pair.roles() == SWAPPED


def test_destroy_source(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = carry_out(pair.job(migration_type="destroy_source"))
    assert job.state == "done"
    assert pair.a.destroyed
    assert pair.roles()["hi-a"] == ("destroyed", "A", False)
    assert active() == ["hi-b"]


def test_there_and_back(pair: Pair) -> None:
    pair.a.add_request("r1")
    assert carry_out(pair.job()).state == "done"
    from migrations_app.services import create_migration

    back = carry_out(create_migration("hi-b", "hi-a", "preserve_source"))
    assert back.state == "done"
    assert pair.roles() == BEFORE
    assert set(pair.a.requests) == {"r1"}


def test_new_requests_go_to_the_target_before_anything_is_copied(pair: Pair) -> None:
    pair.a.add_request("r1")
    seen: list[list[str]] = []
    pair.a.faults["start"] = lambda _: seen.append(active())
    assert carry_out(pair.job()).state == "done"
    assert seen == [["hi-b"]]


def test_the_proxies_are_waited_for(pair: Pair, settings: Any) -> None:
    settings.VLLM_HI_ROUTE_ACK_S = 20
    before: list[int] = []

    def acknowledge() -> None:
        while not connection().exists(ROUTING_KEY) or active() != ["hi-b"]:
            time.sleep(0.02)
        version = json.loads(str(connection().get(ROUTING_KEY)))["version"]
        time.sleep(0.3)
        before.append(len(pair.a.named("start")))
        connection().hset(ACKS_KEY, "w1", json.dumps({"version": version, "seen_at": time.time()}))

    connection().hset(ACKS_KEY, "w1", json.dumps({"version": 0, "seen_at": time.time()}))
    thread = threading.Thread(target=acknowledge)
    thread.start()
    job = carry_out(pair.job())
    thread.join()
    assert (job.state, before) == ("done", [0])


def test_a_proxy_that_does_not_acknowledge_is_named_and_not_waited_for_forever(pair: Pair) -> None:
    connection().hset(ACKS_KEY, "w-slow", json.dumps({"version": 0, "seen_at": time.time()}))
    job = carry_out(pair.job())
    assert job.state == "done"
    assert job.events.filter(message__contains="w-slow").exists()


def test_late_requests_are_moved_too(pair: Pair) -> None:
    pair.a.add_request("r1")
    arrived: list[str] = []

    def one_more(_: Body) -> None:
        if not arrived:
            arrived.append("late")
            pair.a.add_request("late")

    pair.a.faults["handover"] = one_more
    job = carry_out(pair.job())
    assert (job.state, outcomes(job)) == ("done", {"r1": "moved", "late": "moved"})
    assert states(job)[5:9] == ["draining", "attaching", "copying", "handing_over"]
    indexes = [row.round_index for row in selectors.rounds(job)]
    assert indexes == list(range(len(indexes)))


def test_a_request_that_cannot_move_is_waited_for(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("stuck", reason=("lora", "Requests with a LoRA adapter are not moved yet."))

    def end(_: Body) -> None:
        threading.Timer(0.2, lambda: pair.a.requests.pop("stuck")).start()

    pair.a.faults["handover"] = end
    job = carry_out(pair.job())
    assert (job.state, outcomes(job)) == ("done", {"r1": "moved", "stuck": "refused"})
    assert job.request_rows.get(request_id="stuck").code == "lora"


def test_a_request_in_prefill_moves_once_it_decodes(pair: Pair) -> None:
    pair.a.add_request("r1", reason=("incomplete", "Some choices have not arrived yet."))
    threading.Timer(0.3, lambda: pair.a.add_request("r1")).start()
    job = carry_out(pair.job())
    assert (job.state, outcomes(job)) == ("done", {"r1": "moved"})


def test_the_deadline_for_what_cannot_move(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("stuck", reason=("lora", "Requests with a LoRA adapter are not moved yet."))
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("partial", "drain_deadline")
    assert job.error == (
        "1 request could not move within 1 s and go on on hi-a until they end "
        "(Requests with a LoRA adapter are not moved yet); new requests go to hi-b."
    )
    assert pair.roles() == {"hi-a": ("draining", "A", False), "hi-b": ("active", "A", True)}
    assert job.new_active_instance_id == "hi-b"
    assert selectors.seed_status(job)["status"] == "partial"


def test_stop_rules_and_tn_reach_the_rounds(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.rounds = [10, 20, 20, 20, 20]
    job = carry_out(pair.job(tn=4))
    assert [row.blocks for row in selectors.rounds(job)] == [10, 20, 20, 20]
    assert job.events.filter(data__reason="stalled").exists()


def test_a_request_that_ends_while_it_is_being_attached(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    attach = pair.a.do_attach

    def one_ends(body: Body) -> Body:
        del pair.a.requests["r1"]
        return attach(body | {"request_ids": ["r2"]}) | {"finished": ["r1"]}

    pair.a.do_attach = one_ends  # type: ignore[method-assign]
    job = carry_out(pair.job())
    assert (job.state, outcomes(job)) == ("done", {"r1": "finished", "r2": "moved"})


def test_a_request_that_stays_at_its_handover_is_tried_again(pair: Pair) -> None:
    pair.a.add_request("r1")
    tries: list[int] = []
    move = pair.a.do_handover

    def first_refuse(body: Body) -> Body:
        tries.append(1)
        if len(tries) == 1:
            row = {"request_id": "r1", "outcome": "stayed", "code": "no_slot", "message": "B has no free slot."}
            return {"results": [row]}
        return move(body)

    pair.a.do_handover = first_refuse  # type: ignore[method-assign]
    job = carry_out(pair.job())
    assert (job.state, len(tries)) == ("done", 2)


def test_one_that_always_stays_is_not_tried_for_ever(pair: Pair, settings: Any) -> None:
    settings.VLLM_HI_DRAIN_DEADLINE_S = 5.0
    pair.a.add_request("r1")
    row = {"request_id": "r1", "outcome": "stayed", "code": "no_slot", "message": "B has no free slot."}
    pair.a.do_handover = lambda body: {"results": [row]}  # type: ignore[method-assign]
    job = carry_out(pair.job())
    assert len(pair.a.named("handover")) == moving.HANDOVER_TRIES
    assert (job.state, job.error_code, outcomes(job)) == ("partial", "drain_deadline", {"r1": "stayed"})


def test_an_attach_that_is_refused(pair: Pair) -> None:
    pair.a.add_request("r1")
    refused = {"request_id": "r1", "code": "no_capacity", "message": "5 blocks needed, 2 free."}
    pair.a.do_attach = lambda body: {"attached": [], "refused": [refused]}  # type: ignore[method-assign]
    job = carry_out(pair.job())
    assert (job.state, outcomes(job)) == ("partial", {"r1": "refused"})
    assert job.request_rows.get().message == "5 blocks needed, 2 free."
    # Asked now and then, not in a busy loop.
    assert len(pair.a.named("attach")) <= 3


def test_what_the_proxy_refuses_for_good_is_not_asked_again(pair: Pair) -> None:
    pair.a.add_request("r1")
    refused = {"request_id": "r1", "code": "background", "message": "The response is made in the background."}
    pair.a.do_attach = lambda body: {"attached": [], "refused": [refused]}  # type: ignore[method-assign]
    job = carry_out(pair.job())
    assert (job.state, outcomes(job)) == ("partial", {"r1": "refused"})
    assert len(pair.a.named("attach")) == 1
    assert pair.a.requests
