"""One scripted migration under load: the same requests undisturbed, then cut in the middle, compared token by token.

    python -m benchmarks.live_migration --url http://127.0.0.1:8002 --model smollm2-135m --source ID --target ID

The operator's token comes from VLLM_HI_API_TOKEN. A table goes to stderr, one JSON line to stdout. Exit code 0 only if
the migration is done, at least one stream was really cut, and every answer is exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.exactness import MIN_SIDE, Verdict, percentile, rescore, verdicts
from benchmarks.streams import Answer, Request, mixed_requests, run_requests

__all__ = ["Migration", "MigrationRun", "Panel", "migrate_under_load", "summary", "until_all_have"]

TERMINAL = ("done", "partial", "failed", "aborted")
#: Seconds.
MIGRATION_LIMIT_S = 180.0
#: Each question costs the panel some 30 ms of a core that may be an engine's.
POLL_S = 0.5
console = Console(stderr=True)


@dataclass
class Migration:
    """A finished migration as the API tells it: the job, its rounds, its request rows."""

    job: dict[str, Any]
    rounds: list[dict[str, Any]]
    requests: list[dict[str, Any]]


@dataclass
class MigrationRun:
    """Everything one measurement saw. `migrations`: in the order in which they were run."""

    references: list[Answer]
    answers: list[Answer]
    verdicts: list[Verdict]
    migrations: list[Migration]

    @property
    def migration(self) -> Migration:
        """The first one, for measurements that have only that."""
        return self.migrations[0]


class Panel:
    """The few API calls a measurement needs."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str) -> Any:
        async with self.session.get(path) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"GET {path}: {answer}")
            return answer

    async def rows(self, path: str) -> list[dict[str, Any]]:
        """All rows of a list, page after page."""
        rows: list[dict[str, Any]] = []
        while True:
            answer = await self.get(f"{path}?limit=100&offset={len(rows)}")
            if isinstance(answer, list):
                return answer
            rows += answer["results"]
            if not answer.get("next"):
                return rows

    async def migrate(self, source: str, target: str, **fields: Any) -> str:
        """Starts a migration and returns its id.

        Raises:
            RuntimeError: refused, with the panel's reason.
        """
        body = {"source": source, "target": target, **fields}
        async with self.session.post("/api/v1/migrations", json=body) as response:
            answer = await response.json()
            if response.status != 201:
                raise RuntimeError(f"the panel refuses the migration: {answer}")
            return str(answer["id"])

    async def finished(self, job_id: str, limit_s: float = MIGRATION_LIMIT_S) -> Migration:
        """Waits for the end of a migration.

        Raises:
            RuntimeError: it has not ended after `limit_s` seconds.
        """
        began = time.monotonic()
        path = f"/api/v1/migrations/{job_id}"
        while (job := await self.get(path))["state"] not in TERMINAL:
            if time.monotonic() - began > limit_s:
                raise RuntimeError(f"migration {job_id} is still {job['state']} after {limit_s:.0f} s")
            await asyncio.sleep(POLL_S)
        requests = [{**row, "job": job_id} for row in await self.rows(f"{path}/requests")]
        return Migration(job, await self.rows(f"{path}/rounds"), requests)


async def migrate_under_load(
    url: str,
    api_token: str,
    model: str,
    source: str,
    target: str,
    requests: list[Request],
    *,
    start_after_tokens: int = 30,
    further: Sequence[int] = (),
    migration_type: str = "preserve_source",
    references: list[Answer] | None = None,
) -> MigrationRun:
    """Runs `requests` undisturbed, then again with a migration in the middle, and compares.

    Args:
        start_after_tokens: the migration starts when every stream has delivered that many tokens.
        further: after the first migration one more for each of these, back to the instance that was left: each starts
            when every stream has delivered that many more tokens. None is started when all requests have ended.
        references: answers of an earlier undisturbed run of the same requests; None runs them now.

    Raises:
        RuntimeError: the panel refused a migration or it never ended.
    """
    headers = {"Authorization": f"Bearer {api_token}"}
    migrations: list[Migration] = []
    async with aiohttp.ClientSession(url, headers=headers) as session:
        panel = Panel(session)
        if references is None:
            references = await run_requests(url, model, requests)
        live: list[Answer] = []
        load = asyncio.ensure_future(run_requests(url, model, requests, progress=live.extend))
        try:
            for tokens in (start_after_tokens, *further):
                await until_all_have(live, tokens, load)
                if load.done() and migrations:
                    break
                job = await panel.migrate(source, target, migration_type=migration_type)
                migrations.append(await panel.finished(job))
                source, target = target, source
            answers = await load
        finally:
            load.cancel()
    found = verdicts(references, answers, [row for migration in migrations for row in migration.requests])
    for verdict, answer in zip(found, answers, strict=True):
        if not answer.request.repeatable:
            verdict.differences += await rescore(url, model, answer)
    return MigrationRun(references, answers, found, migrations)


