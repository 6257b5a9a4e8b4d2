"""`preserve_source`, and back, five times in a row: exact, and nothing is left behind."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.there_and_back import flat, table, there_and_back
from tests.engine.conftest import RunningStack


@pytest.mark.long
def test_five_times_to_the_standby_and_back(stack: RunningStack) -> None:
    sides = stack.remember_roles()
    with stack.faults(sides[0], step_delay_s=0.02), stack.faults(sides[1], step_delay_s=0.02):
        rows = stack.wait(there_and_back(stack.stack, sides, rounds=5, streams=3, tokens=180))
    Console(stderr=True).print(table(rows))
    for row in rows[1:]:
        assert row["exact"] == row["streams"] == 3, row["differences"]
        assert row["moves"] == 6, row
        assert row["free_blocks"] == rows[0]["free_blocks"], row
    assert flat(rows), [row["memory_mb"] for row in rows]
    assert stack.remember_roles() == sides
