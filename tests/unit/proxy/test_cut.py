"""The cut: whatever the two legs look like, the client gets the answer once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.cut import Cut
from tests.fakes.answers import Received, Shape, Token, event, events, make_tokens, read_stream, text_of


def relay(cut: Cut, *legs: list[bytes]) -> bytes:
    """Feeds each leg's events to the client, one leg after the other."""
    out = b""
    for leg in legs:
        cursor = cut.cursor()
        for chunk in leg:
            passed = cut.feed(cursor, chunk)
            out += passed.ready + passed.failed
    return out


def whole(tokens: list[Token], shape: Shape) -> Received:
    return read_stream(b"".join(events(tokens, [1] * len(tokens), shape, "id-a")))


def assert_same_answer(got: Received, expected: Received) -> None:
    for name in ("text", "token_ids", "logprobs", "finish_reasons", "usages", "roles", "prompts", "ids", "done"):
        assert getattr(got, name) == getattr(expected, name), name
    assert len(got.created) == 1
    assert not got.errors


@st.composite
def partitions(draw: st.DrawFn, total: int) -> list[int]:
    groups: list[int] = []
    while (left := total - sum(groups)) > 0:
        groups.append(draw(st.integers(1, left)))
    return groups


#: How long an example takes says something about the machine only.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def handovers(draw: st.DrawFn) -> tuple[list[Token], Shape, list[list[bytes]]]:
    """An answer, and three legs that each carry it from its start, the first two broken off somewhere."""
    tokens = [Token(i, text, -i / 3) for i, text in enumerate(draw(st.lists(texts, min_size=1, max_size=12)))]
    shape = Shape(
        chat=draw(st.booleans()),
        ids=True,
        logprobs=draw(st.booleans()),
        usage=draw(st.booleans()),
        hold=draw(st.integers(0, 5)),
    )
    legs = []
    for number, name in enumerate(("id-a", "id-b", "id-c")):
        data = b"".join(events(tokens, draw(partitions(len(tokens))), shape, name, created=number + 1))
        if number < 2:
            end = data.rindex(b'"finish_reason":"length"')
            data = data[: draw(st.integers(0, end))]
        cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=6)))
        legs.append([data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])
    return tokens, shape, legs


@unhurried
@given(handovers())
def test_any_legs_and_any_cut_give_the_whole_answer_once(case: tuple[list[Token], Shape, list[list[bytes]]]) -> None:
    tokens, shape, legs = case
    got = read_stream(relay(Cut(wants_token_ids=True), *legs))
    expected = whole(tokens, shape)
    assert len(got.ids) == 1
    expected.ids = got.ids
    assert_same_answer(got, expected)


@unhurried
@given(handovers())
def test_a_client_that_did_not_ask_gets_no_token_ids(case: tuple[list[Token], Shape, list[list[bytes]]]) -> None:
    tokens, shape, legs = case
    data = relay(Cut(wants_token_ids=False), *legs)
    assert b"token_ids" not in data
    got = read_stream(data)
    expected = whole(tokens, shape)
    assert (got.text, got.logprobs, got.finish_reasons) == (expected.text, expected.logprobs, expected.finish_reasons)
    assert (got.usages, got.roles, got.done) == (expected.usages, expected.roles, 1)


def test_one_leg_passes_unchanged_for_a_client_that_wants_token_ids() -> None:
    leg = events(make_tokens(9), [1] * 9, Shape(logprobs=True, usage=True), "id-a")
    assert relay(Cut(wants_token_ids=True), leg) == b"".join(leg)


def test_stripping_removes_nothing_but_the_token_ids() -> None:
    tokens = make_tokens(9)
    with_ids = events(tokens, [1] * 9, Shape(logprobs=True, usage=True), "id-a")
    without = events(tokens, [1] * 9, Shape(logprobs=True, usage=True, ids=False), "id-a")

    def documents(data: bytes) -> list[Any]:
        return [json.loads(raw[6:]) for raw in data.split(b"\n\n") if raw.startswith(b"data: {")]

    def drop_nulls(document: Any) -> Any:
        document.pop("prompt_token_ids", None)
        for choice in document["choices"]:
            choice.pop("token_ids", None)
        return document

    stripped = documents(relay(Cut(wants_token_ids=False), with_ids))
    assert stripped == [drop_nulls(document) for document in documents(b"".join(without))]


