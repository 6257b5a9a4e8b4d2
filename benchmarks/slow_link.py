"""Two instances joined by a slow link: what a migration over it costs its clients.

    python -m benchmarks.slow_link [--mbit 200] [--rtt-ms 20] [--streams 8] [--write docs/slow-link.md]

The link is a relay (`benchmarks/link.py`) for all that goes from instance to instance. A table goes to stderr; the
last line of stdout is JSON: `gap_in_itl_p50`, `gap_in_itl_max`, `gap_ms_p50`, `itl_ms_p50`, `rounds`, `mbytes`,
`exact`. Exit code 0 only if all streams moved and are token-exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.answers import Answer
from benchmarks.demo_models import chat_model
from benchmarks.exactness import verdicts
from benchmarks.failure_rig import Rig
from benchmarks.link import slow_link
from benchmarks.live_migration import until_all_have
from benchmarks.migration import KV_CACHE_BYTES, streams
from benchmarks.migration_shots import Shot, cuts_of
from benchmarks.streams import run_requests
from controlplane.serving import Instance

__all__ = ["move_all"]

HOST = "127.0.0.1"
#: Rounds at most; enough are enough when one copies no more than a block.
ROUNDS = 8

#: Calls an operation of the source: name, fields -> its answer.
Call = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


async def move_all(
    call: Call,
    target: Instance,
    control_port: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Moves everything to `target`, reached at `control_port`, operation by operation, as the control plane does it.

    Returns:
        Rounds, and results of the handovers.

    Raises:
        RuntimeError: an operation was refused.
    """
    job = {"job": f"slow-{time.monotonic_ns()}", "attempt": 1}
    peer = {"vllm_hi_id": target.id, "host": HOST, "control_port": control_port, "base_url": target.base_url}

    async def ask(name: str, **fields: Any) -> dict[str, Any]:
        answer = await call(name, {**job, **fields})
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer

    await ask("start", peer=peer, lease_s=120)
    attached = await ask("attach")
    say(f"  attached {len(attached['attached'])}, refused {attached['refused']}")
    rounds: list[dict[str, Any]] = []
    while len(rounds) < ROUNDS and not (len(rounds) > 1 and rounds[-1]["blocks"] <= 1):
        rounds.append(await ask("round", round=len(rounds)))
        say(f"  round {len(rounds) - 1}: {rounds[-1]['blocks']} blocks in {rounds[-1]['duration_s']:.2f} s")
    results: list[dict[str, Any]] = []
    for row in attached["attached"]:
        answer = await ask("handover", request_ids=[row["request_id"]], wave=1)
        results += answer["results"]
    await ask("finish")
    return rounds, results


async def _main(arguments: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="slow-link-"))
    try:
        started = Rig.started(
            *(folder, str(chat_model()), arguments.port, _say, KV_CACHE_BYTES),
            max_num_seqs=40,
            variables={},
            own_proxy=True,
        )
        async with started as rig:
            source, target = await rig.settled()
            requests = streams(arguments.streams, 200, arguments.tokens, 70)
            references = await rig.undisturbed(requests)
            status = await rig.status(target)
            live: list[Answer] = []
            rig.http.timeout = 300.0

            async def call(name: str, fields: dict[str, Any]) -> dict[str, Any]:
                answer: dict[str, Any] = await rig.instance(source, f"/vllm_hi/migration/{name}", fields)
                return answer

            way = slow_link(status["control_port"], arguments.mbit * 125e3, arguments.rtt_ms / 1e3)
            async with way as (port, _):
                load = asyncio.ensure_future(run_requests(rig.clients_url, rig.model, requests, progress=live.extend))
                await until_all_have(live, 24, load)
                began = time.monotonic()
                rounds, results = await move_all(call, target, port, _say)
                ended = time.monotonic()
                answers = await load
            rows = [{**row, "prompt_tokens": 0, "output_tokens": row["tokens"]} for row in results]
            found = verdicts(references, answers, rows)
            return _report(arguments, rounds, rows, Shot("slow", answers, found, [], [(began, ended)]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(arguments: argparse.Namespace, rounds: list[dict[str, Any]], rows: list[dict[str, Any]], shot: Shot) -> int:
    moved = [row for row in rows if row["outcome"] == "moved"]
    cuts = [cut for answer in shot.answers for cut in cuts_of(answer, moved)]
    for row in rows:
        _say(f"  {row['outcome']} {row['code']} tail {row['tail_bytes'] / 1e6:.2f} MB {row['stages']}")
    for verdict in shot.verdicts:
        if not verdict.exact:
            _say(f"  {verdict.name}: {'; '.join(verdict.differences)}")
    relative = [cut.in_itl for cut in cuts]
    line = {
        "mbit": arguments.mbit,
        "rtt_ms": arguments.rtt_ms,
        "streams": len(rows),
        "moved": len(moved),
        "gap_in_itl_p50": round(statistics.median(relative), 2) if relative else None,
        "gap_in_itl_max": round(max(relative), 2) if relative else None,
        "gap_ms_p50": round(statistics.median(cut.gap_ms for cut in cuts), 1) if cuts else None,
        "itl_ms_p50": round(statistics.median(cut.itl_ms for cut in cuts), 1) if cuts else None,
        "rounds": len(rounds),
        "mbytes": round((sum(row["bytes"] for row in rounds) + sum(row["tail_bytes"] for row in rows)) / 1e6, 1),
        "exact": [sum(verdict.exact for verdict in shot.verdicts), len(shot.verdicts)],
    }
    print(json.dumps(line))
    if arguments.write:
        arguments.write.write_text(_document(line, rounds, rows))
    return 0 if shot.exact and len(moved) == arguments.streams else 1


def _document(line: dict[str, Any], rounds: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    copied = [
        f"| round {number} | {row['blocks']} | {row['bytes'] / 1e6:.1f} | {row['duration_s']:.2f} |"
        for number, row in enumerate(rounds)
    ]
    tails = [f"{row['tail_bytes'] / 1e6:.2f}" for row in rows]
    return f"""# A migration over a slow link

Written by `python -m benchmarks.slow_link --write docs/slow-link.md`; do not edit. {line["streams"]} streams on two
instances of one machine, SmolLM2-135M in float32. All that goes from one instance to the other goes through a relay
that lets {line["mbit"]:g} Mbit/s pass and holds each byte back for half of {line["rtt_ms"]:g} ms. A KV block of 128
tokens has 5.9 MB.

```
{json.dumps(line)}
```

Bar: exact, and a gap of at most four times between tokens plus a round trip.

| | blocks | MB | seconds |
|---|---|---|---|
{chr(10).join(copied)}

MB in each handover: {", ".join(tails)}.
"""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the link, megabits per second")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="its round trip time, milliseconds")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="output tokens of each")
    parser.add_argument("--write", type=Path, help="document to write, for example docs/slow-link.md")
    parser.add_argument("--port", type=int, default=8650, help="first of the ports to use")
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
