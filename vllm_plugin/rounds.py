"""Rounds: full blocks go to B while A keeps decoding. A full block below the written tokens never changes again."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_plugin.messages import Grow, GrowItem, Grown
from vllm_plugin.move import Member, Move
from vllm_plugin.pacing import brake
from vllm_plugin.scheduler import Snapshot
from vllm_plugin.workers import Blocks

if TYPE_CHECKING:
    from vllm_plugin.source import SourceSession

__all__ = ["copy_full_blocks", "freeze", "look", "reserve", "run_round", "unpin"]

logger = logging.getLogger("vllm.vllm_hi.rounds")

#: Steps in flight end within the pipeline's depth; longer than this and the freeze is given up.
DRAIN_DEADLINE_S = 0.8


class Sent(NamedTuple):
    """Full blocks that B has now, and bytes that crossed the wire: fewer where most of a block had been sent ahead,
    more where blocks that A still writes were sent along."""

    blocks: int
    bytes: int


def run_round(session: SourceSession, number: int, slow_source: bool) -> dict[str, Any]:
    """Sends every full block that B does not have yet; the answer is that of docs/protocol.md, section 4."""
    started = time.monotonic()
    moves = [move for move in session.moves.values() if move.state == "copying"]
    first = [member for move in moves for member in move.members if member.hit_tokens is None]
    moves, sent = copy_full_blocks(session, moves)
    if slow_source and sent.bytes:
        _slow_down(session, sent.bytes / (time.monotonic() - started))
    time.sleep(session.engine.faults.hold_round_s)
    ended = session.take_ended()
    dirty = session.engine.on_engine(lambda: sum(_ready_blocks(session, move) for move in moves))
    block_size = session.engine.scheduler.block_size
    return {
        "round": number,
        "blocks": sent.blocks,
        "bytes": sent.bytes,
        "hit_blocks": sum((member.hit_tokens or 0) // block_size for member in first),
        "dirty_blocks": dirty,
        "duration_s": time.monotonic() - started,
        "pause_s": session.engine.scheduler.pause_s,
        "transport": session.engine.workers.transport,
        "attached": len(moves),
        "finished": [move.request_id for move in ended if move.state == "finished"],
        "failed": [
            {"request_id": move.request_id, "code": move.code, "message": move.message}
            for move in ended
            if move.state == "stayed"
        ],
    }


def _slow_down(session: SourceSession, bytes_per_s: float) -> None:
    """Until the session ends the source writes no faster than so much KV can be copied."""
    scheduler, workers = session.engine.scheduler, session.engine.workers
    bytes_per_step = len(scheduler.running) * workers.block_bytes / scheduler.block_size
    step_s = max(0.0, scheduler.pulse.step_s - scheduler.pause_s)
    scheduler.pause_s = brake(bytes_per_step, step_s, bytes_per_s)
    if session.aborting:
        # Its end has let the source go at full speed again, or is about to.
        scheduler.pause_s = 0.0
    logger.info("migration %s: the source pauses %.0f ms before each step", session.job, scheduler.pause_s * 1e3)


def _ready_blocks(session: SourceSession, move: Move) -> int:
    """Full blocks that B does not have, at this moment."""
    block_size: int = session.engine.scheduler.block_size
    ready = 0
    for _, member in move.live:
        snapshot = session.engine.scheduler.snapshot(member.request_id, 0)
        if snapshot is not None:
            ready += max(0, snapshot.valid_tokens // block_size - member.sent_blocks)
    return ready


def copy_full_blocks(session: SourceSession, moves: list[Move]) -> tuple[list[Move], Sent]:
    """Tells B the new tokens, lets it hold blocks for them and one more, and sends the full blocks it lacks.

    Returns the moves that are still on their way, and what was sent.
    """
    snapshots = look(session, moves, freezing=False)
    moves = [move for move in moves if not move.ended]
    sent: list[Sent] = []
    try:
        for parts in _passes(moves, snapshots):
            sent.append(_copy(session, parts, snapshots))
    except ConnectionError as error:
        for move in moves:
            session.roll_back(move, "target_lost", f"KV blocks could not be copied: {error}.")
        return [], Sent(0, 0)
    finally:
        unpin(session, snapshots)
    total = Sent(sum(one.blocks for one in sent), sum(one.bytes for one in sent))
    return [move for move in moves if not move.ended], total


def reserve(session: SourceSession, moves: list[Move]) -> list[Move]:
    """Lets B hold blocks without sending any: all are copied while the requests are frozen. Returns the moves that are
    still on their way."""
    snapshots = look(session, moves, freezing=False)
    moves = [move for move in moves if not move.ended]
    try:
        for parts in _passes(moves, snapshots):
            _grow(session, parts, snapshots)
    except ConnectionError as error:
        for move in moves:
            session.roll_back(move, "target_lost", f"The target was lost before the handover: {error}.")
    finally:
        unpin(session, snapshots)
    return [move for move in moves if not move.ended]


#: A member that still runs on A: its stream, its part in it, itself.
Part = tuple[Move, int, Member]


def _passes(moves: list[Move], snapshots: dict[str, Snapshot]) -> list[list[Part]]:
    """All members, those last that share their first block with one that B has not got yet: by the time of the second
    pass it has, so a shared prefix crosses the wire once."""
    first: list[Part] = []
    second: list[Part] = []
    leaders: set[int] = set()
    for move in moves:
        for part, member in move.live:
            blocks = snapshots[member.request_id].block_ids
            if member.hit_tokens is None and blocks and blocks[0] in leaders:
                second.append((move, part, member))
            else:
                first.append((move, part, member))
                leaders |= set(blocks[:1])
    if not second:
        return [first]
    leading = {snapshots[member.request_id].block_ids[0] for _, _, member in second}
    again = [one for one in first if snapshots[one[2].request_id].block_ids[:1][0] in leading]
    return [first, again + second]


def _copy(session: SourceSession, parts: list[Part], snapshots: dict[str, Snapshot]) -> Sent:
    """Raises: ConnectionError."""
    block_size = session.engine.scheduler.block_size
    blocks = Blocks()
    parts = _grow(session, parts, snapshots)
    with session.target.writing():
        parts = [(move, part, member) for move, part, member in parts if not move.ended]
        for _, _, member in parts:
            snapshot = snapshots[member.request_id]
            full = snapshot.valid_tokens // block_size
            new = slice(member.sent_blocks, full)
            blocks.add(snapshot.block_ids[new], member.window[new], member.owner)
            if snapshot.valid_tokens % block_size and len(member.window) > full:
                blocks.open.append((snapshot.block_ids[full], member.window[full], member.owner))
        sent, _ = session.target.push(blocks)
    for _, _, member in parts:
        member.sent_blocks = max(member.sent_blocks, snapshots[member.request_id].valid_tokens // block_size)
    return Sent(len(blocks.source), sent)


def look(session: SourceSession, moves: list[Move], freezing: bool) -> dict[str, Snapshot]:
    """Snapshots and pins what still runs of `moves` in one go; streams that ended or lost blocks are settled, and not
    in the answer (by request id)."""
    scheduler = session.engine.scheduler

    def on_engine() -> dict[str, Snapshot | None]:
        found = {}
        for move in moves:
            if (record := scheduler.book.stream_of.get(move.request_id)) is not None:
                move.tokens = sum(one.request.num_output_tokens for one in record.members.values())
            for _, member in move.live:
                # Asked here, on the engine thread: a rollback unfreezes after it has left the state.
                if freezing and move.state == "frozen":
                    scheduler.freeze(member.request_id)
                snapshot = scheduler.snapshot(member.request_id, member.told_tokens)
                if snapshot is not None:
                    scheduler.pin(member.request_id)
                found[member.request_id] = snapshot
        return found

    looked = session.engine.on_engine(on_engine) if moves else {}
    alive: dict[str, Snapshot] = {}
    settled: dict[str, Snapshot] = {}
    for move in moves:
        present = {}
        for _, member in move.live:
            snapshot = looked[member.request_id]
            if snapshot is None:
                member.ended = True
            else:
                present[member.request_id] = snapshot
                # Without a window B holds nothing of it: it has not begun here, or waits to begin again.
                if snapshot.epoch != member.epoch or (member.window and snapshot.status != "RUNNING"):
                    session.roll_back(move, "preempted", "The source preempted the request, so its blocks are gone.")
        if not present:
            session.roll_back(move, "finished", "The request ended by itself.", outcome="finished")
        (settled if move.ended else alive).update(present)
    unpin(session, settled)
    return alive


def unpin(session: SourceSession, snapshots: dict[str, Snapshot]) -> None:
    """The blocks of these requests are not read any more; those of requests that ended meanwhile become free, before
    the engine thread does anything that is asked of it later."""
    request_ids = list(snapshots)
    scheduler = session.engine.scheduler

    def on_engine() -> None:
        for request_id in request_ids:
            scheduler.unpin(request_id)

    if request_ids:
        session.engine.later(on_engine)


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
        if not all(snapshots[member.request_id].drained for _, member in move.live if member.request_id in snapshots):
            session.roll_back(move, "not_drained", "The step in flight did not end in time.")
    return snapshots


def _grow(session: SourceSession, parts: list[Part], snapshots: dict[str, Snapshot]) -> list[Part]:
    """Raises: ConnectionError. Streams that B has no room for stay."""
    block_size = session.engine.scheduler.block_size
    parts = [(move, part, member) for move, part, member in parts if not move.ended]
    items = []
    for move, part, member in parts:
        snapshot = snapshots[member.request_id]
        tokens = snapshot.output_tokens[member.told_tokens - snapshot.since :]
        full = snapshot.valid_tokens // block_size * block_size
        capacity = snapshot.valid_tokens + block_size if snapshot.valid_tokens else 0
        sent = member.sent_blocks * block_size
        items.append(GrowItem(move.ticket, part, tokens, full, capacity, sent, move.staged))
    if not items:
        return []
    grown = session.target.ask(lambda call: Grow(call, items))
    if not isinstance(grown, Grown):
        raise ConnectionError("the target answered with an unexpected message")
    by_ticket = {move.ticket: move for move, _, _ in parts}
    for item in grown.items:
        member = by_ticket[item.ticket].members[item.part]
        if member.hit_tokens is None and item.block_ids:
            member.hit_tokens = item.hit_tokens
            member.sent_blocks = item.hit_tokens // block_size
        member.window = item.block_ids
        member.told_tokens = snapshots[member.request_id].num_output_tokens
    for no in grown.refused:
        session.roll_back(by_ticket[no.ticket], no.code, no.message)
    return [(move, part, member) for move, part, member in parts if not move.ended]
