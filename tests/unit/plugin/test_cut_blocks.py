"""Workers of two instances that are cut differently, on real sockets: each rank gets its part of each block, and no
byte beside it changes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.unit.plugin.test_cuda_ipc import pretended_gpu  # noqa: F401
from tests.unit.plugin.test_topology import names
from vllm_plugin import memory
from vllm_plugin.data import DataServer
from vllm_plugin.data_messages import Reach, Reached, Write, Written, decode_data
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.topology import Layout, layout_of
from vllm_plugin.wire import FrameSocket
from vllm_plugin.workers import Blocks, Route, Workers

LAYERS, KV_HEADS, BLOCKS, TOKENS, WIDTH = 12, 4, 9, 2, 4
HEAD_BYTES = TOKENS * WIDTH * 2
#: One block of the whole model, by layer: [blocks, heads, tokens, width], numbers that bfloat16 can tell apart.
SHAPE = (BLOCKS, KV_HEADS, TOKENS, WIDTH)


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, SHAPE, generator=generator, dtype=torch.int16).view(torch.bfloat16)
        for name in names(LAYERS)
    }


class Instance:
    """All workers of an instance, and its engine core's connections to them.

    `content`: the KV cache of the whole model, which its ranks share out; heads that several hold are on each.
    """

    def __init__(self, content: dict[str, torch.Tensor], tp: int, pp: int, backend: str, gpu: bool = False) -> None:
        self.content = content
        self.ranks: list[dict[str, torch.Tensor]] = []
        infos = []
        self.servers: list[DataServer] = []
        for rank in range(tp * pp):
            stage, tp_rank = divmod(rank, tp)
            heads = max(1, KV_HEADS // tp)
            first = tp_rank * heads if tp <= KV_HEADS else tp_rank // (tp // KV_HEADS)
            layers = names(LAYERS)[stage * LAYERS // pp : (stage + 1) * LAYERS // pp]
            self.ranks.append({name: content[name][:, first : first + heads].clone() for name in layers})
            cache = KVCache(self.ranks[-1])
            server = DataServer(
                cache,
                {"seeded": f"state of rank {rank}".encode()}.get,
                token="secret",
                host="127.0.0.1",
                port=0,
                name=f"worker-{rank}",
                cpus=[],
                backend=backend,
            )
            if gpu:
                cache.device, cache.on_host = "cuda", False
            self.servers.append(server)
            infos.append(
                {
                    "data_port": server.port,
                    "tp_rank": tp_rank,
                    "pp_rank": stage,
                    "layers": cache.names,
                    "kv_heads": cache.heads,
                    "bytes_per_layer": cache.bytes_per_layer,
                    "rng": "cpu-0-generator",
                }
            )
        self.layout: Layout = layout_of(infos, TOKENS, KV_HEADS)
        self.workers = Workers(infos, self.layout, "127.0.0.1", "secret")

    def routes(self, other: Instance) -> list[Route]:
        ports = [server.port for server in other.servers]
        return self.workers.routes(other.layout, "127.0.0.1", ports)

    def holds(self, expected: dict[str, torch.Tensor]) -> bool:
        """Whether each rank has its share of `expected`, bit by bit."""
        parts = [{part.layer: part for part in rank} for rank in self.layout.ranks]
        return all(
            _same(layer, expected[name][:, parts[rank][name].first_head : parts[rank][name].end])
            for rank, layers in enumerate(self.ranks)
            for name, layer in layers.items()
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit: random bits are no numbers here and there."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def after(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], moved: dict[int, int]) -> Any:
    """The target's whole cache when blocks have been copied."""
    expected = {name: layer.clone() for name, layer in target.items()}
    for here, there in moved.items():
        for name, layer in expected.items():
            layer[there] = source[name][here]
    return expected


SIZES = [
    ((1, 1), (2, 1)),
    ((2, 1), (1, 1)),
    ((1, 1), (1, 2)),
    ((1, 2), (1, 1)),
    ((2, 1), (1, 2)),
    ((2, 2), (1, 3)),
    ((8, 1), (2, 2)),
    ((4, 1), (8, 1)),
    ((2, 2), (2, 2)),
]
MOVED = {2: 5, 3: 6, 7: 1}


