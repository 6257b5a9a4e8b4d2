"""What the scheduler remembers about requests that the proxy owns: plain data, no vLLM.

Everything here belongs to the engine thread; other threads reach it only through `MigrationEngine.on_engine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_plugin.messages import LogprobRows

__all__ = [
    "MoveBook",
    "ParkedRequest",
    "SchedulerListener",
    "StreamRecord",
    "merge_logprobs",
    "own_columns",
    "split_logprobs",
]


@dataclass
class StreamRecord:
    """History of one proxied request that vLLM itself does not keep, needed to replay it elsewhere.

    `stream`: the tag `<proxy worker>/<stream id>`. `logprobs`: one item per step, as vLLM's `LogprobsLists`.
    """

    stream: str
    siblings: int
    logprobs: list[Any] = field(default_factory=list)
    prefill: dict[str, int] | None = None

    @property
    def proxy(self) -> str:
        return self.stream.partition("/")[0]

    @property
    def stream_id(self) -> str:
        return self.stream.partition("/")[2]


@dataclass
class ParkedRequest:
    """A request on B that waits for its state. `full_tokens`: tokens whose blocks A may have written by now."""

    ticket: str
    request: Any
    hit_tokens: int | None = None
    full_tokens: int = 0
    prepared_until: float | None = None


class SchedulerListener(Protocol):
    """What the scheduler tells the migration engine; called on the engine thread, must not block."""

    def parked(self, ticket: str, request: Any) -> None:
        """A request came with a ticket; it is in `requests` and in no queue."""

    def parked_gone(self, ticket: str) -> None:
        """A parked request was ended by its front end."""

    def producing(self, ticket: str, stream: str, tokens: int) -> None:
        """A committed request has made its first step here; `tokens` were replayed."""

    def memory_pressure(self) -> None:
        """The next step may have to preempt; parked requests should give up their blocks first."""


@dataclass
class MoveBook:
    """records: proxied requests by id. frozen: ids that A does not schedule. pinned: ids whose blocks somebody
    else reads (A) or writes (B) at this moment: freed only when unpinned. quarantine: their blocks, once the
    request itself is gone. parked: requests on B by ticket. watched: requests committed on B that have not
    produced yet."""

    records: dict[str, StreamRecord] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    quarantine: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    parked: dict[str, ParkedRequest] = field(default_factory=dict)
    ticket_of: dict[str, str] = field(default_factory=dict)
    watched: dict[str, tuple[str, str, int]] = field(default_factory=dict)

    def record(self, request_id: str, stream: str) -> StreamRecord:
        """Starts the history of a request. `siblings` counts the requests that came under the same stream so far."""
        self.streams[stream] = self.streams.get(stream, 0) + 1
        record = self.records[request_id] = StreamRecord(stream, self.streams[stream])
        return record

    def forget(self, request_id: str) -> None:
        record = self.records.pop(request_id, None)
        if record is not None and all(other.stream != record.stream for other in self.records.values()):
            self.streams.pop(record.stream, None)


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
