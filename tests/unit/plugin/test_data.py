"""Two data servers on real sockets: blocks arrive byte for byte, and a peer that lies or dies changes nothing."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from vllm_plugin import memory
from vllm_plugin.data import DataServer
from vllm_plugin.data_messages import (
    AllowSession,
    Offer,
    Patch,
    Probe,
    Probed,
    Push,
    Pushed,
    Reach,
    Reached,
    Receiving,
    RevokeSession,
    Write,
    Written,
    decode_data,
)
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.messages import Answer
from vllm_plugin.sending import Sender
from vllm_plugin.wire import FrameSocket, ProtocolError, encode_frame

LAYERS, BLOCKS = ("layers.0", "layers.1"), 12


class Side:
    """One worker: its KV tensors, its server, and its engine core's connection to it."""

    def __init__(self, fill: float, backend: str = "tcp") -> None:
        shape = (BLOCKS, 2, 4, 8)
        self.layers = {name: torch.full(shape, fill, dtype=torch.bfloat16) for name in LAYERS}
        self.server = DataServer(
            KVCache(self.layers),
            {"seeded": b"state"}.get,
            token="secret",
            host="127.0.0.1",
            port=0,
            name="worker",
            cpus=[],
            backend=backend,
        )
        self.engine = FrameSocket.dial("127.0.0.1", self.server.port, "secret", "engine", "engine")
        self._calls = count(1)

    @property
    def sender(self) -> Sender:
        """Its only way to another worker."""
        (sender,) = self.server._senders.values()
        return sender

    def ask(self, build: Any) -> Any:
        message = build(next(self._calls))
        self.engine.send(message)
        return decode_data(self.engine.receive_body())

    def allow(self, session: str) -> None:
        assert isinstance(self.ask(lambda call: AllowSession(call, session)), Answer)

    def revoke(self, session: str) -> None:
        assert isinstance(self.ask(lambda call: RevokeSession(call, session)), Answer)

    def push(
        self, other: Side, source: list[int], target: list[int], generators: tuple[str, ...] = (), **more: Any
    ) -> Pushed:
        port = other.server.port
        answer = self.ask(lambda call: Push(call, "s", "127.0.0.1", port, source, target, list(generators), **more))
        assert isinstance(answer, Pushed)
        return answer


