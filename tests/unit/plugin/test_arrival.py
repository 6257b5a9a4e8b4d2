"""What a target does with requests that come with a ticket: all members of the expected leg, each once, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_plugin.book import MoveBook
from vllm_plugin.compat import RequestStatus, SamplingParams
from vllm_plugin.eligibility import prompt_digest, queueing_digest, sampling_digest
from vllm_plugin.faults import Faults
from vllm_plugin.messages import Expectation, ExpectedMember, Parked
from vllm_plugin.target import TargetSession


class Link:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Engine:
    """A scheduler's book, and what is asked of the engine."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(book=MoveBook(), log_stats=False)
        self.faults = Faults()
        self.adapters: dict[str, str] = {}
        self.refused: list[str] = []
        self.ended: list[str] = []
        self.soon: list[Any] = []

    def refuse_arrival(self, request: Any) -> None:
        request.status = RequestStatus.FINISHED_ABORTED
        self.scheduler.book.forget(request.request_id)
        self.refused.append(request.request_id)

    def end_requests(self, request_ids: list[str], _status: Any) -> None:
        self.ended += request_ids

    def later(self, call: Any) -> None:
        self.soon.append(call)


def request(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> Any:
    one = SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**sampling),
        lora_request=None,
        priority=0,
        cache_salt=None,
        status=RequestStatus.WAITING,
        arrival_time=0.0,
    )
    one.is_finished = lambda: RequestStatus.is_finished(one.status)
    return one


def expected(*requests: Any) -> Expectation:
    members = [
        ExpectedMember(0, number, prompt_digest(one), sampling_digest(one), queueing_digest(one))
        for number, one in enumerate(requests)
    ]
    return Expectation("ticket", "w1/5eed", members, "", 0.0)


def target(*requests: Any) -> tuple[TargetSession, Engine, Link]:
    engine, link = Engine(), Link()
    session = TargetSession(engine, link, "job", 1, "A", 30.0)  # type: ignore[arg-type]
    engine.scheduler.book.expected["ticket"] = expected(*requests)
    return session, engine, link


def arrive(session: TargetSession, engine: Engine, one: Any, stream: str = "w1/5eed", choices: int = 2) -> None:
    engine.scheduler.book.record(one, stream, "ticket", choices)
    session.arrived("ticket", one)


ZERO, ONE = "0_cmpl-5eed-2-0-0123abcd", "1_cmpl-5eed-2-0-0123abcd"


def test_the_source_is_told_once_all_members_are_there():
    session, engine, link = target(request("a", seed=1), request("b", seed=2))
    arrive(session, engine, request(ONE, seed=2))
    assert link.sent == []
    arrive(session, engine, request(ZERO, seed=1))
    assert link.sent == [Parked("ticket", True)]
    stream = engine.scheduler.book.parked["ticket"]
    assert [one.request.request_id for one in stream.arrived()] == [ZERO, ONE], "in the source's order"


@pytest.mark.parametrize(
    ("second", "stream", "code"),
    [
        (request(ONE, prompt=(9,), seed=2), "w1/5eed", "prompt_mismatch"),
        (request(ONE, seed=3), "w1/5eed", "sampling_mismatch"),
        (request("7_cmpl-5eed-2-0-0123abcd", seed=2), "w1/5eed", "unexpected_choice"),
        (request(ONE, seed=2), "w1/other", "wrong_stream"),
    ],
)
def test_one_wrong_member_ends_the_whole_leg(second: Any, stream: str, code: str):
    session, engine, link = target(request("a", seed=1), request("b", seed=2))
    arrive(session, engine, request(ZERO, seed=1))
    arrive(session, engine, second, stream)
    assert [(one.ok, one.code) for one in link.sent] == [(False, code)]
    assert engine.refused == [second.request_id] and engine.ended == [ZERO]
    assert not engine.scheduler.book.parked and not engine.scheduler.book.ticket_of


def test_a_ticket_is_good_for_one_leg_only():
    session, engine, link = target(request("a"))
    arrive(session, engine, request("cmpl-5eed-2-0-0123abcd"), choices=1)
    arrive(session, engine, request("cmpl-5eed-3-0-0123abcd"), choices=1)
    assert engine.refused == ["cmpl-5eed-3-0-0123abcd"]
    # The leg that came first is not disturbed.
    assert link.sent == [Parked("ticket", True)] and "ticket" in engine.scheduler.book.parked


def test_a_ticket_that_was_never_issued_is_refused_on_both_ends():
    session, engine, link = target()
    engine.scheduler.book.expected.clear()
    arrive(session, engine, request("cmpl-5eed-2-0-0123abcd"), choices=1)
    assert [(one.ok, one.code) for one in link.sent] == [(False, "unknown_ticket")]
    assert engine.refused == ["cmpl-5eed-2-0-0123abcd"]


def test_when_one_member_is_closed_the_others_end_between_two_steps():
    session, engine, link = target(request("a", seed=1), request("b", seed=2))
    for request_id, seed in ((ZERO, 1), (ONE, 2)):
        arrive(session, engine, request(request_id, seed=seed))
    engine.scheduler.book.ticket_of.pop(ZERO)
    session.gone("ticket")
    assert [(one.ok, one.code) for one in link.sent] == [(True, ""), (False, "leg_closed")]
    assert engine.ended == [], "vLLM is in the middle of ending the first one"
    for call in engine.soon:
        call()
    assert ONE in engine.ended and not engine.scheduler.book.parked


@pytest.mark.parametrize(
    ("changes", "adapters", "code"),
    [
        ({"priority": 1}, {}, "queueing_mismatch"),
        ({"cache_salt": "another tenant"}, {}, "queueing_mismatch"),
        ({"lora_request": SimpleNamespace(lora_name="fr", lora_int_id=1)}, {"fr": "aa11"}, "lora_missing_on_target"),
    ],
)
def test_what_steers_a_request_besides_sampling_is_compared(
    changes: dict[str, Any], adapters: dict[str, str], code: str
):
    one = request("cmpl-5eed-2-0-0123abcd")
    session, engine, link = target(request("a"))
    engine.adapters = adapters
    vars(one).update(changes)
    arrive(session, engine, one, choices=1)
    assert [(answer.ok, answer.code) for answer in link.sent] == [(False, code)]
    assert engine.refused == [one.request_id]


def test_a_request_to_an_adapter_arrives_where_the_same_one_is_loaded():
    lora = SimpleNamespace(lora_name="fr", lora_int_id=1)
    for adapters, ok in (({"fr": "aa11"}, True), ({"fr": "bb22"}, False), ({}, False)):
        session, engine, link = target(request("a"))
        engine.adapters = adapters
        engine.scheduler.book.expected["ticket"].adapter = "fr=aa11"
        one = request("cmpl-5eed-2-0-0123abcd")
        one.lora_request = lora
        arrive(session, engine, one, choices=1)
        assert [answer.ok for answer in link.sent] == [ok], adapters


def test_a_moved_request_is_as_old_as_it_was():
    session, engine, _ = target(request("a"))
    engine.scheduler.book.expected["ticket"].age_s = 40.0
    one = request("cmpl-5eed-2-0-0123abcd")
    one.arrival_time = 1000.0
    arrive(session, engine, one, choices=1)
    assert one.arrival_time == 960.0
