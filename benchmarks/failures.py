"""The failure table: every state of a move, and everything that can fail in it, on two real engines.

    python -m benchmarks.failures [--only STATE:FAILURE ...] [--results FILE [--minutes N]] [--write docs/failures.md]

Each cell runs a handful of clients, holds their migration in one state, lets one thing fail, and then asserts: clients
whose engine lives get the complete answer, equal to that of an undisturbed run; the others get an error in the
protocol's shape after a correct beginning; nothing stays parked, frozen, quarantined or in a session; every living side
has as many free KV blocks as before, and its prefix cache can be emptied, which fails while anybody holds a block.

The table goes to stderr (and, with --write, into the document); the last line of stdout is JSON: `cells`, `held`,
`failed`. Exit code 0 only if every cell held. `--only frozen:` runs a row, `--only ":A killed"` a column. The whole
takes half an hour, most of it for starting killed engines again: with `--results` it can be done in several sittings,
each of which runs only cells that have not held yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.answers import Answer
from benchmarks.demo_models import tiny_model
from benchmarks.exactness import compare
from benchmarks.failure_cells import FAILURES, STATES, TOKENS, Failure, Run, State, base_requests, impossible
from benchmarks.failure_rig import LEASE_S, Client, NeverHappened, Rig
from benchmarks.failure_table import Cell, document, line

__all__ = ["run_cell"]

#: Seconds after the failure within which everything must be let go: the longest hold of all (A's last resort, 10 s),
#: then one lease, and what a busy machine takes on top.
LIMIT_S = 10.0 + LEASE_S + 7.0
#: Tokens that each client has before the migration starts.
START_AFTER = 20
#: Small enough to be filled on purpose, large enough for every cell.
KV_CACHE_BYTES = 28 * 1024**2


async def run_cell(rig: Rig, state: State, failure: Failure, tokens: int = TOKENS) -> Cell:
    """Runs one cell on a settled rig, with that many tokens for each client, and leaves the rig settled again."""
    cell = Cell(state.name, failure.name)
    try:
        await _run(rig, state, failure, cell, tokens)
    except NeverHappened as never:
        cell.problems.append(str(never))
    return cell


async def _run(rig: Rig, state: State, failure: Failure, cell: Cell, tokens: int) -> None:
    source, target = await rig.settled()
    requests = failure.requests(state.name) if failure.requests else base_requests(tokens)
    references = await rig.undisturbed(requests)
    for instance in (source, target):
        if not await rig.forget_prefixes(instance):
            raise NeverHappened(f"the prefix cache of {instance.letter} could not be emptied before the cell")
    free = {instance.letter: await rig.free_blocks(instance) for instance in (source, target)}
    others = [asyncio.create_task(rig.occupy(source, 16, 1900))] if state.name == "moved" else []
    slow = {"step_delay_s": rig.step_delay_s}
    await rig.faults(source, **slow, **{**state.source, **failure.source.get(state.name, {})})
    await rig.faults(target, **slow, **{**state.target, **failure.target.get(state.name, {})})
    clients = rig.start(requests)
    run = Run(rig, source, target, "", clients, free, others)
    try:
        await rig.until(lambda: _all_have(clients), "the clients' first tokens")
        run.job = await rig.migrate(source, target)
        if failure.waits:
            await rig.until(lambda: state.reached(run), f"every move is {state.name}")
        began = time.monotonic()
        await failure.inject(run)
        await _watch(run, failure, cell, began)
    finally:
        for client in clients:
            client.task.cancel()
        for other in run.others:
            other.cancel()
        await asyncio.gather(*run.others, *(client.task for client in clients), return_exceptions=True)
    _judge(cell, state, failure, clients, references)


async def _watch(run: Run, failure: Failure, cell: Cell, began: float) -> None:
    """From the failure until all is quiet, with what died started again."""
    rig = run.rig
    dead = {"source": run.source, "target": run.target}.get(failure.kills)
    living = [one for one in (run.source, run.target) if one is not dead]
    if failure.waits:
        for instance in living:
            await rig.faults(instance, step_delay_s=rig.step_delay_s)

        async def let_go() -> bool:
            held = [(await rig.status(one))["requests"] for one in living]
            return not any(one[name] for one in held for name in ("parked", "frozen", "quarantined"))

        await rig.until(let_go, "nothing parked, frozen or quarantined", LIMIT_S)
        cell.let_go_s = time.monotonic() - began
        if run.source in living:
            cell.first = await _ended_moves(run)
        await _full_speed(run, living)
    for other in run.others:
        other.cancel()
    if failure.kills == "proxy":
        await rig.restart_service("panel")
    if failure.kills == "worker":
        # Nobody renews: the session must end by itself.
        async def no_session() -> bool:
            return all([(await rig.status(one))["session"] is None for one in living])

        await rig.until(no_session, "the session's end without its control plane", LIMIT_S)
        cell.let_go_s = time.monotonic() - began
    limit = asyncio.gather(*(client.task for client in run.clients), return_exceptions=True)
    if not failure.waits:
        cell.first = await _first_fates(run, limit)
        wanted = failure.first.get(cell.state)
        if wanted and wanted not in cell.first:
            cell.problems.append(f"the moves should first have {wanted}, and have {cell.first or 'not ended'}")
        await _full_speed(run, living)
    try:
        await asyncio.wait_for(limit, 120)
    except TimeoutError as error:
        raise NeverHappened("a client's stream hangs") from error
    if failure.kills == "worker":
        await rig.restart_service("worker")
    job = await rig.job_ended(run.job)
    cell.job = job["state"]
    rows = (await rig.panel("GET", f"/api/v1/migrations/{run.job}/requests?limit=100"))["results"]
    cell.outcomes = dict(Counter(_outcome(row) for row in rows))
    cell.problems += [text for text in [failure.must(job, rows)] if text]
    await _compare_blocks(run, living, cell)
    if dead is not None:
        await (run.restarting or rig.restart(dead))
        cell.free[dead.letter] = run.free[dead.letter], None


def _outcome(row: dict[str, Any]) -> str:
    """A request's fate as the job tells it."""
    return "unknown" if row["code"] == "outcome_unknown" else str(row["outcome"])


