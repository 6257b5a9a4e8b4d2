"""Which bytes of a KV block lie on which rank, and what has to be copied where between two instances that are cut
differently.

Tensor parallelism cuts a layer by KV heads, pipeline parallelism cuts the model by layers. A block has the same number
on all ranks of an instance, and inside a block of a layer each head's bytes lie together (keys and values of all its
tokens), so a rank's share of a block is a range of heads, and what two ranks have in common is one too. Everything here
is arithmetic on two descriptions; it knows neither vLLM nor Django.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Copy",
    "Cut",
    "LayerPart",
    "Layout",
    "Place",
    "TopologyRefused",
    "can_run",
    "cuts",
    "heads_text",
    "in_words",
    "layout_of",
    "plan",
    "size_refusal",
]

#: Where bytes of a block lie: number of the layer on that rank (by name), offset in a block of the layer, size.
Place = tuple[int, int, int]


class TopologyRefused(Exception):
    """Blocks cannot be copied between two instances; `message` is a sentence that says why and what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True)
class LayerPart:
    """What one rank holds of one layer: `heads` KV heads from `first_head` on, of `total_heads` in the layer.

    `head_bytes`: of one head in one block. A latent cache (MLA) is one head that every rank has.
    """

    layer: str
    first_head: int
    heads: int
    total_heads: int
    head_bytes: int

    @property
    def end(self) -> int:
        return self.first_head + self.heads

    @property
    def block_bytes(self) -> int:
        return self.heads * self.head_bytes


