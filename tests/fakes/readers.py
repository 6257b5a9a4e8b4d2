"""What a client makes of a stream, for each kind of answer: everything but the ids that instances make up.

Each reader checks on the way what a client may rely on: ids that do not change, numbers without gaps, texts at the end
that are the sum of their deltas, nothing announced or ended twice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

__all__ = ["read"]

Json = dict[str, Any]


def read(path: str, data: bytes) -> Json:
    """Returns the answer in a form that can be compared with another run's."""
    events = [_document(raw) for raw in data.decode().split("\n\n")[:-1]]
    if path == "/v1/responses":
        return _read_response([event for event in events if event is not None])
    if path == "/v1/messages":
        return _read_message([event for event in events if event is not None])
    return _read_choices(events)


def _document(raw: str) -> Json | None:
    lines = raw.split("\n")
    document = next(line[len("data: ") :] for line in lines if line.startswith("data: "))
    if document == "[DONE]":
        return None
    event: Json = json.loads(document)
    named = [line[len("event: ") :] for line in lines if line.startswith("event: ")]
    assert not named or named == [event["type"]]
    return event


def _read_response(events: list[Json]) -> Json:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts: defaultdict[str, str] = defaultdict(str)
    items: dict[int, Json] = {}
    order: list[Json] = []
    (response_id,) = {event["response"]["id"] for event in events if "response" in event}
    (created,) = {event["response"]["created_at"] for event in events if "response" in event}
    for event in events:
        kind, index = event["type"], event.get("output_index", -1)
        if kind == "response.output_item.added":
            assert index not in items
            items[index] = {name: event["item"].get(name) for name in ("id", "call_id", "type")}
        if "item_id" in event:
            assert event["item_id"] == items[index]["id"]
        if kind.endswith(".delta"):
            assert event["delta"], "an empty delta"
            texts[f"{index} {kind}"] += event["delta"]
            continue
        if kind.endswith(".done") and kind.replace(".done", ".delta") in {key.split(" ")[1] for key in texts}:
            whole = event.get("text", event.get("arguments"))
            assert whole == texts[f"{index} {kind.replace('.done', '.delta')}"]
        order.append(_without_ids(event, items))
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    for number, item in enumerate(last["output"]):
        assert {name: item.get(name) for name in ("id", "call_id", "type")} == items[number]
    assert response_id and created
    return {"texts": dict(texts), "events": order}


def _without_ids(event: Json, items: dict[int, Json]) -> Json:
    """Drops what is made up by each run; `_read_response` has compared it already."""
    copy: Json = json.loads(json.dumps(event))
    copy.pop("sequence_number")
    copy.pop("item_id", None)
    response = copy.get("response", {})
    for name in ("id", "created_at"):
        response.pop(name, None)
    for index, item in [(event.get("output_index", -1), copy.get("item")), *enumerate(response.get("output", ()))]:
        if item is not None:
            assert item.get("id") == items[index]["id"]
            for name in ("id", "call_id"):
                item.pop(name, None)
    return copy


def _read_message(events: list[Json]) -> Json:
    texts: defaultdict[str, str] = defaultdict(str)
    order: list[Json] = []
    opened: list[int] = []
    for event in events:
        if event["type"] == "content_block_delta":
            assert opened == [event["index"]], "a delta outside its block"
            delta = event["delta"]
            (name,) = set(delta) - {"type"}
            assert delta[name], "an empty delta"
            texts[f"{event['index']} {delta['type']}"] += delta[name] if name != "signature" else "one signature"
            continue
        copy: Json = json.loads(json.dumps(event))
        if event["type"] == "content_block_start":
            assert not opened
            opened = [event["index"]]
            copy["content_block"].pop("id", None)
        elif event["type"] == "content_block_stop":
            assert opened == [event["index"]]
            opened = []
        elif event["type"] == "message_start":
            copy["message"].pop("id")
        order.append(copy)
    return {"texts": dict(texts), "events": order}


def _read_choices(events: list[Json | None]) -> Json:
    assert events[-1] is None and events.count(None) == 1
    chunks = [event for event in events if event is not None]
    for name in ("id", "created", "model"):
        assert len({chunk[name] for chunk in chunks}) == 1, name
    choices: defaultdict[int, Json] = defaultdict(lambda: defaultdict(list))
    usages: list[Json] = []
    for chunk in chunks:
        if not chunk["choices"]:
            usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            _add_choice(choices[choice["index"]], choice)
            if "usage" in chunk and "token_ids" in choice:
                # Continuous usage says how far this choice is, so it must fit what has been delivered of it.
                assert chunk["usage"]["completion_tokens"] == len(choices[choice["index"]]["token_ids"])
    for seen in choices.values():
        assert len(seen["finish_reason"]) == 1 and len(seen["role"]) <= 1
    assert len(usages) <= 1
    joined = {index: {name: _join(values) for name, values in seen.items()} for index, seen in choices.items()}
    return {"choices": joined, "usages": usages}


def _add_choice(seen: Json, choice: Json) -> None:
    delta = choice.get("delta", {})
    for name in ("role", "content", "reasoning"):
        if delta.get(name):
            seen[name].append(delta[name])
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if call.get("id") is not None:
            seen[f"call {call['index']}"].append(function["name"])
        seen[f"arguments {call['index']}"].append(function.get("arguments") or "")
    if choice.get("text"):
        seen["text"].append(choice["text"])
    if choice.get("finish_reason") is not None:
        seen["finish_reason"].append(choice["finish_reason"])
    seen["token_ids"] += choice.get("token_ids") or []
    seen["prompt_token_ids"] += choice.get("prompt_token_ids") or []
    logprobs = choice.get("logprobs") or {}
    # Text completions have parallel lists, chats one list of entries.
    seen["logprobs"] += logprobs.get("content") or [
        list(entry) for entry in zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)
    ]


def _join(values: list[Any]) -> Any:
    return "".join(values) if values and all(isinstance(value, str) for value in values) else values
