"""The only door to vLLM internals.

Every name the plugin takes from vLLM is listed in `_NAMES` and resolved on first use; everything else it relies on
(methods it overrides, attributes it reads, arguments it passes) has a named probe in `_PROBES`. A missing probe
never breaks serving: the plugin then leaves the engine alone and the migration endpoints answer 501 with the
probe's name.

Works on vLLM 0.30 to 0.32 (v1 engine, docs/compatibility.md); where their scheduler's queues differ,
`queues.py` hides it. Paths in comments are relative to the installed `vllm` package.
"""

from __future__ import annotations

import ast
import functools
import importlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_plugin.sources import Installed, Sources, assigned_attributes, class_in, resolve, syntax_digest

__all__ = [
    "install_engine_utility",
    "missing_probes",
    "probes",
    "sampler_fingerprint",
    "server_function",
    "sleep_while_waiting",
    "vllm_version",
]

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
    PauseState: Any
    PrefillStats: Any
    Request: Any
    RequestStatus: Any
    SamplingParams: Any
    Scheduler: Any
    get_pp_group: Any
    get_tp_group: Any
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
    "PauseState": "vllm.v1.core.sched.interface:PauseState",
    "PrefillStats": "vllm.v1.metrics.stats:PrefillStats",
    "Request": "vllm.v1.request:Request",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "Scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "get_pp_group": "vllm.distributed.parallel_state:get_pp_group",
    "get_tp_group": "vllm.distributed.parallel_state:get_tp_group",
    "init_logger": "vllm.logger:init_logger",
}

#: Classes that the plugin only meets as attributes of others.
_PATHS = {
    **_NAMES,
    "AsyncMPClient": "vllm.v1.engine.core_client:AsyncMPClient",
    "BlockPool": "vllm.v1.core.block_pool:BlockPool",
    "LoRARequest": "vllm.lora.request:LoRARequest",
    "ModelConfig": "vllm.config:ModelConfig",
    "NewRequestData": "vllm.v1.core.sched.output:NewRequestData",
    "RequestQueue": "vllm.v1.core.sched.request_queue:RequestQueue",
    "StructuredOutputManager": "vllm.v1.structured_output:StructuredOutputManager",
    "StructuredOutputRequest": "vllm.v1.structured_output.request:StructuredOutputRequest",
    "VllmConfig": "vllm.config:VllmConfig",
}

#: The code that turns random state into tokens, for the V1 and the V2 runner.
_SAMPLERS = ("vllm.v1.sample.ops.topk_topp_sampler", "vllm.v1.worker.gpu.sample.gumbel")

#: Where `vllm serve` finds the parts of its server.
_SERVER_MODULES = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")

#: The method by which the API server reaches the plugin's half in the engine core (v1/engine/core.py looks
#: utilities up by name).
ENGINE_UTILITY = "vllm_hi"
ENGINE_PUMP = "vllm_hi_pump"


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve(_NAMES[name])
    return value


# -- probes ------------------------------------------------------------------------------------------------------------

Probe = Callable[[Sources], bool]


def _name(name: str) -> Probe:
    return lambda sources: sources.has(_PATHS[name])


def _method(cls: str, method: str, *arguments: str) -> Probe:
    return lambda sources: set(arguments) <= sources.parameters(_PATHS[cls], method)


def _assigns(cls: str, *attributes: str) -> Probe:
    return lambda sources: set(attributes) <= sources.assigned(_PATHS[cls])


def _members(cls: str, *members: str) -> Probe:
    return lambda sources: set(members) <= sources.members(_PATHS[cls])


def _method_says(cls: str, method: str, text: str) -> Probe:
    return lambda sources: text in sources.method_text(_PATHS[cls], method)


def _one_of(*alternatives: Probe) -> Probe:
    """For what is called differently in the supported versions; `queues.py` chooses."""
    return lambda sources: any(_passes(probe, sources) for probe in alternatives)


def _all_of(*parts: Probe) -> Probe:
    return lambda sources: all(probe(sources) for probe in parts)


def _runner_keeps_requests(sources: Sources) -> bool:
    # Read, not imported: the API server has no use for a model runner.
    runner = class_in(sources.module_text("vllm.v1.worker.gpu_model_runner"), "GPUModelRunner")
    return "requests" in assigned_attributes(runner)


def _front_end_tells(sources: Sources) -> bool:
    # Read, not imported: engine and workers have no use for the API server's classes.
    models = class_in(sources.module_text("vllm.entrypoints.openai.models.serving"), "OpenAIServingModels")
    client = class_in(sources.module_text("vllm.v1.engine.async_llm"), "AsyncLLM")
    methods = {part.name for part in client.body if isinstance(part, ast.FunctionDef)}
    return "lora_requests" in assigned_attributes(models) and "tokenizer" in methods


