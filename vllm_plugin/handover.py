"""The handover of one wave of requests: the only part of a migration that a client can feel.

On the critical path, between the last token of A and the first of B: one look by A's engine (freeze), the tail
blocks, one message to B's engine (commit), B's next step. Everything else happens before or after.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Literal

from vllm_plugin.book import merge_logprobs
from vllm_plugin.messages import Coming, Commit, CommitItem, CommitPart, Prepare, Refusals
from vllm_plugin.move import DEADLINES_S, Member, Move
from vllm_plugin.pulse import TargetStep, aim
from vllm_plugin.rounds import copy_full_blocks, freeze, look, reserve, unpin
from vllm_plugin.scheduler import Snapshot
from vllm_plugin.states import LONG_FREEZE_S, RECOMPUTE_PATIENCE_S
from vllm_plugin.wire import Freezing, Resolve
from vllm_plugin.workers import Blocks

if TYPE_CHECKING:
    from vllm_plugin.source import SourceSession

__all__ = ["HandoverMode", "hand_over", "resolve"]

#: How the KV of a wave comes to B. `rolling`: before the freeze, but for what the last steps wrote. `stop_and_copy`:
#: all of it while the requests are frozen. `recompute`: not at all, B computes it again from the tokens. Two for a B
#: without room, which takes the request for good and lets it wait: `staged`, like `rolling`, but into B's host memory;
#: `queued`, like `recompute`.
HandoverMode = Literal["rolling", "stop_and_copy", "recompute", "staged", "queued"]

logger = logging.getLogger("vllm.vllm_hi.handover")

#: Before a freeze the blocks are copied again so often at most, until it takes no longer than two steps.
CATCH_UP = 4
SHORT_S = 0.05
#: A's last step before a freeze may take longer than it usually does by that share.
LATE = 0.25
#: So often the moment of a freeze is chosen, and again as long as more of A's steps than these begin before it.
LOOKS, NEAR = 3, 1
#: B answers a commit between two of its steps; after this A asks the proxy what became of it.
COMMIT_ANSWER_S = 2.5
RESOLVE_ANSWER_S = 3.0


def hand_over(session: SourceSession, moves: list[Move], mode: HandoverMode = "rolling") -> None:
    """Moves attached requests to B. Afterwards every move has ended: moved, stayed or finished."""
    for move in moves:
        move.queued = mode in ("staged", "queued")
        # What B holds blocks for already needs no other place.
        move.staged = mode == "staged" and not any(member.window for member in move.members)
    if mode == "staged":
        moves = _stageable(session, moves)
    if mode in ("rolling", "staged"):
        moves = _copy_the_rest(session, moves)
    elif mode == "stop_and_copy":
        moves = reserve(session, moves)
        for move in moves:
            move.freeze_s = LONG_FREEZE_S
    else:
        moves = _recomputable(session, moves)
    if mode == "recompute":
        for move in moves:
            move.patience_s = RECOMPUTE_PATIENCE_S
    moves = _prepare(session, moves)
    if moves:
        moves = _until_the_freeze(session, moves)
    moves = _tell_proxies(session, moves)
    time.sleep(session.engine.faults.hold_before_freeze_s)
    if not moves:
        return
    asked = time.monotonic()
    snapshots = freeze(session, moves)
    frozen = time.monotonic()
    moves = [move for move in moves if not move.ended]
    try:
        items = _send_tails(session, moves, snapshots)
        tails = time.monotonic()
        for move in moves:
            move.stages["freeze"] = (frozen - asked) * 1e3
            move.stages["tail"] = (tails - frozen) * 1e3
        if mode == "stop_and_copy":
            # B's promise of a run slot may have run out meanwhile.
            moves = _prepare(session, [move for move in moves if not move.ended])
        session.lead_s = 0.5 * session.lead_s + 0.5 * (tails - frozen)
        _commit(session, moves, items)
    finally:
        unpin(session, snapshots)
    for move in moves:
        move.done.wait(DEADLINES_S["committed"] + move.patience_s)


def _tell_proxies(session: SourceSession, moves: list[Move]) -> list[Move]:
    """Their patience with the silent streams begins."""
    for move in moves:
        link = session.engine.proxies.get(move.proxy)
        if link is None:
            # Nobody would bound the silence of the second leg, or switch.
            session.roll_back(move, "proxy_unreachable", "The proxy worker that owns the client was lost.")
        else:
            link.send(Freezing(move.stream_id, move.ticket, move.patience_s))
    return [move for move in moves if not move.ended]


def _until_the_freeze(session: SourceSession, moves: list[Move]) -> list[Move]:
    """Waits for a good moment to ask for it, and tells B when to expect the commit. Returns the moves that B still has
    room for."""
    own, lead_s = session.engine.scheduler, session.lead_s
    for looks in range(LOOKS):
        now, own_step_s, theirs = time.monotonic(), own.step_s, session.target_step
        found = aim(now, own.pulse.last, own_step_s, theirs.next, theirs.step_s, lead_s)
        if found.ahead <= NEAR or looks == LOOKS - 1:
            break
        # Until then neither goes as it is expected to: B is asked again when the moment is near.
        time.sleep(found.sleep_s - (NEAR + 0.5) * own_step_s)
        moves = _prepare(session, moves)
        if not moves:
            return []
    time.sleep(found.sleep_s)
    late_s = lead_s + LATE * own_step_s
    session.target.tell(Coming(max(0.0, now + found.freeze_s - time.monotonic()) + lead_s, late_s))
    return moves


def _copy_the_rest(session: SourceSession, moves: list[Move]) -> list[Move]:
    """Blocks that became full since the last round belong to the final increment."""
    had = {member.request_id: member.sent_blocks for move in moves for member in move.members if member.window}
    for _ in range(CATCH_UP):
        began = time.monotonic()
        moves, _ = copy_full_blocks(session, moves)
        # Over a slow link the requests have gone on for many steps meanwhile.
        if time.monotonic() - began < (2 * session.engine.scheduler.pulse.step_s or SHORT_S):
            break
    for move in moves:
        late = sum(one.sent_blocks - had.get(one.request_id, _hit_blocks(session, one)) for one in move.members)
        move.tail_blocks += late
        move.tail_bytes += late * session.engine.workers.block_bytes
    return moves


def _stageable(session: SourceSession, moves: list[Move]) -> list[Move]:
    """NIXL writes only into registered memory, and host staging is not."""
    if session.engine.settings.transfer_backend == "rdma":
        for move in moves:
            session.roll_back(move, "target_out_of_staging", "Blocks that travel by RDMA cannot be staged.")
    return [move for move in moves if not move.ended]


def _recomputable(session: SourceSession, moves: list[Move]) -> list[Move]:
    """A prefill that is split over steps would draw once in each, or end the engine on CPUs: what has a generator needs
    its KV."""
    snapshots = look(session, moves, freezing=False)
    unpin(session, snapshots)
    moves = [move for move in moves if not move.ended]
    for move in moves:
        move.recompute = True
        if session.engine.workers.keep_generators and any(snapshots[one.request_id].draws for _, one in move.live):
            message = "The request is seeded, and its random state does not survive a prefill; move its blocks instead."
            session.roll_back(move, "seeded_recompute", message)
    return [move for move in moves if not move.ended]


def _hit_blocks(session: SourceSession, member: Member) -> int:
    block_size: int = session.engine.scheduler.block_size
    return (member.hit_tokens or 0) // block_size


def _prepare(session: SourceSession, moves: list[Move]) -> list[Move]:
    """Before anything is frozen, B promises a run slot for each."""
    if not moves:
        return []
    tickets, queue = [move.ticket for move in moves], moves[0].queued
    try:
        answer: Refusals = session.target.ask(lambda call: Prepare(call, tickets, queue))
    except ConnectionError as error:
        for move in moves:
            session.roll_back(move, "target_lost", f"The target was lost before the handover: {error}.")
        return []
    # It comes from between two steps of B.
    session.target_step = TargetStep(time.monotonic() + answer.step_s, answer.step_s)
    _apply_refusals(session, moves, answer)
    return [move for move in moves if not move.ended]


def _apply_refusals(session: SourceSession, moves: list[Move], answer: Refusals) -> None:
    by_ticket = {move.ticket: move for move in moves}
    for refused in answer.refused:
        session.roll_back(by_ticket[refused.ticket], refused.code, refused.message)


def _send_tails(session: SourceSession, moves: list[Move], snapshots: dict[str, Snapshot]) -> list[CommitItem]:
    """Sends the blocks B lacks (the partial one above all) and reads the random states; builds what B needs to go
    on."""
    keep_generators = session.engine.workers.keep_generators
    for move in moves:
        if keep_generators and any(snapshots[one.request_id].draws_in_prefill for _, one in move.live):
            message = "The request is seeded and in prefill; it can move once it decodes."
            session.roll_back(move, "seeded_prefill", message)
    try:
        with session.target.writing():
            states = _push_tails(session, [move for move in moves if not move.ended], snapshots)
    except ConnectionError as error:
        for move in moves:
            session.roll_back(move, "target_lost", f"The last blocks could not be delivered: {error}.")
        return []
    if session.engine.faults.drop_generator:
        states = dict.fromkeys(states, _fresh_generator_state())
    if keep_generators:
        for move in (move for move in moves if not move.ended):
            if any(snapshots[one.request_id].draws and one.request_id not in states for _, one in move.live):
                message = "The random state of the seeded request could not be read."
                session.roll_back(move, "generator_missing", message)
    return _commit_items(session, [move for move in moves if not move.ended], snapshots, states)


def _push_tails(session: SourceSession, moves: list[Move], snapshots: dict[str, Snapshot]) -> dict[str, bytes]:
    """Raises: ConnectionError. Returns the generator states by request id."""
    blocks = Blocks(urgent=True)
    shares: list[tuple[Move, int]] = []
    for move in moves:
        live = [] if move.recompute else [member for _, member in move.live]
        tails = [_tail(session, move, member, snapshots[member.request_id]) for member in live]
        if not move.ended:
            for member, (source, target) in zip(live, tails, strict=True):
                blocks.add(source, target, member.owner)
            shares.append((move, sum(len(source) for source, _ in tails)))
    blocks.generators = [member.request_id for move in moves if not move.ended for _, member in move.live]
    sent, states = session.target.push(blocks)
    for move, count in shares:
        # Less than whole blocks where most of them had been sent ahead.
        move.tail_bytes += round(sent * count / max(1, len(blocks.source)))
    return states


def _tail(session: SourceSession, move: Move, member: Member, snapshot: Snapshot) -> tuple[list[int], list[int]]:
    """The blocks of one member that B lacks: (source ids, target ids)."""
    block_size, faults = session.engine.scheduler.block_size, session.engine.faults
    needed = -(-snapshot.valid_tokens // block_size)
    if len(member.window) < needed:
        message = f"The target holds {len(member.window)} blocks and {needed} are needed."
        session.roll_back(move, "window_too_small", message)
        return [], []
    move.tail_blocks += needed - member.sent_blocks
    if faults.skip_tail and snapshot.valid_tokens % block_size:
        needed -= 1
    return snapshot.block_ids[member.sent_blocks : needed], member.window[member.sent_blocks : needed]


def _fresh_generator_state() -> bytes:
    import torch

    return bytes(torch.Generator().manual_seed(0).get_state().numpy().tobytes())


def _commit_items(
    session: SourceSession, moves: list[Move], snapshots: dict[str, Snapshot], states: dict[str, bytes]
) -> list[CommitItem]:
    ended: dict[str, CommitPart] = {}
    if any(member.ended for move in moves for member in move.members):
        # Only then: the engine's thread answers between two steps, and the clients are waiting.
        ended = session.engine.on_engine(lambda: _ended_members(session, moves))
    items = []
    for move in moves:
        parts = [
            ended.get(member.request_id)
            or _part(snapshots[member.request_id], states.get(member.request_id), move.recompute)
            for member in move.members
        ]
        items.append(CommitItem(move.ticket, parts))
    if session.engine.faults.drop_logprobs:
        for rows in (part.logprobs for item in items for part in item.parts):
            if rows is not None:
                rows.logprobs = bytes(len(rows.logprobs))
    return items


def _part(snapshot: Snapshot, generator: bytes | None, recompute: bool) -> CommitPart:
    return CommitPart(
        output_tokens=snapshot.output_tokens,
        computed_tokens=0 if recompute else snapshot.valid_tokens,
        generator=generator,
        logprobs=merge_logprobs(list(snapshot.logprobs)),
        prefill=snapshot.prefill,
    )


def _ended_members(session: SourceSession, moves: list[Move]) -> dict[str, CommitPart]:
    """What the clients have of members that have ended already. Engine thread."""
    records = session.engine.scheduler.book.records
    parts = {}
    for member in (member for move in moves for member in move.members if member.ended):
        record = records[member.request_id]
        parts[member.request_id] = CommitPart(
            output_tokens=list(record.request.output_token_ids[member.told_tokens :]),
            computed_tokens=0,
            generator=None,
            logprobs=merge_logprobs(record.logprobs),
            prefill=record.prefill,
            ended=(record.request.status.name, record.request.stop_reason),
        )
    return parts


def _commit(session: SourceSession, moves: list[Move], items: list[CommitItem]) -> None:
    _hold(session, moves)
    # From here on B may own the requests: only those whose own deadline has not undone them already are offered.
    sent = [move for move in moves if move.advance("sent")]
    tickets = {move.ticket for move in sent}
    offered = [item for item in items if item.ticket in tickets]
    if not offered:
        return
    started = time.monotonic()
    try:
        answer: Refusals = session.target.ask(lambda call: Commit(call, offered), COMMIT_ANSWER_S)
    except ConnectionError as error:
        logger.warning("migration %s: the answer to a commit was lost: %s", session.job, error)
        resolve(session, sent)
        return
    answered = time.monotonic()
    refused = {refusal.ticket for refusal in answer.refused}
    for move in sent:
        if move.ticket not in refused:
            move.stages["commit"] = (answered - started) * 1e3
            move.committed_at = answered
            move.advance("committed")
    # An explicit refusal is certain: B does not have the request, A goes on at once.
    _apply_refusals(session, sent, answer)


def _hold(session: SourceSession, moves: list[Move]) -> None:
    hold = session.engine.faults.hold_before_commit_s
    for move in moves:
        move.entered += hold
    ends = time.monotonic() + hold
    while time.monotonic() < ends and any(not move.ended for move in moves):
        time.sleep(0.01)


def resolve(session: SourceSession, moves: list[Move]) -> None:
    """B's answer is lost, which is no refusal. The proxy owns both legs and knows, or decides; who gets no answer from
    it either is left to the deadline."""
    calls = []
    for move in moves:
        link = session.engine.proxies.get(move.proxy)
        if link is not None:
            calls.append((move, link.call(_resolve_message(move))))
    deadline = time.monotonic() + RESOLVE_ANSWER_S
    for move, future in calls:
        try:
            answer = future.result(max(0.0, deadline - time.monotonic()))
        except (FutureTimeout, ConnectionError):
            # Neither B nor the proxy answers: the move's own last resort lets A go on.
            continue
        if answer.outcome == "discarded":
            session.roll_back(move, "target_lost", "The target was lost between the freeze and the commit.")
        else:
            session.moved(move)


def _resolve_message(move: Move) -> Callable[[int], Resolve]:
    return lambda call: Resolve(call, move.stream_id, move.ticket)
