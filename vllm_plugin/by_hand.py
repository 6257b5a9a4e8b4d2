"""The calls of a migration that a person drives with `curl` (docs/protocol.md, section 4, *By hand*): `receive` on the
target, `collect`, `pause` and `resume` on the source. They are made of what a job uses."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from vllm_plugin.compat import PauseState
from vllm_plugin.errors import MigrationError

if TYPE_CHECKING:
    from vllm_plugin.book import ParkedStream
    from vllm_plugin.engine import MigrationEngine
    from vllm_plugin.source import SourceSession

__all__ = ["Pause", "collect", "pause", "receive", "resume"]

Payload = dict[str, Any]

#: Steps in flight end within the pipeline's depth.
DRAIN_S = 5.0


class Pause:
    """Whether all requests of an instance stand still, for which job, and until when (monotonic clock)."""

    def __init__(self, engine: MigrationEngine) -> None:
        self._engine = engine
        self.job: str | None = None
        self.until = math.inf

    def begin(self, job: str, deadline_s: float) -> None:
        """Engine thread only."""
        self.job, self.until = job, time.monotonic() + deadline_s
        self._engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def check_owner(self, job: str) -> None:
        """Raises: MigrationError 409 when another job has paused the instance."""
        if self.job not in (None, job):
            raise MigrationError(409, "paused_by_another", f"The instance is paused by migration {self.job}.", "job")

    def end(self, job: str | None = None) -> bool:
        """All go on, if `job` (None: whoever) has paused them. Returns whether they stood still. Engine thread only."""
        if self.job is None or (job is not None and job != self.job):
            return False
        self.job, self.until = None, math.inf
        self._engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        return True

    def check(self, now: float) -> None:
        """Nobody has ended it in time: the requests go on by themselves. For the watch thread."""
        if now > self.until:
            self.until = math.inf
            self._engine.later(self.end)


def pause(engine: MigrationEngine, payload: Payload) -> Payload:
    """Stops all requests at a step boundary. New ones are taken, and wait."""
    engine.check_attempt(payload["job"], payload["attempt"])
    engine.pause.check_owner(payload["job"])
    deadline_s = float(payload["deadline_s"])
    engine.on_engine(lambda: engine.pause.begin(payload["job"], deadline_s))
    ends_at = time.monotonic() + DRAIN_S
    while not engine.on_engine(lambda: _standing_still(engine)) and time.monotonic() < ends_at:
        # Only with steps in flight (asynchronous scheduling).
        time.sleep(0.002)
    return {"paused": engine.on_engine(lambda: len(engine.scheduler.running)), "expires_in_s": deadline_s}


def _standing_still(engine: MigrationEngine) -> bool:
    snapshots = (engine.scheduler.snapshot(request.request_id, 0) for request in engine.scheduler.running)
    return all(snapshot is None or snapshot.drained for snapshot in snapshots)


def resume(engine: MigrationEngine, payload: Payload) -> Payload:
    """Lets all go on. `resumed` is false where nothing stood still, as after the deadline of the pause. Engine thread
    only."""
    engine.check_attempt(payload["job"], payload["attempt"])
    engine.pause.check_owner(payload["job"])
    return {"resumed": engine.pause.end(payload["job"])}


def collect(engine: MigrationEngine, session: SourceSession, payload: Payload) -> Payload:
    """One round. `full` also attaches what is not attached yet: all that can move, or `request_ids`."""
    session.renew(float(payload["lease_s"]))
    attached: Payload = {"refused": [], "finished": []}
    if payload["mode"] == "full":
        attached = session.attach(payload["request_ids"])
    answer = session.round(session.next_round)
    return {
        "mode": payload["mode"],
        "round_idx": answer["round"],
        "block_count": answer["blocks"],
        "data_size_bytes": answer["bytes"],
        "hit_blocks": answer["hit_blocks"],
        "dirty_blocks": answer["dirty_blocks"],
        "duration_s": answer["duration_s"],
        "transport": answer["transport"],
        "requests": [move.request_id for move in list(session.moves.values()) if move.state == "copying"],
        "refused": [*attached["refused"], *answer["failed"]],
        "finished": [*attached["finished"], *answer["finished"]],
    }


def receive(engine: MigrationEngine, payload: Payload) -> Payload:
    """Who the source has to call, and what has come from it so far. Engine thread only."""
    engine.check_attempt(payload["job"], payload["attempt"])
    session = engine.target
    if session is not None and session.job != payload["job"]:
        raise MigrationError(409, "session_busy", f"The instance is the target of migration {session.job}.", "job")
    if engine.source is not None:
        raise MigrationError(409, "session_busy", f"The instance is the source of migration {engine.source.job}.")
    streams = [] if session is None else list(engine.scheduler.book.parked.values())
    rows = [_parked_row(engine, stream) for stream in streams]
    return {
        "peer": {"host": engine.settings.bind, "control_port": engine.control_port},
        "session": session is not None,
        "parked": rows,
        "blocks": sum(row["blocks"] for row in rows),
        "moved": 0 if session is None else session.accepted,
    }


def _parked_row(engine: MigrationEngine, stream: ParkedStream) -> Payload:
    blocks = engine.scheduler.kv_cache_manager.get_block_ids
    members = list(stream.arrived())
    return {
        "request_id": members[0].request.request_id if members else None,
        "stream_id": stream.expectation.stream.partition("/")[2],
        "blocks": sum(len(group) for one in members for group in blocks(one.request.request_id)),
        "full_tokens": sum(one.full_tokens for one in members),
    }