_PROBES: dict[str, Probe] = {
    **{f"name.{name}": _name(name) for name in _NAMES},
    # Overridden or called on the scheduler (v1/core/sched/scheduler.py).
    "scheduler.add_request": _method("Scheduler", "add_request", "request"),
    "scheduler.finish_requests": _method("Scheduler", "finish_requests", "request_ids", "finished_status"),
    "scheduler._free_request": _method("Scheduler", "_free_request", "request", "delay_free_blocks"),
    "scheduler._free_request_blocks": _method("Scheduler", "_free_request_blocks", "request"),
    "scheduler._preempt_request": _method("Scheduler", "_preempt_request", "request", "timestamp"),
    "scheduler._enqueue_waiting_request": _method("Scheduler", "_enqueue_waiting_request", "request"),
    "scheduler._inflight_prefill_reserved_blocks": _method("Scheduler", "_inflight_prefill_reserved_blocks"),
    "scheduler._drain_deferred_frees": _method("Scheduler", "_drain_deferred_frees"),
    "scheduler.update_from_output": _method(
        "Scheduler", "update_from_output", "scheduler_output", "model_runner_output"
    ),
    "scheduler.schedule": _method("Scheduler", "schedule"),
    "scheduler.has_requests": _method("Scheduler", "has_requests"),
    "scheduler.get_request_counts": _method("Scheduler", "get_request_counts"),
    "scheduler.set_pause_state": _method("Scheduler", "set_pause_state", "pause_state"),
    "scheduler.attributes": _assigns(
        "Scheduler",
        "requests",
        "running",
        "waiting",
        "vllm_config",
        "scheduler_config",
        "kv_cache_config",
        "kv_cache_manager",
        "lora_config",
        "block_size",
        "log_stats",
        "structured_output_manager",
    ),
    "scheduler.run_slots": _one_of(
        _assigns("Scheduler", "max_num_active_reqs"), _assigns("Scheduler", "max_num_running_reqs")
    ),
    "scheduler.resumed_first": _one_of(
        _assigns("Scheduler", "kv_holding_waiting"), _assigns("Scheduler", "skipped_waiting")
    ),
    "scheduler.request_queue": _members("RequestQueue", "prepend_request", "remove_requests", "__len__", "__iter__"),
    "scheduler.defer_block_free": _assigns("Scheduler", "defer_block_free", "deferred_frees", "sched_step_seq"),
    "scheduler.finished_req_ids": _assigns("Scheduler", "finished_req_ids"),
    "model_config.heads": _members("ModelConfig", "get_num_attention_heads", "get_total_num_kv_heads", "use_mla"),
    "vllm_config.max_concurrent_batches": _members("VllmConfig", "max_concurrent_batches"),
    # v1/request.py
    "request.next_decode_eligible_step": _assigns("Request", "next_decode_eligible_step"),
    "request.num_in_flight_tokens": _assigns("Request", "num_in_flight_tokens"),
    "request.num_output_placeholders": _assigns("Request", "num_output_placeholders"),
    "request.num_stale_output_tokens": _assigns("Request", "num_stale_output_tokens"),
    "request.num_preemptions": _assigns("Request", "num_preemptions"),
    "request.prefill_stats": _assigns("Request", "prefill_stats"),
    "request.append_output_token_ids": _method("Request", "append_output_token_ids", "token_ids"),
    "request.attributes": _assigns(
        "Request",
        "request_id",
        "client_index",
        "status",
        "sampling_params",
        "arrival_time",
        "priority",
        "cache_salt",
        "prompt_token_ids",
        "num_prompt_tokens",
        "num_computed_tokens",
        "output_token_ids",
        "structured_output_request",
        # Read to decide that a request cannot move: one that were missed here would move wrongly.
        "prompt_embeds",
        "mm_features",
        "lora_request",
        "resumable",
        "spec_token_ids",
        "spec_decode_metrics",
    ),
    "request.members": _members("Request", "is_finished", "num_tokens", "num_output_tokens"),
    "sampling_params.fields": _members(
        "SamplingParams", "extra_args", "logprobs", "n", "num_logprobs", "prompt_logprobs", "seed"
    ),
    "structured_output.request": _members(
        "StructuredOutputRequest", "is_grammar_ready", "grammar", "reasoner", "reasoning_ended"
    ),
    "structured_output.accept_tokens": _method("StructuredOutputManager", "accept_tokens", "request", "new_token_ids"),
    # v1/core/kv_cache_manager.py
    "kv_cache_manager.allocate_slots": _method(
        "KVCacheManager",
        "allocate_slots",
        "num_new_computed_tokens",
        "new_computed_blocks",
        "num_external_computed_tokens",
        "delay_cache_blocks",
        "reserved_blocks",
    ),
    "kv_cache_manager.get_computed_blocks": _method("KVCacheManager", "get_computed_blocks", "request"),
    "kv_cache_manager.truncate_computed_blocks": _method("KVCacheManager", "truncate_computed_blocks"),
    "kv_cache_manager.pop_blocks_for_free": _method("KVCacheManager", "pop_blocks_for_free", "request"),
    "kv_cache_manager.get_block_ids": _method("KVCacheManager", "get_block_ids", "request_id"),
    "kv_cache_manager.cache_blocks": _method("KVCacheManager", "cache_blocks", "request", "num_computed_tokens"),
    "kv_cache_manager.block_pool": _all_of(
        _assigns("KVCacheManager", "block_pool"), _members("BlockPool", "free_blocks", "get_num_free_blocks")
    ),
    # v1/engine/core.py
    "engine_core.collective_rpc": _method("EngineCore", "collective_rpc", "method", "args"),
    "engine_core.queues": _assigns("EngineCoreProc", "input_queue", "output_queue"),
    "engine_core._send_abort_outputs": _method("EngineCoreProc", "_send_abort_outputs", "aborted_reqs"),
    "engine_core._send_error_outputs_to_client": _method("EngineCoreProc", "_send_error_outputs_to_client"),
    "engine_core.utility_future": _method_says(
        "EngineCoreProc", "_invoke_utility_method", "isinstance(result, Future)"
    ),
    "engine_core.call_utility_async": _method("AsyncMPClient", "call_utility_async", "method"),
    "engine_core_output.fields": _members(
        "EngineCoreOutput", "request_id", "new_token_ids", "new_logprobs", "prefill_stats", "finish_reason"
    ),
    "engine_core_outputs.fields": _members("EngineCoreOutputs", "outputs"),
    "logprobs_lists.fields": _members("LogprobsLists", "logprob_token_ids", "logprobs", "sampled_token_ranks"),
    # The worker's half: the V1 runner resumes what is in its `requests`, the V2 runner what the scheduler sends.
    # What is read to compare two front ends, and the adapter of a request.
    "front_end": _front_end_tells,
    "lora_request.fields": _members("LoRARequest", "lora_name", "lora_int_id", "lora_path"),
    "cached_request_state.fields": _members(
        "CachedRequestState",
        "lora_request",
        "req_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "generator",
        "block_ids",
        "num_computed_tokens",
        "output_token_ids",
    ),
    "model_runner.requests": _runner_keeps_requests,
    "new_request_data.prefill_token_ids": _members("NewRequestData", "prefill_token_ids"),
    "sampler.sources": lambda sources: all(sources.module_text(module) for module in _SAMPLERS),
    # One logical shape for every layer, whatever the physical layout (0.29+, RFC #42082).
    "kv_cache_layout": lambda sources: sources.has("vllm.v1.kv_cache_layout"),
}


