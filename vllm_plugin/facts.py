"""What an instance says about itself: can it take part in migrations, and the factors two instances are compared by."""

from __future__ import annotations

import hashlib
from typing import Any

from vllm_plugin.compat import FullAttentionSpec, missing_probes, vllm_version
from vllm_plugin.wire import PROTOCOL_VERSION

__all__ = ["factors", "unsupported"]


def unsupported(core: Any) -> list[str]:
    """Names of what is missing for migration in this engine core; empty when it is supported."""
    missing = missing_probes()
    if missing:
        return missing
    from vllm_plugin.scheduler import MigrationScheduler

    config = core.vllm_config
    kv_config = getattr(core.scheduler, "kv_cache_config", None)
    groups = kv_config.kv_cache_groups if kv_config is not None else []
    conditions = {
        "scheduler_class": isinstance(core.scheduler, MigrationScheduler),
        "single_full_attention_group": len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec),
        "no_kv_zeroing": not getattr(kv_config, "needs_kv_cache_zeroing", False),
        "tensor_parallel_size_1": config.parallel_config.tensor_parallel_size == 1,
        "pipeline_parallel_size_1": config.parallel_config.pipeline_parallel_size == 1,
        "data_parallel_size_1": config.parallel_config.data_parallel_size == 1,
        "no_speculative_decoding": config.speculative_config is None,
        "no_kv_connector": config.kv_transfer_config is None,
    }
    return [name for name, holds in conditions.items() if not holds]


def factors(core: Any, workers: list[dict[str, Any]]) -> dict[str, str]:
    """Compatibility factors by name. Two instances can exchange requests exactly only where these are equal; which
    of them are errors and which are warnings is the panel's decision."""
    config = core.vllm_config
    model, cache, worker = config.model_config, config.cache_config, workers[0]
    return {
        "model": str(model.model),
        "model_config": hashlib.sha256(model.hf_config.to_json_string(use_diff=False).encode()).hexdigest()[:16],
        "weights": str(worker["weights"]),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(core.scheduler.block_size),
        "kv_layers": f"{len(worker['layers'])}:{hashlib.sha256(repr(worker['layers']).encode()).hexdigest()[:8]}",
        "kv_block_shape": "x".join(map(str, worker["kv_shape"])),
        "runner": str(worker["runner"]),
        "rng": str(worker["rng"]),
        "cpu_isa": str(worker["cpu_isa"]),
        "tokenizer": str(model.tokenizer),
        "max_model_len": str(model.max_model_len),
        "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
        "pipeline_parallel_size": str(config.parallel_config.pipeline_parallel_size),
        "vllm_version": vllm_version(),
        "protocol_version": str(PROTOCOL_VERSION),
    }
