"""Messages under way, and connections that can be lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: A message is delivered within this time, or its connection is lost. Longer than B's commit deadline, A's patience
#: with an answer, and the proxy's patience, so that messages come too late for each of them.
MAX_DELAY_S = 4.0
REDIAL_S = 0.5


@dataclass
class Message:
    kind: str
    ticket: int
    sent_at: float
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kind} to {self.args['to']}" if "to" in self.args else self.kind


class Network:
    """Pending messages by direction. Two letters name one: c, a, b, p = control plane, A, B, proxy.

    HTTP and the copying of blocks are byte streams: always in order, and lost only with one of their ends. The others
    keep their order too if `ordered`; if not, the newest message comes first, and those of the kind `twice` come twice.
    `slow` is a direction in which messages come last of all; `lost` are kinds of which the first is lost together with
    its connection.
    """

    CONTROL = ("ca", "ab", "ba", "ap", "pa", "bp")
    LEGS = ("leg1", "leg2", "close1", "leg2in", "written", "data", "stored")

    def __init__(self, ordered: bool, slow: str = "", lost: tuple[str, ...] = (), twice: str = "") -> None:
        self.ordered = ordered
        self.slow = slow
        self.lost = set(lost)
        self.twice = twice
        self.now = 0.0
        self.pending: dict[str, list[Message]] = {link: [] for link in self.CONTROL + self.LEGS}
        self.up = {"ap": True, "bp": True, "ab": False}
        self.down_since: dict[str, float] = {}
        #: What the proxy keeps for A while their connection is down.
        self.unsent: list[Message] = []

    def send(self, link: str, kind: str, ticket: int = 0, **args: Any) -> None:
        """On a connection that is down a message is lost, but the proxy keeps its own for A."""
        message = Message(kind, ticket, self.now, args)
        if not self.up.get(self.pair(link), True):
            if link == "pa":
                self.unsent.append(message)
            return
        self.pending[link].append(message)
        if not self.ordered and message.name == self.twice:
            self.pending[link].append(Message(kind, ticket, self.now, dict(args)))

    def next(self, slow_too: bool) -> tuple[str, int] | None:
        """The message that comes next when nobody interferes: its direction and position."""
        found: tuple[float, str, int] | None = None
        for link, queue in self.pending.items():
            if queue and (link != self.slow or slow_too):
                position = len(queue) - 1 if link in self.CONTROL and not self.ordered else 0
                if found is None or queue[position].sent_at < found[0]:
                    found = (queue[position].sent_at, link, position)
        return found and found[1:]

    @staticmethod
    def pair(link: str) -> str:
        return {"pa": "ap", "pb": "bp", "ba": "ab"}.get(link, link)

    def take(self, link: str, position: int) -> Message:
        free = link in self.CONTROL and not self.ordered  # else whatever is asked for, the oldest comes
        return self.pending[link].pop(position % len(self.pending[link]) if free else 0)

    def repeat(self, link: str, position: int) -> None:
        """The control plane may always say things twice; on the other connections that needs disorder."""
        queue = self.pending[link]
        if queue and (link == "ca" or (link in self.CONTROL and not self.ordered)):
            message = queue[position % len(queue)]
            queue.append(Message(message.kind, message.ticket, self.now, dict(message.args)))

    def cut(self, pair: str) -> None:
        for link, queue in self.pending.items():
            if link in self.CONTROL and self.pair(link) == pair:
                queue.clear()
        self.up[pair] = False
        self.down_since[pair] = self.now

    def redial(self, pair: str) -> None:
        self.up[pair] = True
        del self.down_since[pair]
        if pair == "ap":
            kept, self.unsent = self.unsent, []
            for message in kept:
                if self.now - message.sent_at <= 10.0:
                    self.send("pa", message.kind, message.ticket, **message.args)

    def busy(self) -> list[str]:
        return [link for link, queue in self.pending.items() if queue]

    def late(self) -> tuple[str, int] | None:
        """A message that cannot be late any longer: its direction and position."""
        for link, queue in self.pending.items():
            for position, message in enumerate(queue):
                if self.now - message.sent_at > MAX_DELAY_S:
                    return link, position
        return None