@pytest.fixture(params=["tcp", "tcp_shm", "rdma"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    a, b = Side(1.0, request.param), Side(-1.0, request.param)
    for index in range(BLOCKS):
        for offset, name in enumerate(LAYERS):
            a.layers[name][index] = index + offset / 2
    yield a, b
    a.engine.close()
    b.engine.close()


def test_blocks_arrive_where_they_belong_and_nowhere_else(sides: tuple[Side, Side]):
    a, b = sides
    b.allow("s")
    pushed = a.push(b, [2, 3, 7], [5, 9, 1], generators=("seeded", "greedy"))
    assert pushed.ok and pushed.sent_bytes == 3 * a.server._cache.block_bytes
    assert pushed.generators == {"seeded": b"state"}
    for offset, name in enumerate(LAYERS):
        for source, target in ((2, 5), (3, 9), (7, 1)):
            assert (b.layers[name][target] == source + offset / 2).all()
        untouched = [index for index in range(BLOCKS) if index not in (5, 9, 1)]
        assert (b.layers[name][untouched] == -1.0).all()


def test_it_says_what_carried_the_blocks_and_how_fast_the_way_is(sides: tuple[Side, Side]):
    a, b = sides
    b.allow("s")
    expected = {"tcp_shm": "memory"}.get(b.server._backend, b.server._backend)
    assert a.push(b, [2], [5]).transport == expected
    probed = a.ask(lambda call: Probe(call, "127.0.0.1", b.server.port))
    assert isinstance(probed, Probed) and probed.ok, probed
    assert probed.transport == expected and probed.bytes_per_s > 0 and probed.block_s > 0
    assert bool(probed.reason) == (expected == "tcp")


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> tuple[Side, Side]:
    monkeypatch.setattr("vllm_plugin.sending.SLOW_BLOCK_S", 0.0)
    a, b = Side(1.0), Side(-1.0)
    b.allow("s")
    # The first whole blocks show how slow the link is.
    assert a.push(b, [1], [1], owners=[1]).ok
    return a, b


def test_over_a_slow_link_an_open_block_is_sent_ahead_and_then_only_what_changed(slow_link: tuple[Side, Side]):
    a, b = slow_link
    size = a.server._cache.block_bytes
    assert a.push(b, [], [], open=[(2, 5, 7)]).sent_bytes == size
    a.layers[LAYERS[1]][2, 0, 1] = 3.5
    changed = a.push(b, [], [], open=[(2, 5, 7)])
    assert changed.ok and 0 < changed.sent_bytes <= 80
    assert torch.equal(b.layers[LAYERS[1]][5], a.layers[LAYERS[1]][2])
    a.layers[LAYERS[0]][2, 1, 2] = -8
    # It is full now, and comes a last time.
    last = a.push(b, [3, 2], [6, 5], owners=[7, 7], urgent=True)
    assert size < last.sent_bytes <= size + 80
    assert all(torch.equal(b.layers[name][[5, 6]], a.layers[name][[2, 3]]) for name in LAYERS)
    assert not a.sender._shadows


def test_a_link_that_was_measured_is_known_to_be_slow_from_the_first_block_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_plugin.sending.SLOW_BLOCK_S", 0.0)
    a, b = Side(1.0), Side(-1.0)
    b.allow("s")
    assert a.push(b, [], [], open=[(2, 5, 7)]).sent_bytes == 0
    a.revoke("s")
    assert a.ask(lambda call: Probe(call, "127.0.0.1", b.server.port)).ok
    assert a.push(b, [], [], open=[(2, 5, 7)]).sent_bytes == a.server._cache.block_bytes


def test_what_was_sent_ahead_is_of_no_use_for_another_request_in_the_same_place(slow_link: tuple[Side, Side]):
    a, b = slow_link
    assert a.push(b, [], [], open=[(2, 5, 7)]).ok
    # B has given block 5 to somebody else meanwhile.
    for layer in b.layers.values():
        layer[5] = 99.0
    assert a.push(b, [2], [5], owners=[8], urgent=True).sent_bytes == a.server._cache.block_bytes
    assert all(torch.equal(b.layers[name][5], a.layers[name][2]) for name in LAYERS)


def test_a_patch_that_lies_about_itself(slow_link: tuple[Side, Side]):
    _, b = slow_link
    before = [layer.clone() for layer in b.layers.values()]
    for block, content, code in ((5, b"\xff" * 3, "size_mismatch"), (0, b"\x00" * 8, "bad_block")):
        liar = _worker(b)
        liar.send(Patch("s", block, len(content)))
        liar.sock.sendall(content)
        answer = decode_data(liar.receive_body())
        assert isinstance(answer, Written) and (answer.ok, answer.code) == (False, code)
    assert all(torch.equal(now, then) for now, then in zip(b.layers.values(), before, strict=True))


@pytest.mark.parametrize("asks", [0, 1])
def test_nixl_that_is_asked_for_and_not_there_is_an_error(asks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_plugin.rdma._PACKAGES", ())
    backends = ["tcp_shm", "tcp_shm"]
    backends[asks] = "rdma"
    a, b = (Side(fill, backend) for fill, backend in zip((1.0, -1.0), backends, strict=True))
    b.allow("s")
    refused = a.push(b, [2], [5])
    assert not refused.ok and "NIXL" in refused.message
    assert all((layer == -1.0).all() for layer in b.layers.values())


@pytest.mark.parametrize("asks", [0, 1])
def test_either_side_can_ask_for_tcp(asks: int):
    backends = ["", ""]
    backends[asks] = "tcp"
    a, b = (Side(1.0, backend) for backend in backends)
    b.allow("s")
    pushed = a.push(b, [2], [5])
    assert pushed.ok and pushed.transport == "tcp"
    assert (b.layers[LAYERS[0]][5] == 1.0).all()


def test_what_another_host_would_send_goes_over_several_connections(monkeypatch: pytest.MonkeyPatch):
    identities = count(1)
    monkeypatch.setattr("vllm_plugin.memory.host_identity", lambda: f"host {next(identities)}")
    a, b = Side(1.0, ""), Side(-1.0, "")
    b.allow("s")
    for index in range(BLOCKS):
        a.layers[LAYERS[0]][index] = index
    pushed = a.push(b, list(range(1, 11)), list(range(11, 1, -1)))
    assert pushed.ok and pushed.transport == "tcp", pushed
    assert [int(b.layers[LAYERS[0]][12 - index].max()) for index in range(1, 11)] == list(range(1, 11))
    assert len(a.sender._channels) == 4


def test_memory_that_cannot_be_read_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    a, b = Side(1.0, ""), Side(-1.0, "")
    b.allow("s")
    monkeypatch.setattr("vllm_plugin.memory.read", forbidden)
    assert a.push(b, [2], [5]).transport == "tcp"
    assert "not permitted" in a.sender.reason
    assert (b.layers[LAYERS[0]][5] == 1.0).all()


def test_a_source_that_lies_about_its_memory_spoils_nothing():
    """Addresses that it does not have: the session ends with a reason."""
    b = Side(-1.0, "tcp_shm")
    b.allow("s")
    cache = b.server._cache
    held = torch.arange(32, dtype=torch.uint8)
    liar = _worker(b)
    liar.send(Reach("s", memory.host_identity(), os.getpid(), "", 1e12))
    reached = decode_data(liar.receive_body())
    assert isinstance(reached, Reached) and reached.transport == "memory"
    liar.send(Offer([4096, 8192], cache.bytes_per_layer, cache.strides, held.data_ptr(), held.numpy().tobytes()))
    assert decode_data(liar.receive_body()) == Reached("memory", True)
    liar.send(Write("s", [5], cache.block_bytes, [2]))
    answer = decode_data(liar.receive_body())
    assert isinstance(answer, Written) and (answer.ok, answer.code) == (False, "source_unreadable")
    assert all((layer == -1.0).all() for layer in b.layers.values())


def test_a_session_that_is_not_allowed_or_revoked_writes_nothing(sides: tuple[Side, Side]):
    a, b = sides
    refused = a.push(b, [2], [5])
    assert not refused.ok and "unknown_session" in refused.message
    b.allow("s")
    assert a.push(b, [2], [5]).ok
    b.revoke("s")
    assert not a.push(b, [3], [6]).ok
    assert (b.layers[LAYERS[0]][6] == -1.0).all()


def test_block_zero_and_blocks_outside_are_refused(sides: tuple[Side, Side]):
    a, b = sides
    b.allow("s")
    for block in (0, BLOCKS, -1):
        refused = a.push(b, [2], [block])
        assert not refused.ok and "bad_block" in refused.message
    assert not a.push(b, [BLOCKS], [2]).ok
    assert all((layer == -1.0).all() for layer in b.layers.values())


def _worker(side: Side) -> FrameSocket:
    return FrameSocket.dial("127.0.0.1", side.server.port, "secret", "worker", "liar")


def test_a_peer_that_lies_about_the_size(sides: tuple[Side, Side]):
    _, b = sides
    b.allow("s")
    liar = _worker(b)
    liar.send(Write("s", [4], 10**9))
    answer = decode_data(liar.receive_body())
    assert isinstance(answer, Written) and not answer.ok and answer.code == "size_mismatch"
    with pytest.raises(ConnectionError):
        liar.receive_body()


def test_a_peer_that_sends_half_a_block_and_dies_does_not_hold_up_a_revocation(sides: tuple[Side, Side]):
    a, b = sides
    b.allow("s")
    size = b.server._cache.block_bytes
    liar = _worker(b)
    liar.send(Write("s", [4], size))
    liar.sock.sendall(b"x" * (size // 2))
    liar.close()
    b.revoke("s")
    b.allow("s")
    assert a.push(b, [2], [5]).ok


def test_a_peer_that_sends_half_a_block_and_falls_silent_is_cut_off_by_a_revocation(sides: tuple[Side, Side]):
    _, b = sides
    b.allow("s")
    size = b.server._cache.block_bytes
    silent = _worker(b)
    silent.send(Write("s", [4], size))
    silent.sock.sendall(b"x" * (size // 2))
    while not b.server._receiver._writing.get("s"):
        time.sleep(0.01)
    b.revoke("s")
    with pytest.raises((ConnectionError, ProtocolError)):
        silent.receive_body()


def test_a_block_that_comes_in_slowly_is_not_taken_for_one_that_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_plugin.receiving.ALIVE_S", 0.0)
    a, b = Side(1.0), Side(-1.0)
    b.allow("s")
    size = b.server._cache.block_bytes
    slow = _worker(b)
    slow.send(Reach("s", "elsewhere", 1, "tcp", 1e12))
    assert isinstance(decode_data(slow.receive_body()), Reached)
    slow.send(Write("s", [4], size))
    for _ in range(2):
        slow.sock.sendall(b"x" * (size // 2))
        assert isinstance(decode_data(slow.receive_body()), Receiving)
    assert decode_data(slow.receive_body()) == Written(True)
    # And whoever sends waits as long as it hears that.
    pushed = a.push(b, [2, 3], [5, 6], owners=[7, 7])
    assert pushed.ok and all((layer[[5, 6]] == 1.0).all() for layer in b.layers.values())


def test_half_of_a_read_that_fails_is_waited_for_by_the_other(monkeypatch: pytest.MonkeyPatch):
    """The two threads that read what somebody waits for: nobody writes any more once the failure is reported."""
    real, threads = memory.read, []

    def read(pid: int, remote: Any, local: Any) -> int:
        threads.append(threading.current_thread())
        if threading.current_thread().name.startswith("vllm-hi-copy"):
            time.sleep(0.1)
            failed.append(time.monotonic())
            raise OSError(14, "Bad address")
        return real(pid, remote, local)

    failed: list[float] = []
    a, b = Side(1.0, "tcp_shm"), Side(-1.0, "tcp_shm")
    b.allow("s")
    assert a.push(b, [1], [1]).ok
    monkeypatch.setattr("vllm_plugin.memory.read", read)
    refused = a.push(b, [2, 3], [5, 6], urgent=True)
    answered = time.monotonic()
    assert not refused.ok and "Bad address" in refused.message
    assert len(set(threads)) == 2 and failed[0] < answered
    b.revoke("s")


def test_a_target_that_does_not_answer_is_reported(sides: tuple[Side, Side]):
    a, _ = sides
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    answer = a.ask(lambda call: Push(call, "s", "127.0.0.1", port, [2], [5], []))
    assert isinstance(answer, Pushed) and not answer.ok and answer.message


def test_roles_are_kept_apart(sides: tuple[Side, Side]):
    _, b = sides
    b.allow("s")
    worker = _worker(b)
    worker.send(RevokeSession(1, "s"))
    answer = decode_data(worker.receive_body())
    assert isinstance(answer, Written) and answer.code == "unexpected_message"
    with pytest.raises(ConnectionError):
        worker.receive_body()
    stranger = FrameSocket.dial("127.0.0.1", b.server.port, "secret", "proxy", "w1")
    with pytest.raises(ConnectionError):
        stranger.receive_body()
    engine = FrameSocket.dial("127.0.0.1", b.server.port, "secret", "engine", "e")
    engine.sock.sendall(struct.pack("<I", 3) + b"abc" + encode_frame(AllowSession(1, "t")))
    with pytest.raises(ConnectionError):
        engine.receive_body()


def test_a_cache_whose_blocks_are_not_contiguous_is_refused():
    layer = torch.zeros((BLOCKS, 4, 2, 8)).transpose(1, 2)
    with pytest.raises(ValueError, match="not contiguous"):
        KVCache({"layers.0": layer})
