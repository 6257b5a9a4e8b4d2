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

from vllm_plugin import compatibility
from vllm_plugin import parked as parked_requests
from vllm_plugin.adapters import target_refusal
from vllm_plugin.book import ParkedRequest, ParkedStream, StreamRecord
from vllm_plugin.compat import EngineCoreEventType, RequestStatus
from vllm_plugin.eligibility import prompt_digest, queueing_digest, sampling_digest
from vllm_plugin.link import Link
from vllm_plugin.messages import (
    Answer,
    CloseSession,
    Coming,
    Commit,
    Expect,
    Expectation,
    ExpectedMember,
    Grow,
    GrowItem,
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
from vllm_plugin.pulse import hold_s
from vllm_plugin.switching import SWITCHING

if TYPE_CHECKING:
    from vllm_plugin.engine import MigrationEngine

__all__ = ["TargetSession"]

logger = logging.getLogger("vllm.vllm_hi.target")

_UNKNOWN = ("unknown_ticket", "The ticket is not known here, was used already, or has run out.")


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
        self._closed = threading.Lock()
        self._commit_here = threading.Event()
        #: When a commit is due, and by how much it may be late.
        self._expected: tuple[float, float] | None = None
        self._pinned: dict[str, set[str]] = {}
        self._accepted: set[str] = set()

    @property
    def accepted(self) -> int:
        """How many requests have been committed here."""
        return len(self._accepted)

    # -- messages of A -------------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        self.expires_at = time.monotonic() + self.lease_s
        if isinstance(message, Expect):
            self.engine.on_engine(lambda: self._expect(message.expectations))
            self.link.send(Answer(message.call, True))
        elif isinstance(message, Grow):
            self.engine.faults.say("grown", self.link, self.engine.on_engine(lambda: self._grow(message)))
        elif isinstance(message, Prepare):
            refused = self.engine.on_engine(lambda: self._prepare(message.tickets, message.queue))
            step_s = self.engine.scheduler.step_s
            self.engine.faults.say("prepared", self.link, Refusals(message.call, refused, step_s))
        elif isinstance(message, Coming):
            self._commit_here.clear()
            self._expected = time.monotonic() + message.within_s, message.late_s
            self.engine.later(self._await_commit)
        elif isinstance(message, Commit):
            time.sleep(self.engine.faults.hold_commit_s)
            refused = self.engine.on_engine(lambda: self._commit(message), self._commit_came)
            self.engine.faults.say("committed", self.link, Refusals(message.call, refused))
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

    def step_begins(self) -> None:
        """A step begins; before the one after it the engine may wait for a commit. Engine thread."""
        if self._expected is not None:
            self.engine.later(self._await_commit)

    def _await_commit(self) -> None:
        """Lets the engine begin no step until the commit is here, if that is due soon. Engine thread."""
        # Read once: the commit may come at this moment, on another thread.
        expected = self._expected
        if expected is None:
            return
        due, late_s = expected
        left, longest = due - time.monotonic(), hold_s(self.engine.scheduler.step_s)
        if left > longest:
            return
        self._expected = None
        # Whatever the source says: B's own requests wait no longer than that.
        began = time.monotonic()
        self._commit_here.wait(min(longest, max(0.0, left + late_s)))
        self.engine.scheduler.waited_s = time.monotonic() - began

    def _commit_came(self) -> None:
        self._expected = None
        self._commit_here.set()

    def opened(self, call: int) -> None:
        workers = self.engine.workers
        workers.allow(self.id)
        SWITCHING.hold(self.id)
        ports = [info["data_port"] for info in workers.infos]
        self.link.send(SessionOpened(call, self.id, self.engine.settings.bind, ports, workers.layout))

    # -- on the engine thread ------------------------------------------------------------------------------------------

    def _expect(self, expectations: list[Expectation]) -> None:
        for expectation in expectations:
            self.engine.scheduler.book.expected[expectation.ticket] = expectation

    def arrived(self, ticket: str, request: Any) -> None:
        """A request of a second leg has reached the scheduler: park it, or refuse it with a reason. A is told once all
        members of the leg are here."""
        book = self.engine.scheduler.book
        expectation = book.expected.pop(ticket, None)
        if expectation is not None:
            book.parked[ticket] = ParkedStream(expectation, [None] * len(expectation.members))
        stream, leg = book.parked.get(ticket), book.stream_of.get(request.request_id)
        part, why = _part_of(stream, request, leg)
        if stream is not None and why is None:
            why = target_refusal(stream.expectation.adapter, request, self.engine.adapters)
        if stream is None or why is not None:
            code, message = why or _UNKNOWN
            self.engine.refuse_arrival(request)
            if stream is not None and not stream.complete:
                self.drop(ticket, message)
            if stream is None or not stream.complete:
                self.link.send(Parked(ticket, False, code, message))
            return
        # Among requests of one priority the older goes first, and what has moved is as old as it was.
        request.arrival_time -= stream.expectation.age_s
        stream.members[part] = ParkedRequest(request)
        book.ticket_of[request.request_id] = ticket
        if self.engine.scheduler.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        if stream.complete:
            self.engine.faults.say("parked", self.link, Parked(ticket, True))

    def _grow(self, message: Grow) -> Grown:
        items: list[GrownItem] = []
        refused: dict[str, Refusal] = {}
        for item in message.items:
            result = self._grow_one(item)
            if isinstance(result, Refusal):
                refused.setdefault(item.ticket, result)
            else:
                items.append(result)
        return Grown(message.call, [item for item in items if item.ticket not in refused], list(refused.values()))

    def _grow_one(self, item: GrowItem) -> GrownItem | Refusal:
        stream = self.engine.scheduler.book.parked.get(item.ticket)
        parked = stream.member(item.part) if stream is not None else None
        if parked is None:
            return Refusal(item.ticket, *_UNKNOWN)
        result = parked_requests.grow(self.engine.scheduler, parked, item)
        if isinstance(result, GrownItem):
            self._pinned.setdefault(item.ticket, set()).add(parked.request.request_id)
        return result

    def _prepare(self, tickets: list[str], queue: bool) -> list[Refusal]:
        refused = []
        for ticket in tickets:
            stream = self.engine.scheduler.book.parked.get(ticket)
            if stream is None or not stream.complete:
                refused.append(Refusal(ticket, *_UNKNOWN))
            elif refusal := parked_requests.prepare(self.engine.scheduler, stream, queue):
                refused.append(refusal)
        return refused

    def _commit(self, message: Commit) -> list[Refusal]:
        if self.engine.faults.refuse_commit:
            return [Refusal(item.ticket, "refused_by_test", "A test switch refuses commits.") for item in message.items]
        # Said again, because the answer was lost, it is answered again.
        items = [item for item in message.items if item.ticket not in self._accepted]
        refused = parked_requests.commit(self.engine.core, items, self.engine.faults)
        failed = {refusal.ticket for refusal in refused}
        for item in items:
            if item.ticket not in failed:
                self._accepted.add(item.ticket)
                self._pinned.pop(item.ticket, None)
        return refused

    def _release(self, tickets: list[str], reason: str) -> None:
        for ticket in tickets:
            self.engine.scheduler.book.expected.pop(ticket, None)
            self.drop(ticket, reason)
            for request_id in self._pinned.pop(ticket, ()):
                self.engine.scheduler.unpin(request_id)

    def drop(self, ticket: str, reason: str) -> None:
        """Ends what is parked under a ticket; the front end answers the second leg with an abort. Its blocks stay
        pinned."""
        stream = self.engine.scheduler.book.parked.pop(ticket, None)
        if stream is None:
            return
        request_ids = [member.request.request_id for member in stream.arrived()]
        logger.info("parked requests %s dropped: %s", ", ".join(request_ids), reason)
        for request_id in request_ids:
            self.engine.scheduler.book.ticket_of.pop(request_id, None)
        self.engine.end_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def revoke_parked(self) -> None:
        """Drops what holds blocks and has no promised run slot. A is told and stops writing; then the blocks are free
        (`Release`)."""
        now, blocks = time.monotonic(), self.engine.scheduler.kv_cache_manager.get_block_ids
        for ticket, stream in list(self.engine.scheduler.book.parked.items()):
            holds = any(blocks(member.request.request_id)[0] for member in stream.arrived())
            if holds and stream.prepared_until < now:
                self.drop(ticket, "the target ran out of free blocks")
                self.link.send(Parked(ticket, False, "target_out_of_blocks", "The target needs its blocks itself."))

    def gone(self, ticket: str) -> None:
        """A parked request was ended by its front end (the client or the proxy closed the leg). Other members of the
        leg follow between two steps: vLLM is in the middle of ending this one."""
        stream = self.engine.scheduler.book.parked.get(ticket)
        if stream is None:
            return
        self.link.send(Parked(ticket, False, "leg_closed", "The second leg was closed before the handover."))
        if len(stream.members) == 1:
            del self.engine.scheduler.book.parked[ticket]
        else:
            self.engine.later(lambda: self.drop(ticket, "the second leg was closed"))

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
        SWITCHING.release(self.id)
        self.engine.target_closed(self)

    def _drop_all(self, reason: str) -> None:
        book = self.engine.scheduler.book
        book.expected.clear()
        for ticket in list(book.parked):
            self.drop(ticket, reason)

    def _unpin_all(self) -> None:
        for request_ids in self._pinned.values():
            for request_id in request_ids:
                self.engine.scheduler.unpin(request_id)
        self._pinned.clear()


def _part_of(stream: ParkedStream | None, request: Any, leg: StreamRecord | None) -> tuple[int, tuple[str, str] | None]:
    """Which member of the expected leg the request is, or (code, sentence) why it is none."""
    if stream is None:
        return -1, _UNKNOWN
    if leg is None or leg.stream != stream.expectation.stream:
        return -1, ("wrong_stream", "The ticket was issued for another stream.")
    key = leg.members[request.request_id].key
    for part, expected in enumerate(stream.expectation.members):
        if (expected.prompt, expected.choice) == key:
            return part, _UNKNOWN if stream.members[part] is not None else _difference(expected, request)
    return -1, ("unexpected_choice", "The target made other choices or prompts of the request than the source.")


def _difference(expected: ExpectedMember, request: Any) -> tuple[str, str] | None:
    if prompt_digest(request) != expected.prompt_digest:
        return "prompt_mismatch", "The target tokenized the request to another prompt than the source."
    if sampling_digest(request) != expected.sampling_digest:
        return "sampling_mismatch", "The target derived other sampling parameters from the request than the source."
    if queueing_digest(request) != expected.queueing_digest:
        return "queueing_mismatch", "The target read another priority or cache salt from the request than the source."
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
    checks = compatibility.compare(message.factors, engine.factors)
    if (difference := compatibility.refusal(checks)) is not None:
        logger.warning("migration %s refused: %s", message.job, difference)
        link.send(Answer(message.call, False, "incompatible", difference))
        return None
    for warning in compatibility.warnings(checks):
        logger.warning("migration %s: %s", message.job, warning)
    if present is not None:
        present.close("a newer attempt took over")
    session = TargetSession(engine, link, message.job, message.attempt, message.source, message.lease_s)
    engine.target = session
    session.opened(message.call)
    return session
