"""B's side of a migration session: serves the peer connection of one source, and undoes everything when that ends.

What A may still be writing into stays pinned until A says that it has stopped (`Release`) or B's workers have
revoked the session.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from vllm_plugin import parked as parked_requests
from vllm_plugin.book import ParkedRequest
from vllm_plugin.compat import EngineCoreEventType, RequestStatus
from vllm_plugin.eligibility import prompt_digest, sampling_digest
from vllm_plugin.link import Link
from vllm_plugin.messages import (
    Answer,
    CloseSession,
    Commit,
    Expect,
    Expectation,
    Grow,
    Grown,
    GrownItem,
    OpenSession,
    Parked,
    Prepare,
    Refusal,
    Refusals,
    Release,
    Renew,
    SessionOpened,
)

if TYPE_CHECKING:
    from vllm_plugin.engine import MigrationEngine

__all__ = ["TargetSession"]

logger = logging.getLogger("vllm.vllm_hi.target")


class TargetSession:
    """One source's session on B. Its messages are handled one after the other on the peer link's reader thread."""

    def __init__(
        self, engine: MigrationEngine, link: Link, job: str, attempt: int, source: str, lease_s: float
    ) -> None:
        self.engine = engine
        self.link = link
        self.job = job
        self.attempt = attempt
        self.source = source
        self.id = secrets.token_hex(16)
        self.lease_s = lease_s
        self.expires_at = time.monotonic() + lease_s
        self.moved_in = 0
        self._closed = threading.Lock()
        self._pinned: dict[str, str] = {}

    # -- messages of A -------------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        self.expires_at = time.monotonic() + self.lease_s
        if isinstance(message, Expect):
            self.engine.on_engine(lambda: self._expect(message.expectations))
            self.link.send(Answer(message.call, True))
        elif isinstance(message, Grow):
            self.link.send(self.engine.on_engine(lambda: self._grow(message)))
        elif isinstance(message, Prepare):
            self.link.send(Refusals(message.call, self.engine.on_engine(lambda: self._prepare(message.tickets))))
        elif isinstance(message, Commit):
            self.link.send(Refusals(message.call, self.engine.on_engine(lambda: self._commit(message))))
        elif isinstance(message, Release):
            self.engine.on_engine(lambda: self._release(message.tickets, message.reason))
        elif isinstance(message, Renew):
            self.lease_s = message.lease_s
            self.expires_at = time.monotonic() + message.lease_s
        elif isinstance(message, CloseSession):
            self.close("closed by the source")
            self.link.send(Answer(message.call, True))
        else:
            logger.warning("unexpected %s from %s", type(message).__name__, self.source)

    def opened(self, call: int) -> None:
        self.engine.workers.allow(self.id)
        ports = [info["data_port"] for info in self.engine.workers.infos]
        self.link.send(SessionOpened(call, self.id, self.engine.settings.bind, ports))

    # -- on the engine thread ------------------------------------------------------------------------------------------

    def _expect(self, expectations: list[Expectation]) -> None:
        for expectation in expectations:
            self.engine.scheduler.book.expected[expectation.ticket] = expectation

    def arrived(self, ticket: str, request: Any) -> None:
        """The request of a second leg has reached the scheduler: park it, or refuse it with a reason."""
        scheduler = self.engine.scheduler
        expectation: Expectation | None = scheduler.book.expected.pop(ticket, None)
        refusal = _arrival_refusal(expectation, request, scheduler.book.records.get(request.request_id))
        if refusal is not None:
            self.engine.refuse_arrival(request)
            self.link.send(Parked(ticket, False, *refusal))
            return
        scheduler.book.parked[ticket] = ParkedRequest(ticket, request)
        scheduler.book.ticket_of[request.request_id] = ticket
        if scheduler.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        self.link.send(Parked(ticket, True))

    def _grow(self, message: Grow) -> Grown:
        items: list[GrownItem] = []
        refused: list[Refusal] = []
        for item in message.items:
            parked = self.engine.scheduler.book.parked.get(item.ticket)
            result: GrownItem | Refusal
            if parked is None:
                result = Refusal(item.ticket, "unknown_ticket", "No request is parked under this ticket.")
            else:
                result = parked_requests.grow(self.engine.scheduler, parked, item)
            if isinstance(result, Refusal):
                refused.append(result)
            else:
                items.append(result)
                if parked is not None:
                    self._pinned[item.ticket] = parked.request.request_id
        return Grown(message.call, items, refused)

    def _prepare(self, tickets: list[str]) -> list[Refusal]:
        refused = []
        for ticket in tickets:
            parked = self.engine.scheduler.book.parked.get(ticket)
            if parked is None:
                refused.append(Refusal(ticket, "unknown_ticket", "No request is parked under this ticket."))
            elif refusal := parked_requests.prepare(self.engine.scheduler, parked):
                refused.append(refusal)
        return refused

    def _commit(self, message: Commit) -> list[Refusal]:
        if self.engine.faults.refuse_commit:
            return [Refusal(item.ticket, "refused_by_test", "A test switch refuses commits.") for item in message.items]
        replay_grammar = not self.engine.faults.skip_grammar
        refused = parked_requests.commit(self.engine.core, message.items, replay_grammar)
        failed = {refusal.ticket for refusal in refused}
        for item in message.items:
            if item.ticket not in failed:
                self._pinned.pop(item.ticket, None)
                self.moved_in += 1
        return refused

    def _release(self, tickets: list[str], reason: str) -> None:
        for ticket in tickets:
            self.engine.scheduler.book.expected.pop(ticket, None)
            self.drop(ticket, reason)
            if request_id := self._pinned.pop(ticket, None):
                self.engine.scheduler.unpin(request_id)

    def drop(self, ticket: str, reason: str) -> None:
        """Ends a parked request; its front end answers the second leg with an abort. Its blocks stay pinned."""
        parked = self.engine.scheduler.book.parked.pop(ticket, None)
        if parked is None:
            return
        logger.info("parked request %s dropped: %s", parked.request.request_id, reason)
        self.engine.scheduler.book.ticket_of.pop(parked.request.request_id, None)
        self.engine.end_requests([parked.request.request_id], RequestStatus.FINISHED_ABORTED)

    def revoke_parked(self) -> None:
        """Drops what has no promised run slot. A is told and stops writing; then the blocks are free (`Release`)."""
        now = time.monotonic()
        for ticket, parked in list(self.engine.scheduler.book.parked.items()):
            if (parked.prepared_until or 0.0) < now:
                self.drop(ticket, "the target ran out of free blocks")
                self.link.send(Parked(ticket, False, "target_out_of_blocks", "The target needs its blocks itself."))

    def gone(self, ticket: str) -> None:
        """A parked request was ended by its front end (the client or the proxy closed the leg)."""
        self.link.send(Parked(ticket, False, "leg_closed", "The second leg was closed before the handover."))

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Drops what is still parked and frees all blocks once no worker writes any more. Safe to call twice, from any
        thread but the engine's."""
        if not self._closed.acquire(blocking=False):
            return
        logger.info("session %s of %s closed: %s", self.job, self.source, reason)
        self.engine.on_engine(lambda: self._drop_all(reason))
        self.engine.workers.revoke(self.id)
        self.engine.on_engine(self._unpin_all)
        self.engine.target_closed(self)

    def _drop_all(self, reason: str) -> None:
        book = self.engine.scheduler.book
        book.expected.clear()
        for ticket in list(book.parked):
            self.drop(ticket, reason)

    def _unpin_all(self) -> None:
        for request_id in self._pinned.values():
            self.engine.scheduler.unpin(request_id)
        self._pinned.clear()


