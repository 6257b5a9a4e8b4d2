"""`preserve_source` and back, several times in a row, under load: what it leaves behind.

    python -m benchmarks.there_and_back [--rounds 5] [--streams 3] [--tokens 500]

Starts the product with two real instances. In each round all requests in flight move from A to B, and back, while their
clients read on. Measured after each round: resident memory of both instances (all their processes), free KV blocks,
and whether every stream is what it is undisturbed. The table goes to stderr; the last line of stdout is JSON. Exit
code 0 only if all streams are exact, all blocks came back, and no instance holds over SLACK_MB more after the last
round than after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.answers import Request
from benchmarks.live_migration import MigrationRun, migrate_under_load
from benchmarks.ping_pong import free_blocks
from benchmarks.stacks import MODEL, stack_of
from benchmarks.streams import run_requests, sized_request
from controlplane.processes import ManagedProcess
from controlplane.serving import Instance
from controlplane.supervisor import Stack

__all__ = ["SLACK_MB", "flat", "resident_mb", "there_and_back"]

#: What an allocator may keep for itself: about one KV block, of the 4,500 MB that an instance holds here.
SLACK_MB = 8.0
#: Tokens between the end of one migration and the beginning of the next.
_BETWEEN = 10
_KINDS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0, "logprobs": 2}]


def resident_mb(process: ManagedProcess) -> float:
    """Resident memory of a process and its family, in MB (1e6 bytes). Pages that they share count for each."""
    total = 0
    for pid in filter(None, [process.pid, *process.relatives()]):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return round(total / 1e6, 1)


async def there_and_back(
    stack: Stack, sides: Sequence[Instance], rounds: int, streams: int = 3, tokens: int = 500
) -> list[dict[str, Any]]:
    """Runs the rounds and returns one row for each: `moves`, `exact`, `streams`, `differences`, `memory_mb` and
    `free_blocks` (of A and of B). The row of number 0 was taken before the first.

    Args:
        sides: the instance that serves now, and the standby.
    """
    await asyncio.gather(*(_touch_all_blocks(side) for side in sides))
    requests = [sized_request(f"stream-{n}", 200, tokens, 700 + n, _KINDS[n % 3]) for n in range(streams)]
    references = await run_requests(stack.url, MODEL, requests)
    before = await _blocks(stack, sides)
    rows = [_row(0, None, sides, before)]
    for number in range(1, rounds + 1):
        run = await migrate_under_load(
            stack.url,
            stack.api_token,
            MODEL,
            sides[0].id,
            sides[1].id,
            # Nothing may be found in a cache that an earlier round has filled.
            [Request(one.name, one.path, {**one.body, "cache_salt": f"round-{number}"}) for one in requests],
            start_after_tokens=_BETWEEN,
            further=[_BETWEEN],
            references=references,
        )
        after = await _blocks(stack, sides)
        # What a side had lent to a session comes back when that is closed on it, a moment after the job's end.
        for _ in range(100):
            if after == before:
                break
            await asyncio.sleep(0.1)
            after = await _blocks(stack, sides)
        rows.append(_row(number, run, sides, after))
    return rows


def flat(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether no instance holds noticeably more after the last round than after the first."""
    first, last = rows[1]["memory_mb"], rows[-1]["memory_mb"]
    return all(now <= then + SLACK_MB for then, now in zip(first, last, strict=True))


async def _touch_all_blocks(side: Instance) -> None:
    """The kernel gives KV memory when it is first written: that must not look like a leak."""
    body = {"max_tokens": 1, "temperature": 0}
    requests = [sized_request(f"touch-{n}", 1700, 1, 800 + n, body) for n in range(14)]
    await run_requests(side.base_url, MODEL, requests)


async def _blocks(stack: Stack, sides: Sequence[Instance]) -> list[int]:
    return [await free_blocks(side, stack.join_token) for side in sides]


def _row(number: int, run: MigrationRun | None, sides: Sequence[Instance], blocks: list[int]) -> dict[str, Any]:
    verdicts = run.verdicts if run else []
    return {
        "round": number,
        "moves": sum(len(verdict.cuts) for verdict in verdicts),
        "streams": len(verdicts),
        "exact": sum(verdict.exact for verdict in verdicts),
        "differences": [f"{verdict.name}: {text}" for verdict in verdicts for text in verdict.differences],
        "memory_mb": [resident_mb(side.process) for side in sides],
        "free_blocks": blocks,
    }


async def _main(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="there-and-back-"))
    stack = stack_of("plain", folder, arguments.port, lambda line: print(line, file=sys.stderr, flush=True))
    try:
        await stack.start()
        sides = list(stack.instances.values())
        return await there_and_back(stack, sides, arguments.rounds, arguments.streams, arguments.tokens)
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="There and back: what each round leaves")
    for heading in (
        "round",
        "streams exact",
        "moves",
        "memory A, MB",
        "memory B, MB",
        "free blocks A",
        "free blocks B",
    ):
        shown.add_column(heading, justify="right")
    for row in rows:
        numbers = [f"{row['exact']} of {row['streams']}", str(row["moves"])] if row["round"] else ["-", "-"]
        memory = [f"{value:.1f}" for value in row["memory_mb"]]
        shown.add_row(str(row["round"]), *numbers, *memory, *map(str, row["free_blocks"]))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream; it must outlast two migrations")
    parser.add_argument("--port", type=int, default=8300, help="first of the ports that are used")
    arguments = parser.parse_args()
    rows = asyncio.run(_main(arguments))
    Console(stderr=True).print(table(rows))
    print(json.dumps({"rounds": rows, "flat": flat(rows), "slack_mb": SLACK_MB}))
    done = rows[1:]
    exact = all(row["exact"] == row["streams"] and row["moves"] == 2 * row["streams"] for row in done)
    return 0 if exact and flat(rows) and all(row["free_blocks"] == rows[0]["free_blocks"] for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
