"""Which requests a job moves: all that come, or with `keep_source_active` those that were there and selected when it
began. The rest is the source's own business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from migrations_app import journal
from migrations_app.choices import EventKind, MigrationType, RequestOutcome
from migrations_app.events import record
from migrations_app.models import MigrationJob
from migrations_app.refusals import FILTERED, TRANSIENT_REASONS
from migrations_app.rollback import MigrationStopped
from migrations_app.selection import Selection

__all__ = ["Chosen"]

Rows = list[dict[str, Any]]


class Chosen:
    """The choice of one job.

    Attributes:
        everything: the source is to be emptied.
        selection: what the operator has asked for.
    """

    def __init__(self, job: MigrationJob) -> None:
        self.everything = job.migration_type != MigrationType.KEEP_SOURCE_ACTIVE
        self._job = job
        self.selection = Selection.of(job.selection)
        self._ids: set[str] | None = None
        self._stay: dict[str, str] = {}

    def still_to_go(self, rows: Rows, given_up: Callable[[str], bool], moved: set[str]) -> Rows:
        """Those of the source's requests that the job still wants to leave it.

        Where the source goes on, what cannot move for good is written down once, and is not waited for.

        Raises:
            MigrationStopped: `nothing_selected`.
        """
        if self.everything:
            return rows
        if self._ids is None:
            self._ids = self._choose(rows)
        waiting = []
        for row in rows:
            request_id = str(row["request_id"])
            if request_id not in self._ids or request_id in moved or request_id in self._stay:
                continue
            reason = row.get("reason") or {}
            if not row.get("migratable") and reason.get("code") not in TRANSIENT_REASONS:
                self._stay[request_id] = str(reason.get("message") or "")
                note = {**row, "code": reason.get("code"), "message": reason.get("message")}
                journal.note_refused(self._job.id, [note], RequestOutcome.REFUSED)
            elif given_up(request_id):
                self._stay[request_id] = _why(self._job, request_id)
            else:
                waiting.append(row)
        return waiting

    def stayed(self) -> MigrationStopped | None:
        """Why not all that were chosen have left, None if they have, or ended."""
        if not self._stay:
            return None
        reason = next((why for why in self._stay.values() if why), "they did not move when tried")
        count = len(self._stay)
        stay = f"{count} of the selected requests {'stays' if count == 1 else 'stay'}"
        return MigrationStopped("requests_stayed", f"{stay} on {self._job.source_id} ({reason.rstrip('.')})")

    def _choose(self, rows: Rows) -> set[str]:
        selected = [row for row in rows if self.selection.matches(row)]
        filtered = [row for row in selected if (row.get("reason") or {}).get("code") == FILTERED]
        ids = {str(row["request_id"]) for row in selected if row not in filtered}
        journal.note_refused(self._job.id, [{**row, **row["reason"]} for row in filtered], RequestOutcome.FILTERED)
        gone = "The request was not in flight any more when the migration began, or never was."
        journal.note_refused(
            self._job.id,
            [
                {"request_id": one, "code": "unknown_request", "message": gone}
                for one in self.selection.unmatched_ids(rows)
            ],
            RequestOutcome.FINISHED,
        )
        record(
            self._job.id,
            EventKind.STEP,
            message=f"{len(ids)} of {len(rows)} requests are to move; new ones stay on {self._job.source_id}",
            data={"selected": len(ids), "filtered": len(filtered), "in_flight": len(rows)},
        )
        if not ids and (rows or self.selection):
            raise MigrationStopped("nothing_selected", _nothing(self._job, self.selection, rows, filtered))
        return ids


def _nothing(job: MigrationJob, selection: Selection, rows: Rows, filtered: Rows) -> str:
    if filtered:
        return f"The request filter of {job.source_id} keeps all {len(filtered)} that were selected"
    return (
        f"None of the {len(rows)} requests of {job.source_id} is selected ({selection.describe()}): widen the selection"
    )


def _why(job: MigrationJob, request_id: str) -> str:
    return str(job.request_rows.filter(request_id=request_id).values_list("message", flat=True).first() or "")
