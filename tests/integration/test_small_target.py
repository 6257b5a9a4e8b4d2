"""A target that cannot take everything at once: what fits goes first, the rest follows or moves in another way, and the
job ends."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from instances.models import Instance
from migrations_app import moving
from migrations_app.preflight import run_preflight
from migrations_app.services import MigrationRefused
from tests.integration.carried_out import carry_out, outcomes
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body


def ways(job: Any) -> dict[str, str]:
    return dict(job.request_rows.values_list("request_id", "way"))


def waves(pair: Pair) -> list[tuple[str, list[str]]]:
    return [(body["mode"], body["request_ids"]) for body in pair.a.named("handover")]


def crowd(pair: Pair, count: int, total_blocks: int) -> None:
    """Requests of 5 blocks, which need 7 each; r0 is the youngest."""
    for number in range(count):
        pair.a.add_request(f"r{number}", age_s=1.0 + number)
    pair.b.total_blocks = total_blocks


def test_the_oldest_fit_and_the_rest_follows_as_room_appears(pair: Pair, settings: Any) -> None:
    settings.VLLM_HI_DRAIN_DEADLINE_S = 30.0
    crowd(pair, 4, total_blocks=15)

    def end_there(_: Body) -> None:
        threading.Timer(0.1, pair.b.requests.clear).start()

    pair.a.faults["handover"] = end_there
    job = carry_out(pair.job())
    assert (job.state, job.error) == ("done", "")
    assert waves(pair) == [("rolling", ["r3", "r2"]), ("rolling", ["r1", "r0"])]
    assert ways(job) == dict.fromkeys(("r0", "r1", "r2", "r3"), "blocks")
    # Nothing was attached that the target would have had to refuse.
    assert [body["request_ids"] for body in pair.a.named("attach")] == [["r3", "r2"], ["r1", "r0"]]
    (event,) = job.events.filter(message__contains="wait on hi-a until hi-b has room")
    assert event.data == {"waiting": ["r1", "r0"], "free_blocks": 15}


def test_past_the_deadline_the_rest_moves_by_its_tokens_and_that_is_written_down(pair: Pair) -> None:
    crowd(pair, 4, total_blocks=15)
    job = carry_out(pair.job(drain_deadline_s=0.3))
    assert (job.state, job.error, job.drain_deadline_s) == ("done", "", 0.3)
    assert waves(pair) == [("rolling", ["r3", "r2"]), ("staged", ["r1", "r0"]), ("queued", ["r1", "r0"])]
    assert ways(job) == {"r3": "blocks", "r2": "blocks", "r1": "recompute", "r0": "recompute"}
    assert job.request_rows.filter(message="", code="").count() == 4
    assert job.events.filter(message__startswith="Request r1 moved (KV computed again)").exists()


def test_host_memory_is_taken_first_as_far_as_it_goes(pair: Pair) -> None:
    crowd(pair, 3, total_blocks=8)
    pair.b.staging_blocks = 5
    pair.a.do_finish = lambda _: {"gaps": [{"request_id": "r1", "gap_ms": 9000.0, "itl_ms": 20.0}]}  # type: ignore[method-assign]
    job = carry_out(pair.job(drain_deadline_s=0.2))
    assert waves(pair) == [("rolling", ["r2"]), ("staged", ["r1", "r0"]), ("queued", ["r0"])]
    assert (job.state, ways(job)) == ("done", {"r2": "blocks", "r1": "staged", "r0": "recompute"})
    # Known only when the request went on.
    assert job.request_rows.get(request_id="r1").gap_ms == 9000.0


def test_a_job_that_moves_no_kv_stages_none(pair: Pair) -> None:
    crowd(pair, 2, total_blocks=8)
    pair.b.staging_blocks = 100
    job = carry_out(pair.job(drain_deadline_s=0.2, mode="recompute"))
    assert (job.state, waves(pair)) == ("done", [("recompute", ["r1"]), ("queued", ["r0"])])


def test_what_cannot_be_computed_again_stays_and_the_job_ends_with_the_list(pair: Pair) -> None:
    crowd(pair, 3, total_blocks=8)
    move = pair.a.do_handover

    def seeded_stay(body: Body) -> Body:
        if body["mode"] != "queued" or "r0" not in body["request_ids"]:
            return move(body)
        others = move(body | {"request_ids": [one for one in body["request_ids"] if one != "r0"]})
        message = "The request is seeded, and its random state does not survive a prefill."
        row = {"request_id": "r0", "outcome": "stayed", "code": "seeded_recompute", "message": message}
        return {"results": [*others["results"], row]}

    pair.a.do_handover = seeded_stay  # type: ignore[method-assign]
    job = carry_out(pair.job(drain_deadline_s=0.2))
    assert (job.state, job.error_code) == ("partial", "drain_deadline")
    assert job.error == (
        "1 request could not move within 0.2 s and go on on hi-a until they end (The request is seeded, and its random "
        "state does not survive a prefill); new requests go to hi-b."
    )
    assert outcomes(job) == {"r0": "stayed", "r1": "moved", "r2": "moved"}
    assert job.request_rows.get(request_id="r0").code == "seeded_recompute"
    # It was asked once: nothing changes it.
    assert [ids for mode, ids in waves(pair) if mode == "queued"] == [["r1", "r0"]]
    assert "r0" in pair.a.requests


def test_a_target_that_never_takes_anything_ends_the_job_too(pair: Pair) -> None:
    crowd(pair, 2, total_blocks=0)
    full = {"code": "commit_too_late", "message": "The commit came after the target's deadline."}
    pair.a.do_handover = lambda body: {  # type: ignore[method-assign]
        "results": [{"request_id": one, "outcome": "stayed", **full} for one in body["request_ids"]]
    }
    job = carry_out(pair.job(drain_deadline_s=0))
    assert (job.state, outcomes(job)) == ("partial", {"r0": "stayed", "r1": "stayed"})
    assert len(waves(pair)) == len(moving.LATE_WAYS) * moving.HANDOVER_TRIES
    assert set(pair.a.requests) == {"r0", "r1"}


@pytest.mark.parametrize("mode", ["rolling", "queued"])
def test_requests_that_are_neither_attached_nor_refused_do_not_hold_it_up(pair: Pair, mode: str) -> None:
    crowd(pair, 1, total_blocks=100 if mode == "rolling" else 0)
    pair.a.do_attach = lambda body: {"attached": [], "refused": []}  # type: ignore[method-assign]
    job = carry_out(pair.job(drain_deadline_s=0.1))
    assert (job.state, job.error_code) == ("partial", "drain_deadline")
    assert job.request_rows.get().message


def test_a_refusal_for_want_of_room_is_asked_again_but_not_in_a_hurry(pair: Pair) -> None:
    """The target looked as if it had room; its own requests were faster."""
    crowd(pair, 1, total_blocks=100)
    no_room = {"request_id": "r0", "code": "target_out_of_blocks", "message": "The target has 2 free KV blocks."}
    answer = pair.a.do_round
    pair.a.do_round = lambda body: answer(body) | {"failed": [no_room]}  # type: ignore[method-assign]
    job = carry_out(pair.job(drain_deadline_s=1.0))
    # Tried at once, after 0.5 s, and in the other way when the second had passed.
    assert len(pair.a.named("round")) in (2, 3)
    assert (job.state, ways(job)) == ("done", {"r0": "recompute"})


def test_a_late_request_waits_for_its_turn(pair: Pair, settings: Any) -> None:
    """Run slots are room too."""
    settings.VLLM_HI_DRAIN_DEADLINE_S = 30.0
    crowd(pair, 3, total_blocks=1000)
    pair.b.run_slots = 2
    pair.a.faults["handover"] = lambda _: threading.Timer(0.1, pair.b.requests.clear).start()
    job = carry_out(pair.job())
    assert (job.state, waves(pair)) == ("done", [("rolling", ["r2", "r1"]), ("rolling", ["r0"])])


def test_pre_flight_says_so_in_numbers(pair: Pair) -> None:
    crowd(pair, 4, total_blocks=15)
    source, target = Instance.objects.order_by("pk")
    preflight = run_preflight(source, target, drain_deadline_s=5)
    (check,) = [check for check in preflight.checks if check.name == "kv_capacity"]
    assert (check.level, preflight.ok) == ("warning", True)
    assert check.source_value == "4 requests hold 20 blocks now, 20 at most"
    assert check.target_value == "15 of 15 blocks free"
    assert check.remedy.startswith("About 2 of the 4 requests move at once, oldest first; the rest stays on the source")
    assert "after 5 s" in check.remedy
    pair.b.total_blocks = 1000
    (check,) = [one for one in run_preflight(source, target).checks if one.name == "kv_capacity"]
    assert (check.level, check.remedy) == ("ok", "")


@pytest.mark.parametrize("deadline", [-1, 86401, math.nan])
def test_a_deadline_that_makes_no_sense_is_refused(pair: Pair, deadline: float) -> None:
    with pytest.raises(MigrationRefused, match="drain_deadline_s") as refused:
        pair.job(drain_deadline_s=deadline)
    assert (refused.value.status, refused.value.param) == (400, "drain_deadline_s")
