"""Run slots and waiting queues of vLLM's scheduler, the same for every supported version.

0.30 has the queues `waiting` and `skipped_waiting`; since 0.31 there are `waiting` and `kv_holding_waiting`, which
holds the requests that own KV blocks and is served first. `compat.py` has a probe for each name used here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "committed_waiting",
    "enqueue_by_age",
    "enqueue_resumed",
    "nothing_waits",
    "promised_run_slots",
    "put_back_first",
    "run_slots",
    "take_from_queue",
]


def _run_slots_attribute(scheduler: Any) -> str:
    # 0.31 split the limit of admissions from the size of the model runner's batch.
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def run_slots(scheduler: Any) -> int:
    """How many requests may run at once."""
    slots: int = getattr(scheduler, _run_slots_attribute(scheduler))
    return slots


@contextmanager
def promised_run_slots(scheduler: Any, promised: int) -> Iterator[None]:
    """Keeps `promised` run slots free of admissions. What runs already counts as allowed: 0.30 asserts that."""
    attribute = _run_slots_attribute(scheduler)
    slots = getattr(scheduler, attribute)
    setattr(scheduler, attribute, max(slots - promised, len(scheduler.running)))
    try:
        yield
    finally:
        setattr(scheduler, attribute, slots)


def _queues(scheduler: Any) -> list[Any]:
    names = ("waiting", "kv_holding_waiting", "skipped_waiting")
    return [getattr(scheduler, name) for name in names if hasattr(scheduler, name)]


def nothing_waits(scheduler: Any) -> bool:
    """True when no request waits in any of the scheduler's queues."""
    return not any(_queues(scheduler))


def committed_waiting(scheduler: Any) -> int:
    """Requests that own KV blocks and wait for a run slot, as a committed one does until its first step."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return len(scheduler.kv_holding_waiting)
    queues = (scheduler.skipped_waiting, scheduler.waiting)
    return sum(1 for queue in queues for request in queue if request.num_computed_tokens > 0)


def enqueue_resumed(scheduler: Any, request: Any) -> None:
    """Queues a request that owns its blocks before all that own none."""
    if hasattr(scheduler, "kv_holding_waiting"):
        scheduler._enqueue_waiting_request(request)
    else:
        # 0.30 takes from `skipped_waiting` first; by itself it would put the request behind all others.
        scheduler.skipped_waiting.prepend_request(request)


def enqueue_by_age(scheduler: Any, request: Any) -> None:
    """Queues a request that owns no blocks before those that are younger; one that was preempted goes on top there, as
    vLLM itself has it."""
    scheduler._enqueue_waiting_request(request)
    queue = scheduler.waiting
    if not isinstance(queue, deque) or request not in queue:
        # Ordered by priority and age already, or put aside until its grammar is compiled.
        return
    queue.remove(request)
    younger = (place for place, other in enumerate(queue) if other.arrival_time > request.arrival_time)
    queue.insert(next(younger, len(queue)), request)


def take_from_queue(scheduler: Any, request: Any) -> None:
    """Takes a waiting request out of whatever queue it is in; it stays in `requests`, so that an abort finds it."""
    for queue in _queues(scheduler):
        queue.remove_requests([request])
    if hasattr(scheduler, "deferred_waiting"):
        scheduler.deferred_waiting.discard(request)


def put_back_first(scheduler: Any, request: Any) -> None:
    """Puts a request that was taken from its queue before all that wait."""
    scheduler.waiting.prepend_request(request)
