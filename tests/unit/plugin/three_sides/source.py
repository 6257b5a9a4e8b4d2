"""A in the model: its engine with the one request, and the session that moves it, driven by the table `SOURCE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_plugin.states import LEASE_S, SOURCE, Side

if TYPE_CHECKING:
    from tests.unit.plugin.three_sides.world import World

#: What the session thread waits for, in seconds (`peer.ANSWER_DEADLINE_S`, `attach`, `handover`).
ANSWER_S = {"expect": 5.0, "open": 10.0, "grow": 5.0, "prepare": 5.0, "commit": 2.5, "resolve": 3.0, "push": 10.0}
SETTLE_S = 4.0


@dataclass
class Move:
    """`resort`: A went on by its own clock after it had offered the request to B."""

    ticket: int
    epoch: int
    state: str = "attaching"
    entered: float = 0.0
    settle_at: float | None = None
    resort: bool = False
    opened: bool = False
    parked: bool = False


@dataclass
class Operation:
    """What the session thread is doing: `step` waits for the answer `call` until `ends`."""

    step: str
    ticket: int
    call: int
    ends: float
    handover: bool = False
    tokens: tuple[str, ...] = ()


class Source:
    def __init__(self, world: World, table: Side = SOURCE) -> None:
        self.world = world
        self.table = table
        self.limits = table.own_deadlines()
        self.alive = True
        self.running = True
        self.frozen = False
        self.history: list[str] = []
        self.epoch = 0
        self.quarantined = 0
        self.session: int | None = None
        self.expires_at = 0.0
        self.closing = False
        self.broken = False
        self.moves: dict[int, Move] = {}
        self.operation: Operation | None = None
        self.pushing = False
        self.release_later: list[int] = []
        self.calls = 0

    # -- the table -----------------------------------------------------------------------------------------------------

    def fire(self, ticket: int, event: str) -> None:
        move = self.moves.get(ticket)
        if move is None or not self.alive:
            return
        step = self.table.steps[move.state, event]
        if step.state != move.state:
            if event in ("timeout", "settled") and move.state in ("sent", "committed"):
                move.resort = True
            move.state, move.entered = step.state, self.world.network.now
        for action in step.actions:
            getattr(self, f"_{action}")(move)

    def open_moves(self) -> list[Move]:
        return [move for move in self.moves.values() if move.state not in self.table.resting]

    def _unfreeze(self, move: Move) -> None:
        self.frozen = False

    def _freeze(self, move: Move) -> None:
        self.frozen = True

    def _keep_held(self, move: Move) -> None:
        """Nothing: a request that is preempted while B may have it is not scheduled again."""

    def _close_leg(self, move: Move) -> None:
        self.world.network.send("ap", "CloseLeg", move.ticket)

    def _tell_freezing(self, move: Move) -> None:
        self.world.network.send("ap", "Freezing", move.ticket)

    def _release(self, move: Move) -> None:
        if self.pushing:
            self.release_later.append(move.ticket)
        elif not self.broken:
            self.world.network.send("ab", "Release", move.ticket, session=self.session)

    def _end_request(self, move: Move) -> None:
        self.end_request()

    def _commit(self, move: Move) -> None:
        assert self.operation is not None
        self._ask("ab", "Commit", "commit", move.ticket, tokens=self.operation.tokens)

    def _ask_proxy(self, move: Move) -> None:
        if self.world.network.up["ap"]:
            self._ask("ap", "Resolve", "resolve", move.ticket)
        else:
            self._end_operation()

    def _settle(self, move: Move) -> None:
        move.settle_at = self.world.network.now + SETTLE_S

    # -- the engine ----------------------------------------------------------------------------------------------------

    @property
    def computes(self) -> bool:
        return self.alive and self.running and not self.frozen

    def step(self) -> None:
        if not self.computes:
            return
        self.history.append((self.history[-1] if self.history else "") + "A")
        self.world.network.send("leg1", "token", value=self.history[-1])
        if len(self.history) == self.world.answer_tokens:
            self.world.network.send("leg1", "finish")
            self.end_request()

    def end_request(self) -> None:
        if self.running:
            self.running = self.frozen = False
            self.quarantined += self._pinned

    def preempt(self) -> None:
        """Its blocks go; what the session does about it shows at its next look, but at once if it stands still."""
        if not self.running:
            return
        self.epoch += 1
        self.quarantined += self._pinned
        held = [move for move in self.open_moves() if move.state in ("frozen", "sent", "committed")]
        for move in held:
            self.fire(move.ticket, "preempted")

    @property
    def _pinned(self) -> bool:
        return self.operation is not None and self.operation.step in ("grow", "push", "commit", "resolve")

    # -- operations ----------------------------------------------------------------------------------------------------

    def command(self, kind: str) -> None:
        """A command of the control plane; delivered twice it does no harm."""
        if not self.alive:
            return
        if kind in ("finish", "abort"):
            self.close_session()
        elif kind == "renew" and self.session is not None:
            self.expires_at = self.world.network.now + LEASE_S
            self.world.network.send("ab", "Renew", session=self.session)
        elif self.operation is None and not self.closing:
            if kind == "attach" and self.running and not self.open_moves():
                self._attach()
            elif kind in ("round", "handover"):
                for move in self.open_moves():
                    if move.state == "copying" and not self.broken and self._look(move):
                        self._ask("ab", "Grow", "grow", move.ticket, handover=kind == "handover")

    def _attach(self) -> None:
        if self.session is None and not self.world.open_session():
            return
        if self.broken:
            return
        ticket = self.world.new_ticket()
        self.moves[ticket] = Move(ticket, self.epoch, entered=self.world.network.now)
        self._ask("ab", "Expect", "expect", ticket)

    def _look(self, move: Move) -> bool:
        if not self.running:
            self.fire(move.ticket, "request_ended")
        elif self.epoch != move.epoch:
            self.fire(move.ticket, "preempted")
        return move.state not in self.table.resting

    def _ask(self, link: str, kind: str, step: str, ticket: int, handover: bool | None = None, **args: Any) -> None:
        self.calls += 1
        before = self.operation
        self.operation = Operation(step, ticket, self.calls, self.world.network.now + ANSWER_S[step])
        if before is not None:
            self.operation.handover, self.operation.tokens = before.handover, before.tokens
        if handover is not None:
            self.operation.handover = handover
        self.world.network.send(link, kind, ticket, call=self.calls, session=self.session, **args)

    def _end_operation(self) -> None:
        self.operation = None
        self.quarantined = 0

    def _push(self, operation: Operation) -> None:
        """From here on no `Release` is said before the push has ended, and what was rolled back is not pushed."""
        self.calls += 1
        operation.step, operation.call = "push", self.calls
        operation.ends = self.world.network.now + ANSWER_S["push"]
        self.pushing = True
        self.world.network.send("data", "Write", operation.ticket, call=self.calls, session=self.session)

    def _push_ended(self) -> None:
        self.pushing = False
        later, self.release_later = self.release_later, []
        for ticket in later:
            self._release(self.moves[ticket])

    def answer(self, call: int, ok: bool, outcome: str = "") -> None:
        """An answer that nobody waits for any more is dropped."""
        operation = self.operation
        if not self.alive or operation is None or operation.call != call:
            return
        move, step = self.moves[operation.ticket], operation.step
        if step == "expect":
            if self.world.network.up["ap"]:
                self._ask("ap", "OpenLeg", "open", move.ticket)
            else:
                self._end_operation()
                self.fire(move.ticket, "leg_refused")
        elif step == "open":
            move.opened = ok
            if not ok:
                self._end_operation()
                self.fire(move.ticket, "leg_refused")
            self._attached(move)
        elif step in ("grow", "prepare") and not ok:
            self._end_operation()
            self.fire(move.ticket, "refused")
        elif step == "grow":
            if move.state in self.table.resting:
                self._end_operation()
            else:
                self._push(operation)
        elif step == "prepare":
            self._freeze_and_push(move, operation)
        elif step == "push":
            self._push_ended()
            self._pushed(move, operation)
        elif step == "commit":
            self._end_operation()
            self.fire(move.ticket, "accepted" if ok else "commit_refused")
        elif step == "resolve":
            self._end_operation()
            self.fire(move.ticket, self._discarded() if outcome == "discarded" else "switched")

    def _attached(self, move: Move) -> None:
        if move.opened and move.parked:
            self._end_operation()
            self.fire(move.ticket, "attached")

    def _freeze_and_push(self, move: Move, operation: Operation) -> None:
        if not self.world.network.up["ap"]:
            self.fire(move.ticket, "no_proxy")
        elif self._look(move):
            self.fire(move.ticket, "freeze")
        if move.state == "frozen":
            operation.tokens = tuple(self.history)
            self._push(operation)
        else:
            self._end_operation()

    def _pushed(self, move: Move, operation: Operation) -> None:
        if move.state == "copying" and operation.handover:
            self._ask("ab", "Prepare", "prepare", move.ticket)
        elif move.state == "frozen":
            self.fire(move.ticket, "tail_sent")
        else:
            self._end_operation()

    def push_failed(self) -> None:
        """B's worker may still be writing: the session is of no further use."""
        operation = self.operation
        if not self.pushing:
            return
        self.broken = True
        self._push_ended()
        if operation is not None:
            self._end_operation()
            self.fire(operation.ticket, "target_lost")

    # -- notices -------------------------------------------------------------------------------------------------------

    def on_parked(self, ticket: int, ok: bool) -> None:
        move = self.moves.get(ticket)
        if move is None or not self.alive:
            return
        if not ok:
            self.fire(ticket, "parked_gone")
        elif move.state == "attaching":
            move.parked = True
            self._attached(move)

    def on_notice(self, kind: str, ticket: int) -> None:
        self.fire(ticket, "switched" if kind == "Switched" else self._discarded())

    def _discarded(self) -> str:
        return "discarded" if self.running else "discarded_ended"

    def target_lost(self) -> None:
        self.broken = True
        operation = self.operation
        for move in self.open_moves():
            self.fire(move.ticket, "target_lost")
        if operation is not None and operation.step == "commit":
            self.fire(operation.ticket, "commit_lost")
        elif operation is not None and operation.step in ("expect", "grow", "prepare"):
            self._end_operation()

    def proxy_lost(self) -> None:
        if self.operation is not None and self.operation.step in ("open", "resolve"):
            self._end_operation()
        for move in self.open_moves():
            self.fire(move.ticket, "proxy_lost")

    # -- clock and end -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = self.world.network.now
        if not self.alive:
            return
        for move in self.open_moves():
            if now - move.entered > self.limits.get(move.state, 1e9):
                self.fire(move.ticket, "timeout")
            elif move.settle_at is not None and now > move.settle_at:
                self.fire(move.ticket, "settled")
        operation = self.operation
        if operation is not None and operation.step == "push":
            if now > operation.ends:
                self.push_failed()
        elif operation is not None and self.moves[operation.ticket].state in self.table.resting:
            self._end_operation()
        elif operation is not None and now > operation.ends:
            self._unanswered(operation)
        if self.session is not None and not self.closing and now > self.expires_at:
            self.close_session()
        self.end_session()

    def _unanswered(self, operation: Operation) -> None:
        if operation.step == "commit":
            self.fire(operation.ticket, "commit_lost")
            return
        self._end_operation()
        if operation.step != "resolve":
            self.fire(operation.ticket, "leg_refused" if operation.step == "open" else "target_lost")

    def close_session(self) -> None:
        if self.session is not None and not self.closing:
            self.closing = True
            for move in self.open_moves():
                self.fire(move.ticket, "session_closed")
            self.end_session()

    def end_session(self) -> None:
        if self.closing and not self.open_moves():
            self.world.network.send("ab", "CloseSession", session=self.session)
            self.session, self.closing = None, False
