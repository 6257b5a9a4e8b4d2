"""The comparison notices what it is there for: with a piece of state left behind, the row of that piece fails."""

from __future__ import annotations

from benchmarks.exactness import Verdict
from benchmarks.fidelity import batch_of
from benchmarks.fidelity_kinds import KINDS
from benchmarks.kinds import Kind
from benchmarks.live_migration import MigrationRun
from tests.engine.conftest import RunningStack

#: Piece of state, the row that depends on it, and what that row says without it.
PIECES = {
    "random generator": ("seeded, temperature 1", "token ids differ"),
    "penalties": ("presence_penalty", "token ids differ"),
    "split between prompt and output": ("stop_token_ids that end the answer", "token ids differ"),
    "grammar": ("structured output: JSON schema", "differ"),
}


def _kinds(names: list[str]) -> list[Kind]:
    return [next(kind for kind in KINDS if kind.name == name) for name in names]


def _moved(stack: RunningStack, names: list[str], salt: int) -> tuple[dict[str, Verdict], MigrationRun]:
    return _moved_kinds(stack, _kinds(names), salt)


def _moved_kinds(stack: RunningStack, kinds: list[Kind], salt: int) -> tuple[dict[str, Verdict], MigrationRun]:
    run = stack.migrate_under_load(batch_of(kinds, salt), start_after_tokens=6)
    assert run.migration.job["state"] == "done", run.migration.job
    found = dict(zip([kind.name for kind in kinds], run.verdicts, strict=True))
    for name, verdict in found.items():
        assert verdict.cut_at is not None, f"{name} was not moved: {run.migration.requests}"
    return found, run


def test_each_piece_of_state_that_is_left_behind_spoils_its_row(stack: RunningStack) -> None:
    names = ["greedy, chat", *(name for name, _ in PIECES.values())]
    source, target = stack.remember_roles()
    with (
        stack.faults(source, drop_generator=True),
        stack.faults(target, drop_output_split=True, skip_grammar=True),
    ):
        found, _ = _moved(stack, names, salt=94)
    # Greedy sampling depends on none of these.
    assert found["greedy, chat"].exact, found["greedy, chat"]
    for piece, (name, sentence) in PIECES.items():
        assert any(sentence in one for one in found[name].differences), f"{piece}: {found[name]}"


def test_log_probabilities_that_are_left_behind_are_noticed(stack: RunningStack) -> None:
    # In one piece, so that those of the source come to the client by the target.
    whole = [kind.but(streamed=False) for kind in _kinds(["logprobs, chat"])]
    with stack.faults(stack.remember_roles()[0], drop_logprobs=True):
        found, _ = _moved_kinds(stack, [*_kinds(["greedy, chat"]), *whole], salt=98)
    assert found["greedy, chat"].exact, found["greedy, chat"]
    wrong = next(verdict for name, verdict in found.items() if name != "greedy, chat")
    assert any("log-probabilit" in one for one in wrong.differences), wrong


def test_a_tail_block_that_is_not_sent_again_is_noticed(stack: RunningStack) -> None:
    with stack.faults(stack.remember_roles()[0], skip_tail=True):
        names = ["greedy, text completion", "greedy, chat", "repetition_penalty"]
        found, run = _moved(stack, names, salt=95)
    wrong = [verdict for verdict in found.values() if any("token ids differ" in one for one in verdict.differences)]
    assert wrong, "no stream noticed that the last block was missing"
    for verdict, answer, reference in zip(run.verdicts, run.answers, run.references, strict=True):
        cut = verdict.cut_at
        assert cut is not None
        assert answer.token_ids[:cut] == reference.token_ids[:cut], f"{verdict.name} went wrong before its cut"


def test_a_detokenizer_that_is_not_told_the_last_token_is_noticed(stack: RunningStack) -> None:
    with stack.faults(stack.remember_roles()[1], drop_replay_tail=True):
        found, _ = _moved(stack, ["greedy, chat"], salt=96)
    assert found["greedy, chat"].differences, found


def test_nothing_is_noticed_when_nothing_is_left_behind(stack: RunningStack) -> None:
    stack.remember_roles()
    names = [name for name, _ in PIECES.values()]
    found, _ = _moved(stack, names, salt=97)
    for name, verdict in found.items():
        assert verdict.exact, f"{name}: {verdict.differences}"
