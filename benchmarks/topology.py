"""Live migrations between instances of different tensor and pipeline parallel sizes, streams in flight, token by token.

    python -m benchmarks.topology [--write docs/topology.md]

Starts the product and three instances of a tiny random model in float32: one of one rank, one with two tensor parallel
ranks, one with two pipeline stages. Streams run on one of them and are moved to another, once for each pair of sizes.
The table goes to stderr; the last line of stdout is JSON. Exit code 0 only if every path moved all its streams and
every answer is that of an undisturbed run on one rank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.answers import Answer, Request
from benchmarks.demo_models import tiny_model
from benchmarks.exactness import percentile
from benchmarks.live_migration import MigrationRun, migrate_under_load
from benchmarks.ping_pong import free_blocks
from benchmarks.streams import mixed_requests, run_requests
from controlplane.preparation import cores
from controlplane.processes import ManagedProcess, choose_port
from controlplane.serving import HOST, Instance, InstanceOptions, serve_command, serve_environment
from controlplane.supervisor import ROOT, Stack, StackOptions

__all__ = ["PATHS", "SIZES", "Passage", "Rig", "Size", "measure", "rig"]

MODEL = "tiny"
#: Each step takes so much longer, or a tiny model's streams would have ended before they are moved.
SLOW_S = 0.02
#: What PP needs on CPUs: vLLM prepares a stage's input only when it traces the model (v1/worker/cpu_model_runner.py,
#: `warming_up_model`); with this backend what is traced is run as it is.
_TRACED = ("--compilation-config", json.dumps({"mode": 2, "backend": "eager"}))
#: From a worker's data port to the next instance's first one.
_PORTS = 4


@dataclass(frozen=True)
class Size:
    """How many ranks an instance has."""

    tp: int
    pp: int

    @property
    def name(self) -> str:
        return f"TP{self.tp}PP{self.pp}"


ONE, TENSOR, PIPELINE = Size(1, 1), Size(2, 1), Size(1, 2)
#: The first serves, the others are standbys.
SIZES = (TENSOR, ONE, PIPELINE)
#: In the order in which they are walked: each begins where the one before has ended.
PATHS = ((TENSOR, ONE), (ONE, PIPELINE), (PIPELINE, ONE), (ONE, TENSOR), (TENSOR, PIPELINE))


@dataclass
class Passage:
    """What one migration did.

    Attributes:
        free: free blocks on both sides before and after.
    """

    source: Size
    target: Size
    run: MigrationRun
    free: list[list[int]] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        job, verdicts = self.run.migration.job, self.run.verdicts
        cut = [verdict for verdict in verdicts if verdict.counted]
        gaps = [verdict.gap_ms for verdict in cut if verdict.gap_ms is not None]
        between = [verdict.itl_ms for verdict in cut if verdict.itl_ms is not None]
        return {
            "from": self.source.name,
            "to": self.target.name,
            "state": job["state"],
            "streams": len(verdicts),
            "cut": len(cut),
            "exact": sum(verdict.exact for verdict in verdicts),
            "rounds": len(self.run.migration.rounds),
            "bytes": job["bytes_total"],
            "gap_ms_p50": _rounded(percentile(gaps, 0.5)),
            "gap_ms_max": _rounded(max(gaps, default=None)),
            "itl_ms_p50": _rounded(percentile(between, 0.5)),
            "blocks_lost": [before - after for before, after in self.free],
        }

    @property
    def good(self) -> bool:
        row = self.row
        exact = row["exact"] == row["streams"] == row["cut"]
        return bool(exact and row["state"] == "done" and row["bytes"] > 0 and row["blocks_lost"] == [0, 0])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


class Rig:
    """The running product with one instance of each size."""

    def __init__(self, stack: Stack, first_port: int) -> None:
        self.stack = stack
        self.instances: dict[Size, Instance] = {}
        self._first_port = first_port

    def plan(self, panel_port: int) -> None:
        """Makes the instances."""
        for number, size in enumerate(SIZES):
            letter = "A" if not number else "B"
            taken: set[int] = set()
            port = choose_port(self._first_port + number, taken)
            data_port = self._first_port + 40 + number * _PORTS
            parallel = ("--tensor-parallel-size", str(size.tp), "--pipeline-parallel-size", str(size.pp))
            options = InstanceOptions(
                model=str(tiny_model()),
                served_model_name=MODEL,
                kv_cache_bytes=64 * 1024**2,
                max_num_seqs=8,
                faults=True,
                arguments=(*parallel, *(_TRACED if size.pp > 1 else ())),
            )
            command = serve_command(options, letter, port, f"{HOST}:{panel_port}", data_port)
            if size.pp > 1:
                command.remove("--enforce-eager")
            environment = {**os.environ, **serve_environment(options, 0, self.stack.join_token)}
            environment["VLLM_CPU_OMP_THREADS_BIND"] = _cores(size.tp * size.pp, number)
            # It would override --kv-cache-memory-bytes.
            environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
            name = f"instance-{size.name.lower()}"
            process = ManagedProcess(name, command, environment, self.stack.logs / f"{name}.log", ROOT)
            # Under its name the stack ends it with everything else.
            self.instances[size] = self.stack.instances[size.name] = Instance(letter, port, data_port, process)

    async def start(self) -> None:
        await asyncio.gather(*(instance.process.start() for instance in self.instances.values()))
        await self.stack.until_registered(self.instances.values())

    async def ask(self, size: Size, path: str, body: dict[str, Any] | None = None) -> Any:
        """Asks an instance's own endpoint."""
        headers = {"Authorization": f"Bearer {self.stack.join_token}"}
        method = "GET" if body is None else "POST"
        url = self.instances[size].base_url + path
        async with aiohttp.ClientSession(headers=headers) as session, session.request(method, url, json=body) as answer:
            return await answer.json()

    async def faults(self, **faults: Any) -> None:
        """Sets the test switches of all instances; those that are not named are off."""
        for size in SIZES:
            await self.ask(size, "/vllm_hi/faults", faults)

    async def free(self, sizes: tuple[Size, Size]) -> list[int]:
        return [await free_blocks(self.instances[size], self.stack.join_token) for size in sizes]

    async def preflight(self, source: Size, target: Size) -> dict[str, dict[str, Any]]:
        """The panel's checks of a pair, by name."""
        pair = {"source": self.instances[source].id, "target": self.instances[target].id}
        async with self.stack.client() as client:
            answer = await client.post("/api/v1/migrations/preflight", json=pair)
        return {check["name"]: check for check in answer.json()["checks"]}

    async def undisturbed(self, requests: list[Request]) -> list[Answer]:
        """The same requests on one rank, with other block hashes, so that the moved ones find nothing cached."""
        salted = [
            Request(one.name, one.path, {**one.body, "cache_salt": "undisturbed"}, one.repeatable) for one in requests
        ]
        return await run_requests(self.instances[ONE].base_url, MODEL, salted)

    async def walk(
        self, source: Size, target: Size, requests: list[Request], references: list[Answer], **faults: Any
    ) -> Passage:
        """Moves streams in flight from one size to another, with these test switches on."""
        sizes = source, target
        before = await self.free(sizes)
        await self.faults(step_delay_s=SLOW_S, **faults)
        run = await migrate_under_load(
            self.stack.url,
            self.stack.api_token,
            MODEL,
            self.instances[source].id,
            self.instances[target].id,
            requests,
            start_after_tokens=15,
            references=references,
        )
        await self.faults()
        after = await self.free(sizes)
        # What was lent to the session comes back when it is closed on both sides, a moment after the job's end.
        for _ in range(100):
            if after == before:
                break
            await asyncio.sleep(0.1)
            after = await self.free(sizes)
        return Passage(source, target, run, [list(pair) for pair in zip(before, after, strict=True)])


