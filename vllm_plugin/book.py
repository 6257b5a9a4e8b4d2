"""What the scheduler remembers about requests that the proxy owns: plain data, no vLLM.

Everything here belongs to the engine thread; other threads reach it only through `MigrationEngine.on_engine`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_plugin.messages import Expectation, LogprobRows

__all__ = [
    "MemberRecord",
    "MoveBook",
    "ParkedRequest",
    "ParkedStream",
    "SchedulerListener",
    "StreamRecord",
    "merge_logprobs",
    "own_columns",
    "split_logprobs",
]

#: Streams whose requests have all ended before all of them came are remembered, but not for ever.
MAX_INCOMPLETE = 1000


@dataclass
class MemberRecord:
    """History of one engine request of a stream that vLLM itself does not keep, needed to replay it elsewhere.

    `request`: vLLM's own, kept after its end as long as other members of the stream run. `key`: (prompt number, choice
    number), the same on every leg. `logprobs`: one item per step, as vLLM's `LogprobsLists`.
    """

    request: Any
    key: tuple[int, int]
    logprobs: list[Any] = field(default_factory=list)
    prefill: dict[str, int] | None = None

    @property
    def request_id(self) -> str:
        request_id: str = self.request.request_id
        return request_id

    @property
    def ended(self) -> bool:
        return bool(self.request.is_finished())


@dataclass
class StreamRecord:
    """What one leg of a client's request runs here: one engine request, or one per choice and prompt.

    `stream`: the tag `<proxy worker>/<stream id>`. `choices`: how many members there will be.
    """

    stream: str
    ticket: str
    choices: int
    members: dict[str, MemberRecord] = field(default_factory=dict)

    @property
    def proxy(self) -> str:
        return self.stream.partition("/")[0]

    @property
    def stream_id(self) -> str:
        return self.stream.partition("/")[2]

    @property
    def request_id(self) -> str:
        """The name of the whole: the id of the first member."""
        return next(iter(self.members))

    @property
    def complete(self) -> bool:
        return len(self.members) >= self.choices

    @property
    def live(self) -> list[MemberRecord]:
        return [member for member in self.members.values() if not member.ended]

    def in_order(self) -> list[MemberRecord]:
        """Members by prompt and choice: the order is the same on every leg."""
        return sorted(self.members.values(), key=lambda member: member.key)


@dataclass
class ParkedRequest:
    """One member on B that waits for its state. `full_tokens`: tokens whose blocks A may have written by now."""

    request: Any
    hit_tokens: int | None = None
    full_tokens: int = 0


@dataclass
class ParkedStream:
    """A second leg on B. `members`: by part, None for those that have not arrived yet. `queued`: it was promised a
    place in the queue, and no run slot."""

    expectation: Expectation
    members: list[ParkedRequest | None]
    prepared_until: float = 0.0
    queued: bool = False

    @property
    def ticket(self) -> str:
        return self.expectation.ticket

    @property
    def complete(self) -> bool:
        return all(member is not None for member in self.members)

    def arrived(self) -> Iterator[ParkedRequest]:
        return (member for member in self.members if member is not None)

    def member(self, part: int) -> ParkedRequest | None:
        return self.members[part] if 0 <= part < len(self.members) else None


class SchedulerListener(Protocol):
    """What the scheduler tells the migration engine; called on the engine thread, must not block."""

    def parked(self, ticket: str, request: Any) -> None:
        """A request came with a ticket; it is in `requests` and in no queue."""

    def parked_gone(self, ticket: str) -> None:
        """A parked request was ended by its front end."""

    def producing(self, ticket: str, stream: str, tokens: int, committed_at: float) -> None:
        """A committed request has made its first step here; `tokens` were replayed."""

    def queued(self, ticket: str, stream: str, tokens: int) -> None:
        """A committed request waits in the queue, and is this instance's from now on; `tokens` were replayed."""

    def preempted(self, request_id: str) -> None:
        """A frozen request has lost its blocks; it is in no queue until it is unfrozen."""

    def unstage(self, moves: list[tuple[int, int]], installs: list[dict[str, Any]]) -> None:
        """Staged requests have blocks: their bytes go from the slots into these, and the model runner hears of them."""

    def step_begins(self) -> None:
        """A step is about to be scheduled."""

    def memory_pressure(self) -> None:
        """The next step may have to preempt; parked requests should give up their blocks first."""