async def _full_speed(run: Run, living: list[Any]) -> None:
    for instance in living:
        await run.rig.faults(instance)


async def _ended_moves(run: Run) -> dict[str, int]:
    moves = await run.moves()
    return {state: moves[state] for state in ("moved", "stayed", "finished") if moves.get(state)}


async def _first_fates(run: Run, clients: asyncio.Future[Any]) -> dict[str, int]:
    """Waits until the fault itself has decided: the requests have moved, or have been rolled back once."""

    async def decided() -> bool:
        return clients.done() or bool(await _ended_moves(run))

    await run.rig.until(decided, "the end of the moves", LIMIT_S)
    return await _ended_moves(run)


async def _compare_blocks(run: Run, living: list[Any], cell: Cell) -> None:
    after: dict[str, int] = {}

    async def as_before() -> bool:
        for one in living:
            after[one.letter] = await run.rig.free_blocks(one)
        idle = all([await run.rig.idle(one) for one in living])
        return idle and all(after[one.letter] == run.free[one.letter] for one in living)

    try:
        await run.rig.until(as_before, "idle engines with as many free blocks as before", LIMIT_S)
    except NeverHappened as never:
        held = {one.letter: (await run.rig.status(one))["requests"] for one in living}
        cell.problems.append(f"{never}: {run.free} before, {after} after, {held}")
    for one in living:
        cell.free[one.letter] = run.free[one.letter], after[one.letter]
        if not await run.rig.forget_prefixes(one):
            cell.problems.append(f"somebody still holds a block of {one.letter}")


async def _all_have(clients: list[Client]) -> bool:
    streamed = [client for client in clients if client.request.streamed]
    return all(len(client.answer.token_ids) >= START_AFTER or client.answer.error for client in streamed)


# -- what clients got --------------------------------------------------------------------------------------------------


def _judge(cell: Cell, state: State, failure: Failure, clients: list[Client], references: list[Answer]) -> None:
    seen: Counter[str] = Counter()
    for client, reference in zip(clients, references, strict=True):
        answer = client.answer
        if client.left:
            seen["left"] += 1
            continue
        fate = failure.fate(state.name)
        difference = _difference(fate, reference, answer)
        seen[fate if not difference else "WRONG"] += 1
        if difference:
            cell.problems.append(f"{answer.request.name}: {difference}")
        if fate == "exact":
            times = [when for when, _ in answer.arrivals]
            cell.silence_s = max([cell.silence_s, *(b - a for a, b in pairwise(times))])
    cell.clients = dict(seen)


