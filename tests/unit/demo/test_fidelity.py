"""The matrix says what was seen: a row holds only if it was moved exactly, or refused with its own code."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks.answers import Answer, Choice
from benchmarks.crowd import state_of
from benchmarks.exactness import Split, Verdict
from benchmarks.fidelity import BATCH, batch_of, choose, reference_of
from benchmarks.fidelity_kinds import KINDS, Kind
from benchmarks.fidelity_rows import Row, document, judge
from benchmarks.kinds import CHAT, MESSAGES, RESPONSES, TEXT
from benchmarks.live_migration import Migration, MigrationRun
from benchmarks.stacks import STACKS

EXACT = Kind("greedy", "/v1/completions", {"temperature": 0})
REFUSED = Kind("n = 2", "/v1/completions", {"n": 2}, refused="several_choices")
ENDS = Kind("ends", "/v1/completions", {"temperature": 0}, ends=True)


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row(EXACT, migrated=2, exact=2, cuts=[12, 40]), True),
        (Row(EXACT, migrated=2, exact=1, ties=1, cuts=[12, 40]), True),
        (Row(EXACT, migrated=2, exact=1, differences=["text differs"]), False),
        (Row(EXACT, migrated=2, exact=2, mismatches=1), False),
        (Row(EXACT), False),
        (Row(EXACT, codes={"tools"}), False),
        (Row(REFUSED, codes={"several_choices"}), True),
        (Row(REFUSED, codes={"tools"}), False),
        (Row(REFUSED, migrated=1, exact=1), False),
        (Row(REFUSED), False),
        (Row(REFUSED, codes={"several_choices"}, differences=["no complete answer"]), False),
        (Row(ENDS, finished=1), True),
        (Row(ENDS, migrated=1, exact=1), False),
    ],
)
def test_when_a_row_holds(row: Row, holds: bool) -> None:
    assert row.holds is holds


def _run(verdict: Verdict, *rows: dict[str, Any], body: dict[str, Any] | None = None) -> MigrationRun:
    kind = Kind("greedy", TEXT, body or {"temperature": 0})
    answer = Answer(kind.request(7), stream_id="s1", choices={0: Choice(token_ids=[1, 2])})
    listed = [{"stream_id": "s1", "request_id": "x-s1-0", "outcome": "moved", "code": "", **row} for row in rows]
    return MigrationRun([], [answer], [verdict], [Migration({"state": "done"}, [], listed)])


def test_a_move_there_and_back_is_one_request_and_two_moves() -> None:
    row = Row(EXACT)
    assert judge({"greedy": row}, [EXACT], _run(Verdict("greedy", cuts=[12, 40]), {}), salt=3) == []
    assert (row.migrated, row.moves, row.exact, row.cuts, row.holds) == (1, 2, 1, [12, 40], True)


def test_a_mismatch_says_all_that_is_needed_to_judge_it() -> None:
    row = Row(EXACT)
    verdict = Verdict("greedy", ["token ids differ"], [Split(0, 17, 5, 6, gap=0.3)], cuts=[12])
    (line,) = judge({"greedy": row}, [EXACT], _run(verdict, {}), salt=3)
    assert row.mismatches == 1 and not row.holds
    for part in ("prompts 3", "cut after 12", "token 17", "5 became 6", "logit gap 3.0e-01"):
        assert part in line


@pytest.mark.parametrize(
    ("body", "gap", "tie"),
    [
        ({"temperature": 0}, 2e-4, True),
        ({"temperature": 0}, 2e-3, False),
        ({"temperature": 0}, None, False),
        ({"temperature": 0.5, "seed": 1}, 2e-4, False),
        ({"temperature": 0, "presence_penalty": 0.5}, 2e-4, False),
    ],
)
def test_only_a_plain_greedy_request_can_have_a_near_tie(body: dict[str, Any], gap: float | None, tie: bool) -> None:
    row = Row(EXACT)
    verdict = Verdict("greedy", ["token ids differ"], [Split(0, 17, 5, 6, gap=gap)], cuts=[12])
    judge({"greedy": row}, [EXACT], _run(verdict, {}, body=body), salt=3)
    assert (row.ties, row.mismatches, row.exact) == ((1, 0, 0) if tie else (0, 1, 0))
    assert bool(row.notes) is tie and ("Near-ties" in document({"greedy": row}, 1)) is tie


def test_a_request_that_stays_must_be_right_as_well() -> None:
    row = Row(REFUSED)
    rows = {"n = 2": row}
    judge(rows, [REFUSED], _run(Verdict("n"), {"outcome": "refused", "code": "several_choices"}), salt=1)
    assert row.holds
    judge(rows, [REFUSED], _run(Verdict("n", ["text differs"]), {"outcome": "refused", "code": "several_choices"}), 2)
    assert not row.holds


def test_the_document_shows_what_was_seen_and_shouts_what_was_not_expected() -> None:
    rows = {
        "greedy": Row(EXACT, migrated=2, moves=3, exact=2, cuts=[40, 12, 50]),
        "n = 2": Row(REFUSED, codes={"several_choices"}),
        "bad": Row(EXACT, migrated=1, moves=1, differences=["greedy #7: text differs"], mismatches=1),
        "never": Row(EXACT, codes={"tools"}),
    }
    text = document(rows, 7)
    assert "| greedy | exact | 2 | 3 | 12 to 50 | - |" in text
    assert "| n = 2 | refused: `several_choices` | - | - | - | - |" in text
    assert "**1 DIFFERENCES**" in text and "- greedy #7: text differs" in text
    assert "**NEVER MOVED**: tools" in text
    assert "seed 7" in text and "3 requests moved, 4 moves" in text


def test_prompts_differ_from_batch_to_batch_and_within_one() -> None:
    bodies = [str(request.body) for salt in (1, 2) for request in batch_of(KINDS[:6], salt)]
    assert len(set(bodies)) == len(bodies)
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_a_batch_has_room_for_all_choices_and_keeps_copies_together() -> None:
    draw = random.Random(1)
    rows = {kind.name: Row(kind) for kind in KINDS}
    for _ in range(40):
        kinds = choose(KINDS, rows, draw)
        assert 0 < sum(kind.sequences for kind in kinds) <= BATCH
        for kind in kinds:
            assert kinds.count(kind) == kind.copies
            rows[kind.name].migrated += 1
            rows[kind.name].codes.add("x")
            rows[kind.name].finished += 1
    assert all(row.tried for row in rows.values()), "a kind was never chosen"


def test_the_reference_cannot_warm_the_cache_of_the_moved_request() -> None:
    for kind in KINDS:
        request = kind.request(5)
        reference = reference_of(request)
        assert reference.body["cache_salt"] != request.body.get("cache_salt")
        assert {**reference.body, "cache_salt": None} == {**request.body, "cache_salt": None}


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_each_route_is_there_streamed_and_whole(path: str) -> None:
    assert {kind.streamed for kind in KINDS if kind.path == path} == {True, False}


def test_kinds_are_plain_json_on_stacks_that_exist() -> None:
    for kind in KINDS:
        json.dumps(kind.request(3).body)
        assert kind.stack in STACKS
        assert kind.repeatable == (kind.fields.get("temperature") == 0 or "seed" in kind.fields), kind.name


@pytest.mark.parametrize(
    ("listed", "state"),
    [
        ({"status": "WAITING", "computed_tokens": 0}, "waiting"),
        ({"status": "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "computed_tokens": 0}, "waiting"),
        ({"status": "PREEMPTED", "computed_tokens": 0}, "preempted"),
        ({"status": "RUNNING", "computed_tokens": 256}, "prefilling"),
        ({"status": "RUNNING", "computed_tokens": 700}, "running"),
    ],
)
def test_states_are_told_apart(listed: dict[str, Any], state: str) -> None:
    assert state_of({"prompt_tokens": 700, **listed}) == state
