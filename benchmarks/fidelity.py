"""The fidelity matrix: every kind of request, really moved in mid-answer, and compared with the same request
undisturbed.

    python -m benchmarks.fidelity [--requests 300] [--seed N] [--write docs/fidelity.md]

Starts the product with two real instances, moves batches of requests to and fro at cut points drawn at random, and
counts. The table goes to stderr (and, with --write, into the document); the last line of stdout is JSON: `migrated`,
`mismatches`, `refused`, `seed`. Exit code 0 only if nothing differed and every kind that must be refused was refused
with its code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.demo_models import chat_model
from benchmarks.fidelity_kinds import KINDS, Kind
from benchmarks.live_migration import MigrationRun, migrate_under_load
from benchmarks.streams import Request, run_requests
from controlplane.serving import InstanceOptions
from controlplane.supervisor import Stack, StackOptions

__all__ = ["Row", "batch_of", "document", "judge"]

BATCH = 8
#: The migration starts when every stream has this many tokens; drawn anew for each batch.
EARLIEST, LATEST = 12, 60


@dataclass
class Row:
    """What was seen of one kind. `cuts`: tokens at which its requests were cut. `codes`: reasons of refusals."""

    kind: Kind
    migrated: int = 0
    exact: int = 0
    cuts: list[int] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the kind behaved as the matrix says: exact each time, or refused with its code."""
        if self.kind.refused:
            return self.codes == {self.kind.refused} and not self.migrated and not self.differences
        return self.migrated > 0 and self.exact == self.migrated and not self.differences


def batch_of(kinds: list[Kind], salt: int) -> list[Request]:
    """One request of each kind; `salt` changes all prompts, so that nothing is found in a prefix cache."""
    return [kind.request(salt * 100 + index) for index, kind in enumerate(kinds)]


def judge(rows: dict[str, Row], kinds: list[Kind], run: MigrationRun) -> None:
    """Adds one migration's outcome to the rows."""
    # A request that the proxy refused has no stream id in its row; its request id is made from it.
    outcomes = run.migration.requests
    for kind, verdict, answer in zip(kinds, run.verdicts, run.answers, strict=True):
        row = rows[kind.name]
        # Where several choices run side by side, the order of their events is not the same twice: of what stays, only
        # the end is looked at.
        differences = [answer.error] if kind.refused and answer.error else [] if kind.refused else verdict.differences
        row.differences += [f"{difference} (cut at {verdict.cut_at})" for difference in differences]
        seen = next((row for row in outcomes if answer.stream_id and answer.stream_id in row["request_id"]), None)
        if verdict.cut_at is not None:
            row.migrated += 1
            row.exact += verdict.exact
            row.cuts.append(verdict.cut_at)
        elif seen is not None and seen["outcome"] in ("refused", "stayed"):
            row.codes.add(seen["code"])


def document(rows: dict[str, Row], seed: int) -> str:
    """The matrix as Markdown."""
    lines = [
        "# Which requests survive a migration, and how",
        "",
        "Written by `python -m benchmarks.fidelity` from the runs that prove it; do not edit. Two real vLLM instances",
        f"on CPUs, SmolLM2-135M in float32, several requests at once, cut points drawn at random (seed {seed}).",
        "",
        "- *Exact*: text, token ids, usage and finish reason equal those of the same request undisturbed, and",
        "  log-probabilities within 1e-4. Unseeded requests have no twin; their delivered tokens are scored again.",
        "- *Refused*: the request stays on its instance and says why before anything is frozen.",
        "",
        "| kind of request | result | moved | cut after tokens |",
        "|---|---|---|---|",
    ]
    for row in rows.values():
        if row.kind.refused:
            result = f"refused: `{row.kind.refused}`" if row.holds else "**NOT REFUSED AS IT SHOULD BE**"
        else:
            result = "exact" if row.holds else "**" + ("; ".join(row.differences) or "never moved") + "**"
        cuts = f"{min(row.cuts)} to {max(row.cuts)}" if row.cuts else "-"
        lines.append(f"| {row.kind.name} | {result} | {row.migrated or '-'} | {cuts} |")
    return "\n".join(lines) + "\n"


async def measure(requests: int, seed: int) -> dict[str, Row]:
    """Runs the matrix on a product of its own until `requests` have moved, every kind at least once."""
    folder = Path(tempfile.mkdtemp(prefix="fidelity-"))
    instances = InstanceOptions(model=str(chat_model()), served_model_name="smollm2-135m")
    options = StackOptions(
        state_dir=folder,
        panel_port=8302,
        first_instance_port=8300,
        first_data_port=9300,
        instances=instances,
        say=_say,
    )
    stack = Stack(options)
    rows = {kind.name: Row(kind) for kind in KINDS}
    draw = random.Random(seed)
    try:
        await stack.start()
        await run_requests(stack.url, "smollm2-135m", batch_of(KINDS[:2], seed % 1000))
        source, target = (instance.id for instance in stack.instances.values())
        salt = seed % 100_000
        # A kind that is never seen to move or to be refused shows up as such in the table; it must not keep this going.
        for _ in range(2 * max(requests, len(KINDS)) // BATCH + 1):
            missing = [row.kind.name for row in rows.values() if not _tried(row)]
            moved = sum(row.migrated for row in rows.values())
            _say(f"  {moved} moved, {len(missing)} kinds not seen yet {missing[:3]}")
            if moved >= requests and not missing:
                break
            kinds = sorted(KINDS, key=lambda kind: (_tried(rows[kind.name]), draw.random()))[:BATCH]
            salt += 1
            start = draw.randint(EARLIEST, LATEST)
            run = await migrate_under_load(
                stack.url,
                stack.api_token,
                "smollm2-135m",
                source,
                target,
                batch_of(kinds, salt),
                start_after_tokens=start,
            )
            judge(rows, kinds, run)
            source, target = target, source
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tried(row: Row) -> int:
    return row.migrated or len(row.codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="how many must have moved")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--write", type=Path, help="document to write, for example docs/fidelity.md")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.requests, arguments.seed))
    text = document(rows, arguments.seed)
    sys.stderr.write(text)
    if arguments.write:
        arguments.write.write_text(text)
    result: dict[str, Any] = {
        "migrated": sum(row.migrated for row in rows.values()),
        "mismatches": sum(row.migrated - row.exact for row in rows.values()),
        "refused": sum(bool(row.codes) for row in rows.values() if row.kind.refused),
        "seed": arguments.seed,
    }
    print(json.dumps(result))
    return 0 if all(row.holds for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
