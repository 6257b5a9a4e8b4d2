"""Requests that arrive before there is room: their blocks wait in host memory, bounded, and come back oldest first."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.plugin.test_data import BLOCKS, LAYERS, Side
from vllm_plugin import parked, queues, staging
from vllm_plugin.book import MoveBook, ParkedRequest, ParkedStream
from vllm_plugin.compat import RequestStatus
from vllm_plugin.kv_cache import KVCache
from vllm_plugin.messages import Expectation, GrowItem, GrownItem, Refusal
from vllm_plugin.scheduler import MigrationScheduler
from vllm_plugin.staged_memory import StagedMemory
from vllm_plugin.staging import StagedRequest, Staging
from vllm_plugin.target import TargetSession
from vllm_plugin.wire import ProtocolError

BLOCK = 4


class Manager:
    """A pool of blocks, and who has which."""

    def __init__(self, free: int) -> None:
        self.free = list(range(1, free + 1))
        self.blocks: dict[str, list[int]] = {}
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: len(self.free))
        self.kv_cache_config = SimpleNamespace(num_blocks=free + 1)

    def allocate_slots(self, request: Any, new: int, *, num_external_computed_tokens: int, **_: Any) -> Any:
        needed = -(-(num_external_computed_tokens + new) // BLOCK)
        if needed > len(self.free):
            return None
        self.blocks[request.request_id] = [self.free.pop(0) for _ in range(needed)]
        return self.blocks[request.request_id]

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.blocks.get(request_id, []),)


def scheduler(free: int = 20, slots: int = 8, staged: int = 6) -> Any:
    one = SimpleNamespace(
        block_size=BLOCK,
        running=[],
        waiting=deque(),
        kv_holding_waiting=[],
        max_num_active_reqs=slots,
        book=MoveBook(),
        staging=Staging(100, staged),
        kv_cache_manager=Manager(free),
        requests={},
        pinned=[],
    )
    one.pin = one.pinned.append
    return one


def request(name: str, arrival: float = 0.0, tokens: int = 9) -> Any:
    return SimpleNamespace(request_id=name, arrival_time=arrival, num_tokens=tokens)


def grown(on: Any, name: str, tokens: int) -> GrownItem | Refusal:
    parked_request = ParkedRequest(request(name))
    return staging.grow(on, parked_request, GrowItem("t", 0, [], 0, tokens, 0, True))


def wait(on: Any, name: str, arrival: float, computed: int = 9) -> None:
    one = request(name, arrival)
    on.staging.hold(name, -(-computed // BLOCK))
    install = {"request_id": name}
    on.staging.add(StagedRequest(one, computed, lambda: install, lambda: on.kv_holding_waiting.append(one)))


# -- slots -------------------------------------------------------------------------------------------------------------


def test_slots_are_held_as_long_as_the_request_needs_them_and_no_more_than_there_are() -> None:
    slots = Staging(100, 6)
    assert slots.hold("a", 2) == [100, 101]
    assert slots.hold("a", 3) == [100, 101, 102]
    assert slots.hold("a", 1) == [100, 101, 102]
    assert slots.hold("b", 4) is None
    assert (slots.free, "b" in slots.held) == (3, False)
    slots.give_back("a")
    slots.give_back("a")
    assert slots.free == 6
    assert sorted(slots.hold("b", 6) or []) == list(range(100, 106))


def test_a_request_that_finds_no_slots_is_refused_with_numbers() -> None:
    on = scheduler(staged=6)
    item = grown(on, "a", 4 * BLOCK)
    assert isinstance(item, GrownItem)
    assert (item.hit_tokens, item.block_ids, on.pinned) == (0, [100, 101, 102, 103], ["a"])
    refusal = grown(on, "b", 3 * BLOCK)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "target_out_of_staging"
    assert refusal.message == "The target has 2 of 6 staging blocks free and the request needs 3."
    assert on.pinned == ["a"]


def test_without_staging_every_request_is_refused() -> None:
    refusal = grown(scheduler(staged=0), "a", 1)
    assert isinstance(refusal, Refusal) and refusal.code == "target_out_of_staging"


# -- back into blocks --------------------------------------------------------------------------------------------------


def test_the_oldest_come_back_first_as_long_as_there_is_room() -> None:
    on = scheduler(free=7, staged=9)
    wait(on, "young", 30.0)
    wait(on, "old", 10.0)
    wait(on, "middle", 20.0)
    moves, installs = staging.restore(on)
    # Three blocks each, and one is left for each that runs.
    assert [one["request_id"] for one in installs] == ["old", "middle"]
    assert [one.request_id for one in on.kv_holding_waiting] == ["old", "middle"]
    assert moves == [(103, 1), (104, 2), (105, 3), (106, 4), (107, 5), (108, 6)]
    assert [one.request.request_id for one in on.staging.waiting] == ["young"]
    assert (on.staging.free, list(on.staging.held)) == (6, ["young"])
    assert staging.restore(on) == ([], [])


def test_only_blocks_with_computed_tokens_are_copied() -> None:
    on = scheduler()
    wait(on, "a", 0.0, computed=8)
    moves, _ = staging.restore(on)
    # The ninth token goes into a third block.
    assert (moves, on.kv_cache_manager.blocks["a"]) == ([(100, 1), (101, 2)], [1, 2, 3])


@pytest.mark.parametrize(
    ("changes", "comes_back"),
    [
        ({}, True),
        ({"running": [1] * 8}, False),  # No run slot.
        ({"running": [1] * 7}, True),
        ({"running": [1] * 7, "kv_holding_waiting": [1]}, False),
        ({"running": [1] * 3, "kv_cache_manager": Manager(6)}, True),
        ({"running": [1] * 3, "kv_cache_manager": Manager(5)}, False),  # The three that run need a block each.
        ({"kv_cache_manager": Manager(2)}, False),
    ],
)
def test_what_runs_keeps_its_room(changes: dict[str, Any], comes_back: bool) -> None:
    on = scheduler()
    vars(on).update(changes)
    assert staging.can_restore(on) is False
    wait(on, "a", 0.0)
    assert staging.can_restore(on) is comes_back


def test_nothing_is_admitted_past_the_first_in_line_unless_nothing_would_ever_end() -> None:
    on = scheduler(free=2)
    wait(on, "a", 0.0)
    on.migration_listener = None
    assert MigrationScheduler._restore_staged(on) == 0
    on.running = [request("runs")]
    assert MigrationScheduler._restore_staged(on) == 8
    on.kv_holding_waiting = [request("resumed")]
    assert MigrationScheduler._restore_staged(on) == 0


# -- the end of one that waits -----------------------------------------------------------------------------------------


class Freed(MigrationScheduler):
    """The parts that free a request, without vLLM's own."""

    def __init__(self) -> None:
        vars(self).update(vars(scheduler()))
        self.deferred_frees: list[Any] = []
        self.pin = super().pin  # type: ignore[method-assign]

    def __new__(cls) -> Freed:
        return object.__new__(cls)