def chunk(delta: dict[str, Any] | None = None, **choice: Any) -> bytes:
    body = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": None, **choice}
    return event(json.dumps({"id": "x", "created": 1, "choices": [body]}, separators=(",", ":")))


def test_an_event_that_only_carried_token_ids_is_not_forwarded() -> None:
    cut = Cut(wants_token_ids=False)
    assert relay(cut, [chunk({}, token_ids=[5])]) == b""
    assert cut.tokens == 1
    assert relay(Cut(wants_token_ids=True), [chunk({}, token_ids=[5])]) == chunk({}, token_ids=[5])


@pytest.mark.parametrize("kept", [{"finish_reason": "stop"}, {"logprobs": {"content": [{"token": "a"}]}}])
def test_an_event_without_text_that_says_something_is_forwarded(kept: dict[str, Any]) -> None:
    assert relay(Cut(wants_token_ids=False), [chunk({}, token_ids=[5], **kept)]) != b""


def test_an_event_without_text_is_forwarded_when_the_instance_would_send_it_anyway() -> None:
    assert b'"content":""' in relay(Cut(wants_token_ids=False), [chunk({"content": ""}, token_ids=[5])])


def test_each_channel_is_cut_by_itself() -> None:
    cut = Cut(wants_token_ids=True)
    first = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "think"}, token_ids=[1]),
        chunk({"content": "He"}, token_ids=[2]),
    ]
    second = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "thinking", "content": "Hello"}, token_ids=[1, 2, 3]),
    ]
    out = relay(cut, first, second)
    last = json.loads(out.split(b"\n\n")[-2][6:])["choices"][0]
    assert last["delta"] == {"reasoning_content": "ing", "content": "llo"}
    assert last["token_ids"] == [3]


def test_tool_calls_keep_the_first_ids_and_are_cut_by_argument() -> None:
    def call(index: int, arguments: str, id_: str | None = None) -> dict[str, Any]:
        head = {"id": id_, "type": "function"} if id_ else {}
        name = {"name": f"f{index}"} if id_ else {}
        return {"index": index, **head, "function": {**name, "arguments": arguments}}

    cut = Cut(wants_token_ids=False)
    relay(cut, [chunk({"tool_calls": [call(0, "", "call-a")]}), chunk({"tool_calls": [call(0, '{"a":')]})])
    out = relay(cut, [chunk({"tool_calls": [call(0, '{"a":1}', "call-b"), call(1, "{}", "call-c")]})])
    delta = json.loads(out[6:])["choices"][0]["delta"]
    assert delta["tool_calls"] == [
        {"index": 0, "function": {"arguments": "1}"}},
        {"index": 1, "id": "call-c", "type": "function", "function": {"name": "f1", "arguments": "{}"}},
    ]


def test_identity_is_that_of_the_first_leg_that_said_anything() -> None:
    tokens = make_tokens(6)
    leg_a = events(tokens, [1] * 6, Shape(), "id-a", created=7)[:3]
    leg_b = events(tokens, [6], Shape(), "id-b", created=8)
    got = read_stream(relay(Cut(wants_token_ids=True), leg_a, leg_b))
    assert (got.ids, got.created) == ({"id-a"}, {7})
    got = read_stream(relay(Cut(wants_token_ids=True), [], leg_b))
    assert (got.ids, got.created) == ({"id-b"}, {8})


def test_held_back_text_is_counted_apart_from_its_tokens() -> None:
    tokens = make_tokens(8)
    shape = Shape(hold=4)
    leg_a = events(tokens, [1] * 8, shape, "id-a")[:5]
    cut = Cut(wants_token_ids=True)
    early = read_stream(relay(cut, leg_a))
    assert len(early.text) < len(text_of(tokens[: len(early.token_ids)]))
    late = read_stream(relay(cut, events(tokens, [5, 3], shape, "id-b")))
    assert early.text + late.text == text_of(tokens)
    assert early.token_ids + late.token_ids == [token.id for token in tokens]


def test_an_error_event_is_set_apart_with_all_that_follows() -> None:
    cut = Cut(wants_token_ids=False)
    cursor = cut.cursor()
    error = event('{"error":{"message":"EngineDeadError"}}')
    passed = cut.feed(cursor, chunk({"content": "a"}) + error + event("[DONE]"))
    assert read_stream(passed.ready).text == "a"
    assert passed.failed == error + event("[DONE]")
    assert not cut.done


