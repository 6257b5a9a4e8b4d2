"""How long a target waits for a commit before it begins a step, and which requests wait for those that have arrived."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.book import MoveBook
from vllm_plugin.compat import RequestStatus
from vllm_plugin.first_steps import StepCosts
from vllm_plugin.messages import Coming
from vllm_plugin.scheduler import MigrationScheduler
from vllm_plugin.target import TargetSession


@pytest.fixture
def session() -> TargetSession:
    soon: list[Any] = []
    engine = SimpleNamespace(scheduler=SimpleNamespace(step_s=2.0), soon=soon, later=soon.append)
    return TargetSession(engine, SimpleNamespace(), "job", 1, "A", 30.0)  # type: ignore[arg-type]


def waited(session: TargetSession) -> bool:
    """Whether the engine thread would wait: it is let go at once, as if the commit came."""
    came: list[bool] = []
    session._commit_here = SimpleNamespace(  # type: ignore[assignment]
        wait=lambda _timeout: came.append(True), clear=lambda: None, set=lambda: None
    )
    session._await_commit()
    return bool(came)


def test_a_commit_that_is_due_soon_is_waited_for_once(session: TargetSession):
    session.handle(Coming(within_s=0.5, late_s=0.1))
    assert session.engine.soon == [session._await_commit]
    assert waited(session)
    assert not waited(session)


def test_a_commit_that_is_due_much_later_is_looked_for_again_before_the_next_step(session: TargetSession):
    session.handle(Coming(within_s=1.5, late_s=0.1))
    assert not waited(session)
    session.step_begins()
    assert session.engine.soon[-1] == session._await_commit
    session._expected = time.monotonic() + 0.3, 0.1
    assert waited(session)


def test_a_commit_that_has_come_is_not_waited_for(session: TargetSession):
    session.handle(Coming(within_s=0.1, late_s=0.1))
    session._commit_came()
    assert not waited(session)


def test_the_commit_ends_the_wait(session: TargetSession):
    session.handle(Coming(within_s=0.3, late_s=100.0))
    waiting = threading.Thread(target=session._await_commit)
    waiting.start()
    session._commit_came()
    waiting.join(10)
    assert not waiting.is_alive()


def scheduler(arrived: int, running: int, **request: Any) -> Any:
    """With steps that take 0.1 s and 0.01 s for each request; `request`: fields of those that have arrived."""
    costs = StepCosts()
    for size in (4, 8, 28):
        costs.note(size, 0.1 + 0.01 * size)
    book = MoveBook()
    waiting = {"status": RequestStatus.PREEMPTED, "num_tokens": 9, "num_computed_tokens": 8, **request}
    requests = {f"new {one}": SimpleNamespace(request_id=f"new {one}", **waiting) for one in range(arrived)}
    book.watched = dict.fromkeys(requests, ("ticket", "stream", 1, 0.0))
    others = [SimpleNamespace(request_id=f"old {one}") for one in range(running)]
    return SimpleNamespace(requests=requests, running=others, book=book, costs=costs, waited_s=0.0, _went_first=set())


def others_of(one: Any) -> list[str]:
    return [request.request_id for request in MigrationScheduler._others_of_arrived(one)]


def test_many_wait_one_step_for_few_that_have_arrived():
    one = scheduler(arrived=1, running=28)
    assert len(others_of(one)) == 28
    # Should the arrived find no room in that step, the others do not wait again.
    assert others_of(one) == []


def test_those_that_have_waited_for_the_commit_do_not_wait_again():
    one = scheduler(arrived=1, running=28)
    one.waited_s = 0.19
    assert len(others_of(one)) == 28
    one = scheduler(arrived=1, running=28)
    # A step of 28 takes 0.38 s, and one of what has arrived 0.11 s.
    one.waited_s = 0.5
    assert others_of(one) == []


def test_what_is_frozen_waits_anyway():
    one = scheduler(arrived=1, running=28)
    one.book.frozen = {"old 3"}
    assert "old 3" not in others_of(one) and len(others_of(scheduler(1, 28))) == 28


@pytest.mark.parametrize(
    ("arrived", "running", "request_"),
    [
        (0, 28, {}),
        (8, 8, {}),  # As many: the others would lose most of a step.
        (1, 28, {"num_tokens": 500}),  # Comes to be computed again.
        (1, 28, {"status": RequestStatus.RUNNING}),  # Has stepped already.
    ],
)
def test_nobody_waits(arrived: int, running: int, request_: dict[str, Any]):
    assert others_of(scheduler(arrived, running, **request_)) == []
