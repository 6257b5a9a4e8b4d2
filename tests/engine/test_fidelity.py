"""The short form of the fidelity matrix: kinds of requests whose state is more than tokens and a random generator."""

from __future__ import annotations

from benchmarks.fidelity import batch_of
from benchmarks.fidelity_kinds import KINDS
from benchmarks.fidelity_rows import Row, judge
from tests.engine.conftest import RunningStack

CHOSEN = (
    "structured output: regex",
    "structured output: JSON schema",
    "structured output: grammar",
    "output cut inside multi-byte characters",
    "logit_bias",
    "seeded, min_p",
    "n = 2, seeded",
)


def test_grammars_multi_byte_characters_and_refusals(stack: RunningStack) -> None:
    kinds = [kind for kind in KINDS if kind.name in CHOSEN]
    assert len(kinds) == len(CHOSEN)
    rows = {kind.name: Row(kind) for kind in kinds}
    judge(rows, kinds, stack.migrate_under_load(batch_of(kinds, salt=91)), salt=91)
    for row in rows.values():
        assert row.holds, f"{row.kind.name}: {row.migrated} moved, {row.codes}, {row.differences}"
