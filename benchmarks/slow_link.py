"""Two instances joined by a slow link: what a migration over it costs its clients.

    python -m benchmarks.slow_link [--mbit 200] [--rtt-ms 20] [--streams 8]

All that goes from instance to instance, control and blocks, passes a relay in this process that limits the rate and
delays each byte; clients and proxy do not. Transport TCP. A table goes to stderr; the last line of stdout is JSON:
`gap_in_itl_p50`, `gap_in_itl_max`, `gap_ms_p50`, `itl_ms_p50`, `rounds`, `mbytes`, `exact`. Exit code 0 only if all
streams moved and are token-exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answers import Answer
from benchmarks.demo_models import chat_model
from benchmarks.exactness import verdicts
from benchmarks.failure_rig import Rig
from benchmarks.live_migration import until_all_have
from benchmarks.migration import KV_CACHE_BYTES, streams
from benchmarks.migration_shots import Shot, cuts_of
from benchmarks.streams import run_requests
from controlplane.serving import Instance
from vllm_plugin.messages import SessionOpened, decode_peer
from vllm_plugin.wire import encode_frame

__all__ = ["Link", "slow_link"]

HOST = "127.0.0.1"
CHUNK = 16 * 1024


@dataclass
class Link:
    """One direction of the link, shared by all connections. `bytes_per_s`, `delay_s`: its rate and its latency."""

    bytes_per_s: float
    delay_s: float
    _free_at: float = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries a connection's bytes until it ends."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        delivering = asyncio.create_task(self._deliver(on_the_way, writer))
        try:
            while chunk := await reader.read(CHUNK):
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(chunk) / self.bytes_per_s
                await asyncio.sleep(max(0.0, self._free_at - now))
                await on_the_way.put((self._free_at + self.delay_s, chunk))
        finally:
            await on_the_way.put((0.0, b""))
            await delivering

    @staticmethod
    async def _deliver(on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                when, chunk = await on_the_way.get()
                await asyncio.sleep(max(0.0, when - time.monotonic()))
                if not chunk:
                    writer.close()
                    return
                writer.write(chunk)
                await writer.drain()


@dataclass
class _Doors:
    """Ports of the relay, and the way back through them for what B says about its data ports."""

    there: Link
    back: Link
    ports: dict[int, int] = field(default_factory=dict)
    servers: list[asyncio.Server] = field(default_factory=list)

    async def door(self, port: int, control: bool = False) -> int:
        """A port that leads to `port` over the link."""
        if port not in self.ports:
            server = await asyncio.start_server(lambda r, w: self._join(r, w, port, control), HOST, 0)
            self.servers.append(server)
            self.ports[port] = server.sockets[0].getsockname()[1]
        return self.ports[port]

    async def _join(self, near: asyncio.StreamReader, far: asyncio.StreamWriter, port: int, control: bool) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        back = self._readdressed(reader) if control else reader
        await asyncio.gather(self.there.carry(near, writer), self.back.carry(back, far), return_exceptions=True)

    def _readdressed(self, reader: asyncio.StreamReader) -> asyncio.StreamReader:
        """What B says on the control connection, with the relay's data ports in place of its own."""
        changed = asyncio.StreamReader()

        async def pump() -> None:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await reader.readexactly(4)
                    body = await reader.readexactly(int.from_bytes(head, "little"))
                    changed.feed_data(await self._frame(head + body))
            changed.feed_eof()

        self._pump = asyncio.create_task(pump())
        return changed

    async def _frame(self, frame: bytes) -> bytes:
        try:
            message = decode_peer(frame[4:])
        except Exception:
            return frame  # Of the handshake.
        if not isinstance(message, SessionOpened):
            return frame
        message.data_ports = [await self.door(port) for port in message.data_ports]
        return encode_frame(message)


@asynccontextmanager
async def slow_link(control_port: int, bytes_per_s: float, rtt_s: float) -> Any:
    """Yields the port at which an instance's control port is reached over a slow link, its data ports with it."""
    doors = _Doors(Link(bytes_per_s, rtt_s / 2), Link(bytes_per_s, rtt_s / 2))
    try:
        yield await doors.door(control_port, control=True)
    finally:
        for server in doors.servers:
            server.close()


async def move_all(
    rig: Rig, source: Instance, target: Instance, control_port: int, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Moves everything from `source` to `target` call by call, as the control plane does; returns rounds and results.

    Raises:
        RuntimeError: a call was refused.
    """
    job = {"job": f"slow-{time.monotonic_ns()}", "attempt": 1}
    peer = {"vllm_hi_id": target.id, "host": HOST, "control_port": control_port, "base_url": target.base_url}

    async def call(name: str, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await rig.instance(source, f"/vllm_hi/migration/{name}", {**job, **fields})
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer

    await call("start", peer=peer, lease_s=120)
    attached = await call("attach")
    say(f"  attached {len(attached['attached'])}, refused {attached['refused']}")
    rounds = []
    for number in range(8):
        rounds.append(await call("round", round=number))
        say(f"  round {number}: {rounds[-1]['blocks']} blocks in {rounds[-1]['duration_s']:.2f} s")
        if number and rounds[-1]["blocks"] <= 1:
            break
    results: list[dict[str, Any]] = []
    for row in attached["attached"]:
        answer = await call("handover", request_ids=[row["request_id"]], wave=1)
        results += answer["results"]
    await call("finish")
    return rounds, results


async def _main(arguments: argparse.Namespace) -> int:
    os.environ["VLLM_HI_TRANSFER_BACKEND"] = "tcp"
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
            async with slow_link(status["control_port"], arguments.mbit * 125e3, arguments.rtt_ms / 1e3) as port:
                load = asyncio.ensure_future(run_requests(rig.clients_url, rig.model, requests, progress=live.extend))
                await until_all_have(live, 24, load)
                began = time.monotonic()
                rounds, results = await move_all(rig, source, target, port, _say)
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
    return 0 if shot.exact and len(moved) == arguments.streams else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the link, megabits per second")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="its round trip time, milliseconds")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="output tokens of each")
    parser.add_argument("--port", type=int, default=8650, help="first of the ports to use")
    return asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
