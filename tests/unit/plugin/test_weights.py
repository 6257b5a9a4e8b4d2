"""The weights' fingerprint is the same however many ranks share them, and another for other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_plugin.weights import fingerprint, parameter_sums

HEADS, KV_HEADS, HEAD, HIDDEN = 8, 4, 2, 6


class Attention(torch.nn.Module):
    """What a rank holds of queries, keys and values, as vLLM names and numbers it."""

    def __init__(self, tp: int, rank: int, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.head_size, self.num_heads = HEAD, HEADS // tp
        self.num_kv_head_replicas = max(1, tp // KV_HEADS)
        kv = max(1, KV_HEADS // tp)
        first = rank * kv // self.num_kv_head_replicas
        rows = self.num_heads * HEAD
        parts = [tensors["q"][rank * rows : (rank + 1) * rows]]
        parts += [tensors[name][first * HEAD : (first + kv) * HEAD] for name in ("k", "v")]
        self.weight = torch.nn.Parameter(torch.cat(parts))


class Model(torch.nn.Module):
    def __init__(self, tp: int, rank: int, tensors: dict[str, torch.Tensor], layers: range) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(tensors["norm"])
        self.down = torch.nn.Parameter(tensors["down"].chunk(tp, dim=1)[rank].contiguous())
        # Taken away by the backend.
        self.packed = torch.nn.Parameter(torch.empty(0))
        self.layers = torch.nn.ModuleDict({str(layer): Attention(tp, rank, tensors) for layer in layers})


def tensors(change: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD, "down": 8}
    made = {name: torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16) for name, rows in shapes.items()}
    made["down"] = torch.randn(HIDDEN, 8, generator=generator)
    made["norm"] = torch.ones(HIDDEN)
    change(made)
    return made


def fingerprint_of(tp: int, pp: int, made: dict[str, torch.Tensor]) -> str:
    workers = []
    for stage in range(pp):
        for rank in range(tp):
            # The first stage has one layer more.
            layers = range(4) if pp == 1 else range(3) if not stage else range(3, 4)
            model = Model(tp, rank, made, layers)
            workers.append({"pp_rank": stage, "weights": parameter_sums(model, rank)})
    return fingerprint(workers)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (8, 1), (1, 2), (2, 2)])
def test_it_does_not_depend_on_the_sizes(tp: int, pp: int) -> None:
    assert fingerprint_of(tp, pp, tensors()) == fingerprint_of(1, 1, tensors())


@pytest.mark.parametrize("name", ["q", "k", "v", "down", "norm"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_one_number_that_differs_shows(name: str, tp: int) -> None:
    def change(made: dict[str, torch.Tensor]) -> None:
        made[name].view(-1)[-1] += 0.5

    assert fingerprint_of(tp, 1, tensors(change)) != fingerprint_of(tp, 1, tensors())


def test_the_layers_of_adapters_have_the_same_names() -> None:
    model = torch.nn.Module()
    model.base_layer = torch.nn.Linear(2, 2, bias=False)
    assert list(parameter_sums(model, 0)) == ["base_layer.weight"]
    outer = torch.nn.Module()
    outer.q = model
    assert list(parameter_sums(outer, 0)) == ["q.weight"]
