"""The comparison notices what it is there for: with a piece of state left behind, it reports the difference."""

from __future__ import annotations

from benchmarks.streams import Request, mixed_requests
from tests.engine.conftest import RunningStack


def _of_kinds(requests: list[Request], *kinds: str) -> list[Request]:
    return [request for request in requests if request.name in kinds]


def test_a_tail_block_that_is_not_sent_again_is_noticed(stack: RunningStack) -> None:
    requests = _of_kinds(mixed_requests(8, tokens=160, salt=31), "greedy", "penalties", "seeded")
    with stack.faults(stack.active(), skip_tail=True):
        run = stack.migrate_under_load(requests)

    assert run.migration.job["state"] == "done", run.migration.job
    assert all(verdict.cut_at is not None for verdict in run.verdicts)
    wrong = [verdict for verdict in run.verdicts if any("token ids differ" in one for one in verdict.differences)]
    assert wrong, "no stream noticed that the last block was missing"
    for verdict, answer, reference in zip(run.verdicts, run.answers, run.references, strict=True):
        cut = verdict.cut_at
        assert cut is not None
        assert answer.token_ids[:cut] == reference.token_ids[:cut], f"{verdict.name} went wrong before its cut"


def test_a_random_state_that_is_left_behind_is_noticed(stack: RunningStack) -> None:
    requests = _of_kinds(mixed_requests(8, tokens=160, salt=32), "greedy", "seeded", "seeded-top")
    with stack.faults(stack.active(), drop_generator=True):
        run = stack.migrate_under_load(requests)

    assert run.migration.job["state"] == "done", run.migration.job
    by_name = {verdict.name: verdict for verdict in run.verdicts}
    assert by_name["greedy"].exact, by_name["greedy"].differences
    assert any("token ids differ" in one for one in by_name["seeded"].differences), by_name["seeded"]
