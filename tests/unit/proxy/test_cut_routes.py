"""What the recordings do not show of the cuts of messages and responses: reasoning, signatures, unknown events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.cursor import AnswerCut, encode_event
from proxy.cut_messages import MessagesCut
from proxy.cut_responses import ResponsesCut

Json = dict[str, Any]


def feed(cut: AnswerCut, leg: list[Json]) -> list[Json]:
    passed = cut.feed(cut.cursor(), b"".join(encode_event(event["type"], event) for event in leg))
    assert not passed.failed
    return [json.loads(raw.partition(b"data: ")[2]) for raw in passed.ready.split(b"\n\n")[:-1]]


def thinking(signature: str) -> list[Json]:
    def delta(**fields: str) -> Json:
        return {"type": "content_block_delta", "index": 0, "delta": fields}

    return [
        {"type": "message_start", "message": {"id": signature, "usage": {"input_tokens": 1, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        delta(type="thinking_delta", thinking="hm"),
        delta(type="thinking_delta", thinking="m."),
        delta(type="signature_delta", signature=signature),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("end", range(7))
def test_a_thinking_block_has_one_signature(end: int) -> None:
    cut = MessagesCut()
    got = feed(cut, thinking("a")[:end]) + feed(cut, thinking("b"))
    signatures = [event["delta"]["signature"] for event in got if "signature" in event.get("delta", {})]
    assert signatures == ["a" if end > 4 else "b"]
    assert "".join(event.get("delta", {}).get("thinking", "") for event in got) == "hmm."
    assert [event["type"] for event in got].count("content_block_stop") == 1
    assert got[0]["message"]["id"] == ("a" if end else "b")


def test_pings_come_from_the_first_leg_only() -> None:
    cut = MessagesCut()
    ping = {"type": "ping"}
    assert feed(cut, [thinking("a")[0], ping]) == [thinking("a")[0], ping]
    assert feed(cut, [thinking("b")[0], ping]) == []


def reasoning(name: str, texts: list[str]) -> list[Json]:
    item = {"id": f"rs_{name}", "type": "reasoning"}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    response = {"id": f"resp_{name}", "created_at": len(name), "output": []}
    events: list[Json] = [
        {"type": "response.created", "response": response},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **place},
        *({"type": "response.reasoning_text.delta", **place, "delta": text} for text in texts),
        {"type": "response.reasoning_text.done", **place, "text": "".join(texts)},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {**response, "output": [item]}},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


@pytest.mark.parametrize("end", range(9))
def test_a_response_keeps_its_ids_and_its_numbering(end: int) -> None:
    cut = ResponsesCut()
    first, second = reasoning("a", ["x", "y", "z"]), reasoning("bb", ["xyz"])
    got = feed(cut, first[:end]) + feed(cut, second)
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    assert len({event["response"]["id"] for event in got if "response" in event}) == 1
    assert len({event["item_id"] for event in got if "item_id" in event}) == 1
    assert got[-1]["response"]["output"][0]["id"] == ("rs_a" if end > 1 else "rs_bb")
    assert "".join(event.get("delta", "") for event in got) == "xyz"
    assert [event["type"] for event in got].count("response.reasoning_text.done") == 1
    assert cut.finished


def test_one_leg_passes_as_it_is_even_if_nobody_understands_it() -> None:
    odd: list[Json] = [
        {"type": "response.created", "response": {"id": "resp_a"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"id": "ws_1", "type": "web_search_call"}},
        {"type": "response.output_item.done", "output_index": 0, "item": {"id": "ws_2", "type": "message"}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": ""},
        {"type": "response.never_heard_of"},
        {"type": "response.never_heard_of"},
    ]
    assert feed(ResponsesCut(), odd) == odd
    twice: list[Json] = [{"type": "never_heard_of"}] * 2
    assert feed(MessagesCut(), twice) == twice


@pytest.mark.parametrize("event", [{"type": "response.failed", "response": {}}, {"type": "error", "message": "dead"}])
def test_a_failure_of_the_instance_is_set_apart(event: Json) -> None:
    for cut in (ResponsesCut(), MessagesCut()):
        cursor = cut.cursor()
        passed = cut.feed(cursor, encode_event(event["type"], event))
        assert cursor.failed is (isinstance(cut, ResponsesCut) or event["type"] == "error")
        assert (passed.failed != b"") is cursor.failed
