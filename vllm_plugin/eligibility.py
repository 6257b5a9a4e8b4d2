"""Which requests can be moved, and if not, why: one code and one sentence each, decided before anything is frozen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_plugin.adapters import source_refusal
from vllm_plugin.book import StreamRecord

__all__ = ["prompt_digest", "queueing_digest", "refusal", "sampling_digest"]

#: Codes that pass by themselves: the same request can be asked about again a moment later.
TRANSIENT = frozenset({"grammar_not_ready", "incomplete", "preempted", "proxy_unreachable", "seeded_prefill", "staged"})


def refusal(
    record: StreamRecord | None, proxy_connected: bool, adapters: Mapping[str, str], keeps_generators: bool
) -> tuple[str, str] | None:
    """Returns (code, sentence) when what runs here for a client's request cannot move now, None when it can.

    `adapters`: fingerprints of the LoRA adapters that this instance serves, by name.
    """
    if record is None:
        return "no_proxy", "The request did not come through the proxy, so nobody could carry its client over."
    if not proxy_connected:
        return "proxy_unreachable", f"The proxy worker {record.proxy!r} that owns the client has no control connection."
    members = list(record.members.values())
    for member in members:
        if (why := _unsupported(member.request) or source_refusal(member.request, adapters)) is not None:
            return why
    for member in members:
        if (why := _not_ready(member.request, keeps_generators)) is not None:
            return why
    if not record.complete:
        return "incomplete", "Some choices of the request have not arrived yet; it can move once all are there."
    return None


def _unsupported(request: Any) -> tuple[str, str] | None:
    params = request.sampling_params
    if params is None:
        return "pooling", "Pooling requests are short and are not moved."
    if params.prompt_logprobs is not None:
        return "prompt_logprobs", "Requests with prompt_logprobs are not moved."
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompt_embeds", "Requests whose prompt is given as embeddings are not moved."
    if request.mm_features:
        return "multimodal", "Multimodal requests are not moved yet."
    if request.resumable:
        return "streaming_input", "Streaming-input sessions are not moved."
    if request.spec_token_ids or request.spec_decode_metrics is not None:
        return "speculative_decoding", "Requests with speculative decoding are not moved yet."
    if getattr(params, "thinking_token_budget", None) is not None:
        return "thinking_budget", "Requests with a thinking budget are not moved yet."
    return None


def _not_ready(request: Any, keeps_generators: bool) -> tuple[str, str] | None:
    if request.is_finished():
        return None
    status = request.status.name
    if status not in ("RUNNING", "WAITING", "PREEMPTED"):
        return (
            "grammar_not_ready",
            f"The request waits for something of its own here ({status}); it can move after that.",
        )
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    begun = bool(computed or request.num_output_tokens)
    if keeps_generators and request.sampling_params.seed is not None and begun and computed < request.num_tokens - 1:
        # vLLM's CPU build fails when it goes on with a prefill that has a generator (v1/worker/gpu_model_runner.py,
        # `set_offset`); on other builds the generator's state would have to be taken in the middle of a draw.
        return "seeded_prefill", "The request is seeded and in prefill; it can move once it decodes."
    return None


def prompt_digest(request: Any) -> bytes:
    """SHA-256 of the prompt's token ids."""
    return hashlib.sha256(msgspec.msgpack.encode(list(request.prompt_token_ids or ()))).digest()


def sampling_digest(request: Any) -> bytes:
    """SHA-256 of everything that steers sampling and stopping, but for `vllm_xargs`, which differs per leg."""
    params = request.sampling_params
    fields = {name: getattr(params, name) for name in params.__struct_fields__ if name != "extra_args"}
    text = ";".join(f"{name}={_stable(value)}" for name, value in sorted(fields.items()))
    return hashlib.sha256(text.encode()).digest()


def queueing_digest(request: Any) -> bytes:
    """SHA-256 of what decides about a request's turn and about who may share its KV blocks."""
    return hashlib.sha256(msgspec.msgpack.encode([request.priority, request.cache_salt])).digest()


def _stable(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return repr(sorted(value))
    if isinstance(value, dict):
        return repr(sorted(value.items(), key=repr))
    return repr(value)
