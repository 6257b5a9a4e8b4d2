"""What a migration costs: the gap that clients see, the bytes, and how much the others are slowed down.

    python -m benchmarks.migration [--quick] [--only SCENARIO] [--port N] [--write docs/benchmarks.md]

Two real instances on this machine, SmolLM2 in float32, prefix cache of the target empty. Every figure is a ratio of two
times taken in this run. Tables go to stderr; the last line of stdout is JSON, its names are explained in
`benchmarks/migration_figures.py`. Exit code 0 only if every stream was token-exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.answers import Request
from benchmarks.demo_models import chat_model
from benchmarks.failure_rig import Rig
from benchmarks.migration_document import write_document
from benchmarks.migration_figures import figures, table
from benchmarks.migration_shots import Shot, shoot
from benchmarks.streams import sized_request

#: Blocks of SmolLM2 in float32 (30 layers, 3 heads of 64, keys and values, 128 tokens) for 40 requests of 1,400 tokens.
KV_CACHE_BYTES = 460 * 30 * 2 * 3 * 64 * 128 * 4
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1"}


@dataclass(frozen=True)
class Size:
    """How often each scenario runs, and how large it is.

    Attributes:
        idle_moves: of one stream, to and fro.
        busy, busy_moves: loads of eight streams, and moves of each, every second one back to an instance without load.
        many_moves: of 32 streams.
        crowd, crowd_prompt, crowd_moves: streams, their tokens, and how often they are handed over one by one.
        replays: streams that are computed again.
    """

    idle_moves: int
    busy: int
    busy_moves: int
    many_moves: int
    crowd: int
    crowd_prompt: int
    crowd_moves: int
    replays: int


QUICK = Size(idle_moves=8, busy=1, busy_moves=4, many_moves=0, crowd=8, crowd_prompt=600, crowd_moves=2, replays=1)
FULL = Size(idle_moves=14, busy=4, busy_moves=4, many_moves=2, crowd=32, crowd_prompt=1000, crowd_moves=1, replays=5)


def streams(count: int, prompt: int, tokens: int, salt: int) -> list[Request]:
    """Greedy and seeded streams in turn, all with prompts of about that many tokens."""
    kinds: list[dict[str, object]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 1234}]
    return [
        sized_request(f"{prompt}-{index}", prompt, tokens, salt * 1000 + index, kinds[index % 2])
        for index in range(count)
    ]


async def idle(rig: Rig, size: Size) -> list[Shot]:
    """One stream at a time onto an instance that has nothing to do, with a short and a long prompt."""
    prompts = (100, 1500)
    loads = [streams(1, prompt, 40 + size.idle_moves * 45, 100) for prompt in prompts]
    references = await rig.undisturbed([request for requests in loads for request in requests])
    return [
        await shoot(rig, f"idle {prompt}", requests, [reference], moves=size.idle_moves, between=12)
        for prompt, requests, reference in zip(prompts, loads, references, strict=True)
    ]


async def busy(rig: Rig, size: Size) -> list[Shot]:
    """Eight streams onto a target that serves four of its own; the way back is to an idle one."""
    shots = []
    for number in range(size.busy):
        own, requests = streams(4, 100, 240, 300 + number), streams(8, 200, 40 + size.busy_moves * 55, 200 + number)
        references = await rig.undisturbed(requests)
        shot = await shoot(
            *(rig, "busy", requests, references),
            own=own,
            moves=size.busy_moves,
            way_back="rolling 8",
            start_after=12,
            between=12,
        )
        shots.append(shot)
    return shots


async def many(rig: Rig, size: Size) -> list[Shot]:
    """Thirty-two streams onto an idle target; for comparison with eight."""
    if not size.many_moves:
        return []
    requests = streams(32, 200, 40 + size.many_moves * 60, 400)
    references = await rig.undisturbed(requests)
    return [await shoot(rig, "rolling 32", requests, references, moves=size.many_moves, between=12)]


async def crowd(rig: Rig, size: Size) -> list[Shot]:
    """Many long streams by all ways of handing over: ours, all with one cut (the seed's way), and without copying
    ahead."""
    requests = streams(size.crowd, size.crowd_prompt, 80 + size.crowd_moves * 40, 500)
    references = await rig.undisturbed(requests)
    moves = {"rolling": size.crowd_moves, "atomic": 1, "stop_and_copy": 1}
    return [
        await shoot(rig, f"crowd {mode}", requests, references, mode=mode, moves=count, between=12)
        for mode, count in moves.items()
    ]


async def replay(rig: Rig, size: Size) -> list[Shot]:
    """One long stream whose KV the target computes again (Dynamo's way)."""
    # Every second one: those with a seed are not computed again, vLLM's random state would not survive it.
    requests = streams(2 * size.replays, 1500, 60, 600)[::2]
    references = await rig.undisturbed(requests)
    return [
        await shoot(rig, "replay 1500", [request], [reference], mode="recompute")
        for request, reference in zip(requests, references, strict=True)
    ]


SCENARIOS: dict[str, Callable[[Rig, Size], Awaitable[list[Shot]]]] = {
    scenario.__name__: scenario for scenario in (idle, busy, many, crowd, replay)
}


async def measure(arguments: argparse.Namespace) -> list[Shot]:
    size = QUICK if arguments.quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="migration-"))
    shots: list[Shot] = []
    try:
        started = Rig.started(
            *(folder, str(chat_model()), arguments.port, _say, KV_CACHE_BYTES),
            max_num_seqs=40,
            variables=VARIABLES,
            own_proxy=True,
        )
        async with started as rig:
            # The first steps of an engine are slower than all later ones.
            requests = streams(8, 200, 50, 1)
            await shoot(rig, "warm", requests, await rig.undisturbed(requests), moves=2, between=8)
            for name, scenario in SCENARIOS.items():
                if not arguments.only or name in arguments.only:
                    found = await scenario(rig, size)
                    shots += found
                    _say(table(found))
    finally:
        if arguments.keep_logs:
            shutil.copytree(folder / "logs", arguments.keep_logs, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return shots


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller loads: under 6 minutes")
    parser.add_argument("--only", action="append", default=[], choices=list(SCENARIOS))
    parser.add_argument("--port", type=int, default=8600, help="first of the ports to use")
    parser.add_argument("--write", type=Path, help="document to write, for example docs/benchmarks.md")
    parser.add_argument("--keep-logs", type=Path, help="folder that gets the logs of all processes")
    arguments = parser.parse_args()
    shots = asyncio.run(measure(arguments))
    found = figures(shots)
    if arguments.write:
        command = "python -m benchmarks.migration" + (" --quick" if arguments.quick else "")
        write_document(arguments.write, shots, found, f"{command} --write docs/benchmarks.md")
    print(json.dumps(found))
    return 0 if shots and all(shot.exact for shot in shots) else 1


if __name__ == "__main__":
    sys.exit(main())
