"""Whole migrations against instances that answer over real HTTP, and fail where they are told to."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from controlplane.redis import ACKS_KEY, ROUTING_KEY, connection
from instances.models import Instance
from migrations_app import executor, selectors
from migrations_app.models import MigrationJob
from migrations_app.services import request_abort
from migrations_app.tasks import execute
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body, FakeInstance, Refusal

BEFORE = {"hi-a": ("active", "A", True), "hi-b": ("standby", "B", False)}
SWAPPED = {"hi-a": ("standby", "B", False), "hi-b": ("active", "A", True)}


def carry_out(job: MigrationJob) -> MigrationJob:
    execute.run(str(job.id))
    return selectors.get_job(job.id)


def active() -> list[str]:
    table = json.loads(str(connection().get(ROUTING_KEY)))
    ids: list[str] = table["models"]["smollm2"]["active"]
    return ids


def states(job: MigrationJob) -> list[str]:
    return [event.data["state"] for event in job.events.filter(kind="state").order_by("seq")]


def outcomes(job: MigrationJob) -> dict[str, str]:
    return dict(job.request_rows.values_list("request_id", "outcome"))


# -- the good end -----------------------------------------------------------------------------------------------------


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
    assert len(pair.a.named("handover")) == executor.HANDOVER_TRIES
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


# -- the bad ends -----------------------------------------------------------------------------------------------------


def fail(status: int = 500, code: str = "engine_unavailable", message: str = "The engine could not do it.") -> Any:
    def fault(_: Body) -> None:
        raise Refusal(status, code, message)

    return fault


def hang(_: Body) -> None:
    time.sleep(1.0)


def at_round(number: int, fault: Any) -> Any:
    return lambda body: fault(body) if body["round"] == number else None


def assert_rolled_back(pair: Pair, job: MigrationJob, code: str) -> None:
    assert (job.state, job.error_code) == ("failed", code)
    assert pair.roles() == BEFORE
    assert active() == ["hi-a"]
    assert set(pair.a.requests) == {"r1", "r2"}
    assert not pair.b.requests
    assert "attached" not in outcomes(job).values()
    assert job.finished_at is not None
    assert job.lease_until is None
    assert selectors.seed_status(job)["status"] == "failed"
    # A new try may begin at once.
    assert not MigrationJob.objects.live_with("hi-a", "hi-b").exists()


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("start", fail()),
        ("attach", fail()),
        ("round", at_round(0, fail())),
        ("round", at_round(1, fail())),
        ("handover", fail()),
    ],
)
def test_a_call_that_fails_rolls_everything_back(pair: Pair, call: str, fault: Any) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    pair.a.faults[call] = fault
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "engine_unavailable")
    assert job.error.startswith(f"The source hi-a (127.0.0.1:{pair.a.port}) refused while ")
    assert job.error.endswith("The engine could not do it; all requests stayed on hi-a.")
    assert len(pair.a.named("abort")) == len(pair.b.named("abort")) == 1


@pytest.mark.parametrize("call", ["start", "attach", "round", "handover"])
def test_a_source_that_hangs(pair: Pair, short_patience: None, call: str) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    pair.a.faults[call] = hang
    job = carry_out(pair.job())
    assert job.error_code == "source_unreachable"
    assert f"The source hi-a (127.0.0.1:{pair.a.port}) stopped answering while " in job.error
    assert job.state in ("failed", "partial")


def test_a_target_that_dies_before_the_handover(pair: Pair) -> None:
    """The source learns it first, and says so in its own way; the sentence names the target."""
    pair.a.add_request("r1")
    pair.a.add_request("r2")

    def target_dies(_: Body) -> None:
        pair.b.stop()
        raise Refusal(502, "target_lost", "The connection to the target was lost.")

    pair.a.faults["round"] = at_round(1, target_dies)
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "target_unreachable")
    assert job.error == (
        f"The target hi-b (127.0.0.1:{pair.b.port}) stopped answering while round 1 was being copied; "
        "all requests stayed on hi-a."
    )


def test_a_target_that_dies_at_the_handover(pair: Pair) -> None:
    """The call succeeds, but nothing moved: the target is asked why."""
    pair.a.add_request("r1")
    pair.a.add_request("r2")

    def handover(body: Body) -> Body:
        pair.b.stop()
        lost = {"outcome": "stayed", "code": "target_lost", "message": "The target was lost."}
        return {"results": [{"request_id": request_id, **lost} for request_id in body["request_ids"]]}

    pair.a.do_handover = handover  # type: ignore[method-assign]
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "target_unreachable")
    assert "stopped answering while 2 requests were being handed over; all requests stayed on hi-a." in job.error
    assert set(outcomes(job).values()) == {"stayed"}


def test_a_target_that_dies_after_some_have_moved(pair: Pair) -> None:
    for number in range(5):
        pair.a.add_request(f"r{number}")
    move = pair.a.do_handover

    def second_wave_fails(body: Body) -> Body:
        if len(pair.a.named("handover")) == 1:
            return move(body)
        pair.b.stop()
        raise Refusal(502, "target_lost", "Lost.")

    pair.a.do_handover = second_wave_fails  # type: ignore[method-assign]
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("partial", "target_unreachable")
    assert job.error.endswith("4 of 5 requests had moved and stay on hi-b, the others stayed on hi-a.")
    assert pair.roles() == BEFORE
    # What moved can still be reached.
    assert "hi-b" in json.loads(str(connection().get(ROUTING_KEY)))["instances"]
    assert sorted(outcomes(job).values()) == ["moved"] * 4 + ["stayed"]


def test_a_source_that_dies(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.faults["round"] = at_round(1, pair.a.die)
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("failed", "source_unreachable")
    assert "stopped answering while round 1 was being copied; the requests of hi-a cannot be reached." in job.error
    assert len(pair.b.named("abort")) == 1


def test_a_target_that_falls_silent_while_a_call_blocks(pair: Pair) -> None:
    """Found out by the lease thread; the executor stops at the next step."""
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    pair.a.rounds = [9] * 50

    def fall_silent(body: Body) -> None:
        if body["round"] == 1:
            pair.b.stop()
            # Each renewal is followed by a look at the target.
            renewals = len(pair.a.named("lease")) + 4
            while len(pair.a.named("lease")) < renewals:
                time.sleep(0.02)

    pair.a.faults["round"] = fall_silent
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "target_unreachable")
    assert not pair.a.named("handover")


def test_a_preflight_that_fails_touches_nothing(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    pair.b.factors["dtype"] = "bfloat16"
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "preflight_dtype")
    assert job.error.startswith("The pre-flight check dtype failed (float32, bfloat16): Start the target with the same")
    assert not pair.a.named("start")
    assert job.preflight["level"] == "error"


def test_a_difference_that_only_the_handshake_sees_ends_the_job(pair: Pair) -> None:
    """Something changed after the pre-flight check: the engines compare again, and asking once more would not help."""
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    sentence = "The factor lora differs (source: fr=aa11, target: none): Load each adapter of the source on the target."
    pair.a.faults["start"] = fail(409, "incompatible", sentence)
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "incompatible")
    assert sentence.rstrip(".") in job.error
    assert len(pair.a.named("start")) == 1
    assert not pair.a.named("attach")


def test_a_target_that_cannot_take_over(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.b.faults["activate"] = fail()
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("partial", "engine_unavailable")
    assert pair.roles() == BEFORE


def test_a_source_that_dies_when_all_have_moved(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.faults["finish"] = pair.a.die
    job = carry_out(pair.job())
    assert (job.state, job.error_code) == ("partial", "source_unreachable")
    assert job.error.endswith("after all requests had moved; new requests go to hi-b.")
    assert pair.roles()["hi-b"] == ("active", "A", True)


def test_a_source_that_is_destroyed_may_be_gone_already(pair: Pair) -> None:
    pair.a.add_request("r1")
    pair.a.faults["destroy"] = pair.a.die
    job = carry_out(pair.job(migration_type="destroy_source"))
    assert (job.state, job.error) == ("done", "")


def test_an_error_in_the_panel_itself(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("r2")

    def burst(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("migrations_app.journal.note_round", burst)
    job = carry_out(pair.job())
    assert_rolled_back(pair, job, "internal_error")
    assert "secret" not in job.error


# -- abort, and two workers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["start", "attach", "round"])
def test_abort_between_two_steps(pair: Pair, call: str) -> None:
    pair.a.add_request("r1")
    pair.a.add_request("r2")
    job = pair.job()
    pair.a.faults[call] = lambda _: MigrationJob.objects.update(abort_requested=True) and None
    job = carry_out(job)
    assert (job.state, job.error_code) == ("aborted", "aborted")
    assert job.error == "The migration was aborted; all requests stayed on hi-a."
    assert pair.roles() == BEFORE
    assert active() == ["hi-a"]
    assert set(pair.a.requests) == {"r1", "r2"}


def test_abort_after_some_have_moved(pair: Pair) -> None:
    for number in range(5):
        pair.a.add_request(f"r{number}")
    job = pair.job()
    pair.a.faults["handover"] = lambda _: MigrationJob.objects.update(abort_requested=True) and None
    job = carry_out(job)
    assert job.state == "aborted"
    assert job.error.endswith("4 of 5 requests had moved and stay on hi-b, the others stayed on hi-a.")


def test_a_message_that_is_delivered_twice(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = pair.job()
    inside: list[int] = []

    def again(_: Body) -> None:
        execute.run(str(job.id))
        inside.append(1)

    pair.a.faults["attach"] = again
    done = carry_out(job)
    carry_out(job)
    assert (done.state, inside, done.attempt) == ("done", [1], 1)
    assert len(pair.a.named("start")) == 1


def test_a_worker_that_lost_its_job_touches_nothing_any_more(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = pair.job()
    pair.a.faults["round"] = lambda _: MigrationJob.objects.update(owner="reaper:1") and None
    carried = carry_out(job)
    # It is the new owner's now: no call, no change of state.
    assert carried.state == "copying"
    assert not pair.a.named("abort")
    assert not pair.a.named("handover")


def test_leases_are_renewed_while_a_call_blocks(pair: Pair) -> None:
    pair.a.add_request("r1")
    leases: list[Any] = []

    def slow(body: Body) -> None:
        for _ in range(2):
            leases.append(MigrationJob.objects.values_list("lease_until", flat=True).get())
            time.sleep(0.3)

    pair.a.faults["round"] = at_round(1, slow)
    assert carry_out(pair.job()).state == "done"
    assert leases[1] > leases[0]
    assert len(pair.a.named("lease")) >= 2


def test_only_operators_words_reach_the_trail(pair: Pair) -> None:
    """The trail alone tells what happened, in order."""
    pair.a.add_request("r1")
    job = carry_out(pair.job())
    seqs = list(job.events.order_by("seq").values_list("seq", flat=True))
    assert seqs == list(range(1, len(seqs) + 1)) and seqs[-1] == job.last_seq
    assert all(event.message for event in job.events.all())


def test_abort_by_the_service_while_it_runs(pair: Pair) -> None:
    pair.a.add_request("r1")
    job = pair.job()
    pair.a.rounds = [9, 8, 7, 6, 5, 4, 3, 2]
    pair.a.faults["round"] = at_round(2, lambda _: request_abort(MigrationJob.objects.get(id=job.id)) and None)
    assert carry_out(job).state == "aborted"
    assert Instance.objects.get(pk="hi-b").status == "standby"


def test_the_fake_refuses_a_wrong_token() -> None:
    import httpx

    fake = FakeInstance("hi-x", "active")
    assert httpx.get(f"http://127.0.0.1:{fake.port}/vllm_hi/status", headers={"Authorization": "x"}).status_code == 401
    fake.stop()
