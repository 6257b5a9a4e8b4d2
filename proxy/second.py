"""A second leg during a handover, and what A is told about it. Its states are those of `vllm_plugin.states.PROXY`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from proxy.context import Context
from proxy.control import ControlLink
from proxy.leg import Leg
from vllm_plugin.states import LEG_S, PROXY
from vllm_plugin.wire import Discarded, FirstToken, LegOpened, Resolve, Resolved, Switched

__all__ = ["FirstTokenNotice", "SecondLeg"]

#: A has much to do when its leg is closed, and on a small machine the client's next token would wait for that.
CLOSE_AFTER_S = 0.02


class SecondLeg:
    """A leg that the client gets nothing from yet.

    Args:
        link: the connection to the instance that asked for it.
        too_late: called when a state has lasted too long.

    Attributes:
        dropped: why it was closed, "" while it is not.
    """

    def __init__(
        self,
        context: Context,
        stream_id: str,
        leg: Leg,
        ticket: str,
        link: ControlLink,
        too_late: Callable[[SecondLeg], None],
    ) -> None:
        self.leg = leg
        self.ticket = ticket
        self.link = link
        self.state = PROXY.steps["one_leg", "open_leg"].state
        self.dropped = ""
        self._context = context
        self._stream_id = stream_id
        self._reported = False
        self._patience_s = 0.0
        self._too_late = too_late
        self._deadline = asyncio.get_running_loop().call_later(LEG_S, too_late, self)

    @property
    def frozen(self) -> bool:
        """Whether B may own the stream already."""
        return self.state in ("frozen", "orphaned")

    def ends_by(self, event: str) -> bool:
        """Whether `event` ends the handover in the present state."""
        return PROXY.steps[self.state, event].state == "discarded"

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

    def freeze(self, event: str, patience_s: float = 0.0) -> None:
        """B may own the stream from now on, and must produce within the patience; once leg one is lost there is more of
        it, for nobody else will.

        Args:
            event: `freezing`, or `leg_one_lost`: A may have died with its notice still on the way.
            patience_s: what A says that B needs at least.
        """
        step = PROXY.steps[self.state, event]
        self.state = step.state
        if "start_patience" in step.actions:
            settings = self._context.settings
            usual = settings.orphan_patience_s if self.state == "orphaned" else settings.patience_s
            self._patience_s = max(self._patience_s, patience_s)
            self._deadline.cancel()
            self._deadline = asyncio.get_running_loop().call_later(max(usual, self._patience_s), self._too_late, self)

    # -- the three ways it ends ----------------------------------------------------------------------------------------

    def discard(self, event: str, reason: str) -> None:
        """Closes it and tells A: by `Discarded`, or by the answer that A still waits for."""
        self._end(event, reason)
        if self._reported:
            self._close_then(self.leg, self.link, Discarded(self._stream_id, self.ticket, reason))
        else:
            self.leg.close()

    def discard_for_a(self, asked: Resolve | None, link: ControlLink | None = None) -> None:
        """Closes it because A says so (None), or asks who owns the stream: then A hears it when it is closed."""
        if asked is None or link is None:
            self._end("close_leg", "closed_by_a")
            self.leg.close()
        else:
            self._end("resolve", "resolved")
            self._close_then(self.leg, link, Resolved(asked.call, "discarded"))

    def switch(self, leg_one: Leg, tokens: int, replayed: int) -> FirstTokenNotice:
        """Makes it the client's leg, closes leg one and tells A; returns the notice that is still owed."""
        self._end("producing")
        told = Switched(self._stream_id, self.ticket, tokens)
        closing = self._close_then(leg_one, self.link, told, CLOSE_AFTER_S)
        return FirstTokenNotice(self._context, self.link, self._stream_id, self.ticket, replayed, closing)

    def _end(self, event: str, reason: str = "") -> None:
        self.state = PROXY.steps[self.state, event].state
        self.dropped = reason
        self._deadline.cancel()
        self._context.live.decide(self.ticket, "discarded" if self.state == "discarded" else "switched")

    def _close_then(
        self, leg: Leg, link: ControlLink, message: msgspec.Struct, after_s: float = 0.0
    ) -> asyncio.Task[None]:
        async def close() -> None:
            if after_s:
                await asyncio.sleep(after_s)
                leg.close()
            await leg.closed()
            link.send(message)

        if not after_s:
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
