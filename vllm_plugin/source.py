"""A's side of a migration session: what is on its way, who decided what became of it, and the way back.

Operations run one at a time on the engine's session thread. Notices of proxies and of B, and the deadlines, arrive on
other threads; `Move.advance` decides races between them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm_plugin import attach, rounds
from vllm_plugin.compat import RequestStatus
from vllm_plugin.errors import MigrationError
from vllm_plugin.handover import HandoverMode, hand_over, resolve
from vllm_plugin.messages import CloseSession, FirstStep, OpenSession, Parked, Renew
from vllm_plugin.move import ALONE, Move, MoveState
from vllm_plugin.peer import TargetConnection
from vllm_plugin.pulse import TargetStep
from vllm_plugin.switching import SWITCHING
from vllm_plugin.wire import CloseLeg, Discarded, FirstToken, Switched

if TYPE_CHECKING:
    from vllm_plugin.engine import MigrationEngine

__all__ = ["SourceSession"]

logger = logging.getLogger("vllm.vllm_hi.source")

#: How long a handover's answer waits for the client's gap to be measured, and a closing session for open handovers.
MEASURE_S = 2.0
SETTLE_S = 4.0
#: From a freeze to its commit, before it was measured.
FIRST_LEAD_S = 0.006


class SourceSession:
    """One migration as seen from A. `moves`: requests on their way, by id. `ended`: those whose fate is known.
    `target_step`: the steps of B, as it said before the handover. `lead_s`: from a freeze to its commit.

    Raises:
        MigrationError: B cannot be reached or refuses the session.
    """

    def __init__(self, engine: MigrationEngine, job: str, attempt: int, peer: dict[str, Any], lease_s: float) -> None:
        self.engine = engine
        self.job = job
        self.attempt = attempt
        self.aborting = False
        self.moves: dict[str, Move] = {}
        self.ended: list[Move] = []
        self._rounds: dict[int, dict[str, Any]] = {}
        self._closed = False
        self._lock = threading.Lock()
        self.target_step = TargetStep(0.0, 0.0)
        self.lead_s = FIRST_LEAD_S
        self.lease_s = lease_s
        self.expires_at = time.monotonic() + lease_s
        self.target = TargetConnection(
            engine,
            peer,
            lambda call: OpenSession(call, job, attempt, engine.name, lease_s, engine.factors),
            self._on_notice,
            self._on_target_lost,
        )
        SWITCHING.hold(self.target.session)

    # -- operations ----------------------------------------------------------------------------------------------------

    def attach(self, request_ids: list[str] | None) -> dict[str, Any]:
        self.check()
        return attach.attach(self, request_ids)

    def round(self, number: int, slow_source: bool = False) -> dict[str, Any]:
        """Asked again with a number that is done, it repeats the answer."""
        self.check()
        if number not in self._rounds:
            self._rounds[number] = rounds.run_round(self, number, slow_source)
        return self._rounds[number]

    @property
    def next_round(self) -> int:
        """The number of a round that has not been run."""
        return max(self._rounds, default=-1) + 1

    def handover(self, request_ids: list[str] | None, wave: int, mode: HandoverMode = "rolling") -> dict[str, Any]:
        """Moves attached requests in waves; each has its own short gap. Returns one result per request."""
        self.check()
        chosen = [
            move
            for move in self.moves.values()
            if move.state == "copying" and (request_ids is None or move.request_id in request_ids)
        ]
        for start in range(0, len(chosen), wave):
            if self.aborting or self.target.lost:
                break
            hand_over(self, chosen[start : start + wave], mode)
        deadline = time.monotonic() + MEASURE_S
        for move in chosen:
            # A client whose request waits in B's queue waits as long as that lasts.
            if move.state == "moved" and move.streamed and not move.queued:
                move.measured.wait(max(0.0, deadline - time.monotonic()))
        return {"results": [move.result() for move in self.take_ended()]}

    def take_ended(self) -> list[Move]:
        """Moves whose fate is known and that no answer has reported yet."""
        ended = [move for move in self.moves.values() if move.ended]
        for move in ended:
            del self.moves[move.request_id]
        self.ended += ended
        return ended

    def moves_by_state(self) -> dict[str, int]:
        return dict(Counter(move.state for move in [*self.ended, *self.moves.values()]))

    def renew(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.expires_at = time.monotonic() + lease_s
        self.target.tell(Renew(lease_s))

    def check(self) -> None:
        """Raises: MigrationError when the session must not go on."""
        if self.aborting:
            raise MigrationError(409, "aborting", "The migration is being aborted.")
        if self.target.lost:
            raise MigrationError(502, "target_lost", "The connection to the target was lost.")

    # -- notices -------------------------------------------------------------------------------------------------------

    def _on_notice(self, message: Parked | FirstStep) -> None:
        move = self._by_ticket(message.ticket)
        if move is None:
            return
        if isinstance(message, FirstStep):
            move.stages["first_step"] = message.step_ms
        elif message.ok:
            move.parked.set()
        else:
            # After the tail was sent only the proxy decides; it sees its leg end as well.
            self.roll_back(move, message.code, message.message, self.end_of(move), ALONE)

    def _on_target_lost(self) -> None:
        if self._closed:
            return
        logger.warning("migration %s: the connection to the target was lost", self.job)
        for move in list(self.moves.values()):
            message = "The connection to the target was lost before the handover."
            self.roll_back(move, "target_lost", message, only_from=ALONE)

    def preempted(self, request_id: str) -> None:
        """A frozen request lost its blocks. If its tail was sent before that, B may have it: the proxy decides."""
        for move in list(self.moves.values()):
            if any(member.request_id == request_id for member in move.members):
                self.roll_back(move, "preempted", "The source preempted the request.", only_from=ALONE)

    def on_proxy(self, message: Switched | FirstToken | Discarded) -> None:
        move = self._by_ticket(message.ticket)
        if move is None:
            return
        if isinstance(message, FirstToken):
            move.gap_ms, move.itl_ms = message.gap_ms, message.itl_ms
            move.measured.set()
        elif isinstance(message, Switched):
            move.streamed = message.tokens > 0
            self.moved(move)
        else:
            text = f"The proxy gave up the second leg: {message.reason}."
            self.roll_back(move, "leg_discarded", text, self.end_of(move))

    def _by_ticket(self, ticket: str) -> Move | None:
        return next((move for move in [*self.moves.values(), *self.ended] if move.ticket == ticket), None)

    # -- fates ---------------------------------------------------------------------------------------------------------

    def moved(self, move: Move) -> None:
        """The client is served by B: A's copy ends, and its blocks are free."""
        if move.advance("moved"):
            if move.committed_at is not None:
                move.stages["switch"] = (time.monotonic() - move.committed_at) * 1e3
            running = [member.request_id for _, member in move.live]
            # Not waited for: each would cost a step of A, and the next wave waits until all of this one have switched.
            self.engine.later(lambda: self.engine.end_requests(running, RequestStatus.FINISHED_ABORTED))

    def roll_back(
        self,
        move: Move,
        code: str,
        message: str,
        outcome: MoveState = "stayed",
        only_from: frozenset[MoveState] | None = None,
    ) -> None:
        """Leaves the request on A: unfreezes it, lets B drop it, and has the proxy close the second leg."""
        if not move.advance(outcome, code, message, only_from):
            return
        self.engine.on_engine(lambda: self._unfreeze(move))
        link = self.engine.proxies.get(move.proxy)
        if link is not None:
            link.send(CloseLeg(move.stream_id, move.ticket, message))
        self.target.release([move.ticket], message)

    def end_of(self, move: Move) -> MoveState:
        """What a move that goes no further ends as: the second leg is also closed because the request has ended."""
        snapshot = self.engine.scheduler.snapshot
        running = self.engine.on_engine(
            lambda: any(snapshot(member.request_id, 0) is not None for member in move.members)
        )
        return "stayed" if running else "finished"

    def _unfreeze(self, move: Move) -> None:
        for member in move.members:
            self.engine.scheduler.unfreeze(member.request_id)

    def check_deadlines(self, now: float) -> None:
        """Called every few milliseconds by the engine's watch thread."""
        for move in list(self.moves.values()):
            if move.overdue(now):
                code = {"attaching": "attach_timeout", "frozen": "freeze_timeout"}.get(move.state, "last_resort")
                message = f"The handover did not end within its deadline (state {move.state})."
                self.roll_back(move, code, message, self.end_of(move) if move.state == "attaching" else "stayed")
        if now > self.expires_at:
            self.expires_at = math.inf
            # Takes a while, in which the deadlines of the moves must be kept.
            self.engine.aborts.submit(self.close, "lease_expired", "The migration's lease ran out: nobody renewed it.")

    def close(self, code: str, message: str) -> int:
        """Rolls back what has not moved and closes both ends. Returns how many requests were released."""
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
        self.aborting = True
        self.engine.scheduler.pause_s = 0.0
        released = 0
        self._settle([move for move in self.moves.values() if move.state not in ALONE and not move.ended])
        for move in list(self.moves.values()):
            if not move.ended:
                released += 1
                self.roll_back(move, code, message)
        self.take_ended()
        try:
            self.target.ask(CloseSession)
        except ConnectionError:
            logger.info("migration %s: the target could not be told about the end; its own lease will", self.job)
        self.target.close()
        SWITCHING.release(self.target.session)
        self.engine.source_closed(self)
        return released

    def _settle(self, moves: list[Move]) -> None:
        """Only the proxy may decide about these: it is given time, then it is asked."""
        deadline = time.monotonic() + SETTLE_S
        for move in moves:
            move.done.wait(max(0.0, deadline - time.monotonic()))
        resolve(self, [move for move in moves if not move.ended])