@dataclass
class MoveBook:
    """What the scheduler knows of moves.

    Attributes:
        records: members by request id.
        streams: what each leg runs, by (stream, ticket).
        frozen: ids that A does not schedule.
        held_back: those of them that were waiting, and are in no queue now.
        pinned: ids whose blocks somebody else reads (A) or writes (B) at this moment: freed only when unpinned.
        quarantine: their blocks, once the request itself is gone.
        expected, parked: second legs on B by ticket, before and after their first member has come.
        watched: requests committed on B whose stream has not made a step yet: ticket, stream, tokens of the stream, and
            the monotonic time of the commit.
    """

    records: dict[str, MemberRecord] = field(default_factory=dict)
    streams: dict[tuple[str, str], StreamRecord] = field(default_factory=dict)
    stream_of: dict[str, StreamRecord] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    held_back: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    quarantine: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Expectation] = field(default_factory=dict)
    parked: dict[str, ParkedStream] = field(default_factory=dict)
    ticket_of: dict[str, str] = field(default_factory=dict)
    watched: dict[str, tuple[str, str, int, float]] = field(default_factory=dict)

    def record(self, request: Any, stream: str, ticket: str = "", choices: int = 1) -> MemberRecord:
        """Starts the history of a request."""
        leg = self.streams.setdefault((stream, ticket), StreamRecord(stream, ticket, choices))
        key = member_key(request.request_id, leg.stream_id)
        if key is None or any(other.key == key for other in leg.members.values()):
            key = (0, len(leg.members))
        member = MemberRecord(request, key)
        self.records[request.request_id] = leg.members[request.request_id] = member
        self.stream_of[request.request_id] = leg
        return member

    def forget(self, request_id: str) -> None:
        """The request has ended. Its history stays as long as other members of its stream run."""
        leg = self.stream_of.get(request_id)
        if leg is None or any(not member.ended for member in leg.members.values() if member.request_id != request_id):
            return
        if leg.complete:
            self._drop(leg)
            return
        incomplete = [other for other in self.streams.values() if not other.live and not other.complete]
        for other in incomplete[: max(0, len(incomplete) - MAX_INCOMPLETE)]:
            self._drop(other)

    def _drop(self, leg: StreamRecord) -> None:
        self.streams.pop((leg.stream, leg.ticket), None)
        for request_id in leg.members:
            self.records.pop(request_id, None)
            self.stream_of.pop(request_id, None)

    def promised(self, now: float) -> int:
        """Run slots that requests about to be committed here have been promised."""
        prepared = (one for one in self.parked.values() if one.prepared_until > now and not one.queued)
        return sum(len(stream.members) for stream in prepared)


def member_key(request_id: str, stream_id: str) -> tuple[int, int] | None:
    """(prompt number, choice number) from the id that vLLM's front end has made of the proxy's upstream id.

    Children of one prompt are `<choice>_<id>` (v1/engine/parallel_sampling.py), several prompts of one completion are
    `<id>-<prompt>` (entrypoints/openai/completion/serving.py), and every engine id ends with eight random digits
    (v1/engine/input_processor.py, `assign_request_id`).
    """
    for ending in ("-[0-9a-f]{8}", ""):
        found = re.fullmatch(rf"(?:(\d+)_)?[a-z_-]*{re.escape(stream_id)}-\d+(?:-(\d+))?{ending}", request_id)
        if found is not None:
            return int(found[2] or 0), int(found[1] or 0)
    return None


def own_columns(step: Any, num_logprobs: int) -> Any:
    """The part of one step's `LogprobsLists` that belongs to the request: the sampled token and its top logprobs.

    vLLM makes the rows as wide as the widest request in the batch asks for, so their width changes from step to step.
    """
    if num_logprobs < 0:  # All of the vocabulary: always that wide.
        return step
    return step._replace(
        logprob_token_ids=step.logprob_token_ids[:, : num_logprobs + 1].copy(),
        logprobs=step.logprobs[:, : num_logprobs + 1].copy(),
    )


def merge_logprobs(steps: list[Any]) -> LogprobRows | None:
    """Joins per-step `LogprobsLists` (arrays [tokens, columns]) into one message; None when there are none."""
    import numpy as np

    if not steps:
        return None
    token_ids = np.concatenate([np.asarray(step.logprob_token_ids, dtype=np.int32) for step in steps])
    logprobs = np.concatenate([np.asarray(step.logprobs, dtype=np.float32) for step in steps])
    ranks = np.concatenate([np.asarray(step.sampled_token_ranks, dtype=np.int64) for step in steps])
    return LogprobRows(
        rows=token_ids.shape[0],
        columns=token_ids.shape[1],
        token_ids=token_ids.tobytes(),
        logprobs=logprobs.tobytes(),
        ranks=ranks.tobytes(),
    )


def split_logprobs(rows: LogprobRows, lists: Any) -> Any:
    """The inverse: builds vLLM's `LogprobsLists` (the class is passed in as `lists`)."""
    import numpy as np

    shape = (rows.rows, rows.columns)
    return lists(
        np.frombuffer(rows.token_ids, dtype=np.int32).reshape(shape),
        np.frombuffer(rows.logprobs, dtype=np.float32).reshape(shape),
        np.frombuffer(rows.ranks, dtype=np.int64),
    )
