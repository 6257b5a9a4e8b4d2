"""The operations behind the instance's HTTP endpoints (docs/protocol.md, section 4), by name.

Quick ones run on the engine thread; those of a session run on its own thread and are answered through a future.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_plugin import by_hand
from vllm_plugin.errors import MigrationError
from vllm_plugin.faults import Faults
from vllm_plugin.handover import HandoverMode
from vllm_plugin.queues import run_slots
from vllm_plugin.request_filter import FILTER_FAILED
from vllm_plugin.rows import request_row
from vllm_plugin.source import SourceSession
from vllm_plugin.wire import ProtocolError

if TYPE_CHECKING:
    from vllm_plugin.book import StreamRecord
    from vllm_plugin.engine import MigrationEngine

__all__ = ["answer"]

logger = logging.getLogger("vllm.vllm_hi.operations")

Payload = dict[str, Any]


def answer(engine: MigrationEngine, op: str, payload: Payload) -> Any:
    """Returns `{"ok": …}`, `{"error": …}`, or a future of one of them. Never raises: an exception would reach
    vLLM's log only."""
    if op not in _QUICK and op not in _SESSION:
        return MigrationError(404, "unknown_operation", f"There is no operation {op!r}.").as_dict()
    if engine.unsupported and op not in ("status", "requests"):
        text = f"Migration is not supported on this instance: {', '.join(engine.unsupported)}."
        return MigrationError(501, "migration_unsupported", text).as_dict()
    if op in _QUICK:
        return _guarded(_QUICK[op], engine, payload)
    function, executor = _SESSION[op], engine.sessions
    if op == "abort":
        # Must not wait behind the operation that it ends.
        session = engine.source
        if session is not None and session.job == payload.get("job") and payload["attempt"] >= session.attempt:
            session.aborting = True
        executor = engine.aborts
    return _deferred(executor, function, engine, payload)


def _guarded(function: Callable[[MigrationEngine, Payload], Payload], engine: MigrationEngine, payload: Payload) -> Any:
    try:
        return {"ok": function(engine, payload)}
    except MigrationError as error:
        return error.as_dict()
    except Exception as error:
        logger.exception("a migration operation failed")
        return MigrationError(500, "internal_error", f"The instance failed: {type(error).__name__}.").as_dict()


def _deferred(executor: Executor, function: Any, engine: MigrationEngine, payload: Payload) -> Future[Any]:
    return executor.submit(_guarded, function, engine, payload)


# -- on the engine thread ----------------------------------------------------------------------------------------------


def _status(engine: MigrationEngine, payload: Payload) -> Payload:
    if "front_end" in payload:
        engine.tell_front_end(payload["front_end"])
    scheduler = engine.core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    book = getattr(scheduler, "book", None)
    staging = getattr(scheduler, "staging", None)
    running, waiting = scheduler.get_request_counts()
    source, target = engine.source, engine.target
    session = source or target
    return {
        "role": engine.role,
        "role_held_s": engine.role_held_s,
        "migration": {"supported": not engine.unsupported, "missing_probes": engine.unsupported},
        "factors": engine.factors,
        "request_filter": engine.request_filter.name,
        "request_filter_problem": engine.request_filter.problem,
        "kv": {
            "total_blocks": scheduler.kv_cache_manager.kv_cache_config.num_blocks,
            "free_blocks": pool.get_num_free_blocks(),
            "block_size": scheduler.block_size,
            "bytes_per_block": engine.workers.block_bytes,
        },
        "requests": {
            "running": running,
            "waiting": waiting,
            "run_slots": run_slots(scheduler),
            "parked": len(book.ticket_of) if book is not None else 0,
            "frozen": len(book.frozen) if book is not None else 0,
            "quarantined": len(book.quarantine) if book is not None else 0,
            "staged": len(staging.waiting) if staging is not None else 0,
        },
        "staging": {
            "total_blocks": staging.total if staging is not None else 0,
            "free_blocks": staging.free if staging is not None else 0,
        },
        "data_port": engine.workers.infos[0]["data_port"] if engine.workers.infos else 0,
        "data_host": engine.settings.bind,
        "data_ports": [info["data_port"] for info in engine.workers.infos],
        "transport": engine.workers.transport,
        "control_port": engine.control_port,
        "proxies": sorted(engine.proxies),
        "paused_by": engine.pause.job,
        "session": None
        if session is None
        else {
            "job": session.job,
            "attempt": session.attempt,
            "side": "source" if source is not None else "target",
            "moves": source.moves_by_state() if source is not None else {},
        },
    }