async def until_all_have(live: list[Answer], tokens: int, load: asyncio.Future[Any]) -> None:
    """Waits until every stream that goes on has `tokens` more tokens than now."""
    had = {id(answer): answer.progress for answer in live}
    while not load.done():
        streams = [answer for answer in live if answer.request.streamed]
        if streams and all(answer.over or answer.progress >= had.get(id(answer), 0) + tokens for answer in streams):
            return
        await asyncio.sleep(0.02)


def summary(run: MigrationRun) -> dict[str, Any]:
    """The measurement's one JSON line; only streams that were really cut are counted."""
    cut = [verdict for verdict in run.verdicts if verdict.counted]
    gaps = [verdict.gap_ms for verdict in cut if verdict.gap_ms is not None]
    relative = [verdict.gap_ms / verdict.itl_ms for verdict in cut if verdict.gap_ms is not None and verdict.itl_ms]
    return {
        "streams": len(cut),
        "moved": sum(row["outcome"] == "moved" for row in run.migration.requests),
        "identical": sum(verdict.exact for verdict in cut),
        "lost_tokens": sum(verdict.lost for verdict in cut),
        "duplicated_tokens": sum(verdict.duplicated for verdict in cut),
        "rounds": len(run.migration.rounds),
        "bytes": run.migration.job["bytes_total"],
        "gap_ms_p50": _rounded(percentile(gaps, 0.5)),
        "gap_ms_p99": _rounded(percentile(gaps, 0.99)),
        "gap_in_itl_p99": _rounded(percentile(relative, 0.99)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _table(run: MigrationRun) -> Table:
    table = Table(title=f"Migration {run.migration.job['id']}: {run.migration.job['state']}")
    for heading in ("request", "prompt", "tokens", "cut at", "gap ms", "between tokens ms", "answer"):
        table.add_column(heading, justify="left" if heading in ("request", "answer") else "right")
    for verdict, answer in zip(run.verdicts, run.answers, strict=True):
        table.add_row(
            verdict.name,
            str(answer.billed["prompt_tokens"] or ""),
            str(answer.tokens),
            ", ".join(map(str, verdict.cuts)) or "-",
            "-" if verdict.gap_ms is None else f"{verdict.gap_ms:.0f}",
            "-" if verdict.itl_ms is None else f"{verdict.itl_ms:.0f}",
            "[green]exact" if verdict.exact else "[red]" + "; ".join(verdict.differences),
        )
    return table


async def _main(arguments: argparse.Namespace) -> int:
    requests = mixed_requests(arguments.streams, tokens=arguments.tokens, salt=int(time.time()) % 100000)
    token = os.environ.get("VLLM_HI_API_TOKEN", "")
    console.print(f"Scripted migration: {len(requests)} streams, {arguments.tokens} tokens each")
    console.print("  undisturbed run, for comparison")
    # The first steps of an engine are slower than all later ones.
    await run_requests(arguments.url, arguments.model, mixed_requests(2, tokens=12, salt=1))
    references = await run_requests(arguments.url, arguments.model, requests)
    console.print("  the same requests again, migrated in the middle")
    try:
        run = await migrate_under_load(
            arguments.url,
            token,
            arguments.model,
            arguments.source,
            arguments.target,
            requests,
            references=references,
        )
    except RuntimeError as error:
        console.print(f"[red]{error}")
        return 1
    console.print(_table(run))
    line = summary(run)
    print(json.dumps(line), flush=True)
    job = run.migration.job
    if job["state"] != "done":
        console.print(f"[red]The migration ended {job['state']}: {job.get('error') or 'no reason given'}")
    if line["streams"] == 0:
        console.print(f"[red]No stream was cut with at least {MIN_SIDE} tokens on each side.")
    exact = all(verdict.exact for verdict in run.verdicts)
    return 0 if exact and job["state"] == "done" and line["streams"] > 0 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True, help="base URL of panel and /v1")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--source", required=True, help="id of the instance to move away from")
    parser.add_argument("--target", required=True, help="id of the standby to move to")
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams (default: 8)")
    parser.add_argument("--tokens", type=int, default=280, help="output tokens of each (default: 280)")
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
