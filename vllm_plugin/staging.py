"""Host staging: KV blocks of requests that have moved here before there was room, kept in host memory until there is.

The engine core counts slots, each for one block; the bytes lie in the workers (`staged_memory.py`). A slot has an id
like a block, above all of them, so that A sends to it as it sends to any block. A staged request is in `requests` and
in no queue. Before each step the oldest get real blocks, as long as there are enough, and go on as if they had been
preempted.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_plugin.messages import GrowItem, GrownItem, Refusal
from vllm_plugin.queues import committed_waiting, run_slots

if TYPE_CHECKING:
    from vllm_plugin.book import ParkedRequest
    from vllm_plugin.scheduler import MigrationScheduler

__all__ = ["StagedRequest", "Staging", "can_restore", "grow", "restore"]


@dataclass
class StagedRequest:
    """A committed request without blocks. `install`: makes what the model runner must know of it, once it has blocks;
    `enqueue`: queues it with them."""

    request: Any
    computed_tokens: int
    install: Callable[[], dict[str, Any]]
    enqueue: Callable[[], None]


class Staging:
    """Slots `first` to `first` + `total` - 1. `held`: by request, from its first `Grow` until it has real blocks or has
    ended and nobody can write into them. `waiting`: committed ones, oldest first."""

    def __init__(self, first: int = 0, total: int = 0) -> None:
        self.total = total
        self.held: dict[str, list[int]] = {}
        self.waiting: list[StagedRequest] = []
        self._free = list(range(first + total - 1, first - 1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def hold(self, request_id: str, count: int) -> list[int] | None:
        """Makes sure that the request has `count` slots; None when there are not enough, and nothing is changed."""
        have = self.held.get(request_id, [])
        more = max(0, count - len(have))
        if more > self.free:
            return None
        self.held[request_id] = [*have, *(self._free.pop() for _ in range(more))]
        return list(self.held[request_id])

    def give_back(self, request_id: str) -> None:
        self._free += reversed(self.held.pop(request_id, []))

    def add(self, staged: StagedRequest) -> None:
        bisect.insort(self.waiting, staged, key=lambda one: one.request.arrival_time)

    def forget(self, request_id: str) -> None:
        self.waiting = [one for one in self.waiting if one.request.request_id != request_id]

    def waits(self, request_id: str) -> bool:
        return any(one.request.request_id == request_id for one in self.waiting)


def grow(scheduler: MigrationScheduler, parked: ParkedRequest, item: GrowItem) -> GrownItem | Refusal:
    """Makes sure that the request has slots for `item.capacity_tokens`. They are pinned like blocks."""
    staging, request_id = scheduler.staging, parked.request.request_id
    needed = -(-item.capacity_tokens // scheduler.block_size)
    slots = staging.hold(request_id, needed)
    if slots is None:
        message = (
            f"The target has {staging.free} of {staging.total} staging blocks free and the request needs {needed}."
        )
        return Refusal(item.ticket, "target_out_of_staging", message)
    parked.hit_tokens, parked.full_tokens = 0, item.full_tokens
    scheduler.pin(request_id)
    return GrownItem(item.ticket, item.part, 0, slots)


def can_restore(scheduler: MigrationScheduler) -> bool:
    """Whether the oldest staged request can have blocks now, and leaves one for each that runs."""
    if not scheduler.staging.waiting:
        return False
    needed = -(-(scheduler.staging.waiting[0].computed_tokens + 1) // scheduler.block_size)
    admitted = len(scheduler.running) + committed_waiting(scheduler)
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    promised = scheduler.book.promised(time.monotonic())
    return bool(admitted + promised < run_slots(scheduler) and needed + admitted <= free)


def restore(scheduler: MigrationScheduler) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    """Gives staged requests blocks and queues them. Returns which slot goes to which block, and what to install; the
    slots are free from here on, so the bytes must be copied before anything else."""
    moves: list[tuple[int, int]] = []
    installs: list[dict[str, Any]] = []
    manager, staging = scheduler.kv_cache_manager, scheduler.staging
    while can_restore(scheduler):
        staged = staging.waiting[0]
        request, computed = staged.request, staged.computed_tokens
        slots = manager.allocate_slots(
            request, 1, num_external_computed_tokens=computed, delay_cache_blocks=True, reserved_blocks=0
        )
        if slots is None:
            break
        del staging.waiting[0]
        blocks = list(manager.get_block_ids(request.request_id)[0])
        used = -(-computed // scheduler.block_size)
        moves += zip(staging.held[request.request_id][:used], blocks[:used], strict=True)
        staging.give_back(request.request_id)
        installs.append(staged.install())
        staged.enqueue()
    return moves, installs