@pytest.mark.parametrize(
    ("here", "there", "backend"),
    [
        *((*sizes, backend) for sizes in SIZES for backend in ("tcp", "tcp_shm")),
        # One process with many agents takes long to make them.
        *((*sizes, "rdma") for sizes in SIZES[:3]),
    ],
    ids=str,
)
def test_each_rank_gets_its_part_of_each_block(here: tuple[int, int], there: tuple[int, int], backend: str) -> None:
    a, b = Instance(model(1), *here, backend), Instance(model(2), *there, backend)
    b.workers.allow("s")
    routes = a.routes(b)
    sent, states = a.workers.push("s", routes, Blocks(list(MOVED), list(MOVED.values()), [1, 1, 1]))
    assert b.holds(after(a.content, b.content, MOVED))
    replicas = max(1, there[0] // KV_HEADS)
    assert sent == len(MOVED) * LAYERS * KV_HEADS * HEAD_BYTES * replicas
    assert states == {}
    assert a.workers.transport == {"tcp_shm": "memory"}.get(backend, backend)
    # While a client waits, and once more into the same places.
    again = {3: 1, 8: 2}
    a.workers.push("s", routes, Blocks(list(again), list(again.values()), [1, 1], urgent=True))
    assert b.holds(after(a.content, after(a.content, b.content, MOVED), again))


def test_a_push_may_take_longer_than_a_connection_to_be_made() -> None:
    a, b = Instance(model(1), 1, 1, "tcp"), Instance(model(2), 2, 1, "tcp")
    b.workers.allow("s")
    a.workers.push("s", a.routes(b), Blocks([2], [5], [1]))
    frames = [connection._frames for connection in a.workers._pushes.values()]
    assert [one.sock.gettimeout() for one in frames if one is not None] == [None, None]


@pytest.mark.parametrize("backend", ["tcp", "tcp_shm"])
@pytest.mark.parametrize(("here", "there"), SIZES[:5], ids=lambda size: f"tp{size[0]}pp{size[1]}")
def test_each_rank_stages_its_part_of_each_block(here: tuple[int, int], there: tuple[int, int], backend: str) -> None:
    a, b = Instance(model(1), *here, backend), Instance(model(2), *there, backend)
    b.workers.allow("s")
    (first,) = {server._cache.stage(3) for server in b.servers}
    a.workers.push("s", a.routes(b), Blocks([2, 3, 7], [first, first + 2, first + 1], [1, 1, 1]))
    assert b.holds(b.content)
    for server in b.servers:
        server._cache.unstage([(first, 5), (first + 2, 6), (first + 1, 1)])
    assert b.holds(after(a.content, b.content, MOVED))


@pytest.mark.parametrize(("here", "there"), SIZES[:5], ids=lambda size: f"tp{size[0]}pp{size[1]}")
@pytest.mark.usefixtures("pretended_gpu")
def test_parts_of_blocks_between_gpus(here: tuple[int, int], there: tuple[int, int]) -> None:
    a, b = Instance(model(1), *here, "", gpu=True), Instance(model(2), *there, "", gpu=True)
    b.workers.allow("s")
    a.workers.push("s", a.routes(b), Blocks(list(MOVED), list(MOVED.values()), [1, 1, 1]))
    assert a.workers.transport == "cuda_ipc"
    assert b.holds(after(a.content, b.content, MOVED))


@pytest.mark.parametrize(("here", "there"), SIZES[:5], ids=lambda size: f"tp{size[0]}pp{size[1]}")
@pytest.mark.usefixtures("pretended_gpu")
def test_parts_of_blocks_of_gpus_over_tcp(here: tuple[int, int], there: tuple[int, int]) -> None:
    a, b = Instance(model(1), *here, "tcp", gpu=True), Instance(model(2), *there, "tcp", gpu=True)
    b.workers.allow("s")
    a.workers.push("s", a.routes(b), Blocks(list(MOVED), list(MOVED.values()), [1, 1, 1]))
    assert a.workers.transport == "tcp"
    assert b.holds(after(a.content, b.content, MOVED))


def test_parts_of_blocks_over_several_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1000))
    monkeypatch.setattr("vllm_plugin.memory.host_identity", lambda: f"host {next(numbers)}")
    a, b = Instance(model(1), 1, 1, ""), Instance(model(2), 2, 1, "")
    b.workers.allow("s")
    moved = {block: BLOCKS - block for block in range(1, BLOCKS)}
    a.workers.push("s", a.routes(b), Blocks(list(moved), list(moved.values()), [1] * len(moved)))
    assert b.holds(after(a.content, b.content, moved))
    assert [len(sender._channels) for sender in a.servers[0]._senders.values()] == [4, 4]


def test_over_a_slow_link_each_rank_gets_what_changed_in_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_plugin.sending.SLOW_BLOCK_S", 0.0)
    a, b = Instance(model(1), 1, 1, "tcp"), Instance(model(2), 2, 1, "tcp")
    b.workers.allow("s")
    routes = a.routes(b)
    a.workers.push("s", routes, Blocks([1], [1], [7]))
    ahead, _ = a.workers.push("s", routes, Blocks(open=[(2, 5, 7)]))
    assert ahead == LAYERS * KV_HEADS * HEAD_BYTES
    layer = a.ranks[0][names(LAYERS)[10]]
    # In the second rank's half.
    layer[2, 3, 1] = 3.5
    changed, _ = a.workers.push("s", routes, Blocks([2], [5], [7], urgent=True))
    assert changed < 200
    a.content[names(LAYERS)[10]][2, 3, 1] = 3.5
    assert b.holds(after(a.content, b.content, {1: 1, 2: 5}))


def test_the_random_state_comes_from_the_rank_that_samples() -> None:
    a, b = Instance(model(1), 2, 2, "tcp"), Instance(model(2), 1, 1, "tcp")
    b.workers.allow("s")
    routes = a.routes(b)
    _, states = a.workers.push("s", routes, Blocks([2], [5], [1], generators=["seeded", "greedy"]))
    assert states == {"seeded": b"state of rank 2"}
    # Also with nothing to send.
    assert a.workers.push("s", routes, Blocks(generators=["seeded"])) == (0, {"seeded": b"state of rank 2"})


