"""All ways of handing over leave the same answers; they differ in what their clients notice."""

from __future__ import annotations

import pytest

from benchmarks.exactness import compare
from benchmarks.streams import sized_request
from tests.engine.conftest import RunningStack


@pytest.mark.parametrize("mode", ["atomic", "stop_and_copy"])
def test_kv_moves_exactly_whenever_it_is_copied(stack: RunningStack, mode: str) -> None:
    source, target = stack.remember_roles()
    free = stack.free_blocks(source), stack.free_blocks(target)
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0, "logprobs": 2}]
    requests = [sized_request(f"{mode}-{index}", 300, 160, 8100 + index, kind) for index, kind in enumerate(kinds)]
    references = stack.run(requests)
    with stack.faults(source, step_delay_s=0.03):
        load = stack.load(requests)
        migration = stack.finished(stack.migrate(source, target, mode=mode))
    assert migration.job["state"] == "done", migration.job
    assert {row["outcome"] for row in migration.requests} == {"moved"}, migration.requests
    assert len(migration.rounds) == (0 if mode == "stop_and_copy" else len(migration.rounds) or 1)
    for reference, answer in zip(references, load.result(120), strict=True):
        verdict = compare(reference, answer)
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)


def test_the_target_can_compute_the_kv_again_but_not_for_a_seeded_request(stack: RunningStack) -> None:
    source, target = stack.remember_roles()
    free = stack.free_blocks(source), stack.free_blocks(target)
    kinds = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]
    requests = [sized_request(f"again-{index}", 300, 160, 8200 + index, kind) for index, kind in enumerate(kinds)]
    references = stack.run(requests)
    with stack.faults(source, step_delay_s=0.03):
        load = stack.load(requests)
        migration = stack.finished(stack.migrate(source, target, mode="recompute"))
    assert migration.job["state"] == "done", migration.job
    by_outcome = {row["outcome"]: row for row in migration.requests}
    # It ended where it was.
    assert set(by_outcome) == {"moved", "finished"}, migration.requests
    assert by_outcome["finished"]["code"] == "seeded_recompute"
    # No block was sent for the other one.
    assert by_outcome["moved"]["tail_bytes"] == 0 and migration.job["bytes_total"] == 0
    for reference, answer in zip(references, load.result(120), strict=True):
        verdict = compare(reference, answer)
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)
