"""How a migration reads on a page: its steps, its numbers and its result in a sentence. Pure: no database, no HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from instances.templatetags.formats import NO_VALUE, milliseconds, seconds, size, times
from migrations_app.choices import LIVE_STATES, MigrationState, MigrationType, MoveWay, RequestOutcome, RoundKind
from migrations_app.models import MigrationEvent, MigrationJob, MigrationRequest, MigrationRound
from migrations_app.prediction import Estimate
from migrations_app.preflight import Check
from migrations_app.selectors import percentile

__all__ = [
    "Numbers",
    "can_go_back",
    "estimate",
    "event_lines",
    "numbers",
    "request_lines",
    "result",
    "round_lines",
    "steps",
    "worst_first",
]

#: Steps of the page, in order. Pending shows as the first one not yet begun.
STEPS = (
    MigrationState.PREFLIGHT,
    MigrationState.ATTACHING,
    MigrationState.COPYING,
    MigrationState.HANDING_OVER,
    MigrationState.DRAINING,
    MigrationState.FINISHING,
    MigrationState.DONE,
)

ROUND_LABELS: dict[str, str] = {RoundKind.FULL: "Full", RoundKind.INCREMENTAL: "Increment", RoundKind.FINAL: "Final"}


class StepLine(TypedDict):
    value: str
    label: str
    #: past, current, future, failed or stopped
    status: str


class Numbers(TypedDict):
    """Totals of one migration. Gaps are in ms, and as text in multiples of the request's own time between tokens."""

    rounds: int
    blocks: int
    hits: int
    bytes: int
    rate: str
    others: str
    gap_p50: float | None
    gap_p99: float | None
    gap_p50_times: str
    gap_p99_times: str


def steps(state: str, events: Iterable[MigrationEvent]) -> list[StepLine]:
    """The stepper. A job that ended badly shows where it was when that happened."""
    ended_badly = state in (MigrationState.FAILED, MigrationState.ABORTED, MigrationState.PARTIAL)
    at = state
    if ended_badly:
        reached = [event.data.get("state") for event in events if event.kind == "state"]
        live = [name for name in reached if name in LIVE_STATES]
        at = live[-1] if live else MigrationState.PREFLIGHT
    position = STEPS.index(MigrationState(at)) if at in STEPS else -1
    lines: list[StepLine] = []
    for index, step in enumerate(STEPS):
        if index < position or state == MigrationState.DONE:
            status = "past"
        elif index > position:
            status = "future"
        elif ended_badly:
            status = "failed" if state == MigrationState.FAILED else "stopped"
        else:
            status = "current"
        lines.append({"value": step.value, "label": str(step.label), "status": status})
    return lines


def numbers(rounds: Sequence[MigrationRound], requests: Sequence[MigrationRequest]) -> Numbers:
    moved = [row for row in requests if row.outcome == RequestOutcome.MOVED]
    gaps = [row.gap_ms for row in moved if row.gap_ms is not None]
    multiples = [row.gap_ms / row.itl_ms for row in moved if row.gap_ms is not None and row.itl_ms]
    duration_ms = sum(row.duration_ms for row in rounds)
    total = sum(row.bytes for row in rounds) + sum(row.tail_bytes for row in requests)
    others = [
        f"{count} {word}"
        for outcome, word in (
            (RequestOutcome.ATTACHED, "attached"),
            (RequestOutcome.FINISHED, "ended by themselves"),
            (RequestOutcome.STAYED, "stayed"),
            (RequestOutcome.REFUSED, "not movable"),
            (RequestOutcome.FILTERED, "kept by the filter"),
        )
        if (count := sum(row.outcome == outcome for row in requests))
    ]
    return {
        "rounds": len(rounds),
        "blocks": sum(row.blocks for row in rounds) + sum(row.tail_blocks for row in requests),
        "hits": sum(row.hit_blocks for row in rounds),
        "bytes": total,
        "rate": _rate(sum(row.bytes for row in rounds), duration_ms),
        "others": ", ".join(others),
        "gap_p50": percentile(gaps, 50),
        "gap_p99": percentile(gaps, 99),
        "gap_p50_times": _in_tokens(percentile(multiples, 50)),
        "gap_p99_times": _in_tokens(percentile(multiples, 99)),
    }


def _rate(sent_bytes: int, duration_ms: float) -> str:
    return f"{size(round(sent_bytes * 1000 / duration_ms))}/s" if duration_ms > 0 and sent_bytes else ""


def _in_tokens(multiple: float | None) -> str:
    return f"{times(multiple)} inter-token time" if multiple is not None else ""


def round_lines(rounds: Sequence[MigrationRound]) -> list[dict[str, Any]]:
    """Rows of the table of rounds; the three percentages share one scale, the largest round."""
    largest = max((max(row.blocks + row.hit_blocks, row.dirty_blocks) for row in rounds), default=0) or 1
    return [
        {
            "round_index": row.round_index,
            "label": ROUND_LABELS.get(row.kind, row.kind),
            "blocks": row.blocks,
            "bytes": row.bytes,
            "hit_blocks": row.hit_blocks,
            "dirty_blocks": row.dirty_blocks,
            "duration_ms": row.duration_ms,
            "rate": _rate(row.bytes, row.duration_ms),
            "sent_percent": f"{100 * row.blocks / largest:.2f}",
            "hit_percent": f"{100 * row.hit_blocks / largest:.2f}",
            "dirty_percent": f"{100 * row.dirty_blocks / largest:.2f}",
        }
        for row in rounds
    ]


