"""One measured migration after the other: load, migrations, and what every client saw of them."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.answers import Answer, Request
from benchmarks.exactness import Verdict, verdicts
from benchmarks.failure_rig import REFERENCE_S, Rig
from benchmarks.live_migration import Migration, Panel, until_all_have
from benchmarks.streams import run_requests

__all__ = ["Cut", "Shot", "cuts_of", "shoot", "switch_times"]

#: Tokens of a KV block in all measured instances.
BLOCK_TOKENS = 128
#: Times between tokens before and after one that tell what is usual there.
AROUND = 8
#: A token that takes so many times as long as usual is late.
LATE = 1.25
#: Tokens that the target's own streams get before anything moves.
OWN_TOKENS = 8


@dataclass(frozen=True)
class Cut:
    """One handover as its client saw it.

    Attributes:
        gap_ms: time without a token before the target's first, or before the source's last if that came late.
        itl_ms: this client's median time between tokens, without the cuts; `after_ms`: that on the target alone.
        tokens: of the request at that moment, prompt included.
        stages: what the source measured, by name in ms.
        scenario: which one it counts for.
    """

    gap_ms: float
    itl_ms: float
    after_ms: float
    tokens: int
    stages: dict[str, float]
    scenario: str = ""

    @property
    def in_itl(self) -> float:
        return self.gap_ms / self.itl_ms

    @property
    def excess_ms(self) -> float:
        return self.gap_ms - self.after_ms


@dataclass
class Shot:
    """Everything that one load with its migrations showed.

    Attributes:
        windows: begin and end of each migration on the clock of `Answer.arrivals`.
        bystanders: answers of streams that the target served meanwhile.
        wall_offset: Unix time minus that clock, in seconds.
        way_back: scenario of every second migration, when it is another one.
    """

    scenario: str
    answers: list[Answer]
    verdicts: list[Verdict]
    migrations: list[Migration]
    windows: list[tuple[float, float]]
    bystanders: list[Answer] = field(default_factory=list)
    wall_offset: float = 0.0
    way_back: str = ""

    @property
    def exact(self) -> bool:
        return all(verdict.exact for verdict in self.verdicts)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [
            {**row, "scenario": self.way_back if self.way_back and number % 2 else self.scenario}
            for number, migration in enumerate(self.migrations)
            for row in migration.requests
            if row["outcome"] == "moved"
        ]

    @property
    def cuts(self) -> list[Cut]:
        return [cut for answer in self.answers for cut in cuts_of(answer, self.rows)]

    def bystander_pauses(self) -> list[float]:
        """The longest pause of each stream that stood by, in its usual time between tokens: those of the target, and
        those of the source outside of their own cuts. Usual is the longer one of those before and after the pause,
        because a target that takes eight streams in addition to four has longer steps from then on, pause or not."""
        found = []
        for answer in [*self.bystanders, *self.answers]:
            own = _near(answer, self.rows)
            spacing = _spacing(answer)
            during = [
                pause / _usual(spacing, index)
                for index, (when, pause) in enumerate(spacing)
                if index not in own and any(begin < when < end for begin, end in self.windows)
            ]
            if during:
                found.append(max(during))
        return found

    def whole_blocks(self) -> tuple[int, int]:
        """Whole KV blocks that were sent, and that the moved requests had when they left."""
        rounds = [row for migration in self.migrations for row in migration.rounds]
        sent = sum(row["blocks"] for row in rounds)
        had = 0
        for row in self.rows:
            # The last token's KV is not written before the next step.
            written = row["prompt_tokens"] + row["output_tokens"] - 1
            had += written // BLOCK_TOKENS
            sent += row["tail_blocks"] - bool(written % BLOCK_TOKENS)
        return sent, had


async def shoot(
    rig: Rig,
    scenario: str,
    requests: Sequence[Request],
    references: Sequence[Answer],
    *,
    mode: str = "rolling",
    moves: int = 1,
    own: Sequence[Request] = (),
    way_back: str = "",
    start_after: int = 24,
    between: int = 24,
) -> Shot:
    """Runs `requests`, moves them `moves` times there and back, and compares with an undisturbed run.

    Args:
        references: the answers of that run.
        own: requests that the second instance serves, past the proxy, while it is the target; it starts again with them
            for each migration there, and drops them for the way back.
        way_back: scenario of the migrations back.
        start_after, between: tokens that every stream gets before the first migration, and before each further one.
    """
    source, target = await rig.settled()
    live: list[Answer] = []
    bystanders: list[Answer] = []
    load = asyncio.ensure_future(
        run_requests(rig.clients_url, rig.model, requests, progress=live.extend, timeout_s=REFERENCE_S)
    )
    beside: asyncio.Future[Any] = asyncio.ensure_future(asyncio.sleep(0))
    migrations: list[Migration] = []
    windows: list[tuple[float, float]] = []
    headers = {"Authorization": f"Bearer {rig.stack.api_token}"}
    try:
        async with aiohttp.ClientSession(rig.stack.url, headers=headers) as session:
            panel = Panel(session)
            for number in range(moves):
                there = number % 2 == 0
                if own and there:
                    mine: list[Answer] = []
                    beside = asyncio.ensure_future(run_requests(target.base_url, rig.model, own, progress=mine.extend))
                    await until_all_have(mine, OWN_TOKENS, beside)
                    bystanders += mine
                await until_all_have(live, between if number else start_after, load)
                if load.done():
                    break
                if not own or not there:
                    await rig.forget_prefixes(target)
                began = time.monotonic()
                job = await rig.migrate(source, target, mode=mode)
                migrations.append(await panel.finished(job))
                windows.append((began, time.monotonic()))
                source, target = target, source
                beside.cancel()
        answers = await load
    finally:
        load.cancel()
        beside.cancel()
    rows = [row for migration in migrations for row in migration.requests]
    found = verdicts(list(references), answers, rows)
    offset = time.time() - time.monotonic()
    return Shot(scenario, answers, found, migrations, windows, bystanders, offset, way_back)


# -- times of one stream -----------------------------------------------------------------------------------------------


def _spacing(answer: Answer) -> list[tuple[float, float]]:
    """For each event but the first: when it came, and the milliseconds since the one before."""
    arrivals = answer.arrivals
    return [(when, (when - before) * 1000) for (before, _), (when, _) in itertools.pairwise(arrivals)]


def _usual(spacing: list[tuple[float, float]], index: int) -> float:
    """The longer one of the medians before and after one entry."""
    sides = spacing[max(0, index - AROUND) : index], spacing[index + 1 : index + 1 + AROUND]
    return max(statistics.median(pause for _, pause in side) for side in sides if side)


def _moved(answer: Answer, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["stream_id"] and row["stream_id"] == answer.stream_id]


def _near(answer: Answer, rows: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Which entries of `_spacing` are at a cut, and at which one of `rows`: the pause before the target's first own
    token, and the one before the source's last, which may reach the client through the target's replay."""
    found: dict[int, int] = {}
    for place, row in enumerate(_moved(answer, rows)):
        delivered = 0
        for index, (_, count) in enumerate(answer.arrivals):
            if index and delivered <= row["output_tokens"] and row["output_tokens"] - 1 < delivered + count:
                found[index - 1] = place
            delivered += count
    return found