def _arrival_refusal(expectation: Expectation | None, request: Any, record: Any) -> tuple[str, str] | None:
    if expectation is None:
        return "unknown_ticket", "The ticket is not known here, was used already, or has run out."
    if record is None or record.stream != expectation.stream:
        return "wrong_stream", "The ticket was issued for another stream."
    if prompt_digest(request) != expectation.prompt_digest:
        return "prompt_mismatch", "The target tokenized the request to another prompt than the source."
    if sampling_digest(request) != expectation.sampling_digest:
        return "sampling_mismatch", "The target derived other sampling parameters from the request than the source."
    return None


def open_session(engine: MigrationEngine, link: Link, message: OpenSession) -> TargetSession | None:
    """Opens a session for a peer, or answers why not. At most one source at a time; a higher attempt of the same
    job wins."""
    present = engine.target
    if present is not None:
        if present.job != message.job:
            text = f"The target takes part in migration {present.job}."
            link.send(Answer(message.call, False, "session_busy", text))
            return None
        if message.attempt < present.attempt:
            link.send(Answer(message.call, False, "stale_attempt", f"Attempt {present.attempt} has been seen."))
            return None
        present.close("a newer attempt took over")
    session = TargetSession(engine, link, message.job, message.attempt, message.source, message.lease_s)
    engine.target = session
    session.opened(message.call)
    return session
