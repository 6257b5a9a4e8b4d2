"""B in the model: its pool of blocks, and one entry per ticket, driven by the table `TARGET`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.unit.plugin.three_sides.network import Message
from vllm_plugin.states import COMMIT_S, LEASE_S, TARGET, Side

if TYPE_CHECKING:
    from tests.unit.plugin.three_sides.world import World

WINDOW = 2
POOL = 12


@dataclass
class Entry:
    """`live`: the request exists in B's scheduler. `blocks`: held for it, by itself or because they are pinned."""

    ticket: int
    state: str = "unknown"
    entered: float = 0.0
    live: bool = False
    pinned: bool = False
    blocks: int = 0
    history: list[str] = field(default_factory=list)
    replayed: int = 0
    promised_at: float = -1e9
    queued: bool = False


class Target:
    def __init__(self, world: World, table: Side = TARGET) -> None:
        self.world = world
        self.table = table
        self.limits = table.own_deadlines()
        self.alive = True
        self.full = False
        #: What is committed waits in the queue until B has room.
        self.queues = False
        self.free = POOL
        self.session: int | None = None
        self.lease_until = 0.0
        self.entries: dict[int, Entry] = {}

    # -- the table -----------------------------------------------------------------------------------------------------

    def entry(self, ticket: int) -> Entry:
        return self.entries.setdefault(ticket, Entry(ticket))

    def fire(self, ticket: int, event: str, message: Message | None = None) -> None:
        if not self.alive:
            return
        entry = self.entry(ticket)
        step = self.table.steps[entry.state, event]
        if step.state != entry.state or event == "prepare":
            entry.state, entry.entered = step.state, self.world.network.now
        if step.state == "prepared" and event == "prepare":
            entry.promised_at = entry.entered
        if event == "arrived" and "tell_parked" in step.actions:
            entry.live = True
        if event == "request_ended":
            entry.live = False
        for action in step.actions:
            getattr(self, f"_{action}")(entry, message)
        if entry.blocks and not entry.live and not entry.pinned:
            self.free += entry.blocks
            entry.blocks = 0

    def _tell_parked(self, entry: Entry, _: Message | None) -> None:
        self._say("ParkedOk", entry)

    def _tell_gone(self, entry: Entry, _: Message | None) -> None:
        self._say("ParkedNo", entry)

    def _refuse_arrival(self, entry: Entry, _: Message | None) -> None:
        self.world.network.send("leg2", "error", entry.ticket)

    def _hold_blocks(self, entry: Entry, _: Message | None) -> None:
        entry.pinned = True
        if not entry.blocks:
            entry.blocks = WINDOW
            self.free -= WINDOW

    def _answer(self, entry: Entry, message: Message | None) -> None:
        assert message is not None
        self._say("Answer", entry, to=message.kind, call=message.args["call"], ok=True)

    def _refuse(self, entry: Entry, message: Message | None) -> None:
        assert message is not None
        self._say("Answer", entry, to=message.kind, call=message.args["call"], ok=False)

    def _install(self, entry: Entry, message: Message | None) -> None:
        assert message is not None
        late = self.world.network.now - entry.promised_at > COMMIT_S
        self.world.check(not late, "B takes a commit after the end of its promise")
        entry.history = list(message.args["tokens"])
        entry.replayed = len(entry.history)
        for token in entry.history:
            self.world.network.send("leg2", "token", entry.ticket, value=token)

    def _unpin(self, entry: Entry, _: Message | None) -> None:
        entry.pinned = False

    def _drop(self, entry: Entry, _: Message | None) -> None:
        entry.live = False
        self.world.network.send("leg2", "abort", entry.ticket)

    def _revoke(self, entry: Entry, _: Message | None) -> None:
        """B's workers take nothing more of this session; when that is certain, blocks may be freed."""
        self.world.revoke_writes(self.session)

    def _tell_producing(self, entry: Entry, _: Message | None) -> None:
        self.world.network.send("bp", "Producing", entry.ticket, tokens=entry.replayed)

    def _free(self, entry: Entry, _: Message | None) -> None:
        entry.live = False

    def _say(self, kind: str, entry: Entry, **args: object) -> None:
        if self.session is not None:
            self.world.network.send("ba", kind, entry.ticket, session=self.session, **args)

    # -- messages ------------------------------------------------------------------------------------------------------

    def on_peer(self, message: Message) -> None:
        if not self.alive or self.session is None or message.args.get("session") != self.session:
            return
        self.lease_until = self.world.network.now + LEASE_S
        entry = self.entry(message.ticket)
        match message.kind:
            case "Expect":
                self.fire(message.ticket, "expect")
                self._answer(entry, message)
            case "Grow":
                room = entry.blocks or (self.free >= WINDOW and not self.full)
                self.fire(message.ticket, "grow" if room else "grow_full", message)
            case "Prepare":
                self.fire(message.ticket, "prepare_full" if self.full and not self.queues else "prepare", message)
            case "Commit" if self.queues:
                entry.queued = True
                self.fire(message.ticket, "commit_queued", message)
            case "Commit":
                self.fire(message.ticket, "commit_bad" if self.full else "commit", message)
            case "Release":
                self.fire(message.ticket, "release")
            case "CloseSession":
                self.close_session()

    def close_session(self) -> None:
        if self.session is None:
            return
        for ticket in list(self.entries):
            self.fire(ticket, "session_closed")
        session, self.session = self.session, None
        self.world.revoke_writes(session)
        self.world.peer_closed(session)

    def accepts_write(self, message: Message) -> bool:
        return self.alive and self.session is not None and message.args["session"] == self.session

    # -- engine and clock ----------------------------------------------------------------------------------------------

    def owned(self) -> list[Entry]:
        """What B computes, or will at its next step."""
        return [e for e in self.entries.values() if self.alive and e.live and e.state in ("committed", "producing")]

    def step(self) -> None:
        for entry in self.owned():
            if entry.queued and self.full:
                continue
            if len(entry.history) < self.world.answer_tokens:
                entry.history.append((entry.history[-1] if entry.history else "") + "B")
                self.world.network.send("leg2", "token", entry.ticket, value=entry.history[-1])
            if entry.state == "committed":
                self.fire(entry.ticket, "first_step")
            if len(entry.history) == self.world.answer_tokens:
                self.world.network.send("leg2", "finish", entry.ticket)
                self.fire(entry.ticket, "request_ended")

    def pressure(self) -> None:
        for ticket in list(self.entries):
            self.fire(ticket, "pressure")

    def tick(self) -> None:
        now = self.world.network.now
        for entry in self.entries.values():
            if now - entry.entered > self.limits.get(entry.state, 1e9):
                self.fire(entry.ticket, "timeout")
        if self.session is not None and now > self.lease_until:
            self.close_session()
