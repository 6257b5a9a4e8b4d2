"""The migration engine: the plugin's half in the engine core process.

It owns the control listener (proxies and peers dial in), the sessions, and the way from other threads onto the
engine thread. The API server reaches it through the utility `vllm_hi(op, payload)`, which answers `{"ok": …}` or
`{"error": …}`.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from vllm_plugin import eligibility, facts
from vllm_plugin.book import StreamRecord
from vllm_plugin.by_hand import Pause
from vllm_plugin.compat import ENGINE_PUMP, EngineCoreRequestType, RequestStatus
from vllm_plugin.errors import MigrationError
from vllm_plugin.faults import Faults
from vllm_plugin.link import Link
from vllm_plugin.messages import Answer, FirstStep, OpenSession, decode_peer
from vllm_plugin.operations import answer
from vllm_plugin.request_filter import FILTER_FAILED, RequestFilter
from vllm_plugin.rows import request_row
from vllm_plugin.scheduler import MigrationScheduler
from vllm_plugin.settings import PluginSettings
from vllm_plugin.source import SourceSession
from vllm_plugin.staging import Staging
from vllm_plugin.states import RECOMPUTE_PATIENCE_S
from vllm_plugin.target import TargetSession, open_session
from vllm_plugin.topology import Layout, TopologyRefused, layout_of
from vllm_plugin.wire import (
    Auth,
    Discarded,
    FirstToken,
    FrameSocket,
    LegOpened,
    Producing,
    ProtocolError,
    Resolved,
    Switched,
    decode_frame,
)
from vllm_plugin.workers import Workers

__all__ = ["MigrationEngine", "pump", "utility"]

logger = logging.getLogger("vllm.vllm_hi.engine")

Result = TypeVar("Result")

WATCH_INTERVAL_S = 0.05
#: A caller waits at most this long for the engine thread; a step that takes longer is a hung engine.
ENGINE_THREAD_S = 30.0
_ATTRIBUTE = "_vllm_hi_engine"


def utility(self: Any, op: str, payload: dict[str, Any] | None = None) -> Any:
    """Becomes `EngineCore.vllm_hi`; runs on the engine thread (v1/engine/core.py, utility dispatch)."""
    engine = getattr(self, _ATTRIBUTE, None)
    if engine is None:
        engine = MigrationEngine(self)
        setattr(self, _ATTRIBUTE, engine)
    return answer(engine, op, payload or {})


def pump(self: Any) -> Future[None]:
    """Becomes `EngineCore.vllm_hi_pump`: runs one queued call on the engine thread. The future is never resolved,
    so vLLM sends no utility output to anybody."""
    engine: MigrationEngine = getattr(self, _ATTRIBUTE)
    engine.run_next_call()
    return Future()


class MigrationEngine:
    """One per engine core; created on the first utility call, on the engine thread."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.settings = PluginSettings.from_env()
        self.take_role("active" if self.settings.instance_type == "A" else "standby")
        self.faults = Faults()
        self.proxies: dict[str, Link] = {}
        self.source: SourceSession | None = None
        self.target: TargetSession | None = None
        self.attempts: dict[str, int] = {}
        self._produced: deque[tuple[float, str, Producing]] = deque(maxlen=1000)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        # One operation of a session after the other; the engine thread never waits for them.
        self.sessions = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-hi-session")
        self.aborts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-hi-abort")
        self.request_filter = RequestFilter(self.settings.request_filter)
        self.pause = Pause(self)
        self.unsupported = facts.unsupported(core)
        self.workers = Workers([], Layout(0, ()), self.settings.bind, self.settings.token)
        self.control_port = 0
        self.factors: dict[str, str] = {}
        #: Fingerprints of the LoRA adapters that the API server serves now, by name.
        self.adapters: dict[str, str] = {}
        if self.unsupported:
            logger.warning("migration is not available on this instance: %s", ", ".join(self.unsupported))
            return
        self._start()

    def _start(self) -> None:
        settings = self.settings
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        transfer = (settings.transfer_backend or "", settings.transfer_bytes_per_s)
        infos = self.core.collective_rpc(
            "vllm_hi_start", args=(settings.token, settings.bind, settings.data_port, cpus, *transfer)
        )
        layout = self._layout(infos)
        if layout is None:
            return
        self.workers = Workers(infos, layout, settings.bind, settings.token)
        self.factors = facts.factors(self.core, infos)
        self._start_staging()
        listener = socket.create_server((settings.bind, settings.control_port))
        self.control_port = listener.getsockname()[1]
        self.name = f"{settings.bind}:{self.control_port}"
        self.scheduler.migration_listener = self
        threading.Thread(target=self._accept, args=(listener,), name="vllm-hi-control", daemon=True).start()
        threading.Thread(target=self._watch, name="vllm-hi-watch", daemon=True).start()
        logger.info("migration is available; control port %d", self.control_port)

    def _layout(self, infos: list[dict[str, Any]]) -> Layout | None:
        """What of a block lies on which worker; None where that cannot be said, and nothing can be migrated."""
        for refusal in (info["refusal"] for info in infos if "refusal" in info):
            # Tokens before heads, for one: then a range of heads is in many pieces.
            text = "migration is not available on this instance: %s; start it with VLLM_KV_CACHE_LAYOUT=LBHNC"
            logger.warning(text, refusal)
            self.unsupported = ["contiguous_kv_blocks"]
            return None
        try:
            return layout_of(infos, self.scheduler.block_size, facts.heads(self.core)[1])
        except TopologyRefused as error:
            logger.warning("migration is not available on this instance: %s", error.message)
            self.unsupported = ["known_kv_head_ranges"]
            return None

    def _start_staging(self) -> None:
        wanted = self.settings.staging_bytes // max(1, self.workers.block_bytes)
        if not wanted or self.settings.transfer_backend == "rdma":
            return
        first, count = min(self.core.collective_rpc("vllm_hi_stage", args=(wanted,)), key=lambda one: one[1])
        self.scheduler.staging = Staging(first, count)
        logger.info("host memory for %d staged KV blocks", count)

    @property
    def scheduler(self) -> MigrationScheduler:
        scheduler: MigrationScheduler = self.core.scheduler
        return scheduler

    def take_role(self, role: str) -> None:
        """What the instance is from now on: active, standby or destroyed."""
        self.role, self._role_since = role, time.monotonic()

    @property
    def role_held_s(self) -> float:
        return round(time.monotonic() - self._role_since, 3)

    # -- the engine thread ---------------------------------------------------------------------------------------------

    def on_engine(self, call: Callable[[], Result], queued: Callable[[], None] = lambda: None) -> Result:
        """Runs `call` on the engine thread, between two steps, and returns its result; `queued` is called at once, when
        the engine cannot miss it any more. Not to be used on that thread."""
        future = self.later(call)
        queued()
        return future.result(ENGINE_THREAD_S)

    def later(self, call: Callable[[], Result]) -> Future[Result]:
        """Like `on_engine`, but returns at once: also for use on the engine thread."""
        future: Future[Result] = Future()
        self._calls.put((call, future))
        self.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, 0, ENGINE_PUMP, ())))
        return future

    def run_next_call(self) -> None:
        call, future = self._calls.get_nowait()
        try:
            future.set_result(call())
        except Exception as error:
            # Whoever waits gets it; an exception here would end the engine core.
            logger.exception("a migration step failed on the engine thread")
            future.set_exception(error)

    def end_requests(self, request_ids: list[str], status: Any) -> None:
        """Ends requests and tells their front ends. Engine thread only."""
        self.core._send_abort_outputs(self.scheduler.finish_requests(request_ids, status))

    def refuse_arrival(self, request: Any) -> None:
        """A request with a bad ticket was put into `requests` only; its front end gets an error."""
        self.scheduler.requests.pop(request.request_id, None)
        request.status = RequestStatus.FINISHED_ABORTED
        self.scheduler.book.forget(request.request_id)
        self.core._send_error_outputs_to_client([request.request_id], request.client_index)

    def refusal(self, record: StreamRecord | None) -> tuple[str, str] | None:
        """Why what runs here for a client's request cannot move now: (code, sentence). Engine thread only."""
        if record is not None and any(self.scheduler.staging.waits(one) for one in record.members):
            return "staged", "Its KV blocks wait in host memory until there is room here; it can move after that."
        connected = record is not None and record.proxy in self.proxies
        why = eligibility.refusal(record, connected, self.adapters, self.workers.keep_generators)
        return why or (self._filtered(record) if record is not None else None)

    def _filtered(self, record: StreamRecord) -> tuple[str, str] | None:
        if self.request_filter.name is None:
            return None
        first = next(iter(record.members.values())).request
        return self.request_filter.refusal(record.request_id, request_row(self, first, record))

    def filter_problem(self) -> str | None:
        """Why the operator's request filter cannot be used, tried on all that runs here. Engine thread only."""
        if self.request_filter.problem is not None:
            return self.request_filter.problem
        records = {id(record): record for record in self.scheduler.book.stream_of.values()}
        found = (self._filtered(record) for record in records.values() if record.live)
        return next((message for code, message in filter(None, found) if code == FILTER_FAILED), None)

    # -- what the scheduler reports ------------------------------------------------------------------------------------

    def parked(self, ticket: str, request: Any) -> None:
        if self.target is None:
            logger.warning("a request came with a ticket, but no migration runs")
            self.refuse_arrival(request)
        else:
            self.target.arrived(ticket, request)

    def producing(self, ticket: str, stream: str, tokens: int, committed_at: float) -> None:
        self.queued(ticket, stream, tokens)
        if self.target is not None:
            self.target.link.send(FirstStep(ticket, (time.monotonic() - committed_at) * 1e3))

    def queued(self, ticket: str, stream: str, tokens: int) -> None:
        """The stream is this instance's: its proxy worker is told to switch."""
        worker, _, stream_id = stream.partition("/")
        message = Producing(stream_id, ticket, tokens)
        self._produced.append((time.monotonic(), worker, message))
        link = self.proxies.get(worker)
        if link is None:
            logger.warning("the proxy worker %s is gone; stream %s runs here and it cannot be told", worker, stream_id)
        else:
            self.faults.say("producing", link, message)

    def _tell_again(self, worker: str, link: Link) -> None:
        """A proxy worker is back: what it may have missed, and still waits for, is repeated."""
        oldest = time.monotonic() - RECOMPUTE_PATIENCE_S
        for when, owner, message in list(self._produced):
            if owner == worker and when > oldest:
                self.faults.say("producing", link, message)

    def unstage(self, moves: list[tuple[int, int]], installs: list[dict[str, Any]]) -> None:
        self.core.collective_rpc("vllm_hi_unstage", args=(moves, installs))

    def step_begins(self) -> None:
        if self.target is not None:
            self.target.step_begins()

    def parked_gone(self, ticket: str) -> None:
        if self.target is not None:
            self.target.gone(ticket)

    def preempted(self, request_id: str) -> None:
        if self.source is not None:
            self.aborts.submit(self.source.preempted, request_id)

    def memory_pressure(self) -> None:
        """Running requests go first: what is only parked here stays on its source."""
        if self.target is not None:
            self.target.revoke_parked()

    def tell_front_end(self, front_end: dict[str, Any]) -> None:
        """The API server reports what only it knows (`vllm_plugin.front_end`), with each question for the status."""
        self.adapters = dict(front_end["adapters"])
        self.factors = {**self.factors, **facts.front_end_factors(front_end)}

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, address = listener.accept()
            threading.Thread(target=self._serve, args=(sock, address), name="vllm-hi-control", daemon=True).start()

    def _serve(self, sock: socket.socket, address: tuple[str, int]) -> None:
        try:
            frames, auth = FrameSocket.accept(sock, self.settings.token, self.name)
        except (OSError, ProtocolError) as error:
            logger.warning("control port: closed a connection from %s: %s", address[0], error)
            sock.close()
            return
        if auth.role == "proxy":
            self._serve_proxy(frames, auth)
        elif auth.role == "peer":
            self._serve_peer(frames, auth)
        else:
            logger.warning("control port: role %s has no business here", auth.role)
            frames.close()

    def _serve_proxy(self, frames: FrameSocket, auth: Auth) -> None:
        link = Link(frames, auth.name, decode_frame, (LegOpened, Resolved), self._on_proxy, self._on_proxy_lost)
        self.proxies[auth.name] = link
        logger.info("proxy worker %s connected", auth.name)
        link.start()
        self._tell_again(auth.name, link)

    def _on_proxy(self, _link: Link, message: Any) -> None:
        if isinstance(message, Switched | FirstToken | Discarded) and self.source is not None:
            self.source.on_proxy(message)

    def _on_proxy_lost(self, link: Link) -> None:
        if self.proxies.get(link.name) is link:
            del self.proxies[link.name]

    def _serve_peer(self, frames: FrameSocket, auth: Auth) -> None:
        sessions: list[TargetSession] = []

        def on_message(link: Link, message: Any) -> None:
            if sessions:
                sessions[0].handle(message)
            elif isinstance(message, OpenSession):
                session = open_session(self, link, message)
                if session is not None:
                    sessions.append(session)
            elif hasattr(message, "call"):
                link.send(Answer(message.call, False, "no_session", "The session is not open."))

        def on_close(_link: Link) -> None:
            if sessions:
                sessions[0].close("the connection to the source was lost")

        Link(frames, f"source {auth.name}", decode_peer, (), on_message, on_close).start()

    def source_closed(self, session: SourceSession) -> None:
        if self.source is session:
            self.source = None
            self.later(lambda: self.pause.end(session.job))

    def target_closed(self, session: TargetSession) -> None:
        if self.target is session:
            self.target = None

    # -- deadlines -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Deadlines live outside the step loop: a request that is frozen makes no steps."""
        while True:
            time.sleep(WATCH_INTERVAL_S)
            now = time.monotonic()
            try:
                self.pause.check(now)
                if self.source is not None:
                    self.source.check_deadlines(now)
                target = self.target
                if target is not None and now > target.expires_at:
                    target.expires_at = math.inf
                    # Takes a while, in which the other deadlines must be kept.
                    self.aborts.submit(target.close, "the lease ran out")
            except Exception:
                logger.exception("a deadline could not be handled")

    # -- attempts ------------------------------------------------------------------------------------------------------

    def check_attempt(self, job: str, attempt: int) -> None:
        """Raises: MigrationError 409 `stale_attempt` for an attempt lower than one seen (a worker that woke up
        late)."""
        seen = self.attempts.get(job, 0)
        if attempt < seen:
            raise MigrationError(409, "stale_attempt", f"Attempt {seen} of this migration has been seen.", "attempt")
        self.attempts[job] = attempt
