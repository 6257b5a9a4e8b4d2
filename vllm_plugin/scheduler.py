"""Scheduler class (`--scheduler-cls`) that can freeze one request, park an arriving one and hold blocks that are
being copied.

It adds to vLLM's scheduler and changes nothing for requests that do not carry the proxy's tag. All of it runs on
the engine thread, between steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm_plugin.book import MoveBook, SchedulerListener, own_columns
from vllm_plugin.compat import AsyncScheduler, RequestStatus, Scheduler
from vllm_plugin.first_steps import NEVER, StepCosts, held
from vllm_plugin.pulse import Pulse
from vllm_plugin.queues import (
    committed_waiting,
    nothing_waits,
    promised_run_slots,
    put_back_first,
    run_slots,
    take_from_queue,
)
from vllm_plugin.staging import Staging, can_restore, restore

__all__ = [
    "CHOICES_ARGUMENT",
    "STREAM_ARGUMENT",
    "TICKET_ARGUMENT",
    "MigrationAsyncScheduler",
    "MigrationScheduler",
    "Snapshot",
]

#: Keys in `vllm_xargs` (docs/protocol.md, section 1).
STREAM_ARGUMENT = "vllm_hi_stream"
TICKET_ARGUMENT = "vllm_hi_ticket"
CHOICES_ARGUMENT = "vllm_hi_choices"


@dataclass(frozen=True)
class Snapshot:
    """One request between two steps. `valid_tokens`: tokens whose KV is written for certain; `output_tokens`:
    those from the asked index `since` on; `epoch` changes when the request loses its blocks; `logprobs`, `prefill`: see
    `StreamRecord`."""

    request_id: str
    status: str
    drained: bool
    valid_tokens: int
    prompt_tokens: int
    num_output_tokens: int
    since: int
    output_tokens: list[int]
    block_ids: list[int]
    epoch: int
    seeded: bool
    logprobs: tuple[Any, ...]
    prefill: dict[str, int] | None

    @property
    def draws(self) -> bool:
        """Whether it has a random state of its own that must travel along."""
        return self.seeded and bool(self.valid_tokens or self.num_output_tokens)

    @property
    def draws_in_prefill(self) -> bool:
        return self.draws and self.valid_tokens < self.prompt_tokens + self.num_output_tokens - 1


class MigrationScheduler(Scheduler):
    """vLLM's scheduler with the operations that a live migration needs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> MigrationScheduler:
        # vLLM picks between two classes by configuration; `--scheduler-cls` names one, so the choice is repeated here.
        config = kwargs.get("vllm_config") or args[0]
        chosen = MigrationAsyncScheduler if config.scheduler_config.async_scheduling else MigrationScheduler
        scheduler: MigrationScheduler = object.__new__(chosen)
        return scheduler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.book = MoveBook()
        self.migration_listener: SchedulerListener | None = None
        self.pulse = Pulse()
        self.costs = StepCosts()
        self._generated = 0
        self._went_first: set[str] = set()
        self.staging = Staging()
        #: Seconds to wait before each step, for a migration that cannot keep pace (pacing.py, `brake`).
        self.pause_s = 0.0
        #: How long the next step has waited for a commit.
        self.waited_s = 0.0
        if self.vllm_config.max_concurrent_batches > 1:
            # A step in flight may still write blocks that an abort has just freed, and a peer may be handed them.
            self.defer_block_free = True

    # -- arrivals ------------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        arguments = (request.sampling_params.extra_args or {}) if request.sampling_params is not None else {}
        stream, ticket = arguments.get(STREAM_ARGUMENT), arguments.get(TICKET_ARGUMENT)
        if stream is not None:
            self.book.record(request, str(stream), str(ticket or ""), int(arguments.get(CHOICES_ARGUMENT, 1)))
        if ticket is None or self.migration_listener is None:
            super().add_request(request)
            return
        # In `requests`, so that an abort finds it, but in no queue: it costs no step until it is committed.
        self.requests[request.request_id] = request
        self.migration_listener.parked(str(ticket), request)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        if can_restore(self):
            return True
        # With nothing but frozen requests the step loop would spin without doing anything.
        frozen = self.book.frozen
        if (
            frozen
            and not self.finished_req_ids
            and nothing_waits(self)
            and all(request.request_id in frozen for request in self.running)
        ):
            return False
        return bool(super().has_requests())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        # Run slots promised to requests that are about to be committed here are not given to new ones.
        if self.book.parked and self.migration_listener is not None:
            free = self.kv_cache_manager.block_pool.get_num_free_blocks()
            if free < len(self.running):
                self.migration_listener.memory_pressure()
        if self.pause_s:
            time.sleep(self.pause_s)
        now = time.monotonic()
        went_on = bool(self.running)
        if self.migration_listener is not None:
            self.migration_listener.step_begins()
        promised = self.book.promised(now)
        if self.staging.waiting:
            promised += self._restore_staged()
        with promised_run_slots(self, promised), held(self._others_of_arrived()):
            scheduled = super().schedule(*args, **kwargs)
        self.waited_s = 0.0
        # With several batches in flight it is also asked when all requests are on their way: no step begins then.
        if counts := scheduled.num_scheduled_tokens.values():
            if self._generated and went_on:
                self.costs.note(self._generated, now - self.pulse.last)
            self.pulse.beat(now)
            self._generated = len(counts) if all(count == 1 for count in counts) else 0
        return scheduled

    def _restore_staged(self) -> int:
        """Lets staged requests go on that have room. Returns run slots to keep free: all, while one is first in
        line."""
        moves, installs = restore(self)
        if installs and self.migration_listener is not None:
            self.migration_listener.unstage(moves, installs)
        first_in_line = self.staging.waiting and self.running and not committed_waiting(self)
        return run_slots(self) if first_in_line else 0

    @property
    def step_s(self) -> float:
        """How long a step takes with what runs now, in seconds; 0 when the engine is idle. For any thread."""
        usual = self.pulse.step_s
        running = len(self.running) - len(self.book.frozen)
        return (self.costs.expected(running) or usual) if usual and running else 0.0

    def _others_of_arrived(self) -> list[Any]:
        """Requests that wait for one step, so that those that have just been handed over need not wait for them."""
        arrived = [self.requests[one] for one in self.book.watched if one in self.requests]
        arrived = [request for request in arrived if request.status is not RequestStatus.RUNNING]
        others = [request for request in self.running if request.request_id not in self.book.frozen]
        # Once only: should they find no room, the others must not wait again.
        if any(request.request_id in self._went_first for request in arrived) or any(
            request.num_tokens - request.num_computed_tokens > 1 for request in arrived
        ):
            return []
        self._went_first = {request.request_id for request in arrived}
        return others if self.costs.alone(len(arrived), len(others), self.waited_s) else []

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        results = super().update_from_output(scheduler_output, model_runner_output)
        book = self.book
        if book.records:
            for outputs in results.values():
                for output in outputs.outputs:
                    self._remember(output)
        for request_id in [one for one in book.watched if one in scheduler_output.num_scheduled_tokens]:
            self._announce_producing(request_id)
        return results

    def _remember(self, output: Any) -> None:
        record = self.book.records.get(output.request_id)
        if record is None:
            return
        if output.new_logprobs is not None and output.new_token_ids:
            record.logprobs.append(own_columns(output.new_logprobs, record.request.sampling_params.num_logprobs))
        if output.prefill_stats is not None:
            record.prefill = dict(vars(output.prefill_stats))

    def _announce_producing(self, request_id: str) -> None:
        """The first step of any member speaks for its stream: the tokens of all have been replayed."""
        watched = self.book.watched.pop(request_id, None)
        if watched is None:
            return
        self.book.watched = {other: entry for other, entry in self.book.watched.items() if entry[0] != watched[0]}
        if self.migration_listener is not None:
            self.migration_listener.producing(*watched)

    # -- departures ----------------------------------------------------------------------------------------------------

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        request_id, book = request.request_id, self.book
        self._unfreeze(request)
        # A front end that finds a stop string in the replayed text ends the request before its first step here.
        self._announce_producing(request_id)
        ticket = book.ticket_of.pop(request_id, None)
        result = super()._free_request(request, *args, **kwargs)
        if ticket is not None and self.migration_listener is not None:
            self.migration_listener.parked_gone(ticket)
        book.forget(request_id)
        self.staging.forget(request_id)
        if request_id not in book.pinned:
            self.staging.give_back(request_id)
        return result

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        # Its blocks go (or into quarantine, while they are pinned); the session sees it by the request's epoch.
        result = super()._preempt_request(request, *args, **kwargs)
        if request.request_id in self.book.frozen:
            # Not for this side to decide whether it goes on: the target may have it already.
            self._hold_back(request)
            if self.migration_listener is not None:
                self.migration_listener.preempted(request.request_id)
        return result

    def _free_request_blocks(self, request: Any) -> None:
        if request.request_id in self.book.pinned:
            blocks = self.kv_cache_manager.pop_blocks_for_free(request)
            if blocks:
                self.book.quarantine.setdefault(request.request_id, []).extend(blocks)
            return
        super()._free_request_blocks(request)

    # -- operations of the migration engine ----------------------------------------------------------------------------

    def pin(self, request_id: str) -> None:
        self.book.pinned.add(request_id)

    def unpin(self, request_id: str) -> None:
        """Nobody else touches the request's blocks any more: what was held back is freed."""
        self.book.pinned.discard(request_id)
        if request_id not in self.requests:
            self.staging.give_back(request_id)
        blocks = self.book.quarantine.pop(request_id, None)
        if not blocks:
            return
        if self.defer_block_free:
            self.deferred_frees.append((self.sched_step_seq, blocks))
            self._drain_deferred_frees()
        else:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def freeze(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.is_finished() or request_id in self.book.held_back:
            return
        self.book.frozen.add(request_id)
        if request.status.name == "RUNNING":
            request.next_decode_eligible_step = NEVER
        else:
            self._hold_back(request)

    def _hold_back(self, request: Any) -> None:
        take_from_queue(self, request)
        self.book.held_back.add(request.request_id)

    def unfreeze(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self._unfreeze(request)

    def _unfreeze(self, request: Any) -> None:
        book, request_id = self.book, request.request_id
        if request_id not in book.frozen:
            return
        book.frozen.discard(request_id)
        request.next_decode_eligible_step = 0
        if request_id in book.held_back:
            book.held_back.discard(request_id)
            if not request.is_finished():
                put_back_first(self, request)

    def snapshot(self, request_id: str, since: int) -> Snapshot | None:
        """The request as it stands, with output tokens from index `since`; None when it is gone or finished."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        record = self.book.records.get(request_id)
        return Snapshot(
            request_id=request_id,
            status=request.status.name,
            drained=request.num_in_flight_tokens == 0
            and request.num_output_placeholders == 0
            and request.num_stale_output_tokens == 0,
            valid_tokens=request.num_computed_tokens - request.num_in_flight_tokens,
            prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            since=since,
            output_tokens=list(request.output_token_ids[since:]),
            block_ids=list(self.kv_cache_manager.get_block_ids(request_id)[0]),
            epoch=request.num_preemptions,
            seeded=request.sampling_params is not None and request.sampling_params.seed is not None,
            logprobs=tuple(record.logprobs) if record is not None else (),
            prefill=record.prefill if record is not None else None,
        )


class MigrationAsyncScheduler(MigrationScheduler, AsyncScheduler):
    """The same over vLLM's scheduler for asynchronous stepping (GPU default)."""
