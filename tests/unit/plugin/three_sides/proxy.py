"""The proxy worker and its client in the model, driven by the table `PROXY`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.unit.plugin.three_sides.network import Message
from vllm_plugin.states import PATIENCE_S, PROXY, Side

if TYPE_CHECKING:
    from tests.unit.plugin.three_sides.world import World


@dataclass
class Handover:
    """One ticket at the proxy. `held`: what leg two has said and nobody has taken. `before`: when the last state was
    entered."""

    ticket: int
    state: str = "one_leg"
    entered: float = 0.0
    before: float = 0.0
    call: int = 0
    open: bool = False
    held: list[Message] = field(default_factory=list)


class Proxy:
    """`fed_by`: 0 is leg one, else the ticket of the leg that feeds the client. `client`: what the client has."""

    def __init__(self, world: World, table: Side = PROXY) -> None:
        self.world = world
        self.table = table
        self.limits = table.own_deadlines()
        self.alive = True
        self.present = True
        self.outcome = ""
        self.client: list[str] = []
        self.fed_by = 0
        self.leg_one = "open"
        self.handovers: dict[int, Handover] = {}
        self.latest = 0
        self._decides = False

    def handover(self, ticket: int) -> Handover:
        return self.handovers.setdefault(ticket, Handover(ticket))

    def fire(self, ticket: int, event: str, call: int = 0) -> None:
        if not self.alive:
            return
        one = self.handover(ticket)
        state = one.state
        step = self.table.steps[state, event]
        if step.state != one.state or "start_patience" in step.actions:
            one.before, one.entered = one.entered, self.world.network.now
            one.state = step.state
        self._decides = one.state != state
        for action in step.actions:
            getattr(self, f"_{action}")(one, call)

    # -- actions -------------------------------------------------------------------------------------------------------

    def _open_leg_two(self, one: Handover, call: int) -> None:
        one.open, one.call, self.latest = True, call, one.ticket
        self.world.network.send("leg2in", "open", one.ticket)
        self.world.network.send("written", "written", one.ticket)

    def _answer_opened(self, one: Handover, call: int) -> None:
        self.world.network.send("pa", "LegOpened", one.ticket, call=call or one.call, ok=True)

    def _refuse_leg(self, one: Handover, call: int) -> None:
        self.world.network.send("pa", "LegOpened", one.ticket, call=call, ok=False)

    def _start_patience(self, one: Handover, call: int) -> None:
        """`fire` has set the clock."""

    def _close_leg_two(self, one: Handover, call: int) -> None:
        if one.open:
            one.open = False
            one.held.clear()
            self.world.network.send("leg2in", "close", one.ticket)

    def _close_leg_one(self, one: Handover, call: int) -> None:
        if self.leg_one == "open":
            self.leg_one = "closed"
            self.world.network.send("close1", "close")

    def _close_fed_leg(self, one: Handover, call: int) -> None:
        if self.fed_by:
            self._close_leg_two(self.handover(self.fed_by), 0)
        else:
            self._close_leg_one(one, 0)

    def _feed_from_leg_two(self, one: Handover, call: int) -> None:
        self.fed_by = one.ticket
        held, one.held = one.held, []
        for message in held:
            self.on_leg_two(message)

    def _tell_switched(self, one: Handover, call: int) -> None:
        self.world.network.send("pa", "Switched", one.ticket)

    def _tell_discarded(self, one: Handover, call: int) -> None:
        self.world.network.send("pa", "Discarded", one.ticket)

    def _answer_discarded(self, one: Handover, call: int) -> None:
        self.world.network.send("pa", "Resolved", one.ticket, call=call, outcome="discarded")

    def _answer_switched(self, one: Handover, call: int) -> None:
        self.world.network.send("pa", "Resolved", one.ticket, call=call, outcome="switched")

    def _go_on(self, one: Handover, call: int) -> None:
        if self.leg_one == "lost":
            self._fail_client(one, call)

    def _fail_client(self, one: Handover, call: int) -> None:
        if not self.outcome and self.present:
            self.outcome = "error"
            engine = self.world.target if self.fed_by else self.world.source
            self.world.check(not engine.alive, "the client gets an error although the engine that feeds it lives")
            waited = not self._decides or self.world.network.now - one.before >= PATIENCE_S
            owner = any(entry.ticket == one.ticket for entry in self.world.target.owned())
            self.world.check(waited or not owner, "the client gets an error although B owns the request and lives")

    # -- messages ------------------------------------------------------------------------------------------------------

    def on_a(self, message: Message) -> None:
        call = message.args.get("call", 0)
        match message.kind:
            case "OpenLeg":
                one = self.handover(message.ticket)
                others = [handover for handover in self.handovers.values() if handover is not one]
                other = any(handover.state in ("two_legs", "frozen", "orphaned") for handover in others)
                refused = other or not self.world.network.up["bp"] or not self.present or bool(self.outcome)
                self.fire(message.ticket, "open_refused" if refused else "open_leg", call)
            case "Freezing":
                self.fire(message.ticket, "freezing")
            case "CloseLeg":
                self.fire(message.ticket, "close_leg")
            case "Resolve":
                self.fire(message.ticket, "resolve", call)

    def on_b(self, message: Message) -> None:
        behind = self.world.client_ahead(len(self.client), message.args["tokens"])
        self.fire(message.ticket, "producing_behind" if behind else "producing")

    def on_written(self, ticket: int) -> None:
        if self.handover(ticket).open:
            self.fire(ticket, "leg_written")

    def on_leg_one(self, message: Message) -> None:
        if self.leg_one != "open":
            return
        if message.kind == "token":
            if self.fed_by == 0:
                self._deliver(message.args["value"])
        elif message.kind == "finish":
            self.leg_one = "finished"
            self._complete()
            self.fire(self.latest, "leg_one_finished")
        else:
            self.leg_one = "lost"
            if not self.outcome:
                self.fire(self.latest, "leg_one_lost")

    def on_leg_two(self, message: Message) -> None:
        one = self.handover(message.ticket)
        if not one.open:
            return
        if self.fed_by != message.ticket:
            if message.kind in ("lost", "error"):
                self.fire(message.ticket, "leg_two_lost")
                return
            one.held.append(message)
            if message.kind in ("finish", "abort"):
                self.fire(message.ticket, "leg_two_complete")
        elif message.kind == "token":
            if len(message.args["value"]) > len(self.client):
                self._deliver(message.args["value"])
        elif message.kind == "finish":
            self._complete()
        elif not self.outcome:
            self.fire(message.ticket, "leg_two_lost")

    # -- the client ----------------------------------------------------------------------------------------------------

    def _deliver(self, token: str) -> None:
        """A token names all before it, so each can be checked against the one the client has."""
        if not self.present or self.outcome:
            return
        before = self.client[-1] if self.client else ""
        self.world.check(token[:-1] == before, f"the client has {before!r} and gets {token!r}")
        self.client.append(token)

    def _complete(self) -> None:
        if self.present and not self.outcome:
            self.outcome = "complete"
            whole = len(self.client) == self.world.answer_tokens
            self.world.check(whole, f"the answer ends with {len(self.client)} tokens")

    def leave(self) -> None:
        if self.present and not self.outcome:
            self.present = False
            self.fire(self.latest, "client_left")

    def tick(self) -> None:
        now = self.world.network.now
        for one in self.handovers.values():
            if now - one.entered > self.limits.get(one.state, 1e9):
                self.fire(one.ticket, "timeout")
