"""The short form of the fidelity matrix: kinds of requests whose state is more than tokens and a random generator."""

from __future__ import annotations

from benchmarks.fidelity import batch_of
from benchmarks.fidelity_kinds import KINDS
from benchmarks.fidelity_rows import Row, judge
from tests.engine.conftest import RunningStack

CHOSEN = (
    "structured output: JSON schema",
    "output cut inside multi-byte characters",
    "n = 3, some of which end early",
    "several prompts",
    "echo, client asks for no token ids",
    "responses",
    "messages, not streamed",
    "all three penalties, seeded",
)


def test_choices_routes_and_grammars_there_and_back(stack: RunningStack) -> None:
    kinds = [kind for kind in KINDS if kind.name in CHOSEN]
    assert len(kinds) == len(CHOSEN)
    rows = {kind.name: Row(kind) for kind in kinds}
    source, target = stack.remember_roles()
    # Slow steps, so that the answers are long enough for the way back.
    with stack.faults(source, step_delay_s=0.1), stack.faults(target, step_delay_s=0.1):
        run = stack.migrate_under_load(batch_of(kinds, salt=91), start_after_tokens=6, further=(3,))
    judge(rows, kinds, run, salt=91)
    for row in rows.values():
        assert row.holds, f"{row.kind.name}: {row.migrated} moved, {row.codes}, {row.differences}"
    assert sum(row.moves for row in rows.values()) > sum(row.migrated for row in rows.values()), "nothing moved twice"
