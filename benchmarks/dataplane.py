"""How fast KV blocks travel between two worker processes, against what the machine can do at all.

    python -m benchmarks.dataplane [--mib 512] [--pieces 12,192] [--write docs/dataplane.md]

Two processes with a KV cache each, scattered blocks, everything without pacing, taken in turn in one run. `memcpy`: one
thread of one process copies the same blocks from one cache into another. `socket`: a bare pair of blocking TCP sockets
with the same pieces. A table goes to stderr, one JSON line to stdout for the smallest pieces: `memory_share` of memcpy,
`tcp_share` of the bare sockets, the rates in GB/s, and the microseconds that one block takes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from vllm_plugin.data import DataServer
from vllm_plugin.data_messages import AllowSession, Push, Pushed, RevokeSession, decode_data
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.memory import vectors
from vllm_plugin.rdma import available
from vllm_plugin.receiving import receive_all
from vllm_plugin.wire import FrameSocket

HOST, TOKEN = "127.0.0.1", "benchmark"
LAYERS = 30
#: KV heads and elements of a token; the tokens of a block make the size of a piece.
HEADS, ELEMENTS = 2, 128
REPEATS = 7


def cache_of(piece_bytes: int, blocks: int, fill: float) -> KVCache:
    """A KV cache whose blocks have `piece_bytes` in each of `LAYERS` layers."""
    tokens = piece_bytes // (HEADS * ELEMENTS * 4)
    layers = {f"layers.{index}": torch.full((blocks, HEADS, tokens, ELEMENTS), fill) for index in range(LAYERS)}
    return KVCache(layers)


def _serve(pipe: Connection, piece_bytes: int, blocks: int, backend: str) -> None:
    """A worker process: its data server, until the pipe closes; it answers what its cache holds."""
    torch.set_num_threads(1)
    cache = cache_of(piece_bytes, blocks, 1.0)
    server = DataServer(
        cache, lambda _: None, token=TOKEN, host=HOST, port=0, name="worker", cpus=[], backend=backend, bytes_per_s=1e15
    )
    pipe.send(server.port)
    with contextlib.suppress(EOFError):
        pipe.recv()


@dataclass
class Worker:
    """One worker process and its engine core's connection to it."""

    piece_bytes: int
    blocks: int
    backend: str
    calls: Iterator[int] = field(default_factory=lambda: count(1))

    def __enter__(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self.piece_bytes, self.blocks, self.backend)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        self.port: int = self.pipe.recv()
        self.engine = FrameSocket.dial(HOST, self.port, TOKEN, "engine", "benchmark")
        self.engine.sock.settimeout(None)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.pipe.send(None)
        self.process.join(10)

    def ask(self, message: Any) -> Any:
        self.engine.send(message)
        return decode_data(self.engine.receive_body())

    def push(self, other: Worker, source: list[int], target: list[int]) -> str:
        """Returns the transport. Raises: RuntimeError."""
        pushed = self.ask(Push(next(self.calls), "s", HOST, other.port, source, target, [], urgent=True))
        if not isinstance(pushed, Pushed) or not pushed.ok:
            raise RuntimeError(f"the blocks did not arrive: {pushed}")
        return pushed.transport


