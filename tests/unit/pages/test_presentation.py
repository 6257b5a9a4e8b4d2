"""What the pages say about a migration. No database: rows are made in memory only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from migrations_app import presentation
from migrations_app.choices import MigrationState as S
from migrations_app.models import MigrationEvent, MigrationJob, MigrationRequest, MigrationRound
from migrations_app.prediction import Estimate
from migrations_app.preflight import Check

START = datetime(2026, 1, 1, tzinfo=UTC)


def job(state: S, **fields: Any) -> MigrationJob:
    defaults: dict[str, Any] = {
        "source_id": "a",
        "target_id": "b",
        "migration_type": "preserve_source",
        "total_requests": 8,
        "moved_requests": 8,
        "created_at": START,
        "started_at": START,
        "finished_at": START + timedelta(seconds=4.2),
    }
    return MigrationJob(state=state, **{**defaults, **fields})


def request(gap_ms: float | None = None, itl_ms: float | None = 40.0, **fields: Any) -> MigrationRequest:
    outcome = "attached" if gap_ms is None else "moved"
    return MigrationRequest(**{"outcome": outcome, "gap_ms": gap_ms, "itl_ms": itl_ms, **fields})


def reached(*states: S) -> list[MigrationEvent]:
    return [MigrationEvent(seq=index, kind="state", data={"state": state}) for index, state in enumerate(states, 1)]


def statuses(state: S, events: list[MigrationEvent]) -> dict[str, str]:
    return {step["value"]: step["status"] for step in presentation.steps(state, events)}


def test_the_stepper_marks_past_current_and_future() -> None:
    shown = statuses(S.HANDING_OVER, [])
    assert shown["copying"] == "past"
    assert shown["handing_over"] == "current"
    assert shown["draining"] == "future"


def test_a_pending_job_has_begun_no_step() -> None:
    assert set(statuses(S.PENDING, reached(S.PENDING)).values()) == {"future"}


def test_a_done_job_has_passed_every_step() -> None:
    assert set(statuses(S.DONE, []).values()) == {"past"}


@pytest.mark.parametrize(("end", "status"), [(S.FAILED, "failed"), (S.ABORTED, "stopped"), (S.PARTIAL, "stopped")])
def test_a_job_that_ended_badly_shows_where(end: S, status: str) -> None:
    shown = statuses(end, reached(S.PENDING, S.PREFLIGHT, S.ATTACHING, S.COPYING, end))
    assert shown["copying"] == status
    assert shown["attaching"] == "past"
    assert shown["handing_over"] == "future"


def test_numbers_add_tails_to_rounds_and_count_gaps_of_moved_requests_only() -> None:
    rounds = [
        MigrationRound(round_index=0, kind="full", blocks=100, bytes=1000, hit_blocks=7, duration_ms=500),
        MigrationRound(round_index=1, kind="incremental", blocks=10, bytes=100, duration_ms=500),
    ]
    requests = [
        request(60, tail_blocks=1, tail_bytes=10),
        request(80, itl_ms=20.0, tail_blocks=1, tail_bytes=10),
        request(None),
        request(None, outcome="finished"),
    ]
    totals = presentation.numbers(rounds, requests)
    assert (totals["rounds"], totals["blocks"], totals["bytes"], totals["hits"]) == (2, 112, 1120, 7)
    assert totals["rate"] == "1.1 kB/s"
    assert (totals["gap_p50"], totals["gap_p99"]) == (60, 80)
    assert totals["gap_p99_times"].startswith("4.0")
    assert totals["others"] == "1 attached, 1 ended by themselves"


def test_bars_share_the_scale_of_the_largest_round() -> None:
    first, second = presentation.round_lines(
        [
            MigrationRound(round_index=0, kind="full", blocks=150, hit_blocks=50, dirty_blocks=20, duration_ms=10),
            MigrationRound(round_index=1, kind="incremental", blocks=20, dirty_blocks=1, duration_ms=10),
        ]
    )
    assert (first["sent_percent"], first["hit_percent"], first["dirty_percent"]) == ("75.00", "25.00", "10.00")
    assert (second["sent_percent"], second["label"]) == ("10.00", "Increment")


def test_a_request_still_attached_at_the_end_was_not_moved() -> None:
    (running,) = presentation.request_lines([request(None, request_id="r")], over=False)
    (over,) = presentation.request_lines([request(None, request_id="r")], over=True)
    assert (running["outcome_word"], over["outcome_word"]) == ("Attached", "Not moved")


def test_stages_that_are_no_numbers_are_left_out() -> None:
    (line,) = presentation.request_lines(
        [request(60, request_id="r", stages={"first_token": 31.4, "freeze": 6.5, "note": "odd"})], over=True
    )
    assert line["stages"] == "first token 31 · freeze 6.5"


def sentence(migration: MigrationJob, *requests: MigrationRequest) -> str:
    return presentation.result(migration, presentation.numbers([], list(requests)))["sentence"]


def test_the_result_of_a_good_migration_is_a_sentence() -> None:
    text = sentence(job(S.DONE), request(60), request(80))
    assert text.startswith(
        "All 8 requests moved from a to b in 4.2 s. The pause that clients saw was 60 ms at the median"
    )
    assert text.endswith("a is a standby now.")


def test_the_result_says_that_nothing_had_to_move() -> None:
    text = sentence(job(S.DONE, total_requests=0, moved_requests=0, migration_type="destroy_source"))
    assert text == "No request had to move in 4.2 s. New traffic goes to b. a was shut down."


def test_the_result_of_a_failure_says_where_the_requests_are() -> None:
    assert "go on running on a" in sentence(job(S.FAILED, moved_requests=0))
    assert sentence(job(S.ABORTED, moved_requests=3)) == "3 of 8 requests had moved to b; the others stayed on a."
    assert "5 of 8 requests moved in 4.2 s; 3 did not move." in sentence(job(S.PARTIAL, moved_requests=5))


def test_a_running_job_has_no_result() -> None:
    assert sentence(job(S.COPYING)) == ""


def test_errors_come_before_warnings_and_agreement() -> None:
    checks = [
        Check(name, "", "", level) for name, level in (("a", "ok"), ("b", "warning"), ("c", "error"), ("d", "ok"))
    ]  # type: ignore[arg-type]
    assert [check.name for check in presentation.worst_first(checks)] == ["c", "b", "a", "d"]


def test_the_estimate_is_a_sentence() -> None:
    assert presentation.estimate(None) == ""
    cost = Estimate(requests=2, blocks=37, bytes=27_300_000, rounds=3, seconds=0.25, gap_ms=1.5)
    assert presentation.estimate(cost) == "About 2 requests, 37 blocks, 27.3 MB, 0.25 s in 3 rounds."


def test_a_source_that_goes_on_is_not_said_to_be_left() -> None:
    done = job(S.DONE, migration_type="keep_source_active", moved_requests=2, total_requests=2)
    text = presentation.result(done, presentation.numbers([], []))["sentence"]
    assert text.startswith("All 2 requests moved from a to b")
    assert text.endswith("a goes on with the others and with new traffic.")
    none = job(S.DONE, migration_type="keep_source_active", moved_requests=0, total_requests=0)
    assert "New traffic goes to a." in presentation.result(none, presentation.numbers([], []))["sentence"]