def test_one_rank_that_cannot_deliver_fails_the_push_when_all_have_ended() -> None:
    a, b = Instance(model(1), 1, 1, "tcp"), Instance(model(2), 2, 1, "tcp")
    b.workers.allow("s")
    b.servers[1]._receiver.revoke("s")
    with pytest.raises(ConnectionError, match="unknown_session"):
        a.workers.push("s", a.routes(b), Blocks([2], [5], [1]))
    assert not any(server._receiver._writing for server in b.servers)
    assert all(_same(layer, b.content[name][:, 2:]) for name, layer in b.ranks[1].items())


def test_a_revoked_session_is_over_on_all_ranks() -> None:
    a, b = Instance(model(1), 2, 1, "tcp_shm"), Instance(model(2), 1, 2, "tcp_shm")
    b.workers.allow("s")
    routes = a.routes(b)
    a.workers.push("s", routes, Blocks([2], [5], [1]))
    b.workers.revoke("s")
    a.workers.revoke("s")
    assert not any(server._senders for server in a.servers)
    with pytest.raises(ConnectionError, match="unknown_session"):
        a.workers.push("s", routes, Blocks([3], [6], [1]))
    assert b.holds(after(a.content, b.content, {2: 5}))


@pytest.mark.parametrize("backend", ["tcp", "tcp_shm"])
@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (4, 2)])
def test_the_way_can_be_measured_between_instances_of_other_sizes(here: int, there: int, backend: str) -> None:
    a, b = Instance(model(1), here, 1, backend), Instance(model(2), there, 2, backend)
    found = a.workers.probe("127.0.0.1", [server.port for server in b.servers])
    assert found.bytes_per_s > 0 and found.transport == {"tcp_shm": "memory"}.get(backend, backend)
    assert b.holds(b.content)


@pytest.mark.parametrize(
    "places",
    [
        ((LAYERS, 0, 8),),
        ((-1, 0, 8),),
        ((0, -2, 8),),
        ((0, 0, 0),),
        ((0, 8, 4 * HEAD_BYTES),),
        ((0, 1, 8),),
        ((0, 0, 3),),
    ],
)
def test_a_cut_that_does_not_fit_the_blocks_is_refused(places: Any) -> None:
    b = Instance(model(2), 1, 1, "tcp")
    b.workers.allow("s")
    liar = FrameSocket.dial("127.0.0.1", b.servers[0].port, "secret", "worker", "liar")
    liar.send(Reach("s", "elsewhere", os.getpid(), "tcp", 1e12, places=places))
    answer = decode_data(liar.receive_body())
    assert isinstance(answer, Written) and (answer.ok, answer.code) == (False, "bad_cut")
    assert b.holds(b.content)


def test_a_write_is_as_large_as_the_part_that_was_agreed() -> None:
    b = Instance(model(2), 1, 1, "tcp")
    b.workers.allow("s")
    liar = FrameSocket.dial("127.0.0.1", b.servers[0].port, "secret", "worker", "liar")
    liar.send(Reach("s", "elsewhere", os.getpid(), "tcp", 1e12, places=((0, 0, HEAD_BYTES),)))
    assert isinstance(decode_data(liar.receive_body()), Reached)
    liar.send(Write("s", [5], 2 * HEAD_BYTES))
    answer = decode_data(liar.receive_body())
    assert isinstance(answer, Written) and answer.code == "size_mismatch"


def test_blocks_that_lie_apart() -> None:
    """As where the blocks of all layers are mixed: host memory is not laid out so, and addresses count the gaps."""
    whole = torch.zeros(4, 2, 2, 2, 2)
    with pytest.raises(ValueError, match="do not follow each other"):
        KVCache({"one": whole[:, 1]})
    vectors = memory.vectors([0, 100], [4, 4], [1, 2], [16, 16])
    assert vectors["address"].tolist() == [16, 32, 116, 132] and vectors["size"].tolist() == [4] * 4


def test_processes_of_one_engine_are_allowed_by_the_one_they_come_from() -> None:
    own = os.getpid()
    assert memory.common_ancestor([]) == 0
    assert memory.common_ancestor([own]) == own
    assert memory.common_ancestor([own, os.getppid()]) == os.getppid()
    # One that is gone is not asked for.
    assert memory.common_ancestor([own, 2**22 + 1]) == own


def test_each_reader_is_allowed_until_it_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[int] = []
    monkeypatch.setattr(memory, "_readers", [])
    monkeypatch.setattr(memory._libc, "prctl", lambda _, pid, *__: allowed.append(pid.value), raising=False)
    own, parent = os.getpid(), os.getppid()
    memory.let_read(own)
    memory.let_read(parent)
    memory.let_read(own)
    memory.forbid_read(own)
    memory.forbid_read(parent)
    memory.forbid_read(own)
    memory.forbid_read(own)
    assert allowed == [own, parent, parent, parent, own, 0]