def test_comments_and_unreadable_events_pass_on_the_first_leg_only() -> None:
    cut = Cut(wants_token_ids=False)
    odd = [b": ping\n\n", b"data: {nonsense\n\n"]
    assert relay(cut, odd) == b"".join(odd)
    relay(cut, [chunk({"content": "a"}, token_ids=[1])])
    assert relay(cut, [b": ping\n\n"]) == b""


def test_windows_line_ends_split_anywhere_are_understood() -> None:
    data = chunk({"content": "a"}).replace(b"\n", b"\r\n")
    cut = Cut(wants_token_ids=False)
    cursor = cut.cursor()
    out = b"".join(cut.feed(cursor, data[i : i + 1]).ready for i in range(len(data)))
    assert read_stream(out).text == "a"


# -- several choices ---------------------------------------------------------------------------------------------------


def test_an_answer_is_finished_when_every_choice_is() -> None:
    cut = Cut(wants_token_ids=True, choices=2)
    relay(cut, [chunk({"content": "a"}, token_ids=[1], finish_reason="stop")])
    assert not cut.finished
    relay(cut, [chunk({"content": "b"}, index=1, token_ids=[2, 3], finish_reason="stop")])
    assert cut.finished and cut.tokens == 3


def test_a_choice_that_has_finished_is_not_told_again() -> None:
    cut = Cut(wants_token_ids=True, choices=2)
    done = chunk({"content": "a"}, token_ids=[1], finish_reason="stop")
    relay(cut, [done, chunk({"content": "b"}, index=1, token_ids=[2])])
    replay = [
        chunk({"content": "a"}, token_ids=[1]),
        chunk({"content": ""}, token_ids=[], finish_reason="stop"),
        chunk({"content": "bc"}, index=1, token_ids=[2, 3], finish_reason="length"),
    ]
    got = [json.loads(raw[6:])["choices"] for raw in relay(cut, replay).split(b"\n\n")[:-1]]
    assert [[(c["index"], c["delta"], c["token_ids"], c["finish_reason"]) for c in choices] for choices in got] == [
        [(1, {"content": "c"}, [3], "length")]
    ]


def test_each_choice_brings_the_prompt_once() -> None:
    def role(index: int) -> bytes:
        body = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return event(json.dumps({"id": "x", "created": 1, "choices": [body], "prompt_token_ids": [1, 2]}))

    cut = Cut(wants_token_ids=True, choices=2)
    out = relay(cut, [role(0)], [role(0), role(1)])
    assert [json.loads(raw[6:]).get("prompt_token_ids") for raw in out.split(b"\n\n")[:-1]] == [[1, 2], [1, 2]]


def test_usage_as_it_goes_does_not_make_an_event_that_nobody_would_have_sent() -> None:
    data = json.loads(chunk({}, token_ids=[5])[6:])
    data["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    assert relay(Cut(wants_token_ids=False), [event(json.dumps(data))]) == b""


def test_without_token_ids_on_the_wire_news_is_counted() -> None:
    cut = Cut(wants_token_ids=False, asked=False)
    events_ = [chunk({"content": "a"}, prompt_token_ids=[1]), chunk({"content": "bc"})]
    out = relay(cut, events_, [chunk({"content": "abcd"})])
    assert b"prompt_token_ids" in out, "an echo brings them uncalled"
    assert (cut.counted, cut.tokens) == (False, 3)


def test_token_ids_that_were_asked_for_and_hidden_are_not_counted() -> None:
    cut = Cut(wants_token_ids=False)
    relay(cut, [chunk({"content": "a"}), chunk({"content": "b"})])
    assert (cut.counted, cut.tokens) == (False, 2)
    relay(cut, [chunk({"content": "abc"}, token_ids=[1, 2, 3])])
    assert (cut.counted, cut.tokens) == (True, 3)


# -- legs that differ --------------------------------------------------------------------------------------------------


def test_a_leg_with_another_text_is_never_joined_to_what_the_client_has() -> None:
    cut = Cut(wants_token_ids=False)
    first = cut.feed(cut.cursor(), chunk({"content": "one "}) + chunk({"content": "two"}))
    cursor = cut.cursor()
    passed = cut.feed(cursor, chunk({"content": "one too many"}) + event("[DONE]"))
    assert read_stream(first.ready).text == "one two"
    assert (cursor.differs, passed.ready) == (True, b"")
    assert [error["code"] for error in read_stream(passed.failed).errors] == ["upstream_lost"]
    assert not cut.done
