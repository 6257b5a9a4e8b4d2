"""Rounds: full blocks go to B while A keeps decoding. A full block below the written tokens never changes again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm_plugin.messages import Grow, GrowItem, Grown
from vllm_plugin.move import Move
from vllm_plugin.scheduler import Snapshot

if TYPE_CHECKING:
    from vllm_plugin.source import SourceSession

__all__ = ["copy_full_blocks", "freeze", "run_round", "unpin"]

#: Steps in flight end within the pipeline's depth; longer than this and the freeze is given up.
DRAIN_DEADLINE_S = 0.8


def run_round(session: SourceSession, number: int) -> dict[str, Any]:
    """Sends every full block that B does not have yet; the answer is that of docs/protocol.md, section 4."""
    started = time.monotonic()
    moves = [move for move in session.moves.values() if move.state == "copying"]
    first = [move for move in moves if move.hit_tokens is None]
    moves, sent = copy_full_blocks(session, moves)
    time.sleep(session.engine.faults.hold_round_s)
    ended = session.take_ended()
    dirty = session.engine.on_engine(lambda: sum(_ready_blocks(session, move) for move in moves))
    block_size = session.engine.scheduler.block_size
    return {
        "round": number,
        "blocks": sent,
        "bytes": sent * session.engine.workers.block_bytes,
        "hit_blocks": sum((move.hit_tokens or 0) // block_size for move in first),
        "dirty_blocks": dirty,
        "duration_s": time.monotonic() - started,
        "attached": len(moves),
        "finished": [move.request_id for move in ended if move.state == "finished"],
        "failed": [
            {"request_id": move.request_id, "code": move.code, "message": move.message}
            for move in ended
            if move.state == "stayed"
        ],
    }


def _ready_blocks(session: SourceSession, move: Move) -> int:
    """Full blocks that B does not have, at this moment."""
    snapshot = session.engine.scheduler.snapshot(move.request_id, 0)
    if snapshot is None:
        return 0
    block_size: int = session.engine.scheduler.block_size
    return max(0, snapshot.valid_tokens // block_size - move.sent_blocks)


def copy_full_blocks(session: SourceSession, moves: list[Move]) -> tuple[list[Move], int]:
    """Tells B the new tokens, lets it hold blocks for them and one more, and sends the full blocks it lacks.

    Returns the moves that are still on their way, and the number of blocks sent.
    """
    snapshots = look(session, moves, freezing=False)
    moves = [move for move in moves if move.request_id in snapshots]
    block_size = session.engine.scheduler.block_size
    source: list[int] = []
    target: list[int] = []
    try:
        moves = _grow(session, moves, snapshots)
        for move in moves:
            full = snapshots[move.request_id].valid_tokens // block_size
            source += snapshots[move.request_id].block_ids[move.sent_blocks : full]
            target += move.window[move.sent_blocks : full]
        session.target.push(source, target, [])
    except ConnectionError as error:
        for move in moves:
            session.roll_back(move, "target_lost", f"KV blocks could not be copied: {error}.")
        return [], 0
    finally:
        unpin(session, snapshots)
    for move in moves:
        move.sent_blocks = max(move.sent_blocks, snapshots[move.request_id].valid_tokens // block_size)
    return [move for move in moves if not move.ended], len(source)


def look(session: SourceSession, moves: list[Move], freezing: bool) -> dict[str, Snapshot]:
    """Snapshots and pins the requests of `moves` in one go; those that ended or lost their blocks are settled."""
    scheduler = session.engine.scheduler

    def on_engine() -> dict[str, Snapshot | None]:
        found = {}
        for move in moves:
            # Asked here, on the engine thread: a rollback unfreezes after it has left the state.
            if freezing and move.state == "frozen":
                scheduler.freeze(move.request_id)
            snapshot = scheduler.snapshot(move.request_id, move.told_tokens)
            if snapshot is not None:
                scheduler.pin(move.request_id)
            found[move.request_id] = snapshot
        return found

    looked = session.engine.on_engine(on_engine) if moves else {}
    alive: dict[str, Snapshot] = {}
    settled: dict[str, Snapshot] = {}
    for move in moves:
        snapshot = looked[move.request_id]
        if snapshot is None:
            session.roll_back(move, "finished", "The request ended by itself.", outcome="finished")
            continue
        if snapshot.epoch != move.epoch or snapshot.status != "RUNNING":
            session.roll_back(move, "preempted", "The source preempted the request, so its blocks are gone.")
        if move.ended:
            settled[move.request_id] = snapshot
        else:
            alive[move.request_id] = snapshot
            move.tokens = snapshot.num_output_tokens
    unpin(session, settled)
    return alive


def unpin(session: SourceSession, snapshots: dict[str, Snapshot]) -> None:
    """The blocks of these requests are not read any more; those of requests that ended meanwhile become free."""
    request_ids = list(snapshots)
    scheduler = session.engine.scheduler

    def on_engine() -> None:
        for request_id in request_ids:
            scheduler.unpin(request_id)

    if request_ids:
        session.engine.on_engine(on_engine)


def freeze(session: SourceSession, moves: list[Move]) -> dict[str, Snapshot]:
    """Freezes all requests at one step boundary; returns the pinned snapshots of those that are drained."""
    for move in moves:
        move.advance("frozen")
    snapshots = look(session, moves, freezing=True)
    deadline = time.monotonic() + DRAIN_DEADLINE_S
    while not all(snapshot.drained for snapshot in snapshots.values()) and time.monotonic() < deadline:
        # Only with steps in flight (asynchronous scheduling).
        time.sleep(0.001)
        unpin(session, snapshots)
        snapshots = look(session, [move for move in moves if not move.ended], freezing=True)
    for move in moves:
        if move.request_id in snapshots and not snapshots[move.request_id].drained:
            session.roll_back(move, "not_drained", "The step in flight did not end in time.")
    return snapshots


def _grow(session: SourceSession, moves: list[Move], snapshots: dict[str, Snapshot]) -> list[Move]:
    """Raises: ConnectionError. Requests that B has no room for stay."""
    block_size = session.engine.scheduler.block_size
    items = []
    for move in moves:
        snapshot = snapshots[move.request_id]
        full = snapshot.valid_tokens // block_size * block_size
        items.append(GrowItem(move.ticket, snapshot.output_tokens, full, snapshot.valid_tokens + block_size))
    if not items:
        return []
    grown = session.target.ask(lambda call: Grow(call, items))
    if not isinstance(grown, Grown):
        raise ConnectionError("the target answered with an unexpected message")
    by_ticket = {move.ticket: move for move in moves}
    for item in grown.items:
        move = by_ticket[item.ticket]
        if move.hit_tokens is None:
            move.hit_tokens = item.hit_tokens
            move.sent_blocks = item.hit_tokens // block_size
        move.window = item.block_ids
        move.told_tokens = snapshots[move.request_id].num_output_tokens
    for no in grown.refused:
        session.roll_back(by_ticket[no.ticket], no.code, no.message)
    return [move for move in moves if not move.ended]
