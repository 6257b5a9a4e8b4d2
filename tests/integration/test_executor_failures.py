"""Whole migrations in which something fails, against instances that fail where they are told to."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from controlplane.redis import ROUTING_KEY, connection
from tests.integration.carried_out import (
    BEFORE,
    assert_rolled_back,
    at_round,
    carry_out,
    fail,
    hang,
    outcomes,
)
from tests.integration.conftest import Pair
from tests.integration.fake_vllm import Body, Refusal


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
