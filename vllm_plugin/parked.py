"""B's side of one stream, on the engine thread: parked, given blocks round by round, committed as if it had been
preempted here.

Resuming a preempted request is a first-class path of vLLM's scheduler (v1/core/sched/scheduler.py,
`scheduled_resumed_reqs`), so a committed request needs nothing special afterwards: it owns its blocks and
continues with the next token.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_plugin import staging
from vllm_plugin.adapters import no_slot
from vllm_plugin.book import MoveBook, ParkedRequest, ParkedStream, split_logprobs
from vllm_plugin.compat import EngineCoreOutput, EngineCoreOutputs, LogprobsLists, PrefillStats, RequestStatus
from vllm_plugin.faults import Faults
from vllm_plugin.grammar import replay_grammar
from vllm_plugin.messages import CommitItem, CommitPart, GrowItem, GrownItem, Refusal
from vllm_plugin.queues import committed_waiting, enqueue_by_age, enqueue_resumed, run_slots
from vllm_plugin.replay import apart, end_apart
from vllm_plugin.scheduler import MigrationScheduler

__all__ = ["COMMIT_DEADLINE_S", "commit", "grow", "prepare"]

#: How long after `Prepare` a commit is still taken; A's last resort is far longer.
COMMIT_DEADLINE_S = 2.0


def grow(scheduler: MigrationScheduler, parked: ParkedRequest, item: GrowItem) -> GrownItem | Refusal:
    """Makes sure that B holds blocks for `item.capacity_tokens`; the first time it looks into the prefix cache.

    The blocks are pinned from here on: A's worker may write into them at any time until the window is closed.
    """
    request, manager = parked.request, scheduler.kv_cache_manager
    request.append_output_token_ids(item.output_tokens)
    if not item.capacity_tokens:
        return GrownItem(item.ticket, item.part, 0, [])
    if item.staged:
        return staging.grow(scheduler, parked, item)
    if parked.hit_tokens is None:
        slots, hit = _first_slots(scheduler, request, item)
    else:
        if item.sent_tokens:
            # Complete, and never written again: others with the same prefix may share these blocks from now on.
            manager.cache_blocks(request, item.sent_tokens)
        missing = item.capacity_tokens - request.num_computed_tokens
        slots = manager.allocate_slots(request, missing, delay_cache_blocks=True) if missing > 0 else ()
        hit = parked.hit_tokens
    if slots is None:
        needed = -(-item.capacity_tokens // scheduler.block_size)
        free = manager.block_pool.get_num_free_blocks()
        message = f"The target has {free} free KV blocks and the request needs {needed}."
        return Refusal(item.ticket, "target_out_of_blocks", message)
    parked.hit_tokens = hit
    parked.full_tokens = request.num_computed_tokens = item.full_tokens
    scheduler.pin(request.request_id)
    return GrownItem(item.ticket, item.part, hit, list(manager.get_block_ids(request.request_id)[0]))


def _first_slots(scheduler: MigrationScheduler, request: Any, item: GrowItem) -> tuple[Any, int]:
    manager, block_size = scheduler.kv_cache_manager, scheduler.block_size
    blocks, hit, _ = manager.get_computed_blocks(request)
    hit = min(hit, item.full_tokens) // block_size * block_size
    slots = manager.allocate_slots(
        request,
        max(item.capacity_tokens - item.full_tokens, 1),
        num_new_computed_tokens=hit,
        new_computed_blocks=manager.truncate_computed_blocks(blocks, hit) if hit else None,
        num_external_computed_tokens=item.full_tokens - hit,
        # Hashes are published later: nobody may share a block that is still being written.
        delay_cache_blocks=True,
        reserved_blocks=scheduler._inflight_prefill_reserved_blocks(),
    )
    return slots, hit


def prepare(scheduler: MigrationScheduler, stream: ParkedStream, queue: bool = False) -> Refusal | None:
    """Promises run slots for the commit that follows within the deadline, or a place in the queue."""
    for parked in stream.arrived():
        structured = parked.request.structured_output_request
        if structured is not None and (not structured.is_grammar_ready or isinstance(structured.grammar, Exception)):
            message = "The target has not compiled the request's grammar yet."
            return Refusal(stream.ticket, "grammar_not_ready", message)
        if not queue and (full := no_slot(scheduler, parked.request)) is not None:
            return Refusal(stream.ticket, "target_out_of_adapter_slots", full)
    now = time.monotonic()
    stream.prepared_until = 0.0
    stream.queued = queue
    if queue:
        stream.prepared_until = now + COMMIT_DEADLINE_S
        return None
    taken = len(scheduler.running) + committed_waiting(scheduler) + scheduler.book.promised(now)
    if taken + len(stream.members) > run_slots(scheduler):
        message = f"All {run_slots(scheduler)} run slots of the target (max_num_seqs) are taken."
        return Refusal(stream.ticket, "target_out_of_run_slots", message)
    stream.prepared_until = now + COMMIT_DEADLINE_S
    return None


def commit(core: Any, items: list[CommitItem], faults: Faults) -> list[Refusal]:
    """Turns parked requests into resumed ones; a stream that cannot be taken as a whole is refused and stays parked."""
    scheduler: MigrationScheduler = core.scheduler
    refused: list[Refusal] = []
    accepted: list[tuple[ParkedStream, CommitItem]] = []
    for item in items:
        stream = scheduler.book.parked.get(item.ticket)
        refusal = _commit_refusal(scheduler, stream, item) or _take_tokens(scheduler, stream, item, faults)
        if refusal is not None:
            refused.append(refusal)
        elif stream is not None:
            accepted.append((stream, item))
    installs = [
        _install(scheduler, parked, part, faults)
        for stream, item in accepted
        for parked, part in zip(stream.arrived(), item.parts, strict=True)
        if part.ended is None and _has_begun(parked, part) and not _is_staged(scheduler, parked, part)
    ]
    if installs:
        core.collective_rpc("vllm_hi_install", args=(installs,))
    for stream, item in accepted:
        _resume(core, stream, item, faults)
    return refused


def _commit_refusal(scheduler: MigrationScheduler, stream: ParkedStream | None, item: CommitItem) -> Refusal | None:
    if stream is None or not stream.complete:
        return Refusal(item.ticket, "unknown_ticket", "No request is parked under this ticket.")
    if stream.prepared_until < time.monotonic():
        return Refusal(item.ticket, "commit_too_late", "The commit came after the target's deadline.")
    if len(item.parts) != len(stream.members):
        message = f"The commit has {len(item.parts)} parts, and {len(stream.members)} requests are parked."
        return Refusal(item.ticket, "state_mismatch", message)
    for parked, part in zip(stream.arrived(), item.parts, strict=True):
        tokens = parked.request.num_tokens + len(part.output_tokens)
        if stream.queued and part.ended is None and (small := _too_small(scheduler, tokens)) is not None:
            return Refusal(item.ticket, "target_too_small", small)
        held = _blocks_held(scheduler, parked) * scheduler.block_size
        if part.ended is None and part.computed_tokens > min(tokens - 1, held):
            message = f"{part.computed_tokens} computed tokens do not fit {tokens} known tokens in blocks for {held}."
            return Refusal(item.ticket, "state_mismatch", message)
    return None


def _blocks_held(scheduler: MigrationScheduler, parked: ParkedRequest) -> int:
    request_id = parked.request.request_id
    blocks = len(scheduler.kv_cache_manager.get_block_ids(request_id)[0])
    return blocks or len(scheduler.staging.held.get(request_id, ()))


def _is_staged(scheduler: MigrationScheduler, parked: ParkedRequest, part: CommitPart) -> bool:
    return bool(part.ended is None and part.computed_tokens and parked.request.request_id in scheduler.staging.held)


def _too_small(scheduler: MigrationScheduler, tokens: int) -> str | None:
    """Why a request of so many tokens would wait for ever: it and its next token need more blocks than there are."""
    needed, total = -(-(tokens + 1) // scheduler.block_size), scheduler.kv_cache_manager.kv_cache_config.num_blocks - 1
    if needed <= total:
        return None
    return f"The request needs {needed} KV blocks and the target has {total} in all."


def _take_tokens(
    scheduler: MigrationScheduler, stream: ParkedStream | None, item: CommitItem, faults: Faults
) -> Refusal | None:
    for parked, part in zip(stream.arrived() if stream is not None else (), item.parts, strict=True):
        parked.request.append_output_token_ids(part.output_tokens)
        replay = part.ended is None and not faults.skip_grammar
        if replay and not replay_grammar(scheduler.structured_output_manager, parked.request):
            return Refusal(item.ticket, "grammar_rejected", "The target's grammar rejects the tokens so far.")
    return None


def _has_begun(parked: ParkedRequest, part: CommitPart) -> bool:
    """Whether the request has run on A; else it is as new here as any other."""
    return bool(part.computed_tokens or parked.request.num_output_tokens)


def _install(scheduler: MigrationScheduler, parked: ParkedRequest, part: CommitPart, faults: Faults) -> dict[str, Any]:
    request = parked.request
    prompt, output = list(request.prompt_token_ids), list(request.output_token_ids)
    if faults.drop_output_split:
        prompt, output = prompt + output, []
    return {
        "request_id": request.request_id,
        "prompt_token_ids": prompt,
        "output_token_ids": output,
        "sampling_params": request.sampling_params,
        "generator": part.generator,
        "block_ids": [list(group) for group in scheduler.kv_cache_manager.get_block_ids(request.request_id)],
        "computed_tokens": part.computed_tokens,
        "lora_request": None if faults.drop_lora else request.lora_request,
    }


def _resume(core: Any, stream: ParkedStream, item: CommitItem, faults: Faults) -> None:
    scheduler: MigrationScheduler = core.scheduler
    book = scheduler.book
    del book.parked[stream.ticket]
    members = list(zip(stream.arrived(), item.parts, strict=True))
    tokens = sum(parked.request.num_output_tokens for parked, _ in members)
    replays: list[Any] = []
    for parked, part in members:
        request = parked.request
        book.ticket_of.pop(request.request_id, None)
        if part.ended is not None or request.num_output_tokens:
            replays += end_apart(_replay(book, request, part, faults))
        if part.ended is None:
            if _is_staged(scheduler, parked, part):
                _stage(scheduler, parked, part, faults)
            else:
                _enqueue(scheduler, parked, part)
            if not stream.queued:
                watched = (stream.ticket, stream.expectation.stream, tokens, time.monotonic())
                book.watched[request.request_id] = watched
        else:
            request.stop_reason = part.ended[1]
            scheduler.finish_requests([request.request_id], RequestStatus[part.ended[0]])
        scheduler.unpin(request.request_id)
    if replays:
        client = members[0][0].request.client_index
        core.output_queue.put_nowait((client, EngineCoreOutputs(outputs=apart(replays))))
    if stream.queued and scheduler.migration_listener is not None:
        scheduler.migration_listener.queued(stream.ticket, stream.expectation.stream, tokens)


def _stage(scheduler: MigrationScheduler, parked: ParkedRequest, part: CommitPart, faults: Faults) -> None:
    """Until there is room it has computed nothing and stands in no queue."""
    parked.request.num_computed_tokens = 0
    parked.request.status = RequestStatus.PREEMPTED
    scheduler.staging.add(
        staging.StagedRequest(
            parked.request,
            part.computed_tokens,
            lambda: _install(scheduler, parked, part, faults),
            lambda: _enqueue(scheduler, parked, part),
        )
    )


def _enqueue(scheduler: MigrationScheduler, parked: ParkedRequest, part: CommitPart) -> None:
    request = parked.request
    if not _has_begun(parked, part):
        enqueue_by_age(scheduler, request)
        return
    request.num_computed_tokens = part.computed_tokens
    request.prefill_stats = None
    request.num_preemptions = 1
    request.status = RequestStatus.PREEMPTED
    if part.computed_tokens:
        scheduler.kv_cache_manager.cache_blocks(request, part.computed_tokens)
        enqueue_resumed(scheduler, request)
    else:
        enqueue_by_age(scheduler, request)


def _replay(book: MoveBook, request: Any, part: CommitPart, faults: Faults) -> Any:
    """One output with everything generated so far: B's front end detokenizes, matches stop strings and counts as if
    it had been there from the start. The history travels on: the request may move again."""
    logprobs = split_logprobs(part.logprobs, LogprobsLists) if part.logprobs is not None else None
    record = book.records.get(request.request_id)
    if record is not None:
        record.logprobs = [logprobs] if logprobs is not None else []
        record.prefill = part.prefill
    tokens = list(request.output_token_ids)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=tokens[:-1] if faults.drop_replay_tail else tokens,
        new_logprobs=logprobs,
        finish_reason=RequestStatus.get_finished_reason(RequestStatus[part.ended[0]]) if part.ended else None,
        stop_reason=part.ended[1] if part.ended else None,
        prefill_stats=PrefillStats(**part.prefill) if part.prefill is not None else None,
    )
