"""Which requests may have a second leg."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.movable import refusal
from tests.unit.proxy.conftest import TICKET, Rig
from vllm_plugin.wire import LegOpened, OpenLeg

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        (CHAT, {}, None),
        (CHAT + "?x=1", {}, None),
        ("/v1/embeddings", {}, "not_a_movable_route"),
        ("/v1/responses", {"n": 2}, "not_a_movable_route"),
        (CHAT, {"n": 1, "best_of": 1}, None),
        (CHAT, {"n": 2}, "several_choices"),
        (TEXT, {"best_of": 2}, "several_choices"),
        (TEXT, {"prompt": "one"}, None),
        (TEXT, {"prompt": ["one"]}, None),
        (TEXT, {"prompt": [1, 2, 3]}, None),
        (TEXT, {"prompt": [[1, 2, 3]]}, None),
        (TEXT, {"prompt": ["one", "two"]}, "several_choices"),
        (TEXT, {"prompt": [[1], [2]]}, "several_choices"),
        (CHAT, {"tools": []}, None),
        (CHAT, {"tools": TOOLS, "tool_choice": "none"}, None),
        (CHAT, {"tools": TOOLS}, "tools"),
        (CHAT, {"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        (CHAT, {"functions": [{"name": "f"}]}, "tools"),
        (CHAT, {"response_format": None}, None),
        (CHAT, {"response_format": {"type": "text"}}, None),
        (CHAT, {"response_format": {"type": "json_object"}}, None),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, None),
        (TEXT, {"use_beam_search": False}, None),
        (TEXT, {"use_beam_search": True}, "beam_search"),
        (TEXT, {"echo": False}, None),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"prompt_logprobs": None}, None),
        (TEXT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"logprobs": True, "stop": ["x"], "seed": 1, "min_tokens": 3, "frequency_penalty": 1}, None),
    ],
)
def test_what_moves_and_what_stays(path: str, fields: dict[str, Any], code: str | None) -> None:
    refused = refusal(path, {"model": "tiny", **fields})
    assert (refused and refused.code) == code
    assert refused is None or refused.message.endswith(".")


async def test_a_request_that_cannot_move_is_refused_before_anything_is_opened(rig: Rig) -> None:
    rig.client.chat(tools=TOOLS)
    on_a = await rig.a.generation()
    rig.a.send(OpenLeg(1, on_a.stream_id, TICKET, rig.b.base_url))
    opened = await rig.a.expect(LegOpened)
    assert (opened.ok, opened.code) == (False, "tools") and opened.message
    assert not rig.b.generations
