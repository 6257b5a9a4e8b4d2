"""Worker extension (`--worker-extension-cls`): opens the data server and installs the worker's half of a moved request.

Its methods run in every worker process, called by `collective_rpc` from the engine core: small calls only, KV
never passes here.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from vllm_plugin.compat import CachedRequestState, get_pp_group, get_tp_group, sampler_fingerprint
from vllm_plugin.data import DataServer
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.weights import parameter_sums

__all__ = ["MigrationWorker"]

logger = logging.getLogger("vllm.vllm_hi.worker")


class MigrationWorker:
    # Set by vLLM's worker class, which vLLM makes a subclass of this one.
    model_runner: Any
    rank: int

    def vllm_hi_start(
        self, token: str, host: str, first_port: int, cpus: list[int], backend: str, bytes_per_s: float
    ) -> dict[str, Any]:
        """Starts the data server (port `first_port` + rank, or a free one for 0; the rest as `DataServer` wants it) and
        describes this worker's KV cache; `refusal` alone says why its blocks cannot be copied."""
        try:
            cache = KVCache(_kv_layers(self.model_runner))
        except ValueError as error:
            return {"refusal": str(error)}
        started = time.monotonic()
        cache.touch()
        logger.info("KV cache of %d blocks is in memory after %.1f s", cache.num_blocks, time.monotonic() - started)
        server = DataServer(
            cache,
            self.vllm_hi_generator_state,
            token=token,
            host=host,
            port=first_port + self.rank if first_port else 0,
            name=f"worker-{self.rank}",
            cpus=cpus,
            backend=backend,
            bytes_per_s=bytes_per_s,
        )
        self.vllm_hi_cache = cache
        # Kept alive by its threads; the reference lets a debugger find it.
        self.vllm_hi_data_server = server
        return {
            "data_port": server.port,
            "tp_rank": get_tp_group().rank_in_group,
            "pp_rank": get_pp_group().rank_in_group,
            "layers": cache.names,
            "kv_heads": cache.heads,
            "bytes_per_layer": cache.bytes_per_layer,
            "kv_shape": cache.shape(),
            "cpu_isa": _cpu_isa(self.model_runner),
            "weights": parameter_sums(self.model_runner.get_model(), get_tp_group().rank_in_group),
            "runner": type(self.model_runner).__name__,
            "rng": f"{self.model_runner.device.type}-{sampler_fingerprint()}-{_rng_family(self.model_runner)}",
        }

    def vllm_hi_generator_state(self, request_id: str) -> bytes | None:
        """State of the request's `torch.Generator` (it has one when the request is seeded). Read it only when no
        step with the request is in flight."""
        state = self.model_runner.requests.get(request_id) if _keeps_request_state(self.model_runner) else None
        if state is None or state.generator is None:
            return None
        return bytes(state.generator.get_state().numpy().tobytes())

    def vllm_hi_install(self, installs: list[dict[str, Any]]) -> None:
        """Makes requests known to the model runner as if they had been preempted here.

        The V1 runner resumes only requests it knows, and keeps prompt and output apart for penalties
        (v1/worker/gpu_model_runner.py, `_update_states`). The V2 runner gets everything from the scheduler.
        """
        if not _keeps_request_state(self.model_runner):
            return
        for install in installs:
            self.model_runner.requests[install["request_id"]] = CachedRequestState(
                req_id=install["request_id"],
                prompt_token_ids=install["prompt_token_ids"],
                mm_features=[],
                sampling_params=install["sampling_params"],
                generator=self._vllm_hi_generator(install["generator"]),
                block_ids=tuple(list(group) for group in install["block_ids"]),
                num_computed_tokens=install["computed_tokens"],
                output_token_ids=list(install["output_token_ids"]),
                lora_request=install["lora_request"],
            )

    def vllm_hi_stage(self, blocks: int) -> tuple[int, int]:
        """Makes room in host memory for so many blocks; returns (id of the first, how many there are)."""
        first = self.vllm_hi_cache.stage(blocks)
        return first, self.vllm_hi_cache.staged.count

    def vllm_hi_unstage(self, moves: list[tuple[int, int]], installs: list[dict[str, Any]]) -> None:
        """Copies staged blocks into the KV cache and makes their requests known to the model runner."""
        self.vllm_hi_cache.unstage(moves)
        self.vllm_hi_install(installs)

    def _vllm_hi_generator(self, state: bytes | None) -> torch.Generator | None:
        if state is None:
            return None
        generator = torch.Generator(device=self.model_runner.device)
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        return generator


def _keeps_request_state(model_runner: Any) -> bool:
    """True for the V1 runner, whose `requests` holds a `CachedRequestState` per request."""
    return isinstance(getattr(model_runner, "requests", None), dict)


def _rng_family(model_runner: Any) -> str:
    """V1 draws from a generator per request, V2 hashes seed and position."""
    return "generator" if _keeps_request_state(model_runner) else "counter"


def _kv_layers(model_runner: Any) -> dict[str, torch.Tensor]:
    """Attention layers that own KV memory, by name. Layers that share another's cache appear once."""
    layers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, layer in model_runner.compilation_config.static_forward_context.items():
        cache = getattr(layer, "kv_cache", None)
        if isinstance(cache, list | tuple):
            cache = cache[0] if cache else None
        if isinstance(cache, torch.Tensor) and cache.numel() and cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            layers[name] = cache
    return layers


def _cpu_isa(model_runner: Any) -> str:
    """The instruction set that decides how CPU attention packs keys inside a block
    (v1/attention/backends/cpu_attn.py)."""
    for layer in model_runner.compilation_config.static_forward_context.values():
        if isa := getattr(layer, "isa", None):
            return str(isa)
    return ""
