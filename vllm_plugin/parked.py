"""B's side of one request, on the engine thread: parked, given blocks round by round, committed as if it had been
preempted here.

Resuming a preempted request is a first-class path of vLLM's scheduler (v1/core/sched/scheduler.py,
`scheduled_resumed_reqs`), so a committed request needs nothing special afterwards: it owns its blocks and
continues with the next token.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_plugin.book import ParkedRequest, split_logprobs
from vllm_plugin.compat import (
    EngineCoreOutput,
    EngineCoreOutputs,
    LogprobsLists,
    PrefillStats,
    RequestStatus,
)
from vllm_plugin.messages import CommitItem, GrowItem, GrownItem, Refusal
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
    if parked.hit_tokens is None:
        slots, hit = _first_slots(scheduler, request, item)
    else:
        missing = item.capacity_tokens - request.num_computed_tokens
        slots = manager.allocate_slots(request, missing, delay_cache_blocks=True) if missing > 0 else ()
        hit = parked.hit_tokens
    if slots is None:
        needed = -(-item.capacity_tokens // scheduler.block_size)
        free = manager.block_pool.get_num_free_blocks()
        message = f"The target has {free} free KV blocks and the request needs {needed}."
        return Refusal(parked.ticket, "target_out_of_blocks", message)
    parked.hit_tokens = hit
    parked.full_tokens = request.num_computed_tokens = item.full_tokens
    scheduler.pin(request.request_id)
    return GrownItem(parked.ticket, hit, list(manager.get_block_ids(request.request_id)[0]))


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
        # Hashes are published only at commit: nobody may share a block that is still being written.
        delay_cache_blocks=True,
        reserved_blocks=scheduler._inflight_prefill_reserved_blocks(),
    )
    return slots, hit


def prepare(scheduler: MigrationScheduler, parked: ParkedRequest) -> Refusal | None:
    """Promises a run slot for the commit that follows within the deadline."""
    structured = parked.request.structured_output_request
    if structured is not None and (not structured.is_grammar_ready or isinstance(structured.grammar, Exception)):
        return Refusal(parked.ticket, "grammar_not_ready", "The target has not compiled the request's grammar yet.")
    now = time.monotonic()
    promised = sum(1 for other in scheduler.book.parked.values() if (other.prepared_until or 0.0) > now)
    if len(scheduler.running) + len(scheduler.kv_holding_waiting) + promised >= scheduler.max_num_active_reqs:
        message = f"All {scheduler.max_num_active_reqs} run slots of the target (max_num_seqs) are taken."
        return Refusal(parked.ticket, "target_out_of_run_slots", message)
    parked.prepared_until = now + COMMIT_DEADLINE_S
    return None


def commit(core: Any, items: list[CommitItem], replay_grammar: bool = True) -> list[Refusal]:
    """Turns parked requests into resumed ones; what cannot be taken is refused and stays parked."""
    scheduler: MigrationScheduler = core.scheduler
    refused: list[Refusal] = []
    accepted: list[tuple[ParkedRequest, CommitItem]] = []
    for item in items:
        parked = scheduler.book.parked.get(item.ticket)
        refusal = _commit_refusal(scheduler, parked, item)
        if refusal is None and parked is not None:
            parked.request.append_output_token_ids(item.output_tokens)
            if replay_grammar and not _replay_grammar(scheduler, parked.request):
                refusal = Refusal(item.ticket, "grammar_rejected", "The target's grammar rejects the tokens so far.")
            else:
                accepted.append((parked, item))
        if refusal is not None:
            refused.append(refusal)
    if accepted:
        core.collective_rpc("vllm_hi_install", args=([_install(scheduler, *pair) for pair in accepted],))
    for parked, item in accepted:
        _resume(core, parked, item)
    return refused


def _commit_refusal(scheduler: MigrationScheduler, parked: ParkedRequest | None, item: CommitItem) -> Refusal | None:
    if parked is None:
        return Refusal(item.ticket, "unknown_ticket", "No request is parked under this ticket.")
    if (parked.prepared_until or 0.0) < time.monotonic():
        return Refusal(item.ticket, "commit_too_late", "The commit came after the target's deadline.")
    tokens = parked.request.num_tokens + len(item.output_tokens)
    held = len(scheduler.kv_cache_manager.get_block_ids(parked.request.request_id)[0]) * scheduler.block_size
    if item.computed_tokens != tokens - 1 or item.computed_tokens > held:
        message = f"{item.computed_tokens} computed tokens do not fit {tokens} known tokens in blocks for {held}."
        return Refusal(item.ticket, "state_mismatch", message)
    return None


def _replay_grammar(scheduler: MigrationScheduler, request: Any) -> bool:
    """Brings the freshly compiled grammar to where it stood on A: its state follows from the tokens alone."""
    accepted: bool = scheduler.structured_output_manager.accept_tokens(request, list(request.output_token_ids))
    return accepted


def _install(scheduler: MigrationScheduler, parked: ParkedRequest, item: CommitItem) -> dict[str, Any]:
    request = parked.request
    return {
        "request_id": request.request_id,
        "prompt_token_ids": list(request.prompt_token_ids),
        "output_token_ids": list(request.output_token_ids),
        "sampling_params": request.sampling_params,
        "generator": item.generator,
        "block_ids": [list(group) for group in scheduler.kv_cache_manager.get_block_ids(request.request_id)],
        "computed_tokens": item.computed_tokens,
    }


def _resume(core: Any, parked: ParkedRequest, item: CommitItem) -> None:
    scheduler: MigrationScheduler = core.scheduler
    book, request = scheduler.book, parked.request
    logprobs = split_logprobs(item.logprobs, LogprobsLists) if item.logprobs is not None else None
    record = book.records.get(request.request_id)
    stream = record.stream if record is not None else ""
    if record is not None:
        # The history travels on: the request may move again.
        record.logprobs = [logprobs] if logprobs is not None else []
        record.prefill = item.prefill
    request.num_computed_tokens = item.computed_tokens
    request.prefill_stats = None
    request.num_preemptions = 1
    request.status = RequestStatus.PREEMPTED
    scheduler.kv_cache_manager.cache_blocks(request, item.computed_tokens)
    del book.parked[parked.ticket]
    book.ticket_of.pop(request.request_id, None)
    scheduler.unpin(request.request_id)
    book.watched[request.request_id] = (parked.ticket, stream, request.num_output_tokens)
    scheduler._enqueue_waiting_request(request)
    # One output with everything generated so far: B's front end detokenizes, matches stop strings and counts as if
    # it had been there from the start.
    replay = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=list(request.output_token_ids),
        new_logprobs=logprobs,
        prefill_stats=PrefillStats(**item.prefill) if item.prefill is not None else None,
    )
    core.output_queue.put_nowait((request.client_index, EngineCoreOutputs(outputs=[replay])))
