"""A fingerprint of a model's weights that does not depend on how many ranks share them.

Each worker adds up the bits of its parameters, as whole numbers: the sum is the same in whatever order, and in however
many parts. It tells two fine-tunes of one architecture apart; it is no proof that two models are equal.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["fingerprint", "parameter_sums"]

_MODULUS = 1 << 64
#: Numbers that are added up at once: the sum needs memory of its own for them.
_PIECE = 1 << 24
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parameter_sums(model: torch.nn.Module, tp_rank: int) -> dict[str, int]:
    """Sums modulo 2^64 of this rank's parameters by name. What it holds only because there are fewer KV heads than
    ranks is left to the first rank that has it.

    Parameters that the backend has replaced by something of its own (on CPUs, packed matrices) are empty, and are left
    out.
    """
    shared = dict(_shared_rows(model, tp_rank))
    sums: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        own = parameter.detach()
        if (rows := shared.get(name)) is not None and own.dim() and own.shape[0] > rows:
            own = own[:rows]
        if own.numel():
            # An engine that may load adapters wraps its layers; their weights are the same.
            sums[name.replace(".base_layer", "")] = _sum(own)
    return sums


def _shared_rows(model: torch.nn.Module, tp_rank: int) -> Iterator[tuple[str, int]]:
    """Parameters of which this rank counts the first rows only: queries, but not keys and values
    (model_executor/layers/linear.py, QKVParallelLinear)."""
    for name, module in model.named_modules():
        replicas = getattr(module, "num_kv_head_replicas", 1)
        if tp_rank % replicas:
            rows = int(module.num_heads) * int(module.head_size)
            yield from ((f"{name}.{kind}", rows) for kind in ("weight", "bias"))


def _sum(parameter: torch.Tensor) -> int:
    flat = parameter.reshape(-1).view(_BITS[parameter.element_size()])
    return sum(int(piece.sum(dtype=torch.int64)) for piece in flat.split(_PIECE)) % _MODULUS


def fingerprint(workers: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 over the names and sums of all parameters.

    Args:
        workers: by rank: `pp_rank`, and `weights` (what `parameter_sums` returned). Of a parameter that the ranks of a
            stage share each has another sum; one that each has for itself counts once, as does one that several stages
            have.
    """
    stages: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        for name, value in worker["weights"].items():
            stages[name][worker["pp_rank"]].append(value)
    digest = hashlib.sha256()
    for name, by_stage in sorted(stages.items()):
        values = by_stage[min(by_stage)]
        total = values[0] if len(set(values)) == 1 else sum(values) % _MODULUS
        digest.update(f"{name} {total}\n".encode())
    return digest.hexdigest()[:32]
