"""The short form of the failure table (docs/failures.md): cells that kill nothing, and that no other test has."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.failure_cells import FAILURES, STATES
from benchmarks.failure_rig import Rig
from benchmarks.failure_table import Cell
from benchmarks.failures import run_cell
from tests.engine.conftest import RunningStack

CELLS = (
    ("attaching", "operator aborts"),
    ("frozen", "abort at both instances"),
    ("frozen", "one client leaves"),
    ("sent", "answer lost"),
    ("sent", "answer and notice lost"),
    ("committed", "answer lost"),
    ("committed", "one client leaves"),
)
TOKENS = 120


@pytest.fixture(scope="module")
def rig(stack: RunningStack) -> Rig:
    return Rig(stack.stack, httpx.AsyncClient(timeout=30, trust_env=False), model=stack.model, step_delay_s=0.0)


@pytest.mark.long
@pytest.mark.parametrize(("state", "failure"), CELLS)
def test_a_cell_of_the_failure_table_holds(stack: RunningStack, rig: Rig, state: str, failure: str) -> None:
    cell: Cell = stack.wait(run_cell(rig, STATES[state], FAILURES[failure], TOKENS))
    assert cell.held, cell.problems
    assert cell.clients.get("exact", 0) >= 3, cell.clients
