"""Instances that are joined by a slow link: it takes longer, and clients get what they would have got anyway."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.answers import Request
from benchmarks.exactness import verdicts
from benchmarks.link import Link, slow_link
from benchmarks.slow_link import move_all
from benchmarks.streams import sized_request
from tests.engine.conftest import RunningStack

#: A block takes a quarter of a second.
BYTES_PER_S, RTT_S = 200e6 / 8, 0.02
#: Two streams write more than that.
TOO_SLOW_BYTES_PER_S = 12e6 / 8
KINDS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]


def test_over_a_slow_link_everything_moves_and_little_is_left_for_the_handover(stack: RunningStack) -> None:
    # Far from the end of a block, so that none becomes full during the handover.
    requests = [sized_request(f"slow-{index}", 140, 200, 8300 + index, KINDS[index % 2]) for index in range(4)]
    rounds, rows, link = moved_over(stack, requests, BYTES_PER_S)
    # All bytes took the slow way. Of the block that was still being written the handover carried only what the last
    # steps had added.
    block = stack.status(stack.active())["kv"]["bytes_per_block"]
    assert link.carried >= sum(row["bytes"] for row in rounds) > 0
    assert all(0 < row["tail_bytes"] < block / 2 for row in rows), rows


def test_a_source_that_writes_more_than_the_link_carries_is_slowed_down(stack: RunningStack) -> None:
    requests = [sized_request(f"slowed-{index}", 140, 500, 8400 + index, KINDS[index]) for index in range(2)]
    rounds, *_ = moved_over(stack, requests, TOO_SLOW_BYTES_PER_S, slow_source=True)
    assert all(row["pause_s"] > 0 for row in rounds), rounds
    # Faster than it is written: each round has less to copy than the one before, but for what a pause rounds up.
    assert rounds[-1]["bytes"] < rounds[0]["bytes"] / 2, rounds


def moved_over(
    stack: RunningStack, requests: list[Request], bytes_per_s: float, slow_source: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Link]:
    """Moves all over such a link, and checks that the clients got what they would have got anyway. Returns rounds,
    results of the handovers, and the link."""
    source, target = stack.remember_roles()
    free = stack.free_blocks(source), stack.free_blocks(target)
    control_port = stack.status(target)["control_port"]
    references = stack.run(requests)

    async def call(name: str, fields: dict[str, Any]) -> dict[str, Any]:
        answer = await asyncio.to_thread(stack.instance_post, source, f"/vllm_hi/migration/{name}", fields)
        return dict(answer.json())

    async def move() -> tuple[list[dict[str, Any]], list[dict[str, Any]], Link]:
        async with slow_link(control_port, bytes_per_s, RTT_S) as (port, link):
            return *await move_all(call, target, port, slow_source=slow_source), link

    with stack.faults(source, step_delay_s=0.05):
        load = stack.load(requests)
        rounds, results, link = stack.wait(move(), 180)
    answers = load.result(180)

    rows = [{**row, "prompt_tokens": 0, "output_tokens": row["tokens"]} for row in results]
    assert {row["outcome"] for row in rows} == {"moved"}, rows
    assert len(rows) == len(requests)
    for verdict in verdicts(references, answers, rows):
        assert verdict.exact, f"{verdict.name}: {verdict.differences}"
        assert verdict.cut_at is not None
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)
    return rounds, rows, link
