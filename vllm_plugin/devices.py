"""The devices that an instance may use, asked without touching them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["described", "thread_binding", "visible_gpu_ids"]


def described() -> dict[str, Any]:
    """`{device_kind: "cpu"|"cuda"|…, device_count}`: cores of this process on CPUs."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"device_kind": "cpu", "device_count": len(os.sched_getaffinity(0))}
    return {"device_kind": current_platform.device_type, "device_count": current_platform.device_count()}


def visible_gpu_ids(world_size: int) -> list[int | str]:
    """Indexes of the GPUs that an instance of this size uses, or their UUIDs where it was started with these; empty
    on CPUs."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return []
    listed = os.environ.get(current_platform.device_control_env_var, "")
    visible = [name.strip() for name in listed.split(",") if name.strip()] or [str(n) for n in range(world_size)]
    return [int(name) if name.isdecimal() else name for name in visible[:world_size]]


def thread_binding(world_size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """`VLLM_CPU_OMP_THREADS_BIND` for so many workers on this host; None where it is right as it is.

    vLLM wants one group of cores for each worker, and a standby was started before anybody knew how many there will be.
    """
    bound = environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    groups = bound.split("|") if bound else []
    if len(groups) == world_size or bound in ("all", "nobind") or (world_size == 1 and not bound):
        return None
    cores = sorted({core for group in groups for core in _cores(group)}) or sorted(os.sched_getaffinity(0))
    share = len(cores) // world_size
    if share == 0:
        return None
    parts = (cores[rank * share : (rank + 1) * share] for rank in range(world_size))
    return "|".join(",".join(map(str, part)) for part in parts)


def _cores(text: str) -> list[int]:
    """ "0-2,5" → [0, 1, 2, 5]; what is no such list has none."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found