@dataclass(frozen=True)
class Layout:
    """How an instance's KV cache is cut: for each rank its layers, by name. `block_size`: tokens."""

    block_size: int
    ranks: tuple[tuple[LayerPart, ...], ...]

    @property
    def layers(self) -> dict[str, LayerPart]:
        """One part of each layer."""
        return {part.layer: part for parts in self.ranks for part in parts}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; heads that several ranks hold count once."""
        return sum(part.total_heads * part.head_bytes for part in self.layers.values())


@dataclass(frozen=True)
class Copy:
    """`heads` KV heads of a layer from `first_head` on go from one rank to another, in every block."""

    layer: str
    first_head: int
    heads: int
    source_rank: int
    target_rank: int


@dataclass(frozen=True)
class Cut:
    """What goes from one rank to another of each block: `source[i]` to `target[i]`. Both empty: whole blocks, of ranks
    that are cut alike."""

    source_rank: int
    target_rank: int
    source: tuple[Place, ...] = ()
    target: tuple[Place, ...] = ()


def layout_of(workers: Sequence[Mapping[str, Any]], block_size: int, kv_heads: int) -> Layout:
    """The layout of an instance from what its workers say of themselves.

    Args:
        workers: by rank: `tp_rank`, `layers` (names), `kv_heads` and `bytes_per_layer` (heads, and bytes of one block,
            of each layer).
        kv_heads: of the model; 1 for a latent cache.

    Raises:
        TopologyRefused: the ranks hold another share of the heads than vLLM's tensor parallelism gives them.
    """
    tp = 1 + max(worker["tp_rank"] for worker in workers)
    ranks = []
    for worker in workers:
        parts = []
        for name, heads, size in zip(worker["layers"], worker["kv_heads"], worker["bytes_per_layer"], strict=True):
            first = _first_head(name, worker["tp_rank"], tp, heads, kv_heads)
            parts.append(LayerPart(name, first, heads, kv_heads, size // heads))
        ranks.append(tuple(sorted(parts, key=lambda part: part.layer)))
    return Layout(block_size, tuple(ranks))


def _first_head(layer: str, tp_rank: int, tp: int, heads: int, total: int) -> int:
    """As vLLM shares out KV heads (model_executor/layers/linear.py, QKVParallelLinear): evenly, and where there are
    fewer heads than ranks, each head to as many neighbouring ranks."""
    if heads * tp == total:
        return tp_rank * heads
    if heads == 1 and tp % total == 0:
        return tp_rank // (tp // total)
    raise TopologyRefused(
        f"Rank {tp_rank} of {tp} holds {heads} KV heads of layer {layer} and the model has {total}: this cut is not "
        "known; use a --tensor-parallel-size that divides the number of KV heads, or is a multiple of it."
    )


def plan(source: Layout, target: Layout) -> list[Copy]:
    """What has to be copied so that every byte of a block on every rank of the target is written exactly once.

    A head that several source ranks hold is taken from one of them: from the rank of the same number where that has
    it, else in turns.

    Raises:
        TopologyRefused: the blocks of the two have nothing in common but their name.
    """
    _check(source, target)
    holders: dict[str, list[tuple[int, LayerPart]]] = defaultdict(list)
    for rank, parts in enumerate(source.ranks):
        for part in parts:
            holders[part.layer].append((rank, part))
    takers: dict[tuple[str, int], int] = defaultdict(int)
    copies = []
    for rank, parts in enumerate(target.ranks):
        for part in parts:
            turn = takers[part.layer, part.first_head]
            takers[part.layer, part.first_head] += 1
            head = part.first_head
            while head < part.end:
                having = [holder for holder in holders[part.layer] if holder[1].first_head <= head < holder[1].end]
                if not having:
                    raise TopologyRefused(f"No rank of the source holds KV head {head} of layer {part.layer}.")
                same = [holder for holder in having if holder[0] == rank]
                source_rank, held = same[0] if same else having[turn % len(having)]
                end = min(part.end, held.end)
                copies.append(Copy(part.layer, head, end - head, source_rank, rank))
                head = end
    return copies


def _check(source: Layout, target: Layout) -> None:
    if source.block_size != target.block_size:
        raise TopologyRefused(
            f"A block has {source.block_size} tokens on the source and {target.block_size} on the target: start the "
            f"target with --block-size {source.block_size}."
        )
    here, there = source.layers, target.layers
    if here.keys() != there.keys():
        name = min(here.keys() ^ there.keys())
        side = "source" if name in here else "target"
        raise TopologyRefused(f"Only the {side} has a KV cache for layer {name}: start both from the same model.")
    for name, part in here.items():
        other = there[name]
        if (part.total_heads, part.head_bytes) != (other.total_heads, other.head_bytes):
            raise TopologyRefused(
                f"A block of layer {name} has {part.total_heads} heads of {part.head_bytes} bytes on the source and "
                f"{other.total_heads} of {other.head_bytes} on the target: start both from the same model, with the "
                "same --dtype and --kv-cache-dtype."
            )


def cuts(source: Layout, target: Layout, copies: Sequence[Copy]) -> list[Cut]:
    """The same plan by pairs of ranks, in places of a block; what two ranks have wholly in common goes as whole
    blocks."""
    places: dict[tuple[int, int], list[tuple[Place, Place]]] = defaultdict(list)
    here, there = _numbered(source), _numbered(target)
    for copy in copies:
        pair = copy.source_rank, copy.target_rank
        both = _place(here, copy.source_rank, copy), _place(there, copy.target_rank, copy)
        places[pair].append(both)
    found = []
    for (source_rank, target_rank), pieces in sorted(places.items()):
        own, theirs = (tuple(side) for side in zip(*sorted(pieces), strict=True))
        if own == _whole(source, source_rank) and theirs == _whole(target, target_rank):
            own = theirs = ()
        found.append(Cut(source_rank, target_rank, own, theirs))
    return found


def _numbered(layout: Layout) -> list[dict[str, tuple[int, LayerPart]]]:
    return [{part.layer: (number, part) for number, part in enumerate(parts)} for parts in layout.ranks]


def _place(ranks: list[dict[str, tuple[int, LayerPart]]], rank: int, copy: Copy) -> Place:
    number, part = ranks[rank][copy.layer]
    return number, (copy.first_head - part.first_head) * part.head_bytes, copy.heads * part.head_bytes


def _whole(layout: Layout, rank: int) -> tuple[Place, ...]:
    return tuple((number, 0, part.block_bytes) for number, part in enumerate(layout.ranks[rank]))


# -- before an instance of that size runs ------------------------------------------------------------------------------


def heads_text(attention: int, kv: int) -> str:
    """The factor `heads`: of the whole model."""
    return f"{attention} attention, {kv} KV"


def size_refusal(factors: Mapping[str, Any], tp: int, pp: int) -> str | None:
    """Why an instance's model cannot run with these sizes, as one sentence with the remedy; None where it can, or where
    the instance does not say enough about itself.

    Args:
        factors: what an instance reports (`heads`, `kv_groups`; vllm_plugin/facts.py).
    """
    if (heads := _heads(factors)) is not None:
        attention, kv = heads
        if not _divides(tp, attention, kv):
            possible = [size for size in range(1, attention + 1) if _divides(size, attention, kv)]
            return (
                f"A tensor parallel size of {tp} does not divide the model's {attention} attention heads and {kv} KV "
                f"heads: choose one of {', '.join(map(str, possible))}."
            )
    layers = re.match(r"\d+", str(factors.get("kv_groups") or ""))
    if layers is not None and not 1 <= pp <= int(layers[0]):
        return f"A pipeline parallel size of {pp} does not fit the model's {layers[0]} layers: choose 1 to {layers[0]}."
    return None


def _divides(tp: int, attention: int, kv: int) -> bool:
    return tp > 0 and attention % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def _heads(factors: Mapping[str, Any]) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d+) attention, (\d+) KV", str(factors.get("heads") or ""))
    return (int(found[1]), int(found[2])) if found is not None and int(found[1]) and int(found[2]) else None


def can_run(factors: Mapping[str, Any]) -> bool:
    """Whether an instance says of itself what a plan needs, and its sizes fit its model."""
    tp, pp = (_number(factors.get(name)) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
    return _heads(factors) is not None and tp > 0 and pp > 0 and size_refusal(factors, tp, pp) is None


def in_words(source: Mapping[str, Any], target: Mapping[str, Any], name: str) -> str:
    """How blocks are cut between instances whose factor `name` (a parallel size) differs: one sentence."""
    here, there = _number(source.get(name)), _number(target.get(name))
    if name == "pipeline_parallel_size":
        return f"Each block is cut by layers: {_become(here, there, 'stage')}."
    kv = (_heads(source) or (0, there))[1]
    again = f", each on {there // kv} ranks" if there > kv else ""
    return f"Each block is cut by KV heads: {_become(min(kv, here), min(kv, there), 'share')}{again}."


def _become(before: int, after: int, noun: str) -> str:
    return f"1 {noun} becomes {after}" if before == 1 else f"{before} {noun}s become {after}"


def _number(value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        return 0
