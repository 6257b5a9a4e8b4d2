"""Rows about requests that are not decoding when a migration begins, on instances that are too small for their load.

What state a request was in is not chosen but seen: the source is asked just before the migration, and each request goes
into the row of the state that it was found in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp

from benchmarks.answers import Answer, Request
from benchmarks.exactness import verdicts, weigh
from benchmarks.fidelity_rows import Row, judge_one
from benchmarks.kinds import CHAT, TEXT, Kind, prompt
from benchmarks.live_migration import MigrationRun, Panel, until_all_have
from benchmarks.stacks import MODEL, sides
from benchmarks.streams import run_requests
from controlplane.supervisor import Stack

__all__ = ["crowded_rows", "measure_crowd", "state_of"]

_STATES = {
    "waiting": "still waiting when the migration begins",
    "prefilling": "half prefilled when the migration begins",
    "preempted": "preempted when the migration begins",
    "running": "decoding beside those",
}


def crowded_rows() -> dict[str, Row]:
    """One row for each state."""
    return {name: Row(Kind(name, TEXT, {"temperature": 0}, stack="crowded")) for name in _STATES.values()}


def state_of(row: dict[str, Any]) -> str:
    """The state of a request as its instance lists it."""
    if row["status"] == "PREEMPTED":
        return "preempted"
    if row["status"] != "RUNNING":
        return "waiting"
    return "prefilling" if row["computed_tokens"] < row["prompt_tokens"] else "running"


async def measure_crowd(
    stack: Stack, rows: dict[str, Row], wanted: int, next_salt: Callable[[], int], say: Callable[[str], None]
) -> None:
    """Moves crowded batches until every state has been seen to move and `wanted` requests have."""
    await run_requests(stack.url, MODEL, _first_lot(next_salt())[:1])
    mine = [rows[name] for name in _STATES.values() if name in rows]
    for turn in range(8):
        missing = [row.kind.name for row in mine if not row.tried]
        moved = sum(row.migrated for row in mine)
        say(f"  crowded: {moved} moved; not seen yet: {missing}")
        if moved >= wanted and not missing:
            return
        await _one_crowd(stack, rows, next_salt(), *await sides(stack), turn % 2 == 1, say)


def _first_lot(salt: int, preempt: bool = False) -> list[Request]:
    """Five requests that decode. To preempt some of them, prompts that almost fill four blocks each: of the 23 that
    there are for them, five requests with a fifth block each need more."""
    kind = Kind("crowded", TEXT, {"temperature": 0, "max_tokens": 70}, text=_words(452 if preempt else 40))
    paths = (TEXT,) if preempt else (TEXT, CHAT)
    return [kind.but(path=paths[index % len(paths)]).request(salt * 100 + index) for index in range(5)]


def _second_lot(salt: int) -> list[Request]:
    """One whose prefill takes several steps of 256 tokens, and three for which there is no run slot."""
    long = Kind("crowded, long", TEXT, {"temperature": 0, "max_tokens": 120}, text=_words(1400))
    short = Kind("crowded, late", TEXT, {"temperature": 0, "max_tokens": 60}, text=_words(40))
    return [long.request(salt * 100 + 50), *(short.request(salt * 100 + 51 + index) for index in range(3))]


def _words(count: int) -> Callable[[int], str]:
    """Prompts of so many words, which are a few tokens more."""

    def text(number: int) -> str:
        words = " ".join(prompt(number * 20 + part) for part in range(20)).split()
        return f"Part {number}: {' '.join(words[:count])}. Continue."

    return text


async def _one_crowd(
    stack: Stack,
    rows: dict[str, Row],
    salt: int,
    source: str,
    target: str,
    preempt: bool,
    say: Callable[[str], None],
) -> None:
    awaited = "preempted" if preempt else "prefilling"
    first = _first_lot(salt, preempt)
    second = _second_lot(salt)[1:] if preempt else _second_lot(salt)
    base_url = next(instance.base_url for instance in stack.instances.values() if instance.id == source)
    salted = [Request(one.name, one.path, {**one.body, "cache_salt": "undisturbed"}) for one in first + second]
    references = []
    # One after the other, so that the references are never preempted themselves.
    for start in range(0, len(salted), 3):
        references += await run_requests(base_url, MODEL, salted[start : start + 3])
    headers = {"Authorization": f"Bearer {stack.api_token}"}
    async with aiohttp.ClientSession(stack.url, headers=headers) as session:
        panel = Panel(session)
        live: list[Answer] = []
        loads = [asyncio.ensure_future(run_requests(stack.url, MODEL, first, progress=live.extend))]
        try:
            await until_all_have(live, 6, loads[0])
            for lot in (second[:1], second[1:]):
                loads.append(asyncio.ensure_future(run_requests(stack.url, MODEL, lot)))
                # In this order: the long one takes the last run slot.
                await asyncio.sleep(0.1)
            states = await _states(stack, base_url, awaited, loads[0])
            migration = await panel.finished(await panel.migrate(source, target, migration_type="preserve_source"))
            answers = [answer for load in loads for answer in await load]
        finally:
            for load in loads:
                load.cancel()
    outcomes = Counter(
        (states.get(row["request_id"], "later"), row["outcome"], row["code"]) for row in migration.requests
    )
    say(f"    awaited {awaited}; {dict(outcomes)}; {migration.job['state']} {migration.job.get('error') or ''}")
    for row in migration.requests:
        if row["outcome"] == "stayed":
            say(f"    {row['request_id']}: {row.get('message')}")
    found = verdicts(references, answers, migration.requests)
    run = MigrationRun(references, answers, found, [migration])
    for verdict, answer in zip(found, answers, strict=True):
        for split in verdict.splits:
            await weigh(stack.url, MODEL, references[answers.index(answer)], split)
        state = next((state for name, state in states.items() if answer.stream_id and answer.stream_id in name), "")
        if state and _STATES[state] in rows:
            for line in judge_one(rows[_STATES[state]], verdict, answer, run, salt):
                say(f"  {line}")


async def _states(stack: Stack, base_url: str, awaited: str, load: asyncio.Future[Any]) -> dict[str, str]:
    """State by request id, as soon as one request is in the awaited state, or the load is over."""
    headers = {"Authorization": f"Bearer {stack.join_token}"}
    states: dict[str, str] = {}
    async with aiohttp.ClientSession(base_url, headers=headers) as session:
        while not load.done():
            async with session.get("/vllm_hi/requests") as response:
                listed = (await response.json())["requests"]
            states = {row["request_id"]: state_of(row) for row in listed}
            if awaited in states.values():
                break
            await asyncio.sleep(0.02)
    return states
