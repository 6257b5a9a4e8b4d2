"""Attach: a second leg on B for every request that can move, before anything is copied or frozen."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from vllm_plugin.adapters import identity
from vllm_plugin.eligibility import prompt_digest, queueing_digest, sampling_digest
from vllm_plugin.errors import MigrationError
from vllm_plugin.messages import Expect, Expectation, ExpectedMember
from vllm_plugin.move import Member, Move
from vllm_plugin.parsers import parser_names
from vllm_plugin.request_filter import FILTER_FAILED
from vllm_plugin.wire import LegOpened, OpenLeg

if TYPE_CHECKING:
    from vllm_plugin.book import StreamRecord
    from vllm_plugin.scheduler import MigrationScheduler
    from vllm_plugin.source import SourceSession

__all__ = ["attach"]

#: B's front end tokenizes and queues the request meanwhile.
ATTACH_DEADLINE_S = 10.0


def attach(session: SourceSession, request_ids: list[str] | None) -> dict[str, Any]:
    """Attaches all requests, or those asked for. Those that cannot move say why and are not touched.

    Raises:
        MigrationError: 502 when B is lost, 422 when the request filter fails.
    """
    moves, expectations, refused = session.engine.on_engine(lambda: _choose(session, request_ids))
    if (broken := next((row for row in refused if row["code"] == FILTER_FAILED), None)) is not None:
        raise MigrationError(422, FILTER_FAILED, broken["message"], "VLLM_HI_REQUEST_FILTER")
    if moves:
        _expect(session, expectations)
        session.check()
        for move in moves:
            session.moves[move.request_id] = move
        _open_legs(session, moves)
    attached, finished = [], []
    for move in moves:
        if move.state == "copying":
            attached.append(
                {
                    "request_id": move.request_id,
                    "stream_id": move.stream_id,
                    "ticket": move.ticket,
                    "prompt_tokens": move.prompt_tokens,
                    "output_tokens": move.tokens,
                    "kv_blocks": move.kv_blocks,
                }
            )
        elif move.state == "finished":
            finished.append(move.request_id)
        else:
            refused.append({"request_id": move.request_id, "code": move.code, "message": move.message})
    return {"attached": attached, "refused": refused, "finished": finished}


def _choose(
    session: SourceSession, request_ids: list[str] | None
) -> tuple[list[Move], list[Expectation], list[dict[str, str]]]:
    scheduler = session.engine.scheduler
    moves, expectations, refused = [], [], []
    for request_id, record in _streams(scheduler, request_ids).items():
        present = session.moves.get(request_id)
        if present is not None and not present.ended:
            continue
        if record is None and request_id not in scheduler.requests:
            refused.append({"request_id": request_id, "code": "unknown_request", "message": "The request has ended."})
            continue
        why = session.engine.refusal(record)
        if why is not None or record is None:
            code, message = why or ("unknown_request", "The request has ended.")
            refused.append({"request_id": request_id, "code": code, "message": message})
            continue
        move = _move_of(scheduler, record)
        moves.append(move)
        expectations.append(_expectation(move, record, session.engine.adapters))
    return moves, expectations, refused


def _streams(scheduler: MigrationScheduler, request_ids: list[str] | None) -> dict[str, StreamRecord | None]:
    """What the asked-for requests (None: all) belong to, by the id of the whole; None for those without a proxy."""
    found: dict[str, StreamRecord | None] = {}
    for request_id in list(scheduler.requests) if request_ids is None else request_ids:
        record = scheduler.book.stream_of.get(request_id)
        found[record.request_id if record is not None else request_id] = record
    return found


def _move_of(scheduler: MigrationScheduler, record: StreamRecord) -> Move:
    members, blocks = [], 0
    for member in record.in_order():
        snapshot = scheduler.snapshot(member.request_id, 0)
        if snapshot is None:
            members.append(Member(member.request_id, 0, ended=True))
        else:
            members.append(Member(member.request_id, snapshot.epoch))
            blocks += len(snapshot.block_ids)
    requests = [member.request for member in record.members.values()]
    return Move(
        request_id=record.request_id,
        stream=record.stream,
        ticket=secrets.token_urlsafe(24),
        members=members,
        prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        kv_blocks=blocks,
        tokens=sum(request.num_output_tokens for request in requests),
    )


def _expectation(move: Move, record: StreamRecord, adapters: Mapping[str, str]) -> Expectation:
    requests = [(member.key, member.request) for member in record.in_order()]
    members = [
        ExpectedMember(*key, prompt_digest(request), sampling_digest(request), queueing_digest(request))
        for key, request in requests
    ]
    first = requests[0][1]
    # Ages, not times: the clocks of two hosts differ.
    age_s = max(0.0, time.time() - first.arrival_time)
    return Expectation(move.ticket, record.stream, members, identity(first, adapters), age_s)


def _expect(session: SourceSession, expectations: list[Expectation]) -> None:
    try:
        session.target.ask(lambda call: Expect(call, expectations))
    except ConnectionError as error:
        text = f"The target was lost while requests were attached: {error}."
        raise MigrationError(502, "target_lost", text) from error


def _open_legs(session: SourceSession, moves: list[Move]) -> None:
    calls: list[tuple[Move, Future[LegOpened]]] = []
    for move in moves:
        link = session.engine.proxies.get(move.proxy)
        if link is None:
            session.roll_back(move, "proxy_unreachable", "The proxy worker that owns the client was lost.")
        else:
            calls.append((move, link.call(_open_leg(move, session))))
    deadline = time.monotonic() + ATTACH_DEADLINE_S
    for move, future in calls:
        try:
            answer = future.result(max(0.0, deadline - time.monotonic()))
        except (FutureTimeout, ConnectionError):
            session.roll_back(move, "proxy_unreachable", "The proxy did not open the second leg in time.")
            continue
        if not answer.ok:
            session.roll_back(move, answer.code or "leg_refused", answer.message or "The proxy refused a second leg.")
    for move, _ in calls:
        if not move.parked.wait(max(0.0, deadline - time.monotonic())):
            message = "The request did not arrive on the target in time."
            session.roll_back(move, "attach_timeout", message, session.end_of(move))
        else:
            # Loses against a rollback that came first, as it should.
            move.advance("copying")


def _open_leg(move: Move, session: SourceSession) -> Callable[[int], OpenLeg]:
    parsers = parser_names(session.engine.factors, session.engine.core.vllm_config)
    return lambda call: OpenLeg(call, move.stream_id, move.ticket, session.target.base_url, *parsers)
