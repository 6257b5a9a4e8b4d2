"""What a client puts together from each API's events, and which breaches of "one response" it notices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.answers import Answer, Request, ToolCall
from benchmarks.messages_answers import MessagesReader
from benchmarks.openai_answers import OpenAIReader
from benchmarks.responses_answers import ResponsesReader

CHAT = Request("chat", "/v1/chat/completions", {"stream": True})


def _chunk(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "created": 5, "choices": [{"index": 0, **choice} for choice in choices], **fields}


def _openai(*events: dict[str, Any] | str) -> Answer:
    answer = Answer(CHAT)
    reader = OpenAIReader(answer)
    for event in events:
        reader.event("", event.encode() if isinstance(event, str) else json.dumps(event).encode(), 1.0)
    reader.end()
    return answer


ROLE = _chunk({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2])
HELLO = _chunk({"delta": {"content": "hello"}, "token_ids": [7, 8], "finish_reason": "stop", "stop_reason": "x"})
USAGE = _chunk(usage={"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4})


def test_a_chat_stream_is_put_together() -> None:
    answer = _openai(ROLE, HELLO, USAGE, "[DONE]")
    assert (answer.error, answer.faults) == ("", [])
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("hello", [7, 8], "stop")
    assert answer.prompt_token_ids == [1, 2] and answer.choice(0).stop_reason == "x"
    assert answer.billed["completion_tokens"] == answer.tokens == answer.progress == 2
    assert answer.arrivals == [(1.0, 2)]


def test_choices_reasoning_and_tool_calls_go_to_their_own_channels() -> None:
    call = {"index": 0, "id": "t1", "function": {"name": "weather", "arguments": '{"ci'}}
    more = {"index": 0, "function": {"arguments": 'ty": 1}'}}
    answer = _openai(
        _chunk({"delta": {"reasoning": "hm"}}),
        _chunk({"index": 1, "delta": {"content": "b"}, "finish_reason": "stop"}),
        _chunk({"delta": {"tool_calls": [call]}}),
        _chunk({"delta": {"tool_calls": [more]}, "finish_reason": "tool_calls"}),
        "[DONE]",
    )
    assert answer.faults == []
    assert answer.choice(0).reasoning == "hm" and answer.choice(1).text == "b"
    assert answer.choice(0).tools == {0: ToolCall("t1", "weather", '{"city": 1}')}


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ((ROLE, ROLE, HELLO, "[DONE]"), "a second role"),
        ((ROLE, {**HELLO, "id": "c2"}, "[DONE]"), "several ids"),
        ((ROLE, {**HELLO, "created": 6}, "[DONE]"), "`created` changes"),
        ((ROLE, HELLO, HELLO, "[DONE]"), "goes on after its finish reason"),
        ((ROLE, HELLO, _chunk({"delta": {}, "finish_reason": "stop"}), "[DONE]"), "two finish reasons"),
        ((ROLE, HELLO, USAGE, USAGE, "[DONE]"), "final usage came twice"),
        ((ROLE, HELLO, "[DONE]", "[DONE]"), "[DONE] came twice"),
        ((ROLE, HELLO, "[DONE]", USAGE), "after [DONE]"),
        ((ROLE, "[DONE]"), "no finish reason"),
    ],
)
def test_breaches_of_one_response_are_noticed(events: tuple[Any, ...], fault: str) -> None:
    assert any(fault in sentence for sentence in _openai(*events).faults), _openai(*events).faults


def test_an_end_without_done_is_no_answer() -> None:
    assert _openai(ROLE, HELLO).error == "the stream ended without [DONE]"


@pytest.mark.parametrize(("field", "value"), [("id", "t2"), ("id", "t1"), ("name", "weather")])
def test_a_tool_call_is_introduced_once(field: str, value: str) -> None:
    first = {"index": 0, "id": "t1", "function": {"name": "weather", "arguments": ""}}
    again = {"index": 0, "function": {"arguments": "{"}}
    if field == "id":
        again["id"] = value
    else:
        again["function"] = {"name": value, "arguments": "{"}
    answer = _openai(_chunk({"delta": {"tool_calls": [first]}}), _chunk({"delta": {"tool_calls": [again]}}), "[DONE]")
    assert any(f"its {field} twice" in fault for fault in answer.faults), answer.faults


def test_running_usage_must_grow_with_what_is_delivered() -> None:
    def chunk(ids: list[int], completed: int) -> dict[str, Any]:
        return _chunk({"delta": {"content": "x"}, "token_ids": ids}, usage={"completion_tokens": completed})

    end = _chunk({"delta": {}, "finish_reason": "stop"})
    assert _openai(chunk([1], 1), chunk([2, 3], 3), end, "[DONE]").faults == []
    assert any("not what was delivered" in fault for fault in _openai(chunk([1], 2), end, "[DONE]").faults)
    assert any("goes back" in fault for fault in _openai(chunk([1], 1), chunk([2], 0), end, "[DONE]").faults)


def test_text_completions_have_their_logprobs_in_parallel_lists() -> None:
    logprobs = {"token_logprobs": [None, -0.5], "top_logprobs": [None, {"a": -0.5}], "text_offset": [0, 3]}
    answer = _openai(_chunk({"text": "ab", "logprobs": logprobs, "finish_reason": "stop"}), "[DONE]")
    choice = answer.choice(0)
    assert (choice.logprobs, choice.alternatives, choice.offsets) == ([None, -0.5], [{}, {"a": -0.5}], [0, 3])


def test_a_whole_chat_answer_fills_the_same_channels() -> None:
    answer = Answer(CHAT)
    call = {"id": "t1", "function": {"name": "weather", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    choices = [
        {"index": 0, "message": message, "finish_reason": "tool_calls", "token_ids": [3]},
        {"index": 1, "message": {"content": "b"}, "finish_reason": "stop", "token_ids": [4, 5]},
    ]
    OpenAIReader(answer).document({"id": "c", "created": 1, "choices": choices, "usage": {}, "prompt_token_ids": [9]})
    assert answer.faults == []
    assert answer.choice(0).tools == {0: ToolCall("t1", "weather", "{}")} and answer.choice(0).reasoning == "hm"
    assert answer.token_ids == [3, 4, 5] and answer.choice(1).prompt_token_ids == [9]


def test_a_choice_that_has_ended_does_not_hold_the_others_up() -> None:
    answer = Answer(CHAT)
    reader = OpenAIReader(answer)
    for event in (
        _chunk({"index": 0, "delta": {}, "token_ids": [1], "finish_reason": "stop"}),
        _chunk({"index": 1, "delta": {}, "token_ids": [1, 2, 3]}),
    ):
        reader.event("", json.dumps(event).encode(), 1.0)
    assert answer.progress == 3


# -- /v1/responses -----------------------------------------------------------------------------------------------------


def _response(**fields: Any) -> dict[str, Any]:
    return {"id": "r1", "created_at": 1, "status": "in_progress", "output": [], "usage": None, **fields}


def _responses_events() -> list[dict[str, Any]]:
    item = {"id": "m1", "type": "message", "content": []}
    content = [{"type": "output_text", "text": "hello"}]
    usage = {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}
    output = [{"id": "m9", "type": "message", "content": content}]
    delta = {"type": "response.output_text.delta", "output_index": 0, "item_id": "m1"}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response()},
        {"type": "response.in_progress", "response": _response()},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {**delta, "delta": "hel"},
        {**delta, "delta": "lo"},
        {"type": "response.output_text.done", "output_index": 0, "item_id": "m1", "text": "hello"},
        {"type": "response.output_item.done", "output_index": 0, "item": {**item, "content": content}},
        {"type": "response.completed", "response": _response(status="completed", output=output, usage=usage)},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _responses(events: list[dict[str, Any]]) -> Answer:
    answer = Answer(Request("responses", "/v1/responses", {"stream": True}))
    reader = ResponsesReader(answer)
    for event in events:
        reader.event(event["type"], json.dumps(event).encode(), 1.0)
    reader.end()
    return answer


def test_a_responses_stream_is_put_together() -> None:
    answer = _responses(_responses_events())
    assert (answer.error, answer.faults) == ("", [])
    assert (answer.text, answer.finish_reason, answer.progress) == ("hello", "completed", 2)
    assert answer.billed == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


@pytest.mark.parametrize(
    ("place", "change", "fault"),
    [
        (3, {"sequence_number": 4}, "sequence numbers"),
        (4, {"sequence_number": 3}, "sequence numbers"),
        (1, {"response": _response(id="r2")}, "several ids"),
        (1, {"response": _response(created_at=2)}, "`created_at` changes"),
        (4, {"item_id": "m2"}, "the id of output item 0 changes"),
        (4, {"delta": "LO"}, "something else than its deltas"),
        (4, {"output_index": 1}, "not open"),
        (5, {"text": "HELLO"}, "something else than its deltas"),
    ],
)
def test_breaches_of_one_responses_stream_are_noticed(place: int, change: dict[str, Any], fault: str) -> None:
    events = _responses_events()
    events[place] |= change
    assert any(fault in sentence for sentence in _responses(events).faults), _responses(events).faults


def test_responses_events_that_come_twice_or_not_at_all_are_noticed() -> None:
    events = _responses_events()
    twice = events[:1] + events
    assert "response.created came twice" in _responses(twice).faults
    assert _responses(events[:-1]).error == "the stream ended without response.completed"
    assert "an output item was never done" in _responses([*events[:6], events[7]]).faults
    assert "output item 0 was added twice" in _responses([*events[:3], *events[2:]]).faults


# -- /v1/messages ------------------------------------------------------------------------------------------------------


def _messages_events() -> list[dict[str, Any]]:
    tool = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    return [
        {"type": "message_start", "message": {"id": "m1", "usage": {"input_tokens": 2, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hello"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": tool},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"input_tokens": 2, "output_tokens": 3},
        },
        {"type": "message_stop"},
    ]


def _messages(events: list[dict[str, Any]]) -> Answer:
    answer = Answer(Request("messages", "/v1/messages", {"stream": True}))
    reader = MessagesReader(answer)
    for event in events:
        reader.event(event["type"], json.dumps(event).encode(), 1.0)
    reader.end()
    return answer


def test_a_messages_stream_is_put_together() -> None:
    answer = _messages(_messages_events())
    assert (answer.error, answer.faults) == ("", [])
    assert (answer.text, answer.finish_reason) == ("hello", "end_turn")
    assert answer.choice(0).tools == {1: ToolCall("t1", "weather", "{}")}
    assert answer.billed["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        ((0, 0, 1, 2, 3, 7, 8), "message_start came twice"),
        ((0, 1, 2, 3, 1, 3, 7, 8), "content block 0 was started twice"),
        ((0, 1, 2, 7, 8), "content block 0 was not stopped"),
        ((0, 1, 4, 6, 7, 8), "content block 0 was not stopped"),
        ((0, 1, 2, 3, 2, 7, 8), "content block 0, which is not open"),
        ((1, 2, 3, 7, 8), "before message_start"),
        ((0, 1, 2, 3, 7, 7, 8), "message_delta came twice"),
        ((0, 1, 2, 3, 7, 8, 8), "message_stop came twice"),
        ((0, 1, 2, 3, 8), "no message_delta"),
    ],
)
def test_breaches_of_one_message_are_noticed(order: tuple[int, ...], fault: str) -> None:
    events = _messages_events()
    answer = _messages([events[place] for place in order])
    assert any(fault in sentence for sentence in answer.faults), answer.faults


def test_a_whole_message_fills_the_same_channels() -> None:
    answer = Answer(Request("messages", "/v1/messages", {}))
    blocks = [{"type": "text", "text": "hi"}, {"type": "tool_use", "id": "t", "name": "w", "input": {"a": 1}}]
    document = {"id": "m", "content": blocks, "stop_reason": "tool_use", "usage": {"output_tokens": 4}}
    MessagesReader(answer).document(document)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("hi", 4, "tool_use")
    assert answer.choice(0).tools == {1: ToolCall("t", "w", '{"a": 1}')}
