"""Moves the requests of one job: what fits first, what is left as room appears, and in other ways past the deadline.

The loop lists the source until it is empty. Before `drain_deadline_s` has passed a request moves with its KV blocks,
and only when the target has room for it. After that each that is left is tried in the ways that need no room at once, a
few times each; then the job ends and says what stayed and why.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.utils import timezone

from migrations_app import journal
from migrations_app.choices import (
    PRECOPY_MODES,
    EventKind,
    HandoverMode,
    MigrationState,
    MoveWay,
    RequestOutcome,
    RoundKind,
    Step,
)
from migrations_app.convergence import stop_reason
from migrations_app.events import record
from migrations_app.refusals import LASTING_REFUSALS, ROOM_REFUSALS, TRANSIENT_REASONS, Refused
from migrations_app.rollback import MigrationStopped
from migrations_app.room import Room, choose, oldest_first, why_not

if TYPE_CHECKING:
    from migrations_app.executor import Execution

__all__ = ["HANDOVER_TRIES", "Moving"]

#: How often a request that stayed at its handover is tried again, in each way; each try costs its client a short pause.
HANDOVER_TRIES = 3
DRAIN_POLL_S = 0.25
#: Past the deadline the source gets so long to end what has moved.
AFTERMATH_S = 10.0
#: Ways for what is left when the deadline has passed, the best first; none of them needs room on the target at once.
LATE_WAYS = (MoveWay.STAGED, MoveWay.RECOMPUTE)
#: How the plugin calls them.
_LATE_MODES = {MoveWay.STAGED: "staged", MoveWay.RECOMPUTE: "queued"}

Rows = list[dict[str, Any]]


class Moving:
    """The requests of one attempt at one job."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.job = execution.job
        self.source = execution.source
        self.target = execution.target
        self.way = MoveWay.BLOCKS
        self.round_index = 0
        self.handover_tries: Counter[str] = Counter()
        self.late_tries: Counter[tuple[str, MoveWay]] = Counter()
        self.refused: dict[str, Refused] = {}
        self.moved: set[str] = set()
        #: Those for which the target had no room when they were looked at.
        self.waiting: set[str] = set()
        #: Those whose row says that they stayed.
        self.behind: set[str] = set()

    def everything(self) -> MigrationStopped | None:
        """Moves what can move until all that is to leave the source has. Returns why some has not when the deadline for
        that is over."""
        execution = self.execution
        state = MigrationState.ATTACHING
        stuck_since: float | None = None
        while True:
            execution.check()
            listed: Rows = execution.ask(self.source.requests, "its requests were being listed")
            self._note_ended({str(row["request_id"]) for row in listed})
            rows = execution.chosen.still_to_go(listed, self._given_up, self.moved)
            left = [row for row in rows if str(row["request_id"]) not in self.moved]
            late = stuck_since is not None and time.monotonic() - stuck_since > self.job.drain_deadline_s
            chosen, self.way = self._choose(left, late)
            if late:
                self.late_tries.update((str(row["request_id"]), self.way) for row in chosen)
            if chosen:
                if state == MigrationState.DRAINING:
                    execution.advance(MigrationState.DRAINING, MigrationState.ATTACHING)
                progress = self._move(chosen)
                state = MigrationState.DRAINING
                if progress:
                    continue
            elif state == MigrationState.ATTACHING:
                execution.advance(MigrationState.ATTACHING, MigrationState.DRAINING)
                state = MigrationState.DRAINING
            if not rows:
                return None
            self._note_unmovable(left)
            now = time.monotonic()
            stuck_since = stuck_since or now
            over = bool(left) or now - stuck_since > self.job.drain_deadline_s + AFTERMATH_S
            if late and not chosen and over:
                return self._stuck(left or rows)
            time.sleep(DRAIN_POLL_S)

    # -- which, and how ------------------------------------------------------------------------------------------------

    def _choose(self, rows: Rows, late: bool) -> tuple[Rows, MoveWay]:
        """What is moved next, oldest first, and in which way."""
        movable = [row for row in rows if row.get("migratable")]
        ready = [row for row in movable if self._may_try(str(row["request_id"]))]
        if late:
            ready = [row for row in ready if self._late_tries(row, MoveWay.BLOCKS) < HANDOVER_TRIES]
        if ready:
            room = Room.of(
                self.execution.ask(self.target.status, "it was asked for its free blocks"),
                self.execution.ask(self.target.requests, "its requests were being listed"),
            )
            fitting, waiting = choose(ready, room)
            self._note_waiting(waiting, room)
            if fitting:
                return [dict(row) for row in fitting], MoveWay.BLOCKS
        for way in self._late_ways if late else ():
            again = [row for row in movable if self._lacks_room(row) and self._late_tries(row, way) < HANDOVER_TRIES]
            if again:
                return [dict(row) for row in oldest_first(again)], way
        return [], MoveWay.BLOCKS

    @property
    def _late_ways(self) -> tuple[MoveWay, ...]:
        # Where the operator wants no KV to travel, or none can, none is staged either.
        return LATE_WAYS[1:] if self.job.mode == HandoverMode.RECOMPUTE else LATE_WAYS

    def _lacks_room(self, row: dict[str, Any]) -> bool:
        """Whether that is all that keeps it: what is refused for another reason would be refused in any way."""
        refused = self.refused.get(str(row["request_id"]))
        return str(row["request_id"]) in self.waiting and (refused is None or not refused.lasting)

    def _late_tries(self, row: dict[str, Any], way: MoveWay) -> int:
        return self.late_tries[str(row["request_id"]), way]

    def _given_up(self, request_id: str) -> bool:
        refused = self.refused.get(request_id)
        return self.handover_tries[request_id] >= HANDOVER_TRIES or (refused is not None and refused.lasting)

    def _may_try(self, request_id: str) -> bool:
        if self.handover_tries[request_id] >= HANDOVER_TRIES:
            return False
        refused = self.refused.get(request_id)
        return refused is None or time.monotonic() >= refused.until

    def _did_not_move(self, row: dict[str, Any]) -> None:
        """Decides when a request that the target or the proxy did not take is tried again."""
        request_id, code = str(row["request_id"]), str(row.get("code") or "")
        self.behind.add(request_id)
        if self.way != MoveWay.BLOCKS:
            if code == "target_out_of_staging":
                self.late_tries[request_id, self.way] = HANDOVER_TRIES
            elif code in LASTING_REFUSALS:
                self.refused.setdefault(request_id, Refused()).again(code)
            return
        if code in ROOM_REFUSALS:
            self.waiting.add(request_id)
        if code in LASTING_REFUSALS or code in ROOM_REFUSALS:
            self.refused.setdefault(request_id, Refused()).again(code)
        if code not in ROOM_REFUSALS:
            self.handover_tries[request_id] += 1

    # -- one batch -----------------------------------------------------------------------------------------------------

    def _move(self, rows: Rows) -> bool:
        """Attaches, copies and hands over; from `attaching` to `draining`. Returns whether any request left."""
        advance = self.execution.advance
        attached = self._attach([str(row["request_id"]) for row in rows])
        if not attached:
            advance(MigrationState.ATTACHING, MigrationState.DRAINING)
            return False
        advance(MigrationState.ATTACHING, MigrationState.COPYING)
        copied = self.way == MoveWay.BLOCKS and self.job.mode in PRECOPY_MODES
        remaining = self._copy(attached) if copied else attached
        if not remaining:
            advance(MigrationState.COPYING, MigrationState.DRAINING)
            return True
        advance(MigrationState.COPYING, MigrationState.HANDING_OVER)
        progress = self._hand_over(remaining)
        advance(MigrationState.HANDING_OVER, MigrationState.DRAINING)
        return progress

    def _attach(self, ids: list[str]) -> list[str]:
        """Returns the ids that have a place on the target now."""
        execution = self.execution
        execution.check()
        answer = execution.ask(
            lambda: self.source.attach(str(self.job.id), execution.attempt, ids), "requests were being attached"
        )
        attached, refused = answer.get("attached") or [], answer.get("refused") or []
        journal.note_attached(self.job.id, attached)
        journal.note_refused(self.job.id, refused, RequestOutcome.REFUSED)
        finished = [{"request_id": one} for one in answer.get("finished") or []]
        journal.note_refused(self.job.id, finished, RequestOutcome.FINISHED)
        for row in refused:
            if self.way == MoveWay.BLOCKS:
                self.refused.setdefault(str(row["request_id"]), Refused()).again(str(row.get("code") or ""))
            else:
                self._did_not_move(row)
        if refused:
            execution.target_must_answer("requests were being attached")
        return [str(row["request_id"]) for row in attached]

    def _copy(self, ids: list[str]) -> list[str]:
        """Rounds until a stop rule fires. Returns the ids that are still to be handed over."""
        execution = self.execution
        remaining = list(ids)
        blocks: list[int] = []
        while remaining:
            execution.check()
            index, self.round_index = self.round_index, self.round_index + 1
            kind = RoundKind.INCREMENTAL if blocks else RoundKind.FULL
            journal.note_round_begin(self.job.id, index, kind)
            started = timezone.now()
            slow = self.job.mode == HandoverMode.SLOWED
            answer = execution.ask(
                partial(self.source.round, str(self.job.id), execution.attempt, index, slow),
                f"round {index} was being copied",
            )
            row = journal.note_round(self.job.id, index, kind, started, answer)
            blocks.append(row.blocks)
            remaining = self._without_lost(remaining, answer, f"round {index} was being copied")
            reason = stop_reason(
                blocks,
                tn=self.job.tn,
                max_increments=self.job.max_increment_rounds,
                stall_rounds=self.job.stall_rounds,
            )
            if reason is not None:
                record(
                    self.job.id, EventKind.STEP, message=f"Copying ends: {reason.value}", data={"reason": reason.value}
                )
                break
        return remaining

    def _without_lost(self, ids: list[str], answer: dict[str, Any], phase: str) -> list[str]:
        finished = [str(request_id) for request_id in answer.get("finished") or []]
        failed: Rows = answer.get("failed") or []
        journal.note_refused(self.job.id, [{"request_id": one} for one in finished], RequestOutcome.FINISHED)
        journal.note_refused(self.job.id, failed, RequestOutcome.STAYED)
        for row in failed:
            self._did_not_move(row)
        if failed:
            self.execution.target_must_answer(phase)
        gone = {*finished, *(str(row["request_id"]) for row in failed)}
        return [one for one in ids if one not in gone]

    def _hand_over(self, ids: list[str]) -> bool:
        """Small waves: each costs its clients one short pause. Returns whether any request left the source."""
        execution = self.execution
        size = self._wave_size(len(ids))
        waves = [ids[start : start + size] for start in range(0, len(ids), size)]
        results: Rows = []
        for number, wave in enumerate(waves):
            execution.check()
            if number == 0:
                execution.step(Step.PAUSE_A, "The first requests are handed over")
            if number == len(waves) - 1:
                execution.step(Step.FINAL_INCREMENTAL, "The last requests are handed over")
            results += self._hand_over_wave(wave)
            if number == 0:
                execution.step(Step.PAUSE_A_DONE, "The first requests were handed over")
        execution.step(
            Step.FINAL_INCREMENTAL_DONE,
            f"{sum(row.get('outcome') == RequestOutcome.MOVED for row in results)} of {len(ids)} requests moved",
            data_size_bytes=sum(int(row.get("tail_bytes") or 0) for row in results),
            block_count=sum(int(row.get("tail_blocks") or 0) for row in results),
        )
        return any(row.get("outcome") != RequestOutcome.STAYED for row in results)

    def _wave_size(self, requests: int) -> int:
        mode, small = self.job.mode, max(1, int(settings.VLLM_HI_HANDOVER_WAVE))
        if self.way != MoveWay.BLOCKS or mode in (HandoverMode.ROLLING, HandoverMode.SLOWED):
            return small
        # The target computes a whole context in one step, and its clients wait for no other.
        return 1 if mode == HandoverMode.RECOMPUTE else requests

    def _hand_over_wave(self, wave: list[str]) -> Rows:
        execution = self.execution
        one = f"request {wave[0]} was" if len(wave) == 1 else f"{len(wave)} requests were"
        phase = f"{one} being handed over"
        mode = HandoverMode.ROLLING if self.job.mode in PRECOPY_MODES else self.job.mode
        mode = _LATE_MODES.get(self.way, mode)
        answer = execution.ask(
            lambda: self.source.handover(str(self.job.id), execution.attempt, wave, len(wave), mode), phase
        )
        results: Rows = answer.get("results") or []
        journal.note_handed_over(self.job.id, results)
        stayed = [row for row in results if row.get("outcome") == RequestOutcome.STAYED]
        self.moved |= {str(row["request_id"]) for row in results if row.get("outcome") == RequestOutcome.MOVED}
        for row in stayed:
            self._did_not_move(row)
        if stayed:
            execution.target_must_answer(phase)
        return results

    # -- what is written down about those that are left ----------------------------------------------------------------

    def _note_waiting(self, rows: Sequence[Any], room: Room) -> None:
        """Writes down, once each, which requests wait for room."""
        new = [row for row in rows if str(row["request_id"]) not in self.waiting]
        if not new:
            return
        self.waiting |= {str(row["request_id"]) for row in new}
        self.behind |= self.waiting
        reasons = [(row, *why_not(row, room)) for row in new]
        noted = [{**row, "code": code, "message": message} for row, code, message in reasons]
        journal.note_refused(self.job.id, noted, RequestOutcome.STAYED)
        count = "1 request waits" if len(new) == 1 else f"{len(new)} requests wait"
        record(
            self.job.id,
            EventKind.STEP,
            message=f"{count} on {self.job.source_id} until {self.job.target_id} has room "
            f"({room.free} of its {room.total} blocks are free)",
            data={"waiting": [str(row["request_id"]) for row in new], "free_blocks": room.free},
        )

    def _note_ended(self, listed: set[str]) -> None:
        """What stayed and is gone from the source has ended there by itself."""
        ended = self.behind - self.moved - listed
        self.behind -= ended
        if ended:
            journal.note_ended(self.job.id, ended)

    def _note_unmovable(self, rows: Rows) -> None:
        """Writes down, once each, which requests hold the source up and why."""
        lasting = []
        for row in rows:
            reason = row.get("reason") or {}
            if not row.get("migratable") and reason.get("code") not in TRANSIENT_REASONS:
                lasting.append({**row, "code": reason.get("code"), "message": reason.get("message")})
        known = set(self.job.request_rows.values_list("request_id", flat=True))
        journal.note_refused(
            self.job.id, [row for row in lasting if str(row["request_id"]) not in known], RequestOutcome.REFUSED
        )

    def _stuck(self, rows: Rows) -> MigrationStopped:
        """Every request that is left gets a row with its reason; the sentence has the commonest ones."""
        known = dict(self.job.request_rows.exclude(message="").values_list("request_id", "message"))
        reasons: list[str] = []
        for row in rows:
            reason = row.get("reason") or {"code": "not_moved", "message": "It did not move when it was tried."}
            noted = known.get(str(row["request_id"]))
            if noted is None:
                journal.note_refused(self.job.id, [{**row, **reason}], RequestOutcome.STAYED)
            reasons.append(str(noted or reason["message"]))
        common = "; ".join(text.rstrip(".") for text, _ in Counter(reasons).most_common(3))
        count = "1 request" if len(rows) == 1 else f"{len(rows)} requests"
        return MigrationStopped(
            "drain_deadline",
            f"{count} could not move within {self.job.drain_deadline_s:g} s and go on on {self.job.source_id} "
            f"until they end ({common})",
        )