def probes(sources: Sources | None = None) -> dict[str, bool]:
    """Evaluates every probe, in this process or on `sources`. A probe that raises counts as missing."""
    looked_at = sources or Installed()
    return {name: _passes(probe, looked_at) for name, probe in _PROBES.items()}


def _passes(probe: Probe, sources: Sources) -> bool:
    # A probe looks into code that may have changed in any way: whatever it raises means "not as we know it".
    try:
        return bool(probe(sources))
    except Exception:
        return False


def missing_probes(sources: Sources | None = None) -> list[str]:
    """Names of the probes that fail, sorted; empty when migration is supported."""
    return sorted(name for name, found in probes(sources).items() if not found)


def vllm_version() -> str:
    """The version that vLLM reports of itself."""
    version: str = importlib.import_module("vllm.version").__version__
    return version


def server_function(name: str) -> Any:
    """`setup_server` or `run_server_worker` of vLLM's API server, which moved with 0.32.

    Raises:
        RuntimeError: this vLLM has none.
    """
    for module in _SERVER_MODULES:
        try:
            return resolve(f"{module}:{name}")
        except (ImportError, AttributeError):
            continue
    raise RuntimeError(f"this vLLM has no {name}")


def sampler_fingerprint() -> str:
    """Eight hex digits that change with the code that draws tokens.

    A generator's state means the same only to the same code: 0.31 and 0.32 each draw other tokens from one state.
    """
    return syntax_digest(Installed(), _SAMPLERS)[:8]


def install_engine_utility() -> None:
    """Adds the plugin's two utilities to `EngineCore`. Adds, never replaces; safe to call twice.

    Raises:
        RuntimeError: vLLM already has an attribute of that name.
    """
    engine_core = resolve(_NAMES["EngineCore"])
    from vllm_plugin import engine

    for name, function in ((ENGINE_UTILITY, engine.utility), (ENGINE_PUMP, engine.pump)):
        present = engine_core.__dict__.get(name)
        if present is function:
            continue
        if hasattr(engine_core, name):
            raise RuntimeError(f"vLLM's EngineCore already has an attribute {name!r}")
        setattr(engine_core, name, function)


def sleep_while_waiting(seconds: float) -> bool:
    """Lets this process sleep where vLLM yields the processor in a loop while it waits for another of its processes
    (distributed/device_communicators/shm_broadcast.py, `SpinCondition.wait`). Returns False where it does not do so.

    The one thing of vLLM that is replaced, and only on demand: with few cores for many processes, those that wait take
    the cores of those that compute. `SpinCondition.busy_loop_s` is no way round: its wake-ups get lost.
    """
    try:
        queues = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    except ImportError:
        return False
    if not hasattr(queues, "sched_yield"):
        return False
    queues.sched_yield = functools.partial(time.sleep, seconds)  # type: ignore[attr-defined]
    return True