def _requests(engine: MigrationEngine, _payload: Payload) -> Payload:
    """One row per client's request: what several choices or prompts add up to."""
    scheduler = engine.core.scheduler
    book = getattr(scheduler, "book", None)
    rows = {}
    for request in scheduler.requests.values():
        record = book.stream_of.get(request.request_id) if book is not None else None
        if record is None or record.request_id not in rows:
            row = _request_row(engine, request, record)
            rows[row["request_id"]] = row
    return {"requests": list(rows.values())}


def _request_row(engine: MigrationEngine, request: Any, record: StreamRecord | None) -> Payload:
    row = request_row(engine, request, record)
    why: tuple[str, str] | None
    if record is not None and request.request_id in engine.scheduler.book.ticket_of:
        row["status"] = "PARKED"
        why = "parked", "The request is parked here; it still runs on its source."
    else:
        why = engine.refusal(record)
    return {
        **row,
        "migratable": why is None,
        "reason": None if why is None else {"code": why[0], "message": why[1]},
    }


def _lease(engine: MigrationEngine, payload: Payload) -> Payload:
    session = _source(engine, payload)
    session.renew(float(payload["lease_s"]))
    return {"expires_in_s": session.lease_s}


def _activate(engine: MigrationEngine, payload: Payload) -> Payload:
    engine.check_attempt(payload["job"], payload["attempt"])
    engine.take_role("active")
    return {"role": engine.role}


def _convert_to_b(engine: MigrationEngine, payload: Payload) -> Payload:
    return _leave(engine, payload, "standby")


def _destroy(engine: MigrationEngine, payload: Payload) -> Payload:
    return _leave(engine, payload, "destroyed")


def _leave(engine: MigrationEngine, payload: Payload, role: str) -> Payload:
    """Raises: MigrationError 409 while anything still runs here."""
    engine.check_attempt(payload["job"], payload["attempt"])
    left = len(engine.core.scheduler.requests)
    if left:
        raise MigrationError(409, "requests_in_flight", f"{left} requests still run here; wait until they have left.")
    engine.take_role(role)
    return {"role": engine.role}


def _faults(engine: MigrationEngine, payload: Payload) -> Payload:
    if not engine.settings.enable_faults:
        raise MigrationError(404, "unknown_operation", "Faults are off; start with VLLM_HI_ENABLE_FAULTS=1.")
    try:
        engine.faults = msgspec.convert(payload, Faults)
    except msgspec.ValidationError as error:
        raise MigrationError(400, "bad_field", f"{error}.") from error
    engine.faults.slow_down(engine.core.scheduler)
    faults: Payload = msgspec.to_builtins(engine.faults)
    return faults


# -- on a session thread -----------------------------------------------------------------------------------------------


def _start(engine: MigrationEngine, payload: Payload) -> Payload:
    job, attempt = payload["job"], payload["attempt"]
    engine.check_attempt(job, attempt)
    present = engine.source
    if present is not None:
        if present.job == job and present.attempt == attempt:
            return {"session": present.target.session}
        if present.job != job:
            raise MigrationError(409, "session_busy", f"The instance takes part in migration {present.job}.")
        present.close("superseded", "A newer attempt took over.")
    if engine.target is not None:
        raise MigrationError(409, "session_busy", f"The instance is the target of migration {engine.target.job}.")
    if (problem := engine.on_engine(engine.filter_problem)) is not None:
        raise MigrationError(422, FILTER_FAILED, problem, "VLLM_HI_REQUEST_FILTER")
    engine.source = SourceSession(engine, job, attempt, payload["peer"], float(payload["lease_s"]))
    return {"session": engine.source.target.session}


