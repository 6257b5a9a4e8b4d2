"""`pause`, `resume`, `receive` and `collect`, on an engine that does nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin import by_hand
from vllm_plugin.compat import PauseState
from vllm_plugin.errors import MigrationError

JOB = {"job": "j1", "attempt": 1}


class Engine:
    def __init__(self) -> None:
        self.states: list[Any] = []
        snapshots = iter([False, False, True])
        self.scheduler = SimpleNamespace(
            running=[SimpleNamespace(request_id="r1")],
            set_pause_state=self.states.append,
            snapshot=lambda request_id, since: SimpleNamespace(drained=next(snapshots, True)),
        )
        self.source: Any = None
        self.target: Any = None
        self.settings = SimpleNamespace(bind="10.0.0.2")
        self.control_port = 9001
        self.pause = by_hand.Pause(self)  # type: ignore[arg-type]

    def on_engine(self, call: Any) -> Any:
        return call()

    later = on_engine

    def check_attempt(self, job: str, attempt: int) -> None:
        if attempt < 1:
            raise MigrationError(409, "stale_attempt", "seen")


@pytest.fixture
def engine() -> Any:
    return Engine()


def test_a_pause_waits_for_steps_in_flight_and_ends_by_hand(engine: Any):
    assert by_hand.pause(engine, JOB | {"deadline_s": 5.0}) == {"paused": 1, "expires_in_s": 5.0}
    assert engine.states == [PauseState.PAUSED_ALL]
    assert by_hand.resume(engine, JOB) == {"resumed": True}
    assert engine.states == [PauseState.PAUSED_ALL, PauseState.UNPAUSED]
    assert by_hand.resume(engine, JOB) == {"resumed": False}


def test_a_pause_ends_by_itself(engine: Any):
    by_hand.pause(engine, JOB | {"deadline_s": 5.0})
    engine.pause.check(time.monotonic() + 4)
    assert engine.pause.job == "j1"
    engine.pause.check(time.monotonic() + 6)
    assert (engine.pause.job, engine.states[-1]) == (None, PauseState.UNPAUSED)


def test_a_second_pause_moves_the_deadline(engine: Any):
    by_hand.pause(engine, JOB | {"deadline_s": 1.0})
    by_hand.pause(engine, JOB | {"deadline_s": 9.0})
    engine.pause.check(time.monotonic() + 5)
    assert engine.pause.job == "j1"


@pytest.mark.parametrize("call", [by_hand.pause, by_hand.resume])
def test_nobody_touches_the_pause_of_another(engine: Any, call: Any):
    by_hand.pause(engine, JOB | {"deadline_s": 5.0})
    with pytest.raises(MigrationError) as refused:
        call(engine, {"job": "j2", "attempt": 1, "deadline_s": 5.0})
    assert (refused.value.status, refused.value.code, refused.value.param) == (409, "paused_by_another", "job")
    assert engine.pause.job == "j1"
    # The end of another migration is none of its business either.
    assert engine.pause.end("j2") is False


def test_receive_tells_whom_to_call_before_anything_has_come(engine: Any):
    assert by_hand.receive(engine, JOB) == {
        "peer": {"host": "10.0.0.2", "control_port": 9001},
        "session": False,
        "parked": [],
        "blocks": 0,
        "moved": 0,
    }


@pytest.mark.parametrize("side", ["source", "target"])
def test_receive_is_refused_by_an_instance_that_is_busy(engine: Any, side: str):
    setattr(engine, side, SimpleNamespace(job="j9"))
    with pytest.raises(MigrationError) as refused:
        by_hand.receive(engine, JOB)
    assert (refused.value.status, refused.value.code) == (409, "session_busy")


@pytest.mark.parametrize("mode", ["full", "incremental"])
def test_collect_is_one_round_and_the_full_one_attaches(engine: Any, mode: str):
    answer = {
        "round": 3, "blocks": 7, "bytes": 7000, "hit_blocks": 1, "dirty_blocks": 2, "duration_s": 0.1,
        "transport": "memory", "finished": ["r8"], "failed": [{"request_id": "r9", "code": "preempted"}],
    }  # fmt: skip
    attached = {"attached": [], "refused": [{"request_id": "r7", "code": "no_proxy", "message": "m"}], "finished": []}
    renewed: list[float] = []
    session: Any = SimpleNamespace(
        renew=renewed.append,
        attach=lambda ids: attached if ids == ["r1"] else None,
        next_round=3,
        round=lambda number: answer if number == 3 else None,
        moves={"r1": SimpleNamespace(request_id="r1", state="copying"), "r9": SimpleNamespace(state="stayed")},
    )
    payload = JOB | {"mode": mode, "request_ids": ["r1"], "lease_s": 60.0, "peer": None}
    got = by_hand.collect(engine, session, payload)
    assert (got["mode"], got["round_idx"], got["block_count"], got["data_size_bytes"]) == (mode, 3, 7, 7000)
    assert got["requests"] == ["r1"] and got["finished"] == ["r8"] and renewed == [60.0]
    assert [row["request_id"] for row in got["refused"]] == (["r7", "r9"] if mode == "full" else ["r9"])
