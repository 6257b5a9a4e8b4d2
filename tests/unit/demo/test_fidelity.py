"""The matrix says what was seen: a row holds only if it was moved exactly, or refused with its own code."""

from __future__ import annotations

import pytest

from benchmarks.fidelity import Row, batch_of, document
from benchmarks.fidelity_kinds import KINDS, Kind

EXACT = Kind("greedy", "/v1/completions", {"temperature": 0})
REFUSED = Kind("n = 2", "/v1/completions", {"n": 2}, refused="several_choices")


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row(EXACT, migrated=2, exact=2, cuts=[12, 40]), True),
        (Row(EXACT, migrated=2, exact=1, differences=["text differs"]), False),
        (Row(EXACT), False),
        (Row(EXACT, codes={"tools"}), False),
        (Row(REFUSED, codes={"several_choices"}), True),
        (Row(REFUSED, codes={"tools"}), False),
        (Row(REFUSED, migrated=1, exact=1), False),
        (Row(REFUSED), False),
        (Row(REFUSED, codes={"several_choices"}, differences=["no complete answer"]), False),
    ],
)
def test_when_a_row_holds(row: Row, holds: bool) -> None:
    assert row.holds is holds


def test_the_document_shows_what_was_seen_and_shouts_what_was_not_expected() -> None:
    rows = {
        "greedy": Row(EXACT, migrated=2, exact=2, cuts=[40, 12]),
        "n = 2": Row(REFUSED, codes={"several_choices"}),
        "bad": Row(EXACT, migrated=1, differences=["text differs (cut at 9)"]),
    }
    text = document(rows, 7)
    assert "| greedy | exact | 2 | 12 to 40 |" in text
    assert "| n = 2 | refused: `several_choices` | - | - |" in text
    assert "**text differs (cut at 9)**" in text
    assert "seed 7" in text


def test_prompts_differ_from_batch_to_batch_and_within_one() -> None:
    bodies = [str(request.body) for salt in (1, 2) for request in batch_of(KINDS[:6], salt)]
    assert len(set(bodies)) == len(bodies)
    assert len({kind.name for kind in KINDS}) == len(KINDS)
