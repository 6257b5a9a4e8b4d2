"""What was seen of each kind of request, whether it holds, and the document that says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.answers import Answer
from benchmarks.exactness import Verdict
from benchmarks.kinds import Kind
from benchmarks.kinds_states import STATIC
from benchmarks.live_migration import MigrationRun

__all__ = ["Row", "document", "judge", "judge_one"]

#: What makes the model's own log-probabilities another thing than what a greedy request chooses by.
_STEERING = frozenset(
    (
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens"),
        *("allowed_token_ids", "structured_outputs", "response_format", "tools"),
    )
)


@dataclass
class Row:
    """What was seen of one kind.

    Attributes:
        migrated: requests that moved at least once.
        moves: all moves of them.
        exact: of the migrated.
        ties: of the migrated, those that took the other one of two equally likely tokens.
        mismatches: requests that were not as undisturbed, whether they moved or not.
        finished: requests that ended by themselves while they were being moved.
        cuts: tokens at which requests were cut.
        codes: reasons of refusals.
        differences, notes: what was not exact, and near-ties.
        troubles: migrations that could not be run at all.
    """

    kind: Kind
    migrated: int = 0
    moves: int = 0
    exact: int = 0
    ties: int = 0
    mismatches: int = 0
    finished: int = 0
    cuts: list[int] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the kind behaved as the matrix says: exact each time, or refused with its code."""
        if self.differences or self.mismatches:
            return False
        if self.kind.refused:
            return self.codes == {self.kind.refused} and not self.migrated
        return self.tried > 0 and self.exact + self.ties == self.migrated

    @property
    def tried(self) -> int:
        """How often it was seen to do what there is to see of it."""
        if self.kind.refused:
            return self.migrated or len(self.codes)
        return self.finished if self.kind.ends else self.migrated


def judge(rows: dict[str, Row], kinds: list[Kind], run: MigrationRun, salt: int) -> list[str]:
    """Adds one run's outcome to the rows; returns a line for everything that was not as it should be."""
    lines = []
    for kind, verdict, answer in zip(kinds, run.verdicts, run.answers, strict=True):
        lines += judge_one(rows[kind.name], verdict, answer, run, salt)
    return lines


def judge_one(row: Row, verdict: Verdict, answer: Answer, run: MigrationRun, salt: int) -> list[str]:
    """Adds one request's outcome to its row."""
    lines: list[str] = []
    cuts = ", ".join(map(str, verdict.cuts)) or "never"
    where = f"{answer.request.name} (prompts {salt}, cut after {cuts})"
    seen = _rows_of(answer, run)
    if verdict.cuts:
        row.migrated += 1
        row.moves += len(verdict.cuts)
        row.cuts += verdict.cuts
        row.exact += verdict.exact
    elif any(one["outcome"] == "finished" for one in seen):
        row.finished += 1
    else:
        row.codes |= {one["code"] for one in seen if one["outcome"] in ("refused", "stayed")}
    if verdict.exact:
        return lines
    # Of a request that stays, the comparison with the undisturbed one holds as well; but nothing was proven of moving.
    found = [*verdict.differences, *map(str, verdict.splits)]
    if verdict.splits and all(split.tied for split in verdict.splits) and _chooses_by_logits(answer):
        row.ties += bool(verdict.cuts)
        row.notes.append(f"{where}: {'; '.join(map(str, verdict.splits))}")
        lines.append(f"near-tie: {row.notes[-1]}")
    else:
        row.mismatches += 1
        row.differences.append(f"{where}: {'; '.join(found)}")
        lines.append(f"MISMATCH: {row.differences[-1]}")
    return lines


def _rows_of(answer: Answer, run: MigrationRun) -> list[dict[str, Any]]:
    # A request that the proxy refused has no stream id in its row; its request id is made from it.
    return [
        row
        for migration in run.migrations
        for row in migration.requests
        if answer.stream_id and (answer.stream_id == row["stream_id"] or answer.stream_id in row["request_id"])
    ]


def _chooses_by_logits(answer: Answer) -> bool:
    body = answer.request.body
    return body.get("temperature") == 0 and not any(body.get(name) for name in _STEERING)


def document(rows: dict[str, Row], seed: int) -> str:
    """The matrix as Markdown."""
    migrated, moves = sum(row.migrated for row in rows.values()), sum(row.moves for row in rows.values())
    lines = [
        "# Which requests survive a migration, and how",
        "",
        "Written by `python -m benchmarks.fidelity` from the runs that prove it; do not edit. Two real vLLM instances",
        "on CPUs, SmolLM2-135M in float32, up to ten sequences at once, moved in mid-answer and most of them back",
        f"again, at cut points drawn at random (seed {seed}): {migrated} requests moved, {moves} moves.",
        "",
        "- *Exact*: text, token ids, reasoning, tool calls, usage, finish and stop reason equal those of the same",
        "  request sent straight to an instance that nothing disturbs, log-probabilities within 1e-4; and the client",
        "  sees one response: one id, one role, one end of each choice, one usage, no event twice and none missing.",
        "  Unseeded requests have no twin; their delivered tokens are scored again.",
        "- *Refused*: the request stays on its instance and says why before anything is frozen.",
        "- *Near-tie*: at one position two tokens were as likely to within 1e-3; listed below, not counted as exact.",
        "",
        "| kind of request | result | requests moved | moves | cut after tokens | near-ties |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        cuts = f"{min(row.cuts)} to {max(row.cuts)}" if row.cuts else "-"
        name = row.kind.name.replace("|", "\\|")
        lines.append(
            f"| {name} | {_result(row)} | {row.migrated or '-'} | {row.moves or '-'} | {cuts} | {row.ties or '-'} |"
        )
    lines += [f"| {name} | {result} | - | - | - | - |" for name, result in STATIC]
    for title, texts in (
        ("Near-ties", [note for row in rows.values() for note in row.notes]),
        ("Differences", [difference for row in rows.values() for difference in row.differences]),
    ):
        if texts:
            lines += ["", f"## {title}", "", *(f"- {text}" for text in texts)]
    return "\n".join(lines) + "\n"


def _result(row: Row) -> str:
    if row.differences:
        return f"**{len(row.differences)} DIFFERENCES**"
    if row.kind.refused:
        return f"refused: `{row.kind.refused}`" if row.holds else f"**NOT REFUSED AS IT SHOULD BE** {sorted(row.codes)}"
    if not row.tried:
        reasons = sorted(row.codes) or row.troubles[:1] or ["no reason given"]
        return f"**NEVER MOVED**: {', '.join(reasons)}"
    if row.kind.ends:
        return f"exact; {row.finished} ended before they moved"
    return "exact"
