"""What a migration will probably cost, from the requests' sizes, the rate at which they grow, and the measured way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Estimate", "estimate_cost"]

#: Bytes per second that a local copy reached at least in measurements; taken where the way was not measured.
ASSUMED_BANDWIDTH = 500e6
#: Time that a request's handover takes beside the copying, in seconds.
HANDOVER_S = 0.1
#: More rounds than that mean in effect that there is no end.
MOST_ROUNDS = 20


@dataclass(frozen=True)
class Estimate:
    """What the migration will probably move.

    Attributes:
        bytes: on the wire, increments included. rounds: with the full one.
        gap_ms: what the last, partial block of one request takes on the wire; a client waits for it.
        bytes_per_s: of the way to the target. dirty_bytes_per_s: KV that the movable requests write.
        converges: the rounds get smaller. Otherwise what is left at the handover only grows.
    """

    requests: int
    blocks: int
    bytes: int
    rounds: int
    seconds: float
    gap_ms: float | None
    bytes_per_s: float = ASSUMED_BANDWIDTH
    dirty_bytes_per_s: float = 0.0
    converges: bool = True


def estimate_cost(
    requests: Sequence[Mapping[str, Any]], kv: Mapping[str, Any], probe: Mapping[str, Any] | None = None
) -> Estimate:
    """Predicts from the source's requests, its `kv` and the measured way (`probe`) what a migration moves.

    A round of V bytes takes V / bandwidth, in which V * dirty / bandwidth new bytes become ready: the rounds are a
    geometric series (live migration of virtual machines, Clark et al., NSDI 2005).
    """
    movable = [row for row in requests if row.get("migratable")]
    block = int(kv.get("bytes_per_block") or 0)
    blocks = sum(int(row.get("kv_blocks") or 0) for row in movable)
    bandwidth = float((probe or {}).get("bytes_per_s") or ASSUMED_BANDWIDTH)
    dirty = _tokens_per_s(movable) * block / max(1, int(kv.get("block_size") or 1))
    ratio = dirty / bandwidth
    converges = ratio < 1
    rounds = _rounds(blocks * block, block, ratio)
    size = round(blocks * block * (1 - min(ratio, 0.99) ** rounds) / (1 - min(ratio, 0.99)))
    return Estimate(
        requests=len(movable),
        blocks=blocks,
        bytes=size,
        rounds=rounds,
        seconds=round(size / bandwidth + HANDOVER_S * len(movable), 2),
        gap_ms=round(1000 * block / bandwidth, 2) if movable else None,
        bytes_per_s=round(bandwidth),
        dirty_bytes_per_s=round(dirty),
        converges=converges,
    )


def _rounds(size: int, block: int, ratio: float) -> int:
    """Until less than a block is left; at least two, for the first increment shows whether it got smaller."""
    if not size:
        return 0
    if ratio >= 1:
        return MOST_ROUNDS
    if ratio <= 0:
        return 2
    return min(MOST_ROUNDS, max(2, 1 + math.ceil(math.log(block / size) / math.log(ratio)) if size > block else 2))


def _tokens_per_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """Tokens that running requests have got on average since they arrived; a request that waits gets none."""
    return sum(
        float(row.get("output_tokens") or 0) / max(0.1, float(row.get("age_s") or 0.0))
        for row in rows
        if str(row.get("status", "")).upper() == "RUNNING" and row.get("age_s")
    )
