"""One client's request while it is being answered: the leg that feeds the client, and a second one during a handover.

The states of a handover, and what moves between them, are the table `vllm_plugin.states.PROXY`:

    one leg ──OpenLeg──> two legs ──Freezing──> frozen ──leg one lost──> orphaned ──Producing──> the other leg
                            │                     │ └───────Producing──────────────────────────────┘
                            └── CloseLeg, Resolve, leg two lost, too late, leg one finished ──> the same leg

Control messages are handled at once and without awaiting, so each sees and leaves a consistent state; forwarding is
done by one task, which looks at the state again after every write. Only `_leg` ever feeds the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from proxy.context import Context, Send
from proxy.control import ControlLink
from proxy.cursor import Cursor
from proxy.cuts import cut_for
from proxy.errors import ApiError, upstream_lost
from proxy.headers import RawHeaders, from_upstream, request_id, to_upstream
from proxy.leg import Head, Leg
from proxy.movable import refusal
from proxy.pace import Pace
from proxy.routing import Route
from proxy.second import FirstTokenNotice, SecondLeg
from proxy.tags import ClientRequest
from vllm_plugin.wire import Freezing, LegOpened, OpenLeg, Producing, Resolve, Resolved

__all__ = ["LiveStream"]

log = logging.getLogger(__name__)


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
        self._cut = cut_for(request)
        self._cursor = self._cut.cursor()
        self._withheld = b""
        self._collected: list[bytes] = []
        self._pace = Pace()
        self._first_token: FirstTokenNotice | None = None

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
            event = "leg_two_complete" if leg.ended == "complete" else "leg_two_lost"
            if leg.ended is not None and second.ends_by(event):
                self._drop_second(event, "leg_lost")
            elif leg.head is not None and leg.head.status != 200:
                self._drop_second("leg_two_lost", f"http_{leg.head.status}")
        self._wake.set()

    def _end(self) -> None:
        self._over = True
        self._context.live.remove(self)
        self._occupy("")
        if self._second is not None:
            self._drop_second("client_left", "client_left")
        if self._leg is not None:
            self._leg.close()

    # -- control messages ----------------------------------------------------------------------------------------------

    def open_leg(self, message: OpenLeg, link: ControlLink) -> None:
        """Opens the second leg; `LegOpened` is sent when its request is written, or has failed."""
        second = self._second
        if second is None:
            parsers = (message.tool_parser, message.reasoning_parser)
            refused = refusal(self._request.path, self._request.body, *parsers)
            if refused is not None:
                link.send(LegOpened(message.call, False, refused.code, refused.message))
                return
            if self._context.live.decided(message.ticket):
                link.send(LegOpened(message.call, False, "ticket_used", "the handover under this ticket was decided"))
                return
            routing = self._context.routing
            instance_id = routing.instance_at(message.base_url)
            if instance_id is not None and not routing.connected(instance_id):
                text = f"there is no control connection to {instance_id}, which would have to say when it takes over"
                link.send(LegOpened(message.call, False, "target_not_connected", text))
                return
            leg = self._open_leg(message.base_url, instance_id or message.base_url, message.ticket)
            second = self._second = SecondLeg(self._context, self.stream_id, leg, message.ticket, link, self._too_late)
        elif second.ticket != message.ticket:
            text = "the stream has a second leg already; close that one first"
            link.send(LegOpened(message.call, False, "leg_exists", text))
            return
        second.report_opened(message.call, link, self._not_opened)

    def _not_opened(self, second: SecondLeg) -> None:
        if self._second is second:
            self._second = None
            second.discard("leg_two_lost", "connect_failed")

    def freezing(self, message: Freezing) -> None:
        """Starts the patience of a handover."""
        second = self._matching(message.ticket)
        if second is not None:
            second.freeze("freezing", message.patience_s)

    def _too_late(self, second: SecondLeg) -> None:
        if self._second is second:
            self._drop_second("timeout", "patience")

    def close_leg(self, ticket: str) -> None:
        """Closes leg two on A's request: A knows, so nothing is said."""
        second = self._matching(ticket)
        if second is not None:
            self._second = None
            second.discard_for_a(None)
            self._wake.set()

    def resolve(self, message: Resolve, link: ControlLink) -> None:
        """Tells A who owns the stream; if that is open, A does, and leg two is closed before A hears it."""
        second = self._matching(message.ticket)
        if second is not None:
            self._second = None
            second.discard_for_a(message, link)
            self._wake.set()
        else:
            link.send(Resolved(message.call, self._context.live.outcome(message.ticket)))

    def producing(self, message: Producing) -> None:
        """Switches to leg two, unless A had resumed.

        Where no token ids are on the wire it cannot be seen whether the client is ahead of B. It is not as long as A
        resumes only after B's refusal or the end of leg two: the patience ends that long before A's last resort. If it
        is nevertheless, the client waits until B has computed the same characters again, and the cut makes sure that
        they are the same.
        """
        second = self._matching(message.ticket)
        if second is None or self._over:
            return
        if self._cut.counted and self._cut.tokens > message.tokens:
            self._drop_second("producing_behind", "client_ahead")
            return
        self._second = None
        old, self._leg = self._leg, second.leg
        assert old is not None
        self._moved = True
        self._occupy(second.leg.instance_id)
        self._cursor = self._cut.cursor()
        self._withheld = b""
        self._collected.clear()
        tokens = self._cut.tokens
        log.info("stream %s moved to %s with %d tokens", self.stream_id, self.instance_id, tokens)
        notice = second.switch(old, tokens, message.tokens)
        if self._request.streamed:
            self._pace.switched_at = time.monotonic()
            self._first_token = notice
        self._wake.set()

    def _matching(self, ticket: str) -> SecondLeg | None:
        return self._second if self._second is not None and self._second.ticket == ticket else None

    def _drop_second(self, event: str, reason: str) -> None:
        second, self._second = self._second, None
        assert second is not None
        log.info("stream %s stays on %s: %s", self.stream_id, self.instance_id, reason)
        second.discard(event, reason)
        self._wake.set()

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

    def _left_to_b(self) -> bool:
        """Leg one is lost: whether the stream is left to B, for a while at least."""
        if self._second is not None:
            self._second.freeze("leg_one_lost")
        return self._second is not None

    async def _replace_lost(self, leg: Leg) -> bool:
        """The instance went away before it answered: somebody else takes the request, if there is anybody."""
        if self._left_to_b():
            return False
        log.warning("no answer from %s: %s", leg.url, leg.error)
        if self._started:
            await self._finish(self._cut.failure(upstream_lost()))
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
        elif self._left_to_b():
            return False
        else:
            log.warning("stream %s broke on %s: %s", self.stream_id, self.instance_id, leg.error or "ended too early")
            await self._finish(self._cut.failure(upstream_lost()))
        return True

    async def _forward_chunk(self, chunk: bytes) -> None:
        cut, cursor = self._cut, self._cursor
        tokens, advances = cut.tokens, cut.advances
        passed = cut.feed(cursor, chunk)
        if self._second is not None and cut.finished:
            self._drop_second("leg_one_finished", "finished")
        ready = passed.ready
        if passed.failed and not cursor.differs and self._left_to_b():
            self._withheld += passed.failed
        else:
            ready += passed.failed
        if ready:
            await self._write(ready)
        if cursor.differs:
            await self._finish()
        if cut.advances > advances or cut.finished:
            self._report_first_token(cursor)
        if cut.advances > advances:
            self._pace.event(cut.tokens - tokens)

    def _report_first_token(self, cursor: Cursor) -> None:
        """Tells A how long the client waited, once something that B itself generated is with the client."""
        notice = self._first_token
        if notice is None or cursor is not self._cursor:
            return
        # Uncounted, anything new passes for B's own: it may be one that A had generated and not delivered.
        if 0 < cursor.tokens <= notice.replayed and not self._cut.finished:
            return
        self._first_token = None
        notice.send(self._pace.gap_ms(), self._pace.itl_ms())

    async def _forward_whole(self, leg: Leg, head: Head) -> bool:
        """Forwards an answer in one piece: a non-streamed one, or an error."""
        chunk = leg.take()
        if chunk is not None:
            self._collected.append(chunk)
            return True
        if leg.ended is None:
            return False
        if (leg.ended == "broken" or head.status >= 500) and self._left_to_b():
            return False
        if self._second is not None:
            self._drop_second("leg_one_finished", "finished")
        if self._started:  # leg one had begun to stream, and leg two, which owns the stream, answers with an error
            await self._finish(self._cut.failure(upstream_lost()))
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
            self._drop_second("leg_one_finished", "finished")
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
