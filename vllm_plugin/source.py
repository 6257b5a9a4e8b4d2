"""A's side of a migration session: attach, rounds, handover, rollback.

Its operations run one at a time on the engine's session thread. Notices of proxies and of B, and the deadlines, arrive on
other threads; `Move.advance` decides races between them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from vllm_plugin.compat import RequestStatus
from vllm_plugin.eligibility import prompt_digest, refusal, sampling_digest
from vllm_plugin.errors import MigrationError
from vllm_plugin.handover import hand_over
from vllm_plugin.link import Link
from vllm_plugin.messages import (
    Answer,
    CloseSession,
    Expect,
    Expectation,
    Grow,
    Grown,
    GrowItem,
    OpenSession,
    Parked,
    Refusals,
    Release,
    Renew,
    SessionOpened,
    decode_peer,
)
from vllm_plugin.move import Move
from vllm_plugin.scheduler import Snapshot
from vllm_plugin.wire import CloseLeg, Discarded, FirstToken, FrameSocket, LegOpened, OpenLeg, ProtocolError, Switched

if TYPE_CHECKING:
    from vllm_plugin.engine import MigrationEngine

__all__ = ["SourceSession"]

logger = logging.getLogger("vllm.vllm_hi.source")

ATTACH_DEADLINE_S = 10.0
PEER_DEADLINE_S = 5.0


class SourceSession:
    """One migration as seen from A. `peer`: {vllm_hi_id, host, control_port, base_url} of B."""

    def __init__(self, engine: MigrationEngine, job: str, attempt: int, peer: dict[str, Any], lease_s: float) -> None:
        self.engine = engine
        self.job = job
        self.attempt = attempt
        self.peer = peer
        self.aborting = False
        self.moves: dict[str, Move] = {}
        self.rounds: dict[int, dict[str, Any]] = {}
        self.ended: list[Move] = []
        self.broken = False
        self._closed = False
        self._lock = threading.Lock()
        self._pushing = False
        self._release_later: list[str] = []
        self.renew(lease_s, tell_peer=False)
        self._link = self._dial()
        opened = self.ask(lambda call: OpenSession(call, job, attempt, engine.name, lease_s))
        if isinstance(opened, Answer):
            self._link.close()
            raise MigrationError(409, opened.code, opened.message)
        if not isinstance(opened, SessionOpened):
            self._link.close()
            raise MigrationError(502, "peer_protocol", "The target answered with an unexpected message.")
        self.id = opened.session
        self._data_host = opened.data_host
        self._data_ports = opened.data_ports

    # -- the peer ------------------------------------------------------------------------------------------------------

    def _dial(self) -> Link:
        host, port = str(self.peer["host"]), int(self.peer["control_port"])
        try:
            frames = FrameSocket.dial(host, port, self.engine.settings.token, "peer", self.engine.name)
        except (OSError, ProtocolError) as error:
            raise MigrationError(
                502, "peer_unreachable", f"The target at {host}:{port} does not answer: {error}."
            ) from error
        frames.sock.settimeout(None)
        return Link(
            frames, "target", decode_peer, (Answer, SessionOpened, Grown, Refusals), self._on_peer, self._on_peer_lost
        ).start()

    def ask(self, build: Any, timeout_s: float = PEER_DEADLINE_S) -> Any:
        """Calls B and waits. Raises: ConnectionError when the answer is lost or late."""
        try:
            return self._link.call(build).result(timeout_s)
        except FutureTimeout as error:
            raise ConnectionError("the target did not answer in time") from error

    @property
    def peer_lost(self) -> bool:
        return self._link.closed

    def _on_peer(self, _link: Link, message: Any) -> None:
        if not isinstance(message, Parked):
            return
        move = next((move for move in self.moves.values() if move.ticket == message.ticket), None)
        if move is None:
            return
        if message.ok:
            move.parked.set()
        elif move.state in ("attaching", "copying", "frozen"):
            # After the tail was sent only the proxy decides; it sees its leg end as well.
            self.roll_back(move, message.code, message.message)

    def _on_peer_lost(self, _link: Link) -> None:
        if self._closed:
            return
        logger.warning("migration %s: the connection to the target was lost", self.job)
        for move in list(self.moves.values()):
            if move.state in ("attaching", "copying", "frozen"):
                self.roll_back(move, "target_lost", "The connection to the target was lost before the handover.")

    # -- operations ----------------------------------------------------------------------------------------------------

    def attach(self, request_ids: list[str] | None) -> dict[str, Any]:
        """Opens a second leg on B for every request that can move. Those that cannot say why and are not touched."""
        self.check()
        moves, expectations, refused = self.engine.on_engine(lambda: self._choose(request_ids))
        if moves:
            self._expect(expectations)
            for move in moves:
                self.moves[move.request_id] = move
            self._open_legs(moves)
        for move in moves:
            if move.state != "copying":
                refused.append({"request_id": move.request_id, "code": move.code, "message": move.message})
        attached = [
            {
                "request_id": move.request_id,
                "stream_id": move.stream_id,
                "ticket": move.ticket,
                "prompt_tokens": move.prompt_tokens,
                "output_tokens": move.tokens,
                "kv_blocks": move.kv_blocks,
            }
            for move in moves
            if move.state == "copying"
        ]
        return {"attached": attached, "refused": refused}

    def _choose(self, request_ids: list[str] | None) -> tuple[list[Move], list[Expectation], list[dict[str, str]]]:
        scheduler = self.engine.scheduler
        moves, expectations, refused = [], [], []
        for request_id in list(scheduler.requests) if request_ids is None else request_ids:
            request = scheduler.requests.get(request_id)
            present = self.moves.get(request_id)
            if present is not None and not present.ended:
                continue
            if request is None or request.is_finished():
                refused.append({"request_id": request_id, "code": "unknown_request", "message": "It has ended."})
                continue
            record = scheduler.book.records.get(request_id)
            why = refusal(request, record, record is not None and record.proxy in self.engine.proxies)
            if why is not None:
                refused.append({"request_id": request_id, "code": why[0], "message": why[1]})
                continue
            snapshot = scheduler.snapshot(request_id, 0)
            move = Move(
                request_id,
                record.stream,
                secrets.token_urlsafe(24),
                snapshot.epoch,
                snapshot.prompt_tokens,
                len(snapshot.block_ids),
                tokens=snapshot.num_output_tokens,
            )
            moves.append(move)
            expectations.append(
                Expectation(move.ticket, record.stream, prompt_digest(request), sampling_digest(request))
            )
        return moves, expectations, refused

    def _expect(self, expectations: list[Expectation]) -> None:
        try:
            self.ask(lambda call: Expect(call, expectations))
        except ConnectionError as error:
            raise MigrationError(
                502, "target_lost", f"The target was lost while requests were attached: {error}."
            ) from error

    def _open_legs(self, moves: list[Move]) -> None:
        calls: list[tuple[Move, Future[LegOpened]]] = []
        for move in moves:
            link = self.engine.proxies.get(move.proxy)
            if link is None:
                self.roll_back(move, "proxy_unreachable", "The proxy worker that owns the client was lost.")
                continue
            calls.append((move, link.call(self._open_leg(move))))
        deadline = time.monotonic() + ATTACH_DEADLINE_S
        for move, future in calls:
            try:
                answer = future.result(max(0.0, deadline - time.monotonic()))
            except (FutureTimeout, ConnectionError):
                self.roll_back(move, "proxy_unreachable", "The proxy did not open the second leg in time.")
                continue
            if not answer.ok:
                self.roll_back(move, answer.code or "leg_refused", answer.message or "The proxy refused a second leg.")
        for move, _ in calls:
            if not move.parked.wait(max(0.0, deadline - time.monotonic())):
                self.roll_back(move, "attach_timeout", "The request did not arrive on the target in time.")
            elif move.state == "attaching":
                move.advance("copying")

    def _open_leg(self, move: Move) -> Any:
        return lambda call: OpenLeg(call, move.stream_id, move.ticket, str(self.peer["base_url"]))

    def round(self, number: int) -> dict[str, Any]:
        """Sends every full block that B does not have yet. Asked again with a number that is done, it repeats the answer."""
        self.check()
        if number in self.rounds:
            return self.rounds[number]
        started = time.monotonic()
        moves = [move for move in self.moves.values() if move.state == "copying"]
        first = [move for move in moves if move.hit_tokens is None]
        finished, failed = [], []
        moves = self.copy_full_blocks(moves)
        sent_blocks = sum(move.stages.pop("round_blocks", 0) for move in moves)
        for move in self.take_ended():
            if move.state == "finished":
                finished.append(move.request_id)
            elif move.state == "stayed":
                failed.append({"request_id": move.request_id, "code": move.code, "message": move.message})
        dirty = self.engine.on_engine(lambda: sum(self._ready_blocks(move) for move in moves))
        block_size = self.engine.scheduler.block_size
        result = {
            "round": number,
            "blocks": int(sent_blocks),
            "bytes": int(sent_blocks) * self.engine.workers.block_bytes,
            "hit_blocks": sum((move.hit_tokens or 0) // block_size for move in first),
            "dirty_blocks": dirty,
            "duration_s": time.monotonic() - started,
            "attached": len(moves),
            "finished": finished,
            "failed": failed,
        }
        self.rounds[number] = result
        return result

    def _ready_blocks(self, move: Move) -> int:
        snapshot = self.engine.scheduler.snapshot(move.request_id, 0)
        if snapshot is None:
            return 0
        return max(0, snapshot.valid_tokens // self.engine.scheduler.block_size - move.sent_blocks)

    def copy_full_blocks(self, moves: list[Move]) -> list[Move]:
        """Tells B the new tokens, lets it hold blocks for them and one more, and sends the full blocks it lacks.

        Returns the moves that are still on their way.
        """
        snapshots = self._look(moves, freeze=False)
        moves = [move for move in moves if move.request_id in snapshots]
        if not moves:
            return []
        try:
            moves = self.grow(moves, snapshots)
            block_size = self.engine.scheduler.block_size
            source: list[int] = []
            target: list[int] = []
            for move in moves:
                full = snapshots[move.request_id].valid_tokens // block_size
                source += snapshots[move.request_id].block_ids[move.sent_blocks : full]
                target += move.window[move.sent_blocks : full]
                move.stages["round_blocks"] = max(0, full - move.sent_blocks)
            self.push(source, target, [])
            for move in moves:
                move.sent_blocks = max(move.sent_blocks, snapshots[move.request_id].valid_tokens // block_size)
        except ConnectionError as error:
            for move in moves:
                self.roll_back(move, "target_lost", f"KV blocks could not be copied: {error}.")
        finally:
            self.unpin(snapshots)
        return [move for move in moves if not move.ended]

    def _look(self, moves: list[Move], freeze: bool) -> dict[str, Snapshot]:
        """Snapshots and pins the requests of `moves`; those that ended or lost their blocks are settled."""

        def look() -> dict[str, Snapshot | None]:
            found = {}
            for move in moves:
                # Asked here, on the engine thread: a rollback unfreezes after it has left the state.
                if freeze and move.state == "frozen":
                    self.engine.scheduler.freeze(move.request_id)
                snapshot = self.engine.scheduler.snapshot(move.request_id, move.told_tokens)
                if snapshot is not None:
                    self.engine.scheduler.pin(move.request_id)
                found[move.request_id] = snapshot
            return found

        looked = self.engine.on_engine(look)
        alive = {}
        for move in moves:
            snapshot = looked[move.request_id]
            if snapshot is None:
                self.roll_back(move, "finished", "The request ended by itself.", outcome="finished")
            elif snapshot.epoch != move.epoch or snapshot.status != "RUNNING":
                self.unpin({move.request_id: snapshot})
                self.roll_back(move, "preempted", "The source preempted the request, so its blocks are gone.")
            elif not move.ended:
                alive[move.request_id] = snapshot
                move.tokens = snapshot.num_output_tokens
            else:
                self.unpin({move.request_id: snapshot})
        return alive

    def freeze(self, moves: list[Move]) -> dict[str, Snapshot]:
        """Freezes all requests at one step boundary; returns their pinned snapshots."""
        for move in moves:
            move.advance("frozen")
        snapshots = self._look(moves, freeze=True)
        deadline = time.monotonic() + 0.8
        while not all(snapshot.drained for snapshot in snapshots.values()) and time.monotonic() < deadline:
            # Only with steps in flight (asynchronous scheduling): they end within the pipeline's depth.
            time.sleep(0.001)
            self.unpin(snapshots)
            snapshots = self._look([move for move in moves if not move.ended], freeze=True)
        return snapshots

    def unpin(self, snapshots: dict[str, Snapshot]) -> None:
        request_ids = list(snapshots)
        if request_ids:
            self.engine.on_engine(lambda: [self.engine.scheduler.unpin(request_id) for request_id in request_ids])

    def grow(self, moves: list[Move], snapshots: dict[str, Snapshot]) -> list[Move]:
        """Raises: ConnectionError. Requests that B has no room for stay."""
        block_size = self.engine.scheduler.block_size
        items = []
        for move in moves:
            snapshot = snapshots[move.request_id]
            full = snapshot.valid_tokens // block_size * block_size
            items.append(GrowItem(move.ticket, snapshot.output_tokens, full, snapshot.valid_tokens + block_size))
        grown: Grown = self.ask(lambda call: Grow(call, items))
        by_ticket = {move.ticket: move for move in moves}
        for item in grown.items:
            move = by_ticket[item.ticket]
            if move.hit_tokens is None:
                move.hit_tokens = item.hit_tokens
                move.sent_blocks = item.hit_tokens // block_size
            move.window = item.block_ids
            move.told_tokens = snapshots[move.request_id].num_output_tokens
        for no in grown.refused:
            self.roll_back(by_ticket[no.ticket], no.code, no.message)
        return [move for move in moves if not move.ended]

    def push(self, source: list[int], target: list[int], generators: list[str]) -> tuple[int, dict[str, bytes]]:
        """Raises: ConnectionError; the session is of no further use then, for B's worker may still be writing."""
        if not source and not generators:
            return 0, {}
        with self._lock:
            self._pushing = True
        try:
            return self.engine.workers.push(self.id, self._data_host, self._data_ports, source, target, generators)
        except (OSError, ProtocolError) as error:
            self.broken = True
            raise ConnectionError(str(error)) from error
        finally:
            with self._lock:
                self._pushing = False
                tickets, self._release_later = self._release_later, []
            self._release(tickets, "rolled back during a copy")

    def _release(self, tickets: list[str], reason: str) -> None:
        """Tells B that nobody writes under these tickets any more; while that is not so, it waits for the end of the push.

        After a broken push it is never said: B then frees the blocks at the end of the session, after its workers have
        revoked it.
        """
        with self._lock:
            if self._pushing:
                self._release_later += tickets
                return
        if tickets and not self.broken:
            self._link.send(Release(tickets, reason))

    def handover(self, request_ids: list[str] | None, wave: int) -> dict[str, Any]:
        """Moves attached requests in waves; each has its own short gap. Returns one result per request."""
        self.check()
        chosen = [
            move
            for move in self.moves.values()
            if move.state == "copying" and (request_ids is None or move.request_id in request_ids)
        ]
        for start in range(0, len(chosen), max(1, wave)):
            if self.aborting or self.peer_lost or self.broken:
                break
            hand_over(self, chosen[start : start + max(1, wave)])
        deadline = time.monotonic() + 2.0
        for move in chosen:
            if move.state == "moved" and move.streamed:
                move.measured.wait(max(0.0, deadline - time.monotonic()))
        results = [move.result() for move in chosen if move.ended]
        for move in self.take_ended():
            if move not in chosen:
                results.append(move.result())
        return {"results": results}

    def take_ended(self) -> list[Move]:
        """Ended moves that no answer has reported yet; removed from the session's active set."""
        ended = [move for move in self.moves.values() if move.ended]
        for move in ended:
            del self.moves[move.request_id]
        self.ended += ended
        return ended

    # -- notices of the proxy ------------------------------------------------------------------------------------------

    def on_proxy(self, message: Switched | FirstToken | Discarded) -> None:
        move = next((move for move in [*self.moves.values(), *self.ended] if move.ticket == message.ticket), None)
        if move is None:
            return
        if isinstance(message, FirstToken):
            move.gap_ms, move.itl_ms = message.gap_ms, message.itl_ms
            move.measured.set()
        elif isinstance(message, Switched):
            move.streamed = message.tokens > 0
            if move.advance("moved"):
                move.stages["switch"] = (time.monotonic() - move.stages.pop("committed_at", time.monotonic())) * 1e3
                self.engine.on_engine(
                    lambda: self.engine.end_requests([move.request_id], RequestStatus.FINISHED_ABORTED)
                )
        else:
            self.roll_back(move, "leg_discarded", f"The proxy gave up the second leg: {message.reason}.")

    # -- rollback ------------------------------------------------------------------------------------------------------

    def roll_back(self, move: Move, code: str, message: str, outcome: Any = "stayed") -> None:
        """Leaves the request on A: unfreezes it, lets B drop it, and has the proxy close the second leg."""
        if not move.advance(outcome, code, message):
            return
        self.engine.on_engine(lambda: self.engine.scheduler.unfreeze(move.request_id))
        link = self.engine.proxies.get(move.proxy)
        if link is not None:
            link.send(CloseLeg(move.stream_id, move.ticket, message))
        self._release([move.ticket], message)

    def check_deadlines(self, now: float) -> None:
        """Called every few milliseconds by the engine's watch thread."""
        for move in list(self.moves.values()):
            if move.overdue(now):
                code = "freeze_timeout" if move.state == "frozen" else "last_resort"
                self.roll_back(move, code, f"The handover did not end within its deadline (state {move.state}).")
        if now > self.expires_at:
            self.close("lease_expired", "The migration's lease ran out: nobody renewed it.")

    def renew(self, lease_s: float, tell_peer: bool = True) -> None:
        self.lease_s = lease_s
        self.expires_at = time.monotonic() + lease_s
        if tell_peer:
            self._link.send(Renew(lease_s))

    def check(self) -> None:
        """Raises: MigrationError when the session must not go on."""
        if self.aborting:
            raise MigrationError(409, "aborting", "The migration is being aborted.")
        if self.peer_lost or self.broken:
            raise MigrationError(502, "target_lost", "The connection to the target was lost.")

    def close(self, code: str, message: str) -> int:
        """Rolls back what has not moved and closes both ends. Returns how many requests were released."""
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
        self.aborting = True
        released = 0
        for move in list(self.moves.values()):
            if move.state in ("sent", "committed"):
                # Only the proxy may decide about these; they have their own deadline.
                move.done.wait(4.0)
            if not move.ended:
                released += 1
                self.roll_back(move, code, message)
        self.take_ended()
        try:
            self.ask(CloseSession)
        except ConnectionError:
            logger.info("migration %s: the target could not be told about the end; its own lease will", self.job)
        self._link.close()
        self.engine.workers.revoke(self.id)
        self.engine.source_closed(self)
        return released
