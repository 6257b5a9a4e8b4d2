"""What a job wishes of a target that has no engine yet, and what can be said of it before one is started."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from instances.life import needs_engine
from instances.models import Instance
from migrations_app.models import MigrationJob

__all__ = ["Problem", "Wishes", "of_job", "problem", "shown"]

_MODEL = re.compile(r"[^-\s\x00-\x1f][^\x00-\x1f]*")


@dataclass(frozen=True)
class Wishes:
    """None (or empty): as the standby was started, else as the source is."""

    tp: int | None = None
    pp: int | None = None
    gpu_memory_utilization: float | None = None
    model: str = ""


@dataclass(frozen=True)
class Problem:
    """Why an engine cannot be brought up as wished. `message` says what to change, `param` names the field."""

    code: str
    message: str
    param: str
    source_value: str = ""
    target_value: str = ""


def of_job(job: MigrationJob) -> Wishes:
    return Wishes(job.target_tp, job.target_pp, job.target_gpu_memory_utilization, job.target_model)


def shown(source: Instance, target: Instance, wishes: Wishes) -> str:
    """The sizes that the engine will have: "TP 2, PP 1"."""
    tp, pp = _sizes(source, target, wishes)
    return f"TP {tp}, PP {pp}"


def problem(source: Instance, target: Instance, wishes: Wishes) -> Problem | None:
    """The first reason why `target` cannot bring up an engine as wished; None for one that has an engine."""
    if not needs_engine(target):
        return None
    return (
        _form(wishes)
        or _model_shape(source, target, wishes)
        or _devices(source, target, wishes)
        or _shared_accelerator(source, target, wishes)
    )


def _form(wishes: Wishes) -> Problem | None:
    for param, size in (("target_tp", wishes.tp), ("target_pp", wishes.pp)):
        if size is not None and not 1 <= size <= 1024:
            return Problem("invalid_request", f"{param} must be a whole number from 1 to 1024.", param)
    fraction = wishes.gpu_memory_utilization
    # Also for what is no number at all.
    if fraction is not None and not 0 < fraction <= 1:
        param = "target_gpu_memory_utilization"
        return Problem("invalid_request", f"{param} must be above 0 and at most 1.", param)
    if wishes.model and not _MODEL.fullmatch(wishes.model):
        text = "target_model must be the name or path of a model; it may not begin with a dash or hold line breaks."
        return Problem("invalid_request", text, "target_model")
    return None


def _devices(source: Instance, target: Instance, wishes: Wishes) -> Problem | None:
    count = target.topology.get("device_count")
    if not isinstance(count, int):
        return None
    tp, pp = _sizes(source, target, wishes)
    if tp * pp <= count:
        return None
    noun = "cores" if target.topology.get("device_kind") == "cpu" else "devices"
    return Problem(
        "too_few_devices",
        f"TP {tp} x PP {pp} needs {tp * pp} {noun} and instance {target.vllm_hi_id} has {count}: choose a smaller "
        "target_tp or target_pp, or start the standby with more of them.",
        "target_tp" if tp > 1 else "target_pp",
        target_value=f"{count} {noun}",
    )


def _model_shape(source: Instance, target: Instance, wishes: Wishes) -> Problem | None:
    """The rules by which vLLM splits a model (vllm/config/model.py, verify_with_parallel_config)."""
    tp, pp = _sizes(source, target, wishes)
    facts = source.inference_params
    heads, kv_heads = facts.get("num_attention_heads"), facts.get("num_key_value_heads")
    if isinstance(heads, int) and heads % tp:
        return Problem(
            "heads_not_divisible",
            f"The model has {heads} attention heads, which {tp} workers cannot share: choose a target_tp that divides "
            f"{heads} ({_divisors(heads)}).",
            "target_tp",
            f"{heads} attention heads",
            f"TP {tp}",
        )
    if isinstance(kv_heads, int) and kv_heads % tp and tp % kv_heads:
        return Problem(
            "heads_not_divisible",
            f"The model has {kv_heads} key-value heads, which {tp} workers cannot share: choose a target_tp that "
            f"divides {kv_heads} or is a multiple of it.",
            "target_tp",
            f"{kv_heads} key-value heads",
            f"TP {tp}",
        )
    layers = facts.get("num_hidden_layers")
    if isinstance(layers, int) and pp > layers:
        return Problem(
            "too_few_layers",
            f"The model has {layers} layers, too few for {pp} stages: choose a target_pp of at most {layers}.",
            "target_pp",
            f"{layers} layers",
            f"PP {pp}",
        )
    return None


def _shared_accelerator(source: Instance, target: Instance, wishes: Wishes) -> Problem | None:
    """Two engines on one accelerator need its memory at the same time while requests move."""
    if source.ip != target.ip:
        return None
    common = [str(one) for one in _gpus(source) if one in _gpus(target)]
    mine = _fraction(source.topology.get("gpu_memory_utilization"))
    theirs = _fraction(wishes.gpu_memory_utilization or target.topology.get("gpu_memory_utilization"))
    if not common or mine + theirs <= 1:
        return None
    which = f"GPU {common[0]}" if len(common) == 1 else f"GPUs {', '.join(common)}"
    running = sum(int(source.requests.get(name) or 0) for name in ("running", "waiting"))
    start = source.inference_params.get("start_s")
    known = isinstance(start, (int, float))
    took = f"about {start:.0f} s, as the source's own start took," if known else "a while"
    return Problem(
        "shared_accelerator",
        f"Instances {source.vllm_hi_id} and {target.vllm_hi_id} share {which}, and their memory adds up to "
        f"{mine + theirs:.2f} of it, so their engines cannot be up at the same time. Give the standby other GPUs "
        "(CUDA_VISIBLE_DEVICES), or both a --gpu-memory-utilization that adds up to at most 1. The cold path is left: "
        f"stop the source, then start the standby's engine; that is {took} without service, and the "
        f"{running} requests that are in flight now are lost to their clients.",
        "target",
        f"{which}, {mine:.2f}",
        f"{which}, {theirs:.2f}",
    )


def _sizes(source: Instance, target: Instance, wishes: Wishes) -> tuple[int, int]:
    """As the plugin chooses them (vllm_plugin/engine_arguments.py): a size of 1 is the same as none given."""

    def size(name: str, wish: int | None) -> int:
        own = target.topology.get(name)
        return wish or (own if isinstance(own, int) and own > 1 else None) or source.topology.get(name) or 1

    return size("tensor_parallel_size", wishes.tp), size("pipeline_parallel_size", wishes.pp)


def _gpus(instance: Instance) -> list[Any]:
    ids = instance.topology.get("visible_gpu_ids")
    return ids if isinstance(ids, list) else []


def _fraction(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 1.0


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)