def _cores(ranks: int, number: int) -> str:
    """One core for each rank, as VLLM_CPU_OMP_THREADS_BIND wants them: the same number of threads everywhere."""
    usable = cores()
    return "|".join(str(usable[(number + rank) % len(usable)]) for rank in range(ranks))


@asynccontextmanager
async def rig(folder: Path, first_port: int, say: Callable[[str], None]) -> AsyncIterator[Rig]:
    """Starts everything, and ends it."""
    options = StackOptions(state_dir=folder, panel_port=first_port + 20, say=say)
    stack = Stack(options)
    try:
        await stack.start()
        made = Rig(stack, first_port)
        made.plan(int(stack.url.rpartition(":")[2]))
        say(f"Starting instances {', '.join(size.name for size in SIZES)}")
        await made.start()
        # The first steps of an engine are slower than all later ones.
        for size in SIZES:
            await run_requests(made.instances[size].base_url, MODEL, mixed_requests(2, tokens=8, salt=1))
        yield made
    finally:
        await stack.stop()


async def measure(made: Rig, streams: int, tokens: int) -> list[Passage]:
    """Walks all paths."""
    paths = []
    for number, (source, target) in enumerate(PATHS):
        requests = mixed_requests(streams, tokens=tokens, salt=900 + number)
        references = await made.undisturbed(requests)
        paths.append(await made.walk(source, target, requests, references))
    return paths