def _difference(fate: str, reference: Answer, answer: Answer) -> str:
    """What is not as it should be; "" when nothing is."""
    if fate == "exact":
        return "; ".join(compare(reference, answer).differences)
    delivered = len(answer.token_ids)
    if answer.token_ids != reference.token_ids[:delivered]:
        return "what was delivered before the failure is wrong"
    if fate == "error" and not answer.request.streamed and not answer.error:
        # Nothing of it had been sent: the proxy gave it to another instance, from its beginning.
        return "; ".join(compare(reference, answer).differences)
    if fate == "error":
        shaped = "upstream_lost" in answer.error and ("error event" in answer.error or "HTTP 502" in answer.error)
        return "" if shaped else f"no error in the protocol's shape: {answer.error or 'a complete answer'}"
    return "" if answer.error else "a complete answer, although its proxy was killed"


# -- sittings ----------------------------------------------------------------------------------------------------------


def _chosen(only: list[str]) -> list[tuple[State, Failure]]:
    wanted = [tuple(one.split(":", 1)) for one in only]
    chosen = []
    for state in STATES.values():
        for failure in FAILURES.values():
            if impossible(state.name, failure.name):
                continue
            if not wanted or any(s in ("", state.name) and f in ("", failure.name) for s, f in wanted):
                chosen.append((state, failure))
    return chosen


def _remembered(path: Path | None) -> dict[tuple[str, str], Cell]:
    """Cells of earlier sittings; of one that was run twice, the last."""
    if path is None or not path.exists():
        return {}
    cells = [msgspec.json.decode(line, type=Cell) for line in path.read_text().splitlines()]
    return {(cell.state, cell.failure): cell for cell in cells}


async def _measure(arguments: argparse.Namespace) -> list[Cell]:
    """Runs the chosen cells that have not held in an earlier sitting; returns all that were ever run, in order."""
    known = _remembered(arguments.results)
    missing = [pair for pair in _chosen(arguments.only) if (cell := known.get(_key(pair))) is None or not cell.held]
    if missing:
        for cell in await _sitting(arguments, missing):
            known[cell.state, cell.failure] = cell
    return [known[_key(pair)] for pair in _chosen([]) if _key(pair) in known]


def _key(pair: tuple[State, Failure]) -> tuple[str, str]:
    return pair[0].name, pair[1].name


async def _sitting(arguments: argparse.Namespace, pairs: list[tuple[State, Failure]]) -> list[Cell]:
    folder = Path(tempfile.mkdtemp(prefix="failures-"))
    cells: list[Cell] = []
    ends_at = time.monotonic() + 60 * arguments.minutes
    try:
        model = arguments.model or str(tiny_model())
        async with Rig.started(folder, model, arguments.port, _say, KV_CACHE_BYTES) as rig:
            for state, failure in pairs:
                if time.monotonic() > ends_at:
                    _say("The time of this sitting is over.")
                    break
                cell = await run_cell(rig, state, failure)
                cells.append(cell)
                _say(f"{time.strftime('%H:%M:%S')} {line(cell)}")
                if arguments.results:
                    with arguments.results.open("ab") as file:
                        file.write(msgspec.json.encode(cell) + b"\n")
    finally:
        if arguments.keep_logs:
            shutil.copytree(folder / "logs", arguments.keep_logs, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return cells


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="STATE:FAILURE", help="may be given several times"
    )
    parser.add_argument("--model", help="folder of another model (default: a tiny random one)")
    parser.add_argument("--port", type=int, default=8800, help="first of the ports to use")
    parser.add_argument("--write", type=Path, help="document to write, for example docs/failures.md")
    parser.add_argument("--results", type=Path, help="file that remembers cells from one sitting to the next")
    parser.add_argument("--minutes", type=float, default=1e6, help="no new cell is begun after that time")
    parser.add_argument("--keep-logs", type=Path, help="folder that gets the logs of all processes")
    arguments = parser.parse_args()
    if not _chosen(arguments.only):
        parser.error("--only names no cell; states: " + ", ".join(STATES) + "; failures: " + ", ".join(FAILURES))
    cells = asyncio.run(_measure(arguments))
    text = document(cells, LIMIT_S)
    sys.stderr.write(text)
    if arguments.write:
        arguments.write.write_text(text)
    held = sum(cell.held for cell in cells)
    print(json.dumps({"cells": len(cells), "held": held, "failed": len(cells) - held}))
    return 0 if cells and held == len(cells) else 1


if __name__ == "__main__":
    sys.exit(main())