def scattered(blocks: int) -> tuple[list[int], list[int]]:
    """Half of the blocks, in no order, to other places in another order."""
    source, target = list(range(1, blocks)), list(range(1, blocks))
    random.Random(1).shuffle(source)
    random.Random(2).shuffle(target)
    return source[: blocks // 2], target[: blocks // 2]


def _timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# -- what the machine can do -------------------------------------------------------------------------------------------


class Memcpy:
    """One thread copies scattered blocks from cache to cache."""

    def __init__(self, piece_bytes: int, blocks: int) -> None:
        self._from, self._to = cache_of(piece_bytes, blocks, 1.0), cache_of(piece_bytes, blocks, 0.0)

    def copy(self, source: list[int], target: list[int]) -> None:
        sizes = self._from.bytes_per_layer
        here, there = vectors(self._from.addresses, sizes, source), vectors(self._to.addresses, sizes, target)
        for to, from_, size in zip(
            there["address"].tolist(), here["address"].tolist(), here["size"].tolist(), strict=True
        ):
            ctypes.memmove(to, from_, size)


def _drain(pipe: Connection, port: int, piece_bytes: int, blocks: int) -> None:
    """The other end of the bare sockets: fills scattered blocks of a cache, and says so with one byte."""
    torch.set_num_threads(1)
    cache = cache_of(piece_bytes, blocks, 0.0)
    with socket.create_connection((HOST, port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(EOFError):
            while (target := pipe.recv()) is not None:
                receive_all(sock, cache.buffers(target))
                sock.sendall(b"x")


class BareSockets:
    """A pair of blocking TCP sockets between two processes, with nothing around them."""

    def __init__(self, piece_bytes: int, blocks: int) -> None:
        self._cache = cache_of(piece_bytes, blocks, 1.0)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with socket.create_server((HOST, 0)) as server:
            arguments = (theirs, server.getsockname()[1], piece_bytes, blocks)
            self._process = context.Process(target=_drain, args=arguments, daemon=True)
            self._process.start()
            self._sock, _ = server.accept()
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def copy(self, source: list[int], target: list[int]) -> None:
        self._pipe.send(target)
        for buffer in self._cache.buffers(source):
            self._sock.sendall(buffer)
        self._sock.recv(1)

    def close(self) -> None:
        self._pipe.send(None)
        self._sock.close()
        self._process.join(10)


# -- the measurement ---------------------------------------------------------------------------------------------------


def measure(piece_bytes: int, blocks: int) -> dict[str, dict[str, float]]:
    """Seconds for all scattered blocks, and for one block, by way of copying: the median of `REPEATS`, the ways in
    turn."""
    source, target = scattered(blocks)
    memcpy, bare = Memcpy(piece_bytes, blocks), BareSockets(piece_bytes, blocks)
    backends = ["tcp_shm", "tcp_shm", "tcp", *(["rdma"] if available() else [])]
    with contextlib.ExitStack() as stack:
        receiver, by_memory, by_tcp, *by_nixl = (
            stack.enter_context(Worker(piece_bytes, blocks, backend)) for backend in backends
        )
        receiver.ask(AllowSession(1, "s"))
        ways = {
            "memcpy": memcpy.copy,
            "memory": lambda here, there: _must(by_memory.push(receiver, here, there), "memory"),
            "socket": bare.copy,
            "tcp": lambda here, there: _must(by_tcp.push(receiver, here, there), "tcp"),
        }
        if by_nixl:
            ways["nixl"] = lambda here, there: _must(by_nixl[0].push(receiver, here, there), "rdma")
        found: dict[str, dict[str, list[float]]] = {name: {"all": [], "one": []} for name in ways}
        for repeat in range(REPEATS + 1):
            for name, copy in ways.items():
                whole = _timed(lambda copy=copy: copy(source, target))
                one = statistics.median(_timed(lambda copy=copy: copy(source[:1], target[:1])) for _ in range(20))
                if repeat:  # The first touches all pages.
                    found[name]["all"].append(whole)
                    found[name]["one"].append(one)
        receiver.ask(RevokeSession(2, "s"))
    bare.close()
    return {name: {key: statistics.median(values) for key, values in one.items()} for name, one in found.items()}


def _must(transport: str, wanted: str) -> None:
    if transport != wanted:
        raise RuntimeError(f"the blocks went by {transport}, not by {wanted}")


def result(seconds: dict[str, dict[str, float]], size: int) -> dict[str, Any]:
    rate = {name: size / one["all"] / 1e9 for name, one in seconds.items()}
    return {
        "nixl_gb_per_s": None,
        **{f"{name}_gb_per_s": round(value, 2) for name, value in rate.items()},
        "memory_share": round(rate["memory"] / rate["memcpy"], 2),
        "tcp_share": round(rate["tcp"] / rate["socket"], 2),
        "block_us": {name: round(one["one"] * 1e6) for name, one in seconds.items()},
    }


def document(lines: dict[int, dict[str, Any]], mib: int) -> str:
    """docs/dataplane.md. `lines`: results by KiB of a piece."""
    ways = list(next(iter(lines.values()))["block_us"])
    rows = []
    for kib, line in lines.items():
        rates = (f"{line[f'{way}_gb_per_s']} GB/s, {line['block_us'][way]} us" for way in ways)
        rows.append(f"| {kib} KiB | {' | '.join(rates)} | {line['memory_share']} | {line['tcp_share']} |")
    return f"""# How fast KV blocks travel

Written by `python -m benchmarks.dataplane --write docs/dataplane.md`; do not edit. Two worker processes on one machine
with a KV cache of {mib} MiB each, half of the blocks at scattered places, {LAYERS} layers, no pacing. Each cell: rate
for all blocks, and how long one block alone takes.

`memcpy` is one thread of one process that copies the same pieces, `socket` a bare pair of blocking TCP sockets;
`memory` is our way on one host (the target reads the source's memory), `tcp` ours between hosts, `nixl` NIXL over UCX.
Bars: `memory` at least 0.70 of `memcpy`, `tcp` at least 0.80 of `socket`.

| piece of a block in one layer | {" | ".join(ways)} | memory / memcpy | tcp / socket |
|---|{"---|" * len(ways)}---|---|
{chr(10).join(rows)}

Not run: `cuda_ipc` and gather/scatter on a GPU. There was none.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of each cache")
    parser.add_argument("--pieces", default="12,192", help="KiB of one block in one layer, smallest first")
    parser.add_argument("--write", type=Path, help="document to write, for example docs/dataplane.md")
    arguments = parser.parse_args()
    lines: dict[int, dict[str, Any]] = {}
    for kib in map(int, arguments.pieces.split(",")):
        blocks = arguments.mib * 1024 // (kib * LAYERS)
        line = result(measure(kib * 1024, blocks), blocks // 2 * kib * 1024 * LAYERS)
        print(f"pieces of {kib} KiB, {blocks // 2} blocks of {LAYERS} layers: {json.dumps(line)}", file=sys.stderr)
        lines[kib] = line
    if not available():
        print("NIXL is not installed: not measured", file=sys.stderr)
    if arguments.write:
        arguments.write.write_text(document(lines, arguments.mib))
    print(json.dumps(next(iter(lines.values()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
