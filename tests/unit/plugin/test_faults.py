"""The test switch itself: a hold that does not hold would make every test behind it worthless."""

from __future__ import annotations

import threading
from typing import Any, cast

import msgspec
import pytest

from vllm_plugin.faults import Faults
from vllm_plugin.link import Link
from vllm_plugin.wire import Ping


class Wire:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.arrived = threading.Event()

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.arrived.set()


def test_without_a_fault_everything_is_said_at_once() -> None:
    wire = Wire()
    Faults().say("committed", cast(Link, wire), Ping())
    assert wire.sent == [Ping()]


def test_what_is_late_comes_later_and_what_is_lost_never() -> None:
    wire = Wire()
    faults = Faults(late={"committed": 0.05, "producing": -1})
    faults.say("producing", cast(Link, wire), Ping())
    faults.say("committed", cast(Link, wire), Ping())
    assert wire.sent == []
    assert wire.arrived.wait(10)
    assert wire.sent == [Ping()]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"late": {"comitted": 1.0}}, Faults)


def test_a_slow_engine_becomes_fast_again() -> None:
    class Scheduler:
        def schedule(self, step: int) -> int:
            return step

    scheduler: Any = Scheduler()
    Faults(step_delay_s=0.001).slow_down(scheduler)
    assert "schedule" in vars(scheduler) and scheduler.schedule(3) == 3
    # Twice does not add up.
    Faults(step_delay_s=0.001).slow_down(scheduler)
    Faults().slow_down(scheduler)
    assert "schedule" not in vars(scheduler) and scheduler.schedule(4) == 4