def test_a_request_that_ends_while_a_peer_may_write_keeps_its_slots_until_it_cannot() -> None:
    on = Freed()
    on.requests["a"] = request("a")
    on.staging.hold("a", 3)
    on.book.pinned.add("a")
    del on.requests["a"]
    assert on.staging.free == 3
    on.unpin("a")
    assert on.staging.free == 6


def test_a_commit_does_not_give_the_slots_back() -> None:
    on = Freed()
    on.requests["a"] = request("a")
    on.staging.hold("a", 3)
    on.book.pinned.add("a")
    on.unpin("a")
    assert on.staging.free == 3


def test_a_waiting_request_that_ends_is_forgotten() -> None:
    on = scheduler()
    wait(on, "a", 0.0)
    wait(on, "b", 1.0)
    on.staging.forget("a")
    assert not on.staging.waits("a") and on.staging.waits("b")


# -- a place in the queue ----------------------------------------------------------------------------------------------


def stream(*names: str) -> ParkedStream:
    members: list[Any] = [ParkedRequest(request(name)) for name in names]
    for member in members:
        member.request.structured_output_request = None
        member.request.lora_request = None
    return ParkedStream(Expectation("t", "w1/s", []), members)


def test_a_place_in_the_queue_is_promised_where_no_run_slot_is_free() -> None:
    on = scheduler(slots=2)
    on.running = [request("1"), request("2")]
    on.lora_config = None
    one = stream("a")
    on.book.parked["t"] = one
    refusal = parked.prepare(on, one)
    assert refusal is not None and refusal.code == "target_out_of_run_slots"
    assert parked.prepare(on, one, queue=True) is None
    assert one.prepared_until > 0
    # It takes no run slot from others.
    assert on.book.promised(0.0) == 0
    # Asked again in the other way, the promise is another one.
    on.running.clear()
    assert parked.prepare(on, one) is None
    assert on.book.promised(0.0) == 1


