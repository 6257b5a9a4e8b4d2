"""One client's request while it is being answered: the leg that feeds the client, and a second one during a handover.

States, and what moves between them:

    one leg ──OpenLeg──> two legs ──Freezing──> frozen ──Producing──> one leg (the other one)
                            │                     │
                            └── CloseLeg, Resolve, leg two lost, patience over, leg one finished ──> one leg (the same)

Control messages are handled at once and without awaiting, so each sees and leaves a consistent state; forwarding is
done by one task, which looks at the state again after every write. Only `_leg` ever feeds the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from proxy.control import ControlLink
from proxy.cut import Cursor, Cut
from proxy.errors import ApiError, error_event, upstream_lost
from proxy.headers import RawHeaders, from_upstream, request_id, to_upstream
from proxy.leg import Head, Leg
from proxy.live import LiveStreams
from proxy.movable import refusal
from proxy.pace import Pace
from proxy.routing import Route, Routing
from proxy.settings import ProxySettings
from proxy.tags import ClientRequest
from vllm_plugin.wire import Discarded, FirstToken, LegOpened, OpenLeg, Producing, Resolve, Resolved, Switched

__all__ = ["Context", "LiveStream"]

log = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Context:
    """What all streams of a worker share."""

    settings: ProxySettings
    session: aiohttp.ClientSession
    routing: Routing
    live: LiveStreams
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass
class SecondLeg:
    """A leg that the client gets nothing from yet.

    Attributes:
        link: the connection to the instance that asked for it.
        reported: A has been told that it is open, so A must be told when it is not any more.
        dropped: why it was closed, "" while it is not.
    """

    leg: Leg
    ticket: str
    link: ControlLink
    reported: bool = False
    dropped: str = ""
    frozen: bool = False
    patience: asyncio.TimerHandle | None = None


class LiveStream:
    """One request from its routing to its end."""

    def __init__(self, context: Context, request: ClientRequest, path: str, headers: RawHeaders, send: Send) -> None:
        self.stream_id = uuid.uuid4().hex
        self.instance_id = ""
        self._context = context
        self._request = request
        self._path = path
        self._headers = headers
        self._send = send
        self._leg: Leg | None = None
        self._second: SecondLeg | None = None
        self._tried: frozenset[str] = frozenset()
        self._legs_opened = 0
        self._moved = False
        self._over = False
        self._started = False
        self._wake = asyncio.Event()
        self._cut = Cut(request.wants_token_ids, request.choices)
        self._cursor = self._cut.cursor()
        self._withheld = b""
        self._collected: list[bytes] = []
        self._pace = Pace()
        self._first_token: tuple[ControlLink, str, int, asyncio.Task[None]] | None = None

    async def serve(self) -> None:
        """Answers the client.

        Raises:
            ApiError: nothing has been sent yet, and this is the answer.
        """
        self._context.live.add(self)
        try:
            self._open_first(frozenset())
            while not self._over:
                self._wake.clear()
                if not await self._step() and not self._over:
                    await self._wake.wait()
        finally:
            self._end()

    def describe(self) -> dict[str, Any]:
        """Returns this stream's entry of the live list; docs of `LiveStreams.describe`."""
        now = time.monotonic()
        last = self._pace.last_at
        return {
            "stream_id": self.stream_id,
            "model": self._request.model,
            "instance": self.instance_id,
            "tokens": self._cut.tokens,
            "age_s": round(now - self._pace.started_at, 3),
            "last_token_age_s": None if last is None else round(now - last, 3),
            "legs": (self._leg is not None) + (self._second is not None),
        }

    @property
    def instances(self) -> set[str]:
        """The instances whose notices this stream may still need."""
        return {self.instance_id} | ({self._second.leg.instance_id} if self._second is not None else set())

    # -- legs ----------------------------------------------------------------------------------------------------------

    def _open_first(self, tried: frozenset[str]) -> None:
        route = self._context.routing.choose(self._request.model, tried)
        self._tried = tried | {route.instance_id}
        self._leg = self._open_leg(route.base_url, route.instance_id)
        self._occupy(route.instance_id)
        self._context.spawn(self._acknowledge(self._leg, route))

    async def _acknowledge(self, leg: Leg, route: Route) -> None:
        await leg.sent()
        self._context.routing.sent(route)

    def _open_leg(self, base_url: str, instance_id: str, ticket: str | None = None) -> Leg:
        self._legs_opened += 1
        headers = to_upstream(self._headers)
        headers["Content-Type"] = "application/json"
        headers["Accept-Encoding"] = "identity"
        headers["X-Request-Id"] = f"{self.stream_id}-{self._legs_opened}"
        settings = self._context.settings
        return Leg(
            self._context.session,
            "POST",
            base_url.rstrip("/") + self._path,
            headers,
            self._request.tagged(f"{settings.worker_id}/{self.stream_id}", ticket),
            self._leg_changed,
            settings.max_buffered_bytes if self._request.streamed else None,
            instance_id,
        )

    def _occupy(self, instance_id: str) -> None:
        load = self._context.routing.load
        if self.instance_id:
            load[self.instance_id] -= 1
        self.instance_id = instance_id
        if instance_id:
            load[instance_id] += 1

    def _leg_changed(self, leg: Leg) -> None:
        second = self._second
        if second is not None and leg is second.leg and leg.written:
            # A complete answer is B's if it was frozen for a handover: the notice comes on another connection.
            if leg.ended == "broken" or (leg.ended == "complete" and not second.frozen):
                self._drop_second("leg_lost")
            elif leg.head is not None and leg.head.status != 200:
                self._drop_second(f"http_{leg.head.status}")
        self._wake.set()

    def _end(self) -> None:
        self._over = True
        self._context.live.remove(self)
        self._occupy("")
        if self._second is not None:
            self._drop_second("client_left")
        if self._leg is not None:
            self._leg.close()

    # -- control messages ----------------------------------------------------------------------------------------------

    def open_leg(self, message: OpenLeg, link: ControlLink) -> None:
        """Opens the second leg; `LegOpened` is sent when its request is written, or has failed."""
        second = self._second
        if second is None:
            refused = refusal(self._path, self._request.body)
            if refused is not None:
                link.send(LegOpened(message.call, False, refused.code, refused.message))
                return
            routing = self._context.routing
            instance_id = routing.instance_at(message.base_url)
            if instance_id is not None and not routing.connected(instance_id):
                text = f"there is no control connection to {instance_id}, which would have to say when it takes over"
                link.send(LegOpened(message.call, False, "target_not_connected", text))
                return
            leg = self._open_leg(message.base_url, instance_id or message.base_url, message.ticket)
            second = self._second = SecondLeg(leg, message.ticket, link)
        elif second.ticket != message.ticket:
            text = "the stream has a second leg already; close that one first"
            link.send(LegOpened(message.call, False, "leg_exists", text))
            return
        self._context.spawn(self._report_opened(second, message.call, link))

    async def _report_opened(self, second: SecondLeg, call: int, link: ControlLink) -> None:
        if await second.leg.sent() and not second.dropped:
            second.reported = True
            link.send(LegOpened(call, True))
            return
        if self._second is second:
            self._forget_second("connect_failed")
        link.send(LegOpened(call, False, second.dropped, second.leg.error or "the leg was closed again at once"))

    def freezing(self, ticket: str) -> None:
        """Starts the patience of a handover."""
        second = self._matching(ticket)
        if second is None:
            return
        second.frozen = True
        if second.patience is not None:
            second.patience.cancel()
        loop = asyncio.get_running_loop()
        second.patience = loop.call_later(self._context.settings.patience_s, self._out_of_patience, second)

    def _out_of_patience(self, second: SecondLeg) -> None:
        if self._second is second:
            self._drop_second("patience")

    def close_leg(self, ticket: str) -> None:
        """Closes leg two on A's request: A knows, so nothing is said."""
        if self._matching(ticket) is not None:
            self._forget_second("closed_by_a").leg.close()
            self._wake.set()

    def resolve(self, message: Resolve, link: ControlLink) -> None:
        """Tells A who owns the stream; if that is open, A does, and leg two is closed before A hears it."""
        if self._matching(message.ticket) is not None:
            leg = self._forget_second("resolved").leg
            self._close_then(leg, link, Resolved(message.call, "discarded"))
            self._wake.set()
        else:
            link.send(Resolved(message.call, self._context.live.outcome(message.ticket)))

    def producing(self, message: Producing) -> None:
        """Switches to leg two, unless A had resumed."""
        second = self._matching(message.ticket)
        if second is None or self._over:
            return
        if self._cut.tokens > message.tokens:
            self._drop_second("client_ahead")
            return
        self._forget_second()
        old, self._leg = self._leg, second.leg
        self._moved = True
        self._occupy(second.leg.instance_id)
        self._cursor = self._cut.cursor()
        self._withheld = b""
        self._collected.clear()
        tokens = self._cut.tokens
        log.info("stream %s moved to %s with %d tokens", self.stream_id, self.instance_id, tokens)
        assert old is not None
        closing = self._close_then(old, second.link, Switched(self.stream_id, second.ticket, tokens))
        if self._request.streamed:
            self._pace.switched_at = time.monotonic()
            self._first_token = (second.link, second.ticket, message.tokens, closing)
        self._wake.set()

    def _matching(self, ticket: str) -> SecondLeg | None:
        return self._second if self._second is not None and self._second.ticket == ticket else None

    def _forget_second(self, dropped: str = "") -> SecondLeg:
        second = self._second
        assert second is not None
        self._second = None
        second.dropped = dropped
        if second.patience is not None:
            second.patience.cancel()
        self._context.live.decide(second.ticket, "discarded" if dropped else "switched")
        return second

    def _drop_second(self, reason: str) -> None:
        """Closes leg two and tells A: by `Discarded`, or by the answer that A still waits for."""
        second = self._forget_second(reason)
        log.info("stream %s stays on %s: %s", self.stream_id, self.instance_id, reason)
        if second.reported:
            self._close_then(second.leg, second.link, Discarded(self.stream_id, second.ticket, reason))
        else:
            second.leg.close()
        self._wake.set()

    def _close_then(self, leg: Leg, link: ControlLink, message: msgspec.Struct) -> asyncio.Task[None]:
        async def close() -> None:
            await leg.closed()
            link.send(message)

        leg.close()
        return self._context.spawn(close())

    # -- forwarding ----------------------------------------------------------------------------------------------------

    async def _step(self) -> bool:
        """Does one thing for the client; returns False when there is nothing to do until something changes."""
        leg = self._leg
        assert leg is not None
        if leg.head is None:
            return leg.ended is not None and await self._replace_lost(leg)
        if self._request.streamed and leg.head.is_events:
            return await self._forward_events(leg, leg.head)
        return await self._forward_whole(leg, leg.head)

    @property
    def _may_move(self) -> bool:
        """Whether B may own the stream already, so that trouble on leg one does not end it."""
        return self._second is not None and self._second.frozen

    async def _replace_lost(self, leg: Leg) -> bool:
        """The instance went away before it answered: somebody else takes the request, if there is anybody."""
        if self._may_move:
            return False
        if self._second is not None:
            self._drop_second("leg_one_lost")
        log.warning("no answer from %s: %s", leg.url, leg.error)
        if self._started:
            await self._finish(error_event(upstream_lost()))
            return True
        if self._moved:
            raise upstream_lost()
        try:
            self._open_first(self._tried)
        except ApiError as error:
            raise error if leg.connect_failed else upstream_lost() from None
        return True

    async def _forward_events(self, leg: Leg, head: Head) -> bool:
        if not self._started:
            await self._start(head, rewritten=True)
            return True
        if self._withheld and not self._may_move:
            withheld, self._withheld = self._withheld, b""
            await self._write(withheld)
            return True
        chunk = leg.take()
        if chunk is not None:
            await self._forward_chunk(chunk)
            return True
        if leg.ended is None:
            return False
        if self._cut.done or (leg.ended == "complete" and self._cut.finished) or self._cursor.failed:
            if self._withheld:
                return False
            await self._finish()
        elif self._may_move:
            return False
        else:
            log.warning("stream %s broke on %s: %s", self.stream_id, self.instance_id, leg.error or "ended too early")
            await self._finish(error_event(upstream_lost()))
        return True

    async def _forward_chunk(self, chunk: bytes) -> None:
        cut, cursor = self._cut, self._cursor
        tokens, advances = cut.tokens, cut.advances
        passed = cut.feed(cursor, chunk)
        if self._second is not None and cut.finished:
            self._drop_second("finished")
        ready = passed.ready
        if self._may_move:
            self._withheld += passed.failed
        else:
            ready += passed.failed
        if ready:
            await self._write(ready)
        if cut.advances > advances or cut.finished:
            self._report_first_token(cursor)
        if cut.advances > advances:
            self._pace.event(cut.tokens - tokens)

    def _report_first_token(self, cursor: Cursor) -> None:
        """Tells A how long the client waited, once something that B itself generated is with the client."""
        if self._first_token is None or cursor is not self._cursor:
            return
        link, ticket, replayed, closing = self._first_token
        if 0 < cursor.tokens <= replayed and not self._cut.finished:
            return
        self._first_token = None
        message = FirstToken(self.stream_id, ticket, self._pace.gap_ms(), self._pace.itl_ms())

        async def report() -> None:
            await closing
            link.send(message)

        self._context.spawn(report())

    async def _forward_whole(self, leg: Leg, head: Head) -> bool:
        """Forwards an answer in one piece: a non-streamed one, or an error."""
        chunk = leg.take()
        if chunk is not None:
            self._collected.append(chunk)
            return True
        if leg.ended is None:
            return False
        if self._may_move and (leg.ended == "broken" or head.status >= 500):
            return False
        if self._second is not None:
            self._drop_second("finished")
        if self._started:  # leg one had begun to stream, and leg two, which owns the stream, answers with an error
            await self._finish(error_event(upstream_lost()))
            return True
        if leg.ended == "broken":
            raise upstream_lost()
        self._over = True
        await self._start(head, rewritten=False)
        await self._finish(b"".join(self._collected))
        return True

    # -- the client's side ---------------------------------------------------------------------------------------------

    async def _start(self, head: Head, *, rewritten: bool) -> None:
        self._started = True
        headers = from_upstream(head.headers, rewritten=rewritten)
        headers.append((b"x-request-id", request_id(self._headers, self.stream_id)))
        headers.append((b"x-vllm-hi-stream", self.stream_id.encode()))
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _finish(self, data: bytes = b"") -> None:
        self._over = True
        if self._second is not None:
            self._drop_second("finished")
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
