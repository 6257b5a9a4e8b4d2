"""A second leg during a handover, and what A is told about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec

from proxy.context import Context
from proxy.control import ControlLink
from proxy.leg import Leg
from vllm_plugin.wire import Discarded, FirstToken, LegOpened, Resolve, Resolved, Switched

__all__ = ["FirstTokenNotice", "SecondLeg"]

State = Literal["two_legs", "frozen", "switched", "discarded"]


class SecondLeg:
    """A leg that the client gets nothing from yet. `Freezing` and its end move its state, and nothing else does.

    Attributes:
        link: the connection to the instance that asked for it.
        dropped: why it was closed, "" while it is not.
    """

    def __init__(self, context: Context, stream_id: str, leg: Leg, ticket: str, link: ControlLink) -> None:
        self.leg = leg
        self.ticket = ticket
        self.link = link
        self.state: State = "two_legs"
        self.dropped = ""
        self._context = context
        self._stream_id = stream_id
        self._reported = False
        self._patience: asyncio.TimerHandle | None = None

    @property
    def frozen(self) -> bool:
        """Whether B may own the stream already."""
        return self.state == "frozen"

    def report_opened(self, call: int, link: ControlLink, failed: Callable[[SecondLeg], None]) -> None:
        """Answers A as soon as the request is written, or calls `failed` and answers that it will not be."""

        async def report() -> None:
            if await self.leg.sent() and not self.dropped:
                self._reported = True
                link.send(LegOpened(call, True))
                return
            failed(self)
            link.send(LegOpened(call, False, self.dropped, self.leg.error or "the leg was closed again at once"))

        self._context.spawn(report())

    def freeze(self, out_of_patience: Callable[[SecondLeg], None]) -> None:
        """A handover has begun: B must produce within the patience."""
        self.state = "frozen"
        if self._patience is not None:
            self._patience.cancel()
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(self._context.settings.patience_s, out_of_patience, self)

    # -- the three ways it ends ----------------------------------------------------------------------------------------

    def discard(self, reason: str) -> None:
        """Closes it and tells A: by `Discarded`, or by the answer that A still waits for."""
        self._end("discarded", reason)
        if self._reported:
            self._close_then(self.leg, self.link, Discarded(self._stream_id, self.ticket, reason))
        else:
            self.leg.close()

    def discard_for_a(self, reason: str, resolve: tuple[Resolve, ControlLink] | None = None) -> None:
        """Closes it because A said so, or asks who owns the stream: then A hears it when it is closed."""
        self._end("discarded", reason)
        if resolve is None:
            self.leg.close()
        else:
            message, link = resolve
            self._close_then(self.leg, link, Resolved(message.call, "discarded"))

    def switch(self, leg_one: Leg, tokens: int, replayed: int) -> FirstTokenNotice:
        """Makes it the client's leg: closes leg one and tells A; returns the notice that is still owed."""
        self._end("switched")
        closing = self._close_then(leg_one, self.link, Switched(self._stream_id, self.ticket, tokens))
        return FirstTokenNotice(self._context, self.link, self._stream_id, self.ticket, replayed, closing)

    def _end(self, state: Literal["switched", "discarded"], reason: str = "") -> None:
        self.state = state
        self.dropped = reason
        if self._patience is not None:
            self._patience.cancel()
        self._context.live.decide(self.ticket, state)

    def _close_then(self, leg: Leg, link: ControlLink, message: msgspec.Struct) -> asyncio.Task[None]:
        async def close() -> None:
            await leg.closed()
            link.send(message)

        leg.close()
        return self._context.spawn(close())


class FirstTokenNotice:
    """Owed to A after a switch: how long the client waited for the first token that B itself generated."""

    def __init__(
        self,
        context: Context,
        link: ControlLink,
        stream_id: str,
        ticket: str,
        replayed: int,
        switched: asyncio.Task[None],
    ) -> None:
        self.replayed = replayed
        self._context = context
        self._link = link
        self._stream = (stream_id, ticket)
        self._switched = switched

    def send(self, gap_ms: float, itl_ms: float) -> None:
        """Sends it, after `Switched`."""

        async def report() -> None:
            await self._switched
            self._link.send(FirstToken(*self._stream, gap_ms, itl_ms))

        self._context.spawn(report())