def test_what_could_never_run_is_not_queued() -> None:
    on = scheduler(free=3)
    assert parked._too_small(on, 11) is None
    assert parked._too_small(on, 12) == "The request needs 4 KV blocks and the target has 3 in all."


def test_a_request_goes_before_younger_ones_and_behind_older_ones() -> None:
    on = scheduler()
    on._enqueue_waiting_request = on.waiting.append
    on.waiting.extend([request("old", 1.0), request("young", 9.0), request("younger", 10.0)])
    queues.enqueue_by_age(on, request("moved", 5.0))
    queues.enqueue_by_age(on, request("last", 99.0))
    assert [one.request_id for one in on.waiting] == ["old", "moved", "young", "younger", "last"]


def test_under_pressure_only_what_holds_blocks_is_dropped() -> None:
    on = scheduler()
    on.kv_cache_manager.blocks["holds"] = [1]
    on.book.parked = {"one": stream("holds"), "two": stream("waits")}
    on.book.parked["one"].expectation.ticket = "one"
    ended: list[str] = []
    engine: Any = SimpleNamespace(scheduler=on, end_requests=lambda ids, _: ended.extend(ids))
    link: Any = SimpleNamespace(send=lambda message: None)
    TargetSession(engine, link, "job", 1, "A", 30.0).revoke_parked()
    assert (ended, list(on.book.parked)) == (["holds"], ["two"])


def test_a_staged_request_stands_in_no_queue_and_has_computed_nothing() -> None:
    on = scheduler()
    one = ParkedRequest(request("a"))
    parked._stage(on, one, SimpleNamespace(computed_tokens=9), SimpleNamespace())  # type: ignore[arg-type]
    assert (one.request.num_computed_tokens, one.request.status) == (0, RequestStatus.PREEMPTED)
    assert on.staging.waits("a") and not on.waiting and not on.kv_holding_waiting


# -- the bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tcp", "tcp_shm"])
def test_blocks_are_staged_beside_the_cache_and_come_back_byte_for_byte(backend: str) -> None:
    a, b = Side(1.0, backend), Side(-1.0, backend)
    cache: KVCache = b.server._cache
    for index in range(BLOCKS):
        for offset, name in enumerate(LAYERS):
            a.layers[name][index] = index + offset / 2
    first = cache.stage(3)
    b.allow("s")
    assert a.push(b, [7, 4], [first, first + 2]).ok
    for name in LAYERS:
        assert (b.layers[name] == -1.0).all(), "nothing of it is in the cache yet"
    cache.unstage([(first + 2, 5), (first, 11)])
    for offset, name in enumerate(LAYERS):
        assert (b.layers[name][5] == 4 + offset / 2).all()
        assert (b.layers[name][11] == 7 + offset / 2).all()
        assert (b.layers[name][[0, 1, 6, 10]] == -1.0).all()
    a.engine.close()
    b.engine.close()


def test_an_open_block_is_patched_where_it_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_plugin.sending.SLOW_BLOCK_S", 0.0)
    a, b = Side(1.0), Side(-1.0)
    cache: KVCache = b.server._cache
    first = cache.stage(2)
    b.allow("s")
    assert a.push(b, [1], [first], owners=[1]).ok
    assert a.push(b, [], [], open=[(2, first + 1, 7)]).ok
    a.layers[LAYERS[1]][2, 0, 1] = 3.5
    assert a.push(b, [2], [first + 1], owners=[7]).ok
    cache.unstage([(first + 1, 5)])
    assert torch.equal(b.layers[LAYERS[1]][5], a.layers[LAYERS[1]][2])
    a.engine.close()
    b.engine.close()


@pytest.mark.parametrize("blocks", [[16], [5, 13], [12], [0, 13]])
def test_ids_that_are_neither_in_the_cache_nor_staged_are_refused(blocks: list[int]) -> None:
    cache = KVCache({"layers.0": torch.zeros(12, 2, 4, 8)})
    assert cache.stage(3) == 13
    cache.check([13, 14, 15])
    with pytest.raises(ProtocolError, match="bad_block"):
        cache.check(blocks)


def test_before_anything_is_staged_there_are_no_such_blocks() -> None:
    cache = KVCache({"layers.0": torch.zeros(12, 2, 4, 8)})
    with pytest.raises(ProtocolError, match="bad_block"):
        cache.check([13])
    assert not StagedMemory(13, 0, [64]).has(13)