def _attach(engine: MigrationEngine, payload: Payload) -> Payload:
    return _source(engine, payload).attach(payload.get("request_ids"))


def _round(engine: MigrationEngine, payload: Payload) -> Payload:
    return _source(engine, payload).round(int(payload["round"]), bool(payload.get("slow_source")))


def _handover(engine: MigrationEngine, payload: Payload) -> Payload:
    session = _source(engine, payload)
    mode: HandoverMode = payload.get("mode") or "rolling"
    return session.handover(payload.get("request_ids"), max(1, int(payload.get("wave") or 4)), mode)


def _probe(engine: MigrationEngine, payload: Payload) -> Payload:
    """How fast KV would travel to another instance. Belongs to no job, and leaves nothing behind."""
    try:
        found = engine.workers.probe(payload["host"], payload["data_ports"])
    except (OSError, ProtocolError, ValueError) as error:
        raise MigrationError(502, "target_unreachable", f"{error}.") from error
    return {
        "transport": found.transport,
        "reason": found.reason,
        "bytes_per_s": round(found.bytes_per_s),
        "block_s": found.block_s,
    }


def _collect(engine: MigrationEngine, payload: Payload) -> Payload:
    if payload["peer"] is not None and engine.source is None:
        _start(engine, payload)
    return by_hand.collect(engine, _source(engine, payload), payload)


def _finish(engine: MigrationEngine, payload: Payload) -> Payload:
    session = engine.source
    if session is None:
        return {"moved": 0, "stayed": 0, "gaps": []}
    session = _source(engine, payload)
    session.close("finished", "The migration ended.")
    outcomes = [move.state for move in session.ended]
    late = [move for move in session.ended if move.queued and move.gap_ms is not None]
    return {
        "moved": outcomes.count("moved"),
        "stayed": outcomes.count("stayed"),
        "gaps": [{"request_id": one.request_id, "gap_ms": one.gap_ms, "itl_ms": one.itl_ms} for one in late],
    }


def _abort(engine: MigrationEngine, payload: Payload) -> Payload:
    engine.check_attempt(payload["job"], payload["attempt"])
    released = 0
    if engine.source is not None and engine.source.job == payload["job"]:
        released += engine.source.close("aborted", "The migration was aborted.")
    if engine.target is not None and engine.target.job == payload["job"]:
        engine.target.close("the migration was aborted")
    return {"released": released}


def _source(engine: MigrationEngine, payload: Payload) -> SourceSession:
    engine.check_attempt(payload["job"], payload["attempt"])
    session = engine.source
    if session is None or session.job != payload["job"]:
        raise MigrationError(409, "no_session", "No session of this migration is open here; start it first.", "job")
    if session.attempt != payload["attempt"]:
        raise MigrationError(409, "no_session", "The open session belongs to another attempt; start again.", "attempt")
    return session


_QUICK: dict[str, Callable[[MigrationEngine, Payload], Payload]] = {
    "status": _status,
    "requests": _requests,
    "lease": _lease,
    "activate": _activate,
    "convert_to_b": _convert_to_b,
    "destroy": _destroy,
    "receive": by_hand.receive,
    "resume": by_hand.resume,
    "faults": _faults,
}

_SESSION: dict[str, Callable[[MigrationEngine, Payload], Payload]] = {
    "start": _start,
    "attach": _attach,
    "round": _round,
    "handover": _handover,
    "collect": _collect,
    "pause": by_hand.pause,
    "probe": _probe,
    "finish": _finish,
    "abort": _abort,
}
