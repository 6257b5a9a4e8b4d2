"""Sends what changed to the pages that watch. Hints only: a page that misses one refetches by event number.

One daemon thread per process owns one event loop and one connection; a loop and a connection for each message would
cost a hundred times as much. State changes go out at once and always. Everything else is limited to ten messages a
second and job: what comes faster waits, and of job snapshots only the newest is kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, TypedDict

from channels.layers import get_channel_layer

from migrations_app.choices import EventKind

if TYPE_CHECKING:
    from migrations_app.models import MigrationEvent, MigrationRequest, MigrationRound

__all__ = [
    "DASHBOARD_GROUP",
    "RateGate",
    "event_recorded",
    "job_changed",
    "job_group",
    "job_progressed",
    "plain",
    "request_changed",
    "round_recorded",
]

logger = logging.getLogger(__name__)

DASHBOARD_GROUP = "dashboard"
MAX_MESSAGES_PER_S = 10
#: A page that far behind refetches anyway.
MAX_WAITING = 200


class Message(TypedDict, total=False):
    """What a websocket carries: `type` and, under the same name, the object as the REST API shows it."""

    type: str
    job: dict[str, Any]
    event: dict[str, Any]
    round: dict[str, Any]
    request: dict[str, Any]


def job_group(job_id: uuid.UUID | str) -> str:
    return f"migration.{job_id}"


class RateGate:
    """Decides when a job's next message that is no state change may go out; no clock of its own."""

    def __init__(self, per_second: int = MAX_MESSAGES_PER_S) -> None:
        self._interval = 1.0 / per_second
        self._free_at: dict[str, float] = {}

    def delay(self, key: str, now: float) -> float:
        """Seconds to wait from `now`, 0 if it may go at once. Books the slot."""
        if len(self._free_at) > 1000:
            self._free_at = {k: at for k, at in self._free_at.items() if at > now}
        at = max(now, self._free_at.get(key, 0.0))
        self._free_at[key] = at + self._interval
        return at - now


class _Sender(threading.Thread):
    """The thread with the loop. Never blocks who publishes, never raises at them."""

    def __init__(self) -> None:
        super().__init__(name="migration-publisher", daemon=True)
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._gate = RateGate()
        self._waiting: dict[str, deque[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def put(self, group: str, message: Message, *, at_once: bool) -> None:
        self._loop.call_soon_threadsafe(self._accept, group, message, at_once)

    def _accept(self, group: str, message: Message, at_once: bool) -> None:
        if at_once:
            self._spawn(self._send(group, message))
            return
        waiting = self._waiting.get(group)
        if waiting is None:
            self._waiting[group] = deque([message])
            self._spawn(self._drain(group))
            return
        if message["type"] == "job" and any(other["type"] == "job" for other in waiting):
            waiting = deque(other for other in waiting if other["type"] != "job")
            self._waiting[group] = waiting
        if len(waiting) < MAX_WAITING:
            waiting.append(message)

    async def _drain(self, group: str) -> None:
        while self._waiting.get(group):
            await asyncio.sleep(self._gate.delay(group, time.monotonic()))
            waiting = self._waiting[group]
            if waiting:
                await self._send(group, waiting.popleft())
        self._waiting.pop(group, None)

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, group: str, message: Message) -> None:
        layer = get_channel_layer()
        if layer is None:
            return
        try:
            await layer.group_send(group, {"type": "push", "message": message})
        except Exception as error:
            # Whatever the layer's client raises when Redis is away; the page finds out by itself.
            logger.warning("Could not publish to %s: %s", group, error)


_lock = threading.Lock()
_sender: _Sender | None = None


def _put(group: str, message: Message, *, at_once: bool = False) -> None:
    global _sender
    with _lock:
        # A forked worker process inherits the object but not the thread.
        if _sender is None or _sender.pid != os.getpid():
            _sender = _Sender()
            _sender.start()
    _sender.put(group, message, at_once=at_once)


def job_changed(job_id: uuid.UUID) -> None:
    """The job's state changed: the page and the dashboard learn it at once."""
    _put(job_group(job_id), {"type": "job", "job": _job_payload(job_id)}, at_once=True)
    _put(DASHBOARD_GROUP, {"type": "changed"}, at_once=True)


def job_progressed(job_id: uuid.UUID) -> None:
    """Counters of the job changed, its state did not."""
    _put(job_group(job_id), {"type": "job", "job": _job_payload(job_id)})


def event_recorded(event: MigrationEvent) -> None:
    from migrations_app.api.serializers import EventSerializer

    payload = plain(EventSerializer(event).data)
    at_once = event.kind in (EventKind.STATE, EventKind.ERROR)
    _put(job_group(event.job_id), {"type": "event", "event": payload}, at_once=at_once)


def round_recorded(row: MigrationRound) -> None:
    from migrations_app.api.serializers import RoundSerializer

    _put(job_group(row.job_id), {"type": "round", "round": plain(RoundSerializer(row).data)})


def request_changed(row: MigrationRequest) -> None:
    from migrations_app.api.serializers import RequestSerializer

    _put(job_group(row.job_id), {"type": "request", "request": plain(RequestSerializer(row).data)})


def _job_payload(job_id: uuid.UUID) -> dict[str, Any]:
    from migrations_app.api.serializers import JobSerializer
    from migrations_app.selectors import get_job

    return plain(JobSerializer(get_job(job_id)).data)


def plain(data: Any) -> dict[str, Any]:
    """What the JSON renderer would make of serializer data: the channel layer takes plain types only."""
    import json

    from rest_framework.utils.encoders import JSONEncoder

    plain: dict[str, Any] = json.loads(json.dumps(data, cls=JSONEncoder))
    return plain