def switch_times(answer: Answer, rows: Sequence[dict[str, Any]]) -> list[float]:
    """When the client got its first token from the target, for each move."""
    spacing, near = _spacing(answer), _near(answer, rows)
    first: dict[int, int] = {}
    for index, place in near.items():
        first[place] = max(index, first.get(place, 0))
    return [spacing[index][0] for index in first.values()]


def cuts_of(answer: Answer, rows: Sequence[dict[str, Any]]) -> list[Cut]:
    spacing, near, moved = _spacing(answer), _near(answer, rows), _moved(answer, rows)
    ordinary = [pause for index, (_, pause) in enumerate(spacing) if index not in near]
    if not ordinary:
        return []
    cuts = []
    for place, row in enumerate(moved):
        at = [index for index, number in near.items() if number == place]
        after = [pause for index, (_, pause) in enumerate(spacing) if index > max(at, default=0) and index not in near]
        # Until the next move, or the end.
        later = [index for index, number in near.items() if number == place + 1]
        if later:
            after = after[: min(later) - max(at) - 1]
        if at and len(after) > 5:
            before = [pause for index, (_, pause) in enumerate(spacing[: min(at)]) if index not in near][-AROUND:]
            usual = statistics.median(before or ordinary)
            # The source's last token belongs to the cut if it came late: by the target's replay.
            pauses = [spacing[index][1] for index in at]
            gap = max(pauses[-1:] + [pause for pause in pauses[:-1] if pause > LATE * usual])
            tokens = row["prompt_tokens"] + row["output_tokens"]
            cuts.append(
                Cut(
                    *(gap, statistics.median(ordinary), statistics.median(after), tokens),
                    *(row.get("stages") or {}, row.get("scenario", "")),
                )
            )
    return cuts
