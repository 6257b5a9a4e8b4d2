"""One client's request on its way from A to B, as A sees it: states, transitions, and what is measured."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, cast

from vllm_plugin.states import PATIENCE_S, SOURCE

__all__ = ["ALONE", "DEADLINES_S", "TRANSITIONS", "Member", "Move", "MoveState"]

MoveState = Literal["attaching", "copying", "frozen", "sent", "committed", "moved", "stayed", "finished"]

#: What the tables of `vllm_plugin.states` say, in the shape that is asked for here.
TRANSITIONS: dict[MoveState, frozenset[MoveState]] = {
    state: cast("frozenset[MoveState]", after)
    for state, after in cast("dict[MoveState, frozenset[str]]", SOURCE.successors()).items()
}

#: Until the tail was sent A decides by itself; after that only the proxy does.
ALONE: frozenset[MoveState] = frozenset({"attaching", "copying", "frozen"})

#: A state that lasts longer is undone by A itself. After the tail was sent the proxy decides; the last resort is
#: much longer.
DEADLINES_S = cast("dict[MoveState, float]", SOURCE.own_deadlines())


@dataclass
class Member:
    """One engine request of the stream; its position in `Move.members` is its `part` in all messages.

    `epoch`: see `Snapshot`. `window`: B's block ids for it. `sent_blocks`: leading blocks that B has (hit or sent).
    `told_tokens`: output tokens that B has been told. `ended`: it has ended on A, while others of the stream go on.
    `owner`: a number that no other member of this process has.
    """

    request_id: str
    epoch: int
    ended: bool = False
    window: list[int] = field(default_factory=list)
    hit_tokens: int | None = None
    sent_blocks: int = 0
    told_tokens: int = 0
    owner: int = field(default_factory=count(1).__next__)


@dataclass
class Move:
    """`request_id`: the first member's. `prompt_tokens`, `kv_blocks`, `tokens` (output): sums over the members.

    `tail_blocks`, `tail_bytes`: what was sent for it in its own handover. `recompute`: B gets its tokens only.
    `queued`: B need not have room for it yet. `staged`: its blocks wait in B's host memory until it has.
    `freeze_s`: how long it may be frozen, before B has it; `patience_s`: how long the proxy then waits for B.
    """

    request_id: str
    stream: str
    ticket: str
    members: list[Member]
    prompt_tokens: int
    kv_blocks: int
    state: MoveState = "attaching"
    code: str = ""
    message: str = ""
    tokens: int = 0
    tail_blocks: int = 0
    tail_bytes: int = 0
    recompute: bool = False
    queued: bool = False
    staged: bool = False
    freeze_s: float = DEADLINES_S["frozen"]
    patience_s: float = PATIENCE_S
    gap_ms: float | None = None
    itl_ms: float | None = None
    streamed: bool = False
    committed_at: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    parked: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    measured: threading.Event = field(default_factory=threading.Event)
    entered: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def proxy(self) -> str:
        return self.stream.partition("/")[0]

    @property
    def stream_id(self) -> str:
        return self.stream.partition("/")[2]

    @property
    def live(self) -> list[tuple[int, Member]]:
        """Members that still run on A, with their part."""
        return [(part, member) for part, member in enumerate(self.members) if not member.ended]

    @property
    def ended(self) -> bool:
        return not TRANSITIONS[self.state]

    def advance(
        self, state: MoveState, code: str = "", message: str = "", only_from: frozenset[MoveState] | None = None
    ) -> bool:
        """Takes the transition if the table has it, and the state is one of `only_from`; False means that another event
        came first and has decided."""
        with self._lock:
            if state not in TRANSITIONS[self.state] or (only_from is not None and self.state not in only_from):
                return False
            self.state = state
            self.code, self.message = code, message
            self.entered = time.monotonic()
        if self.ended:
            self.parked.set()
            self.done.set()
        return True

    @property
    def deadline_s(self) -> float:
        """How long the present state may last; infinite where somebody else bounds it."""
        if self.state == "frozen":
            return self.freeze_s
        deadline = DEADLINES_S.get(self.state, math.inf)
        return deadline if self.state in ALONE else deadline + self.patience_s - PATIENCE_S

    def overdue(self, now: float) -> bool:
        return now - self.entered > self.deadline_s

    def result(self) -> dict[str, Any]:
        """The handover result of docs/protocol.md, section 4."""
        return {
            "request_id": self.request_id,
            "stream_id": self.stream_id,
            "outcome": self.state,
            "code": self.code,
            "message": self.message,
            "tokens": self.tokens,
            "tail_blocks": self.tail_blocks,
            "tail_bytes": self.tail_bytes,
            "recomputed": self.recompute and self.state == "moved",
            "queued": self.queued and self.state == "moved",
            "staged": self.staged and self.state == "moved",
            "gap_ms": self.gap_ms,
            "itl_ms": self.itl_ms,
            "stages": {name: round(value, 3) for name, value in self.stages.items()},
        }
