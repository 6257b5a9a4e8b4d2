"""The fidelity matrix: every kind of request, really moved in mid-answer, and compared with the same request
undisturbed.

    python -m benchmarks.fidelity [--requests 300] [--seed N] [--kinds REGEX] [--write docs/fidelity.md]

Starts the product with two real instances, moves batches of requests there and back at cut points drawn at random, and
counts. The table goes to stderr (and, with --write, into the document); the last line of stdout is JSON: `migrated`,
`moves`, `mismatches`, `near_ties`, `refused`, `seed`. Exit code 0 only if nothing differed and every kind that must be
refused was refused with its code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.answers import Answer, Request
from benchmarks.crowd import crowded_rows, measure_crowd
from benchmarks.exactness import weigh
from benchmarks.fidelity_kinds import KINDS, Kind
from benchmarks.fidelity_rows import Row, document, judge
from benchmarks.live_migration import migrate_under_load
from benchmarks.stacks import MODEL, STACKS, sides, stack_of
from benchmarks.streams import run_requests
from controlplane.supervisor import Stack

__all__ = ["batch_of", "choose", "reference_of"]

#: Sequences of one batch; more only make each step slower.
BATCH = 10
#: A migration starts when every stream has that many more tokens; drawn anew for each.
EARLIEST, LATEST = 2, 28
AGAIN_EARLIEST, AGAIN_LATEST = 1, 10


@dataclass
class Draw:
    """What is drawn at random, and from what: everything that a repetition needs is `seed`."""

    seed: int

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.salt = self.seed % 100_000

    def next_salt(self) -> int:
        self.salt += 1
        return self.salt


def batch_of(kinds: list[Kind], salt: int) -> list[Request]:
    """One request of each kind; `salt` changes all prompts, so that nothing is found in a prefix cache."""
    return [kind.request(salt * 100 + index) for index, kind in enumerate(kinds)]


def choose(kinds: list[Kind], rows: dict[str, Row], draw: random.Random) -> list[Kind]:
    """The kinds of the next batch, those first that have been tried least; a kind with copies comes several times.

    Kinds that are refused come together: a migration waits for what stays, and then nothing is left for the way back.
    """
    chosen: list[Kind] = []
    room = BATCH
    wanted = [kind for kind in kinds if not (kind.refused and rows[kind.name].tried)] or kinds
    in_turn = sorted(wanted, key=lambda kind: (rows[kind.name].tried, draw.random()))
    for kind in (kind for kind in in_turn if bool(kind.refused) == bool(in_turn[0].refused)):
        size = kind.sequences * kind.copies
        if size <= room:
            chosen += [kind] * kind.copies
            room -= size
    return chosen


def reference_of(request: Request) -> Request:
    """The same request with other block hashes: whatever its run leaves in a prefix cache, the moved one finds none of
    it."""
    salt = "undisturbed" + request.body.get("cache_salt", "")
    return Request(request.name, request.path, {**request.body, "cache_salt": salt}, request.repeatable)


async def undisturbed(stack: Stack, requests: list[Request]) -> list[Answer]:
    """Sends the repeatable requests straight to the instances, half of them to each: no proxy, no migration."""
    urls = [instance.base_url for instance in stack.instances.values()]
    needed = [index for index, request in enumerate(requests) if request.repeatable]
    parts = [needed[start :: len(urls)] for start in range(len(urls))]
    answers = [Answer(request) for request in requests]
    found = await asyncio.gather(
        *(
            run_requests(url, MODEL, [reference_of(requests[index]) for index in part])
            for url, part in zip(urls, parts, strict=True)
        )
    )
    for part, some in zip(parts, found, strict=True):
        for index, answer in zip(part, some, strict=True):
            answers[index] = answer
    return answers


async def measure(stack_name: str, kinds: list[Kind], rows: dict[str, Row], wanted: int, draw: Draw, port: int) -> None:
    """Moves requests of these kinds on a product of their own until `wanted` have moved, every kind at least once."""
    folder = Path(tempfile.mkdtemp(prefix="fidelity-"))
    stack = stack_of(stack_name, folder, port, _say)
    try:
        await stack.start()
        if stack_name == "crowded":
            await measure_crowd(stack, rows, wanted, draw.next_salt, _say)
            return
        mine = [rows[kind.name] for kind in kinds]
        # The first steps of an engine are slower than all later ones.
        await undisturbed(stack, batch_of(kinds[:2], draw.next_salt()))
        # A kind that is never seen to move or to be refused shows up as such in the table; it must not keep this going.
        for _ in range(2 * max(wanted, len(kinds)) // BATCH + 2):
            missing = [row.kind.name for row in mine if not row.tried]
            moved = sum(row.migrated for row in mine)
            _say(
                f"  {time.strftime('%H:%M:%S')} {stack_name}: {moved} moved; not seen yet: {len(missing)} {missing[:4]}"
            )
            if moved >= wanted and not missing:
                break
            await _one_batch(stack, choose(kinds, rows, draw.random), rows, draw, *await sides(stack))
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _one_batch(
    stack: Stack, chosen: list[Kind], rows: dict[str, Row], draw: Draw, source: str, target: str
) -> None:
    """Moves one batch there and back."""
    salt = draw.next_salt()
    requests = batch_of(chosen, salt)
    began = time.monotonic()
    _say(f"  prompts {salt}: {'; '.join(sorted({kind.name for kind in chosen}))}")
    references = await undisturbed(stack, requests)
    compared = time.monotonic()
    warm = [request for kind, request in zip(chosen, requests, strict=True) if kind.warm]
    if warm:
        url = next(instance.base_url for instance in stack.instances.values() if instance.id == target)
        short = [Request(one.name, one.path, {**one.body, "max_tokens": 1}, one.repeatable) for one in warm]
        await run_requests(url, MODEL, short)
    start = draw.random.randint(EARLIEST, LATEST)
    if any(kind.ends for kind in chosen):
        start = 32
    again = draw.random.randint(AGAIN_EARLIEST, AGAIN_LATEST)
    try:
        run = await migrate_under_load(
            stack.url,
            stack.api_token,
            MODEL,
            source,
            target,
            requests,
            start_after_tokens=start,
            further=() if chosen[0].refused else (again,),
            references=references,
        )
    except RuntimeError as error:
        _say(f"  {error}")
        for kind in chosen:
            rows[kind.name].troubles.append(str(error))
        return
    over = time.monotonic()
    moves = [
        f"{migration.job['state']}, {sum(row['outcome'] == 'moved' for row in migration.requests)} moved"
        for migration in run.migrations
    ]
    _say(f"    undisturbed {compared - began:.0f} s, moved {over - compared:.0f} s; {'; '.join(moves)}")
    for verdict, reference in zip(run.verdicts, references, strict=True):
        for split in verdict.splits:
            await weigh(stack.url, MODEL, reference, split)
    for line in judge(rows, chosen, run, salt):
        _say(f"  {line}")
    for migration in run.migrations:
        if migration.job["state"] not in ("done", "partial"):
            _say(f"  migration {migration.job['state']}: {migration.job.get('error')}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _rows_for(arguments: argparse.Namespace) -> dict[str, Row]:
    rows = {kind.name: Row(kind) for kind in KINDS} | crowded_rows()
    return {
        name: row
        for name, row in rows.items()
        if re.search(arguments.kinds, name) and arguments.stack in ("", row.kind.stack)
    }


async def _main(arguments: argparse.Namespace, rows: dict[str, Row]) -> None:
    draw = Draw(arguments.seed)
    _say(f"seed {arguments.seed}")
    for number, name in enumerate(STACKS):
        kinds = [row.kind for row in rows.values() if row.kind.stack == name]
        if kinds:
            wanted = round(arguments.requests * len(kinds) / len(rows))
            await measure(name, kinds, rows, wanted, draw, arguments.port + 10 * number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=320, help="how many must have moved")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--kinds", default="", help="only kinds whose names match this regular expression")
    parser.add_argument("--stack", default="", choices=["", *STACKS], help="only kinds that need these instances")
    parser.add_argument("--port", type=int, default=8300, help="first of the ports that are used")
    parser.add_argument("--write", type=Path, help="document to write, for example docs/fidelity.md")
    arguments = parser.parse_args()
    rows = _rows_for(arguments)
    complete = False
    try:
        asyncio.run(_main(arguments, rows))
        complete = True
    except KeyboardInterrupt:
        _say("interrupted: this is what was seen until then")
    text = document(rows, arguments.seed)
    sys.stderr.write(text)
    if arguments.write and complete:
        arguments.write.write_text(text)
    result: dict[str, Any] = {
        "migrated": sum(row.migrated for row in rows.values()),
        "moves": sum(row.moves for row in rows.values()),
        "mismatches": sum(row.mismatches for row in rows.values()),
        "near_ties": sum(row.ties for row in rows.values()),
        "refused": sum(bool(row.codes) for row in rows.values() if row.kind.refused),
        "seed": arguments.seed,
    }
    print(json.dumps(result))
    return 0 if complete and all(row.holds for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
