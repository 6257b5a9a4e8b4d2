"""Which requests a target has room for now: oldest first, by blocks and run slots. Pure arithmetic over what the two
instances report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Room", "blocks_needed", "choose", "oldest_first", "sizes", "why_not"]

Row = Mapping[str, Any]

#: Free blocks that a target keeps for each request that runs: with fewer it drops what is parked, before it preempts.
#: Blocks up to `max_tokens` would be safer, and leave most of the target empty: most requests end long before.
KEPT_FREE = 1
#: A handover holds one block ahead, so that nothing is allocated while a request is frozen.
HELD_AHEAD = 1


@dataclass(frozen=True)
class Room:
    """What a target can take. `blocks`: free ones that it need not keep for what runs there. `slots`: requests that may
    still run, infinite where it does not say. `free`, `total`: blocks as it reports them."""

    blocks: int
    slots: float
    block_size: int
    free: int
    total: int

    @classmethod
    def of(cls, status: Row, requests: Iterable[Row]) -> Room:
        """From the target's status and its list of requests."""
        kv, load = status.get("kv") or {}, status.get("requests") or {}
        block_size = max(1, int(kv.get("block_size") or 1))
        free = int(kv.get("free_blocks") or 0)
        taken = int(load.get("running") or 0) + int(load.get("waiting") or 0)
        slots = int(load["run_slots"]) - taken if load.get("run_slots") else math.inf
        # What waits there without blocks is younger than what comes.
        kept = KEPT_FREE * sum(_choices(row) for row in requests if row.get("kv_blocks"))
        return cls(max(0, free - kept), max(0, slots), block_size, free, int(kv.get("total_blocks") or 0))


def blocks_held(row: Row, block_size: int) -> int:
    """Blocks that the request has, or will once its tokens are computed."""
    tokens = int(row.get("prompt_tokens") or 0) + int(row.get("output_tokens") or 0)
    return max(int(row.get("kv_blocks") or 0), math.ceil(tokens / block_size))


def blocks_at_most(row: Row, block_size: int) -> int:
    """Blocks that it has in the end if it generates all of its `max_tokens`."""
    choices = _choices(row)
    tokens = int(row.get("prompt_tokens") or 0) / choices + int(row.get("max_tokens") or 0)
    return max(blocks_held(row, block_size), choices * math.ceil(tokens / block_size))


def blocks_needed(row: Row, block_size: int) -> int:
    """What must be free for it."""
    return blocks_held(row, block_size) + (HELD_AHEAD + KEPT_FREE) * _choices(row)


def _choices(row: Row) -> int:
    return int(row.get("choices") or 1)


def oldest_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -float(row.get("age_s") or 0.0))


def choose(rows: Iterable[Row], room: Room) -> tuple[list[Row], list[Row]]:
    """Splits into those that move now and those that wait for room, each oldest first.

    One that does not fit is passed over: a large one must not keep smaller ones from leaving, and past the deadline it
    moves in another way.
    """
    chosen: list[Row] = []
    left: list[Row] = []
    blocks, slots = room.blocks, room.slots
    for row in oldest_first(rows):
        needed, choices = blocks_needed(row, room.block_size), _choices(row)
        if needed <= blocks and choices <= slots:
            chosen.append(row)
            blocks, slots = blocks - needed, slots - choices
        else:
            left.append(row)
    return chosen, left


def why_not(row: Row, room: Room) -> tuple[str, str]:
    """Code and sentence for one that waits."""
    needed = blocks_needed(row, room.block_size)
    if _choices(row) > room.slots:
        return "target_out_of_run_slots", "It waits for a run slot on the target (max_num_seqs)."
    return (
        "target_out_of_blocks",
        f"It waits for room: it needs {needed} KV blocks with what it will write soon, and the target has "
        f"{room.free} free, of which it keeps {room.free - room.blocks} for what runs there.",
    )


def sizes(rows: Sequence[Row], block_size: int) -> tuple[int, int]:
    """Blocks that the requests hold now, and at most in the end."""
    return sum(blocks_held(row, block_size) for row in rows), sum(blocks_at_most(row, block_size) for row in rows)
