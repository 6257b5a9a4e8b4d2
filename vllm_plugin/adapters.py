"""LoRA adapters of moved requests: the target must have the same one, by name and by content, and a slot for it.

Fingerprints by name come from each instance's API server (`vllm_plugin.front_end`); engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm_plugin.compatibility import adapters_text

__all__ = ["identity", "no_slot", "source_refusal", "target_refusal"]

#: The same shape as everywhere: a code for programs, one sentence for people.
Why = tuple[str, str]


def identity(request: Any, adapters: Mapping[str, str]) -> str:
    """Name and fingerprint of the request's adapter; empty for a request to the model itself."""
    lora = request.lora_request
    return adapters_text({lora.lora_name: adapters.get(lora.lora_name, "unknown")}) if lora is not None else ""


def source_refusal(request: Any, adapters: Mapping[str, str]) -> Why | None:
    """Why a request cannot leave because of its adapter: nobody could say any more whether the target has the same."""
    lora = request.lora_request
    if lora is None or lora.lora_name in adapters:
        return None
    return (
        "lora_unloaded",
        f"The LoRA adapter {lora.lora_name!r} is not among those that the instance serves now: the request ends here.",
    )


def target_refusal(expected: str, request: Any, adapters: Mapping[str, str]) -> Why | None:
    """Why a request that has arrived cannot go on here with the adapter that it had on its source (`identity`)."""
    found = identity(request, adapters)
    if found == expected:
        return None
    return (
        "lora_missing_on_target",
        f"The request's LoRA adapter is {expected or 'none'} on the source and {found or 'none'} on the target: "
        "load the same files there under the same name.",
    )


def no_slot(scheduler: Any, request: Any) -> str | None:
    """One sentence if a step cannot take the request's adapter beside those of the requests that run, or have been
    promised a run slot."""
    lora, config = request.lora_request, scheduler.lora_config
    if lora is None or config is None:
        return None
    now = time.monotonic()
    promised = [stream for stream in scheduler.book.parked.values() if stream.prepared_until > now]
    others = [*scheduler.running, *(one.request for stream in promised for one in stream.arrived())]
    used = {other.lora_request.lora_int_id for other in others if other.lora_request is not None}
    if lora.lora_int_id in used or len(used) < config.max_loras:
        return None
    return f"All {config.max_loras} adapter slots of the target (max_loras) are in use."
