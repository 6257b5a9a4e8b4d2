"""A ticket for a second leg is worth something once, to the one it was issued for, and for a while."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.answers import Request
from benchmarks.streams import mixed_requests
from controlplane.serving import Instance
from tests.engine.conftest import RunningStack
from tests.engine.impostors import ByHand, Impostor

SLOW = {"step_delay_s": 0.03}


@pytest.fixture
def impostor(stack: RunningStack) -> Iterator[Impostor]:
    source, target = stack.remember_roles()
    impostor = Impostor(stack, source, target)
    # Slow, so that the request is still there when its ticket is misused, however late a busy machine comes to that.
    with stack.faults(source, **SLOW):
        yield impostor
    impostor.close()


def _redeem(target: Instance, body: dict[str, Any]) -> httpx.Response:
    """A client that goes to B's own port."""
    return httpx.post(target.base_url + "/v1/completions", json=body, timeout=30, trust_env=False)


def _tokens_of(answer: httpx.Response) -> list[int]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line[6:]).get("choices", ())]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def _assert_error_without_tokens(answer: httpx.Response) -> None:
    assert not _tokens_of(answer) and '"error"' in answer.text, answer.text


@pytest.mark.parametrize(
    ("stream", "changes", "code"),
    [
        ("mine", {"prompt": "Another prompt altogether."}, "prompt_mismatch"),
        ("mine", {"temperature": 0.7, "seed": 1}, "sampling_mismatch"),
        ("mine", {"max_tokens": 300}, "sampling_mismatch"),
        ("another", {}, "wrong_stream"),
    ],
)
def test_a_ticket_for_another_body_or_by_another_client_is_refused_on_both_ends(
    stack: RunningStack, impostor: Impostor, stream: str, changes: dict[str, Any], code: str
) -> None:
    source, target = stack.remember_roles()
    free = stack.free_blocks(source), stack.free_blocks(target)
    impostor.start("mine")
    stack.until(lambda: len(impostor.tokens) > 5)
    by_hand = ByHand(stack, f"ticket-{code}-{len(changes)}", source, target)
    with by_hand.session(), ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(by_hand.call, "attach")
        ticket = impostor.asked.get(timeout=30).ticket
        _assert_error_without_tokens(_redeem(target, impostor.body(stream, ticket, **changes)))
        attached = attaching.result(30).json()
    assert attached["attached"] == []
    assert [row["code"] for row in attached["refused"]] == [code]
    assert attached["refused"][0]["message"].endswith(".")
    # The source has never stopped.
    assert impostor.over.wait(60) and len(impostor.tokens) == 160
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)


def test_a_ticket_is_worth_nothing_a_second_time_nor_after_its_session(stack: RunningStack, impostor: Impostor) -> None:
    source, target = stack.remember_roles()
    free = stack.free_blocks(source), stack.free_blocks(target)
    impostor.start("mine")
    stack.until(lambda: len(impostor.tokens) > 5)
    by_hand = ByHand(stack, "ticket-replayed", source, target)
    with ThreadPoolExecutor(2) as pool:
        with by_hand.session():
            attaching = pool.submit(by_hand.call, "attach")
            ticket = impostor.asked.get(timeout=30).ticket
            first = pool.submit(_redeem, target, impostor.body("mine", ticket))
            assert [row["ticket"] for row in attaching.result(30).json()["attached"]] == [ticket]
            # The same ticket, body and stream again: the first stays parked, nobody gets its place.
            _assert_error_without_tokens(_redeem(target, impostor.body("mine", ticket)))
            assert stack.status(target)["requests"]["parked"] == 1
            assert by_hand.call("round", round=0).json()["failed"] == []
        assert _tokens_of(first.result(30)) == []
        # Its session is over.
        _assert_error_without_tokens(_redeem(target, impostor.body("mine", ticket)))
    assert impostor.over.wait(60) and len(impostor.tokens) == 160
    assert stack.status(target)["requests"]["parked"] == 0
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)


def test_a_ticket_is_worth_nothing_after_its_commit(stack: RunningStack, impostor: Impostor) -> None:
    source, target = stack.remember_roles()
    free = stack.free_blocks(source), stack.free_blocks(target)
    impostor.start("mine")
    stack.until(lambda: len(impostor.tokens) > 5)
    by_hand = ByHand(stack, "ticket-committed", source, target)
    with by_hand.session(), ThreadPoolExecutor(2) as pool, stack.faults(target, **SLOW):
        attaching = pool.submit(by_hand.call, "attach")
        ticket = impostor.asked.get(timeout=30).ticket
        first = pool.submit(_redeem, target, impostor.body("mine", ticket))
        assert [row["ticket"] for row in attaching.result(30).json()["attached"]] == [ticket]
        assert by_hand.call("round", round=0).json()["failed"] == []
        (moved,) = by_hand.call("handover").json()["results"]
        assert moved["outcome"] == "moved", moved
        _assert_error_without_tokens(_redeem(target, impostor.body("mine", ticket)))
        assert not first.done()
        # The one that was first has the whole answer, from the beginning; the proxy cuts what its client has.
        tokens = _tokens_of(first.result(30))
    assert len(tokens) == 160 and tokens[: len(impostor.tokens)] == impostor.tokens
    stack.until(lambda: (stack.free_blocks(source), stack.free_blocks(target)) == free)


def test_a_ticket_that_nobody_redeems_in_time_leaves_the_request_on_the_source(
    stack: RunningStack, impostor: Impostor
) -> None:
    source, target = stack.remember_roles()
    impostor.start("mine")
    stack.until(lambda: len(impostor.tokens) > 5)
    by_hand = ByHand(stack, "ticket-late", source, target)
    with by_hand.session(), ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(by_hand.call, "attach")
        ticket = impostor.asked.get(timeout=30).ticket
        refused = attaching.result(30).json()["refused"]
        assert [row["code"] for row in refused] == ["attach_timeout"]
        _assert_error_without_tokens(_redeem(target, impostor.body("mine", ticket)))
    assert impostor.over.wait(60) and len(impostor.tokens) == 160


def test_a_client_that_puts_a_ticket_into_its_body_is_served_like_any_other(stack: RunningStack) -> None:
    (plain,) = mixed_requests(1, tokens=12, salt=63)
    extra = {"vllm_hi_ticket": "made-up", "vllm_hi_stream": "somebody/else"}
    with_ticket = Request("with-ticket", plain.path, {**plain.body, "vllm_xargs": extra})
    one, other = stack.run([plain, with_ticket])
    assert not other.error
    assert other.token_ids == one.token_ids
