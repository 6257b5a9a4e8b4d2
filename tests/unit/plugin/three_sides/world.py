"""All sides together: who gets which message, what breaks, how time passes, and what must always be true."""

from __future__ import annotations

from typing import Literal

from tests.unit.plugin.three_sides.network import REDIAL_S, Network
from tests.unit.plugin.three_sides.proxy import Handover, Proxy
from tests.unit.plugin.three_sides.source import Move, Source
from tests.unit.plugin.three_sides.target import POOL, Entry, Target
from vllm_plugin.states import LEASE_S, PROXY, SIDES, SOURCE, TARGET, Side

TICK_S = 0.5
#: For how long two engines may compute the same request after A went on by its own clock: a `CloseLeg` that is lost
#: with its connection, a `Producing` that is late or said again, and the closing of a leg.
DOUBLE_S = 10.0
#: Longer than a lease and every deadline of a handover together.
QUIET_S = 60.0

LIMITS = {side.name: side.own_deadlines() for side in SIDES}

Fault = Literal["A dies", "B dies", "the proxy dies", "the control plane dies", "the client leaves"]


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    def __init__(self, network: Network, source: Side = SOURCE, target: Side = TARGET, proxy: Side = PROXY) -> None:
        self.network = network
        self.answer_tokens = 10
        self.control_alive = True
        self.spoil_next = False
        self.violated = False
        self.tickets = self.sessions = self.beats = 0
        self.double_s = 0.0
        self.source = Source(self, source)
        self.target = Target(self, target)
        self.proxy = Proxy(self, proxy)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.violated = True
            raise Violation(what)

    # -- what the sides ask of the world -------------------------------------------------------------------------------

    def client_ahead(self, have: int, replayed: int) -> bool:
        return have > replayed

    def new_ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def open_session(self) -> bool:
        if not self.target.alive:
            return False
        self.target.close_session()
        self.network.cut("ab")
        self.network.redial("ab")
        self.sessions += 1
        self.source.session = self.target.session = self.sessions
        self.source.expires_at = self.target.lease_until = self.network.now + LEASE_S
        self.source.broken = False
        return True

    def peer_closed(self, session: int) -> None:
        self.network.cut("ab")
        if self.source.alive and self.source.session == session:
            self.source.target_lost()

    def revoke_writes(self, session: int | None) -> None:
        """No write of the session is under way any more when this returns."""
        writes, self.network.pending["data"] = self.network.pending["data"], []
        for write in writes:
            if write.args["session"] == session:
                self.network.send("stored", "stored", write.ticket, call=write.args["call"], ok=False)
            else:
                self.network.pending["data"].append(write)

    # -- the network ---------------------------------------------------------------------------------------------------

    def deliver(self, link: str, position: int = 0) -> None:
        message = self.network.take(link, position)
        ticket, args = message.ticket, message.args
        if message.name in self.network.lost:
            self.network.lost.remove(message.name)
            self.cut(Network.pair(link))
            return
        match link:
            case "ca":
                self.source.command(message.kind)
            case "ab":
                self.target.on_peer(message)
            case "ba" if args["session"] == self.source.session:
                if message.kind == "Answer":
                    self.source.answer(args["call"], args["ok"])
                else:
                    self.source.on_parked(ticket, message.kind == "ParkedOk")
            case "ap" if self.proxy.alive:
                self.proxy.on_a(message)
            case "pa":
                if message.kind in ("Switched", "Discarded"):
                    self.source.on_notice(message.kind, ticket)
                else:
                    self.source.answer(args["call"], args.get("ok", True), args.get("outcome", ""))
            case "bp" if self.proxy.alive:
                self.proxy.on_b(message)
            case "leg1" if self.proxy.alive:
                self.proxy.on_leg_one(message)
            case "leg2" if self.proxy.alive:
                self.proxy.on_leg_two(message)
            case "close1":
                self.source.end_request()
            case "leg2in":
                self._leg_two(message.kind, ticket)
            case "written" if self.proxy.alive:
                self.proxy.on_written(ticket)
            case "data":
                accepted = self.target.accepts_write(message)
                held = accepted and self.target.entry(ticket).blocks > 0
                self.check(held or not accepted, "A writes into blocks that B has freed")
                self.network.send("stored", "stored", ticket, call=args["call"], ok=accepted)
            case "stored":
                self._stored(args["call"], args["ok"])

    def _leg_two(self, kind: str, ticket: int) -> None:
        if not self.target.alive:
            self.network.send("leg2", "lost", ticket)
        elif kind == "open":
            self.target.fire(ticket, "arrived_bad" if self.spoil_next else "arrived")
            self.spoil_next = False
        elif self.target.entry(ticket).live:
            self.target.fire(ticket, "request_ended")

    def _stored(self, call: int, ok: bool) -> None:
        if ok:
            self.source.answer(call, True)
        elif self.source.operation is not None and self.source.operation.call == call:
            self.source.push_failed()

    def deliver_next(self, slow_too: bool = True) -> bool:
        next_ = self.network.next(slow_too)
        if next_ is None:
            return False
        self.deliver(*next_)
        self.check_always()
        return True

    def deliver_all(self) -> None:
        for _ in range(1000):
            if not self.deliver_next():
                return
        raise Violation("messages go round in circles")

    def progress(self) -> None:
        """The next thing that happens when nothing goes wrong: a message, else a command of the job, else a step."""
        self.beats += 1
        if self.deliver_next(slow_too=self.beats % 5 == 0):
            return
        moves = self.source.open_moves()
        if not self.source.history:
            self.source.step()
        elif self.source.running and not moves and not self.network.busy():
            self.command("attach")
        elif moves and moves[0].state == "copying" and self.source.operation is None:
            self.command("handover")
        else:
            self.target.step()
            self.source.step()

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def cut(self, pair: str) -> None:
        if not self.network.up[pair]:
            return
        if pair == "ab":
            self.target.close_session()
            return
        self.network.cut(pair)
        if pair == "ap" and self.source.alive:
            self.source.proxy_lost()
        for ticket in self.proxy.handovers:
            self.proxy.fire(ticket, "control_lost")

    def fail(self, fault: Fault) -> None:
        match fault:
            case "A dies" if self.source.alive:
                self.source.alive = False
                self.network.send("leg1", "lost")
                self.cut("ap")
                self.target.close_session()
            case "B dies" if self.target.alive:
                self.target.close_session()
                self.cut("bp")
                for entry in self.target.entries.values():
                    if entry.live:
                        self.network.send("leg2", "lost", entry.ticket)
                self.target.alive = False
            case "the proxy dies" if self.proxy.alive:
                self.proxy.alive = self.proxy.present = False
                self.network.send("close1", "close")
                for one in self.proxy.handovers.values():
                    if one.open:
                        self.network.send("leg2in", "close", one.ticket)
                self.cut("ap")
                self.cut("bp")
            case "the control plane dies":
                self.control_alive = False
            case "the client leaves" if self.proxy.alive:
                self.proxy.leave()

    def command(self, kind: str) -> None:
        if self.control_alive:
            self.network.send("ca", kind)

    # -- time ----------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / TICK_S))):
            self.network.now += TICK_S
            while (late := self.network.late()) is not None:
                self.deliver(*late)
            for pair, since in list(self.network.down_since.items()):
                if pair != "ab" and self.network.now - since >= REDIAL_S:
                    self._redial(pair)
            self.source.tick()
            self.target.tick()
            if self.proxy.alive:
                self.proxy.tick()
            both = self.source.computes and any(entry.state == "producing" for entry in self.target.owned())
            self.double_s = self.double_s + TICK_S if both else 0.0

    def _redial(self, pair: str) -> None:
        engine = self.source if pair == "ap" else self.target
        if not engine.alive or not self.proxy.alive:
            return
        self.network.redial(pair)
        if pair == "bp":
            for ticket in self.target.entries:
                self.target.fire(ticket, "proxy_back")

    def items(self) -> list[tuple[Source | Target | Proxy, list[Move | Entry | Handover]]]:
        """What each side that lives knows of each ticket."""
        sides = (
            (self.source, self.source.moves),
            (self.target, self.target.entries),
            (self.proxy, self.proxy.handovers),
        )
        return [(side, list(known.values())) for side, known in sides if side.alive]

    # -- what must be true ---------------------------------------------------------------------------------------------

    def check_always(self) -> None:
        now, source, target = self.network.now, self.source, self.target
        for entry in target.owned():
            one, move = self.proxy.handover(entry.ticket), source.moves[entry.ticket]
            fenced = one.state == "discarded" or not self.proxy.alive
            self.check(
                not source.computes or move.resort or fenced,
                f"A ({move.state}) goes on while B owns the request, before its own deadline and without the proxy",
            )
        self.check(self.double_s <= DOUBLE_S, f"two engines compute the request for {self.double_s} s")
        held = sum(entry.blocks for entry in target.entries.values())
        self.check(target.free + held == POOL, "B's blocks do not add up")
        overdue = [
            (side.table.name, item.ticket, item.state)
            for side, items in self.items()
            for item in items
            if now - item.entered > LIMITS[side.table.name].get(item.state, 1e9) + TICK_S
        ]
        self.check(not overdue, f"longer than their deadlines: {overdue}")
        if source.alive and source.session is not None and not source.closing:
            self.check(now <= source.expires_at + TICK_S, "A's session outlives its lease")
        if target.session is not None:
            self.check(now <= target.lease_until + TICK_S, "B's session outlives its lease")
        elif target.alive:
            leased = [
                e.ticket for e in target.entries.values() if e.state in ("expected", "parked", "prepared", "dropped")
            ]
            self.check(not leased, f"tickets {leased} are held on B without a session")

    def check_nothing_held(self) -> None:
        """No session is open, and nobody has made a step: what is left belongs to requests that go on."""
        source, target = self.source, self.target
        if source.alive:
            self.check(source.session is None and not source.open_moves(), "A's session has not ended")
            self.check(source.operation is None and not source.quarantined, "A still holds blocks of a copy")
            self.check(not (source.running and source.frozen), "the request stands still on A for ever")
        if target.alive:
            owned = sum(entry.blocks for entry in target.owned())
            self.check(target.free == POOL - owned, f"B has {target.free} free blocks of {POOL}, {owned} are in use")

    def idle(self, steps: bool) -> bool:
        """Time changes nothing any more: no session, no handover, and no connection that is being dialled."""
        source, target, proxy = self.source, self.target, self.proxy
        return (
            (not source.alive or (source.session is None and source.operation is None))
            and target.session is None
            and (not proxy.alive or all(one.state in proxy.table.resting for one in proxy.handovers.values()))
            and not (steps and (source.computes or target.owned()))
            and "ap" not in self.network.down_since
        )

    def settle(self, hold: bool) -> None:
        """Nothing goes wrong any more: the job ends (or its lease does), then the engines go on to the end."""
        self.target.full = False
        self.command("abort")
        self.deliver_all()
        if not self.proxy.present:
            working = self.source.computes or bool(self.target.owned())
            self.check(not working, "an engine works for a client that has left")
        for steps in (False, True) if hold else (True,):
            for _ in range(round(QUIET_S / TICK_S)):
                if steps:
                    # What A says last comes first: the worst order for a client that is fed by A.
                    self.source.step()
                    self.deliver_all()
                    self.target.step()
                self.deliver_all()
                if self.idle(steps):
                    break
                self.advance(TICK_S)
                self.check_always()
            self.check_nothing_held()
        self.check(not self.target.alive or self.target.free == POOL, "B has lost blocks")
        self.check(not self.source.alive or not self.source.running, "A still runs a request that nobody reads")
        if self.proxy.alive:
            self.check(not self.proxy.present or bool(self.proxy.outcome), "nobody generates for a client that waits")
            self.check(self.proxy.leg_one != "open", "leg one is still open")
        open_ = [
            (side.table.name, item.state)
            for side, items in self.items()
            for item in items
            if item.state not in side.table.resting
        ]
        self.check(not open_, f"not at rest in the end: {open_}")
