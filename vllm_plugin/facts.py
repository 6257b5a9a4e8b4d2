"""What an instance says about itself: can it take part in migrations, and the factors two instances are compared by."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from vllm_plugin.compat import FullAttentionSpec, missing_probes, vllm_version
from vllm_plugin.compatibility import adapters_text
from vllm_plugin.topology import heads_text
from vllm_plugin.weights import fingerprint
from vllm_plugin.wire import PROTOCOL_VERSION

__all__ = ["factors", "front_end_factors", "heads", "unsupported"]


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
        "data_parallel_size_1": config.parallel_config.data_parallel_size == 1,
        # These cut a request by tokens: its blocks do not lie whole on any rank.
        "context_parallel_size_1": config.parallel_config.decode_context_parallel_size == 1
        and getattr(config.parallel_config, "prefill_context_parallel_size", 1) == 1,
        "no_speculative_decoding": config.speculative_config is None,
        "no_kv_connector": config.kv_transfer_config is None,
    }
    return [name for name, holds in conditions.items() if not holds]


def factors(core: Any, workers: list[dict[str, Any]]) -> dict[str, str]:
    """What the engine core and its workers know of the compatibility factors, by name (`vllm_plugin.compatibility`)."""
    config = core.vllm_config
    model, cache, worker = config.model_config, config.cache_config, workers[0]
    layers = sorted({name for one in workers for name in one["layers"]})
    attention, kv = heads(core)
    return {
        "model": str(model.model),
        "model_config": _model_config(model.hf_config),
        "weights": fingerprint(workers),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(core.scheduler.block_size),
        "kv_groups": _kv_groups(core.scheduler.kv_cache_config.kv_cache_groups, layers),
        "kv_block_shape": "x".join(map(str, [kv, *worker["kv_shape"][1:]])),
        "heads": heads_text(attention, kv),
        "runner": str(worker["runner"]),
        "rng": str(worker["rng"]),
        "cpu_isa": str(worker["cpu_isa"]),
        "scheduling_policy": str(config.scheduler_config.policy),
        "max_model_len": str(model.max_model_len),
        "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
        "pipeline_parallel_size": str(config.parallel_config.pipeline_parallel_size),
        "vllm_version": vllm_version(),
        "protocol_version": str(PROTOCOL_VERSION),
    }


def heads(core: Any) -> tuple[int, int]:
    """Attention heads and KV heads of the whole model; a latent cache (MLA) is one head."""
    config = core.vllm_config
    model = config.model_config
    attention = model.get_num_attention_heads(config.parallel_config) * config.parallel_config.tensor_parallel_size
    return int(attention), 1 if model.use_mla else int(model.get_total_num_kv_heads())


def front_end_factors(front_end: dict[str, Any]) -> dict[str, str]:
    """What the API server knows of them (`vllm_plugin.front_end`)."""
    known = {name: str(value) for name, value in front_end.items() if name != "adapters"}
    return {**known, "lora": adapters_text(front_end.get("adapters") or {})}


def _model_config(hf_config: Any) -> str:
    """Digest of the model's configuration without what says where its files lie and who wrote them."""
    content = json.loads(hf_config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        content.pop(name, None)
    return _digest(json.dumps(content, sort_keys=True))


def _kv_groups(groups: Any, layers: list[str]) -> str:
    """Number of layers that own KV memory, on whatever rank, their kind, and a digest of their names. There is one
    group (`unsupported`), and the scheduler knows only the first rank's layers of it."""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    sizes = [group.kv_cache_spec.block_size for group in groups]
    return f"{len(layers)} {' + '.join(kinds)} ({_digest(json.dumps([kinds, sizes, layers]))})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
