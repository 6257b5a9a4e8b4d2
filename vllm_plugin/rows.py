"""What an instance tells about one client's request: for the list of requests, and for the request filter."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_plugin.book import StreamRecord
    from vllm_plugin.engine import MigrationEngine

__all__ = ["request_row"]


def request_row(engine: MigrationEngine, request: Any, record: StreamRecord | None) -> dict[str, Any]:
    """The fields of docs/protocol.md, section 4, but for `migratable` and `reason`: what several choices or prompts add
    up to. Engine thread only."""
    scheduler = engine.core.scheduler
    members = [member.request for member in record.members.values()] if record is not None else [request]
    blocks = scheduler.kv_cache_manager.get_block_ids
    return {
        "request_id": record.request_id if record is not None else request.request_id,
        "stream_id": record.stream_id if record is not None else None,
        "proxy": record.proxy if record is not None else None,
        "model": _model(engine, request),
        "status": request.status.name,
        "choices": len(members),
        "prompt_tokens": sum(one.num_prompt_tokens for one in members),
        "output_tokens": sum(one.num_output_tokens for one in members),
        "computed_tokens": sum(one.num_computed_tokens for one in members),
        "max_tokens": request.max_tokens,
        "kv_blocks": sum(len(group) for one in members if not one.is_finished() for group in blocks(one.request_id)),
        "age_s": round(time.time() - request.arrival_time, 3),
    }


def _model(engine: MigrationEngine, request: Any) -> str:
    """The name that the client asked for: of its adapter, or the first served name."""
    if request.lora_request is not None:
        return str(request.lora_request.lora_name)
    served = engine.core.vllm_config.model_config.served_model_name
    return str(served[0] if isinstance(served, list) else served)
