"""One long stream moved to and fro: exact to its last token, and no KV block lost on either side.

    python -m benchmarks.ping_pong [--tokens 1500] [--moves 10]

Starts the product with two real instances. The table goes to stderr; the last line of stdout is JSON: `tokens`,
`moves`, `cuts`, `exact`, `free_blocks` (before and after, of A and B). Exit code 0 only if the stream was moved that
often, is exact, and both sides have as many free blocks as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.answers import Answer, Request
from benchmarks.exactness import weigh
from benchmarks.kinds import CHAT, Kind
from benchmarks.live_migration import migrate_under_load
from benchmarks.stacks import MODEL, stack_of
from benchmarks.streams import run_requests
from controlplane.serving import Instance
from controlplane.supervisor import Stack

__all__ = ["free_blocks", "long_request", "ping_pong", "undisturbed"]

#: Tokens between the end of one migration and the beginning of the next; most pass while a migration is under way.
_BETWEEN = 10


def long_request(tokens: int, number: int) -> Request:
    """A seeded request with penalties and log-probabilities: all the state a stream can have, for `tokens` tokens."""
    # A chat: up to 0.31 vLLM's text offsets of a streamed text completion depend on how tokens are grouped.
    fields = {"temperature": 0.9, "seed": number, "frequency_penalty": 0.2, "logprobs": True, "top_logprobs": 1}
    return Kind("ping-pong", CHAT, {**fields, "max_tokens": tokens}).request(number)


async def free_blocks(instance: Instance, join_token: str) -> int:
    """KV blocks that nobody holds."""
    headers = {"Authorization": f"Bearer {join_token}"}
    url = f"{instance.base_url}/vllm_hi/status"
    async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
        status = await response.json()
    return int(status["kv"]["free_blocks"])


async def undisturbed(side: Instance, request: Request) -> Answer:
    """The same request without any move, and with other block hashes, so that the moved one finds nothing cached."""
    body = {**request.body, "cache_salt": "undisturbed"}
    (answer,) = await run_requests(side.base_url, MODEL, [Request(request.name, request.path, body)])
    return answer


async def ping_pong(
    stack: Stack, sides: Sequence[Instance], request: Request, reference: Answer, moves: int
) -> dict[str, Any]:
    """Moves one stream `moves` times and returns what is to be known about it.

    Args:
        sides: the instance that serves now, and the standby.
        reference: the undisturbed answer.
    """
    before = [await free_blocks(side, stack.join_token) for side in sides]
    run = await migrate_under_load(
        stack.url,
        stack.api_token,
        MODEL,
        sides[0].id,
        sides[1].id,
        [request],
        start_after_tokens=_BETWEEN,
        further=[_BETWEEN] * (moves - 1),
        references=[reference],
    )
    (verdict,) = run.verdicts
    for split in verdict.splits:
        await weigh(stack.url, MODEL, reference, split)
    after = [await free_blocks(side, stack.join_token) for side in sides]
    # What a side had lent to a session comes back when that is closed on it, a moment after the job's end.
    for _ in range(100):
        if after == before:
            break
        await asyncio.sleep(0.1)
        after = [await free_blocks(side, stack.join_token) for side in sides]
    return {
        "tokens": run.answers[0].tokens,
        "moves": len(verdict.cuts),
        "cuts": verdict.cuts,
        "exact": verdict.exact,
        "differences": [*verdict.differences, *map(str, verdict.splits)],
        "free_blocks": {"before": before, "after": after},
    }


async def _main(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="ping-pong-"))
    stack = stack_of("plain", folder, arguments.port, _say)
    try:
        await stack.start()
        sides = list(stack.instances.values())
        request = long_request(arguments.tokens, arguments.seed)
        reference = await undisturbed(sides[0], request)
        return await ping_pong(stack, sides, request, reference, arguments.moves)
    finally:
        await stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--moves", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--port", type=int, default=8300, help="first of the ports that are used")
    arguments = parser.parse_args()
    result = asyncio.run(_main(arguments))
    for number, cut in enumerate(result["cuts"]):
        _say(f"  move {number + 1}: {'A to B' if number % 2 == 0 else 'B to A'} after token {cut}")
    for difference in result["differences"]:
        _say(f"  DIFFERENCE: {difference}")
    print(json.dumps(result))
    blocks = result["free_blocks"]
    good = result["exact"] and result["moves"] == arguments.moves and blocks["before"] == blocks["after"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