def table(paths: list[Passage]) -> Table:
    shown = Table(title="Migrations between different sizes")
    for name in paths[0].row:
        shown.add_column(name.replace("_", " "), justify="left" if name in ("from", "to", "state") else "right")
    for path in paths:
        shown.add_row(*(str(value) for value in path.row.values()))
    return shown


def document(found: list[dict[str, Any]]) -> str:
    """docs/topology.md. `found`: the rows of the passages."""
    rows = []
    for row in found:
        kilobytes = f"{row['bytes'] / 1e3:.0f}"
        cells = (row["from"], row["to"], f"{row['exact']} of {row['streams']}", row["rounds"], kilobytes)
        times = (row["gap_ms_p50"], row["gap_ms_max"], row["itl_ms_p50"])
        rows.append(f"| {' | '.join(map(str, (*cells, *times)))} |")
    return f"""# Migrations between instances of different sizes

Written by `python -m benchmarks.topology --write docs/topology.md`; do not edit. Three instances of a random model of
two layers with four KV heads, in float32, on the {len(cores())} cores of one machine: one rank (TP1PP1), two tensor
parallel ranks (TP2PP1), two pipeline stages (TP1PP2). Streams (greedy, seeded, penalties, log-probabilities, stop
strings) run on the first one and are moved to the second. *Exact*: every token, log-probability and usage is that of an
undisturbed run on one rank. Steps are slowed down by {SLOW_S * 1e3:.0f} ms (a pipeline of two makes two of them for a
token), so gaps are to be read beside the time between tokens.

| from | to | exact | rounds | KB | gap ms, median | gap ms, longest | between tokens ms |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


async def _main(arguments: argparse.Namespace) -> list[Passage]:
    folder = Path(tempfile.mkdtemp(prefix="topology-"))
    try:
        async with rig(folder, arguments.port, _say) as made:
            return await measure(made, arguments.streams, arguments.tokens)
    finally:
        if arguments.keep:
            _say(f"logs in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each")
    parser.add_argument("--port", type=int, default=8700, help="first of the ports to use")
    parser.add_argument("--write", type=Path, help="document to write, for example docs/topology.md")
    parser.add_argument("--keep", action="store_true", help="leaves the logs where they are")
    arguments = parser.parse_args()
    paths = asyncio.run(_main(arguments))
    Console(stderr=True, width=160).print(table(paths))
    for path in paths:
        for verdict in path.run.verdicts:
            if not verdict.exact:
                _say(f"  {path.source.name} to {path.target.name}, {verdict.name}: {'; '.join(verdict.differences)}")
    if arguments.write:
        arguments.write.write_text(document([path.row for path in paths]))
    print(json.dumps([path.row for path in paths]))
    return 0 if all(path.good for path in paths) else 1


if __name__ == "__main__":
    sys.exit(main())