def request_lines(requests: Sequence[MigrationRequest], *, over: bool) -> list[dict[str, Any]]:
    """Rows of the table of requests. When the job is `over`, what is still attached has not moved and will not."""
    multiples = {row.request_id: row.gap_ms / row.itl_ms for row in requests if row.gap_ms is not None and row.itl_ms}
    largest = max([*multiples.values(), 4.0])

    def left_behind(row: MigrationRequest) -> bool:
        return over and row.outcome == RequestOutcome.ATTACHED

    return [
        {
            "request_id": row.request_id,
            "outcome": row.outcome,
            "outcome_word": "Not moved" if left_behind(row) else row.get_outcome_display(),
            "tone": "muted" if left_behind(row) else row.outcome_tone,
            "moved": row.outcome == RequestOutcome.MOVED,
            "why": row.message or row.code or (row.get_way_display() if row.way not in ("", MoveWay.BLOCKS) else ""),
            "prompt_tokens": row.prompt_tokens,
            "output_tokens": row.output_tokens,
            "kv_blocks": row.kv_blocks,
            "tail": f"{row.tail_blocks} · {size(row.tail_bytes)}" if row.tail_blocks else NO_VALUE,
            "gap_ms": row.gap_ms,
            "gap_times": multiples.get(row.request_id),
            "gap_percent": f"{100 * multiples.get(row.request_id, 0) / largest:.1f}",
            "stages": _stages(row.stages),
        }
        for row in requests
    ]


def _stages(stages: Mapping[str, Any]) -> str:
    known = {name: ms for name, ms in stages.items() if isinstance(ms, (int, float))}
    return " · ".join(f"{name.replace('_', ' ')} {ms:.{1 if ms < 10 else 0}f}" for name, ms in known.items())


def event_lines(job: MigrationJob, events: Iterable[MigrationEvent]) -> list[dict[str, Any]]:
    return [
        {
            "seq": event.seq,
            "kind": event.kind,
            "step": event.step,
            "message": event.message,
            "offset": f"+{(event.created_at - job.created_at).total_seconds():.3f} s",
        }
        for event in events
    ]


def worst_first(checks: Iterable[Check]) -> list[Check]:
    """Errors, then warnings, then what agrees, each in the order of the pre-flight."""
    order = {"error": 0, "warning": 1, "ok": 2}
    return sorted(checks, key=lambda check: order[check.level])


def estimate(cost: Estimate | None) -> str:
    """What a migration will probably move, in a sentence; empty when the instances could not be asked."""
    if cost is None:
        return ""
    if not cost.requests:
        return "No request can move right now: only the route for new requests would change."
    what = "1 request" if cost.requests == 1 else f"{cost.requests} requests"
    return f"About {what}, {cost.blocks:,} blocks, {size(cost.bytes)}, {seconds(cost.seconds)} in {cost.rounds} rounds."


def result(job: MigrationJob, totals: Numbers) -> dict[str, str]:
    """The end of a migration for people: a title and a sentence or two. Empty strings while it runs."""
    if not job.is_terminal:
        return {"title": "", "sentence": ""}
    took = f" in {seconds(job.duration_s)}" if job.duration_s is not None else ""
    moved, total = job.moved_requests, job.total_requests
    if job.state == MigrationState.DONE:
        title = "Migration done"
        beside = job.migration_type == MigrationType.KEEP_SOURCE_ACTIVE
        if not moved:
            where = job.source_id if beside else job.target_id
            text = f"No request had to move{took}. New traffic goes to {where}."
        else:
            text = f"{_all_of(moved, total)} moved from {job.source_id} to {job.target_id}{took}.{_felt(totals)}"
        if job.migration_type == MigrationType.PRESERVE_SOURCE:
            text += f" {job.source_id} is a standby now."
        elif job.migration_type == MigrationType.DESTROY_SOURCE:
            text += f" {job.source_id} was shut down."
        elif moved:
            text += f" {job.source_id} goes on with the others and with new traffic."
        return {"title": title, "sentence": text}
    rest = max(0, total - moved)
    if job.state == MigrationState.PARTIAL:
        return {
            "title": "Migration partly done",
            "sentence": f"{moved} of {total} requests moved{took}; {rest} did not move.{_felt(totals)}",
        }
    title = "Migration failed" if job.state == MigrationState.FAILED else "Migration aborted"
    if not moved:
        text = f"Nothing moved: requests go on running on {job.source_id}, and new traffic goes there."
    else:
        text = f"{moved} of {total} requests had moved to {job.target_id}; the others stayed on {job.source_id}."
    return {"title": title, "sentence": text}


def can_go_back(job: MigrationJob) -> bool:
    """Whether what moved could move back now: to the standby, or to the source that went on beside it."""
    beside = job.migration_type == MigrationType.KEEP_SOURCE_ACTIVE
    return job.target.status == "active" and job.source.status == ("active" if beside else "standby")


def _all_of(moved: int, total: int) -> str:
    if moved < total:
        return f"{moved} of {total} requests"
    return "The only request" if total == 1 else f"All {total} requests"


def _felt(totals: Numbers) -> str:
    if totals["gap_p50"] is None:
        return ""
    text = f" The pause that clients saw was {milliseconds(totals['gap_p50'])} at the median"
    text += f" and {milliseconds(totals['gap_p99'])} at the 99th percentile"
    return f"{text} ({totals['gap_p99_times']})." if totals["gap_p99_times"] else f"{text}."
