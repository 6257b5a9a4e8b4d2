"""The only door to vLLM internals.

Every name the plugin takes from vLLM is listed in `_NAMES` and resolved on first use; everything else it relies on
(methods it overrides, attributes it reads, arguments it passes) has a named probe in `_PROBES`. A missing probe
never breaks serving: the plugin then leaves the engine alone and the migration endpoints answer 501 with the
probe's name.

Written against vLLM 0.32 (v1 engine). Paths in comments are relative to the installed `vllm` package.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["install_engine_utility", "missing_probes", "probes", "vllm_version"]

if TYPE_CHECKING:
    # Resolved by `__getattr__` below; vLLM's own types differ between its versions.
    AsyncScheduler: Any
    CachedRequestState: Any
    EngineCore: Any
    EngineCoreEventType: Any
    EngineCoreOutput: Any
    EngineCoreOutputs: Any
    EngineCoreProc: Any
    EngineCoreRequestType: Any
    FullAttentionSpec: Any
    KVCacheManager: Any
    LogprobsLists: Any
    PrefillStats: Any
    Request: Any
    RequestStatus: Any
    SamplingParams: Any
    Scheduler: Any
    init_logger: Any

#: Our name -> where vLLM keeps it.
_NAMES = {
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "CachedRequestState": "vllm.v1.worker.gpu_input_batch:CachedRequestState",
    "EngineCore": "vllm.v1.engine.core:EngineCore",
    "EngineCoreEventType": "vllm.v1.engine:EngineCoreEventType",
    "EngineCoreOutput": "vllm.v1.engine:EngineCoreOutput",
    "EngineCoreOutputs": "vllm.v1.engine:EngineCoreOutputs",
    "EngineCoreProc": "vllm.v1.engine.core:EngineCoreProc",
    "EngineCoreRequestType": "vllm.v1.engine:EngineCoreRequestType",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "KVCacheManager": "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "LogprobsLists": "vllm.v1.outputs:LogprobsLists",
    "PrefillStats": "vllm.v1.metrics.stats:PrefillStats",
    "Request": "vllm.v1.request:Request",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "Scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "init_logger": "vllm.logger:init_logger",
}

#: The method by which the API server reaches the plugin's half in the engine core (v1/engine/core.py looks
#: utilities up by name).
ENGINE_UTILITY = "vllm_hi"
ENGINE_PUMP = "vllm_hi_pump"


def _resolve(name: str) -> Any:
    module, _, attribute = _NAMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _resolve(name)
    return value


def _has_name(name: str) -> Callable[[], bool]:
    return lambda: _resolve(name) is not None


def _has_method(name: str, method: str, *arguments: str) -> Callable[[], bool]:
    def probe() -> bool:
        function = getattr(_resolve(name), method, None)
        return function is not None and set(arguments) <= set(inspect.signature(function).parameters)

    return probe


def _sets_attribute(name: str, attribute: str) -> Callable[[], bool]:
    """Instance attributes exist only after `__init__`: look for the assignment in its source."""
    return lambda: f"self.{attribute}" in inspect.getsource(_resolve(name).__init__)


def _has_fields(name: str, *fields: str) -> Callable[[], bool]:
    def probe() -> bool:
        cls = _resolve(name)
        declared = getattr(cls, "__struct_fields__", None) or getattr(cls, "_fields", None) or cls.__annotations__
        return set(fields) <= set(declared)

    return probe


_PROBES: dict[str, Callable[[], bool]] = {
    **{f"name.{name}": _has_name(name) for name in _NAMES},
    # Overridden or called on the scheduler (v1/core/sched/scheduler.py).
    "scheduler.add_request": _has_method("Scheduler", "add_request", "request"),
    "scheduler.finish_requests": _has_method("Scheduler", "finish_requests", "request_ids", "finished_status"),
    "scheduler._free_request": _has_method("Scheduler", "_free_request", "request", "delay_free_blocks"),
    "scheduler._free_request_blocks": _has_method("Scheduler", "_free_request_blocks", "request"),
    "scheduler._preempt_request": _has_method("Scheduler", "_preempt_request", "request", "timestamp"),
    "scheduler._enqueue_waiting_request": _has_method("Scheduler", "_enqueue_waiting_request", "request"),
    "scheduler._inflight_prefill_reserved_blocks": _has_method("Scheduler", "_inflight_prefill_reserved_blocks"),
    "scheduler.update_from_output": _has_method(
        "Scheduler", "update_from_output", "scheduler_output", "model_runner_output"
    ),
    "scheduler.schedule": _has_method("Scheduler", "schedule"),
    "scheduler.has_requests": _has_method("Scheduler", "has_requests"),
    "scheduler.max_num_active_reqs": _sets_attribute("Scheduler", "max_num_active_reqs"),
    "scheduler.defer_block_free": _sets_attribute("Scheduler", "defer_block_free"),
    "scheduler.kv_holding_waiting": _sets_attribute("Scheduler", "kv_holding_waiting"),
    "scheduler.finished_req_ids": _sets_attribute("Scheduler", "finished_req_ids"),
    # v1/request.py
    "request.next_decode_eligible_step": _sets_attribute("Request", "next_decode_eligible_step"),
    "request.num_in_flight_tokens": _sets_attribute("Request", "num_in_flight_tokens"),
    "request.num_output_placeholders": _sets_attribute("Request", "num_output_placeholders"),
    "request.num_stale_output_tokens": _sets_attribute("Request", "num_stale_output_tokens"),
    "request.num_preemptions": _sets_attribute("Request", "num_preemptions"),
    "request.prefill_stats": _sets_attribute("Request", "prefill_stats"),
    "request.append_output_token_ids": _has_method("Request", "append_output_token_ids", "token_ids"),
    # v1/core/kv_cache_manager.py
    "kv_cache_manager.allocate_slots": _has_method(
        "KVCacheManager",
        "allocate_slots",
        "num_new_computed_tokens",
        "new_computed_blocks",
        "num_external_computed_tokens",
        "delay_cache_blocks",
        "reserved_blocks",
    ),
    "kv_cache_manager.get_computed_blocks": _has_method("KVCacheManager", "get_computed_blocks", "request"),
    "kv_cache_manager.truncate_computed_blocks": _has_method("KVCacheManager", "truncate_computed_blocks"),
    "kv_cache_manager.pop_blocks_for_free": _has_method("KVCacheManager", "pop_blocks_for_free", "request"),
    "kv_cache_manager.get_block_ids": _has_method("KVCacheManager", "get_block_ids", "request_id"),
    "kv_cache_manager.cache_blocks": _has_method("KVCacheManager", "cache_blocks", "request", "num_computed_tokens"),
    # v1/engine/core.py
    "engine_core.collective_rpc": _has_method("EngineCore", "collective_rpc", "method", "args"),
    "engine_core._send_abort_outputs": _has_method("EngineCoreProc", "_send_abort_outputs", "aborted_reqs"),
    "engine_core._send_error_outputs_to_client": _has_method("EngineCoreProc", "_send_error_outputs_to_client"),
    "engine_core.utility_future": lambda: (
        "isinstance(result, Future)" in inspect.getsource(_resolve("EngineCoreProc")._invoke_utility_method)
    ),
    "engine_core_output.fields": _has_fields(
        "EngineCoreOutput", "request_id", "new_token_ids", "new_logprobs", "prefill_stats", "finish_reason"
    ),
    "logprobs_lists.fields": _has_fields("LogprobsLists", "logprob_token_ids", "logprobs", "sampled_token_ranks"),
    "cached_request_state.fields": _has_fields(
        "CachedRequestState", "generator", "block_ids", "num_computed_tokens", "output_token_ids"
    ),
    # One logical shape for every layer, whatever the physical layout (0.29+, RFC #42082).
    "kv_cache_layout": lambda: importlib.import_module("vllm.v1.kv_cache_layout") is not None,
}


def probes() -> dict[str, bool]:
    """Evaluates every probe in this process. A probe that raises counts as missing."""
    return {name: _passes(probe) for name, probe in _PROBES.items()}


def _passes(probe: Callable[[], bool]) -> bool:
    # A probe looks into code that may have changed in any way: whatever it raises means "not as we know it".
    try:
        return bool(probe())
    except Exception:
        return False


def missing_probes() -> list[str]:
    """Names of the probes that fail, sorted; empty when migration is supported."""
    return sorted(name for name, found in probes().items() if not found)


def vllm_version() -> str:
    """The version that vLLM reports of itself."""
    version: str = importlib.import_module("vllm.version").__version__
    return version


def install_engine_utility() -> None:
    """Adds the plugin's two utilities to `EngineCore`. Adds, never replaces; safe to call twice.

    Raises:
        RuntimeError: vLLM already has an attribute of that name.
    """
    engine_core = _resolve("EngineCore")
    from vllm_plugin import engine

    for name, function in ((ENGINE_UTILITY, engine.utility), (ENGINE_PUMP, engine.pump)):
        present = engine_core.__dict__.get(name)
        if present is function:
            continue
        if hasattr(engine_core, name):
            raise RuntimeError(f"vLLM's EngineCore already has an attribute {name!r}")
        setattr(engine_core, name, function)
