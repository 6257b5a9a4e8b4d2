"""How fast blocks are copied, and how much a source is slowed down that writes them faster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin import pacing
from vllm_plugin.pacing import CHUNK, LONGEST_PAUSE_S, Pace, brake
from vllm_plugin.rounds import _slow_down


def test_a_pace_is_kept_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(pacing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pacing.time, "sleep", sleep)
    pace = Pace(CHUNK / 0.1)
    pace.rest(CHUNK // 2)
    assert slept == []
    pace.rest(CHUNK)
    now[0] += 0.04
    pace.rest(2 * CHUNK)
    assert slept == pytest.approx([0.1, 0.06])


@pytest.mark.parametrize(
    ("bytes_per_step", "step_s", "bytes_per_s", "pause_s"),
    [
        (1e6, 0.1, 100e6, 0.0),  # A tenth of what the way carries.
        (1e6, 0.1, 20e6, 0.0),  # Just the half.
        (1e6, 0.1, 10e6, 0.1),
        (1e6, 0.1, 1e6, LONGEST_PAUSE_S),
        (1e6, 0.1, 0.0, 0.0),  # Nothing was sent: nothing is known.
        (0.0, 0.0, 10e6, 0.0),
    ],
)
def test_the_source_writes_at_most_half_of_what_the_way_carries(
    bytes_per_step: float, step_s: float, bytes_per_s: float, pause_s: float
) -> None:
    assert brake(bytes_per_step, step_s, bytes_per_s) == pytest.approx(pause_s)


def test_the_pause_does_not_count_as_a_part_of_the_step() -> None:
    scheduler = SimpleNamespace(running=["a", "b"], block_size=128, pause_s=0.0, pulse=SimpleNamespace(step_s=0.1))
    workers = SimpleNamespace(block_bytes=128 * 500_000)
    engine = SimpleNamespace(scheduler=scheduler, workers=workers)
    session: Any = SimpleNamespace(job="j", aborting=False, engine=engine)
    _slow_down(session, 10e6)
    assert scheduler.pause_s == pytest.approx(0.1)
    # Asked again, now that the steps take 0.2 s with it.
    scheduler.pulse.step_s = 0.2
    _slow_down(session, 10e6)
    assert scheduler.pause_s == pytest.approx(0.1)
    # One of the two has gone: nothing to wait for any more.
    scheduler.running = ["a"]
    _slow_down(session, 10e6)
    assert scheduler.pause_s == pytest.approx(0.0)
    # The migration ends in this very moment.
    scheduler.running = ["a", "b"]
    session.aborting = True
    _slow_down(session, 10e6)
    assert scheduler.pause_s == 0.0
