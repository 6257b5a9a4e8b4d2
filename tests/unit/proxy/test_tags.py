"""What a leg asks its instance for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.tags import ClientRequest, parse_request

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


def request(path: str, **fields: Any) -> ClientRequest:
    return parse_request(path, json.dumps({"model": "tiny", **fields}).encode())


def leg(path: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request(path, **fields).tagged("worker/abc", "ticket"))
    return body


@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        (CHAT, {"stream": True}, True),
        (TEXT, {"stream": True}, True),
        (CHAT, {}, None),
        # Else vLLM would leave the prompt's text out of the echo.
        (TEXT, {"stream": True, "echo": True}, None),
        (TEXT, {"stream": True, "echo": True, "return_token_ids": True}, True),
        (CHAT, {"stream": True, "echo": True}, True),
        (MESSAGES, {"stream": True}, None),
        (RESPONSES, {"stream": True}, None),
    ],
)
def test_token_ids_are_asked_for_where_they_change_nothing_else(
    path: str, fields: dict[str, Any], asked: bool | None
) -> None:
    assert leg(path, **fields).get("return_token_ids") is asked


def test_a_response_has_the_same_id_on_each_leg() -> None:
    assert leg(RESPONSES, input="a")["request_id"] == "resp_abc"
    assert leg(RESPONSES, input="a", request_id="mine")["request_id"] == "mine"
    assert "request_id" not in leg(CHAT)


@pytest.mark.parametrize(
    ("path", "fields", "choices"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (TEXT, {"n": 2, "prompt": ["a", "b", "c"]}, 6),
        (TEXT, {"prompt": [[1, 2], [3]]}, 2),
        (TEXT, {"prompt": [1, 2]}, 1),
        (RESPONSES, {"n": 2}, 1),
        (MESSAGES, {"n": 2}, 1),
    ],
)
def test_how_many_choices_an_answer_has(path: str, fields: dict[str, Any], choices: int) -> None:
    assert request(path, **fields).choices == choices
