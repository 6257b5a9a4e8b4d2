"""Which requests may have a second leg."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.movable import refusal
from tests.unit.proxy.conftest import TICKET, Rig
from vllm_plugin.wire import LegOpened, OpenLeg

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
#: A pair of parsers that nobody has proved anything about.
UNPROVEN = {"tool_parser": "nobody", "reasoning_parser": "knows"}


@pytest.fixture(autouse=True)
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parsers that say the same in any grouping, whatever has been proved of real ones."""
    every = frozenset({"none", "auto", "required", "named"})
    proved = {("good", ""): every, ("half", ""): frozenset({"none", "named"}), ("", "thinks"): every}
    monkeypatch.setattr("vllm_plugin.parsers.INVARIANT", proved)


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        (CHAT, {}, None),
        ("/v1/embeddings", {}, "not_a_movable_route"),
        ("/v1/messages/count_tokens", {}, "not_a_movable_route"),
        (CHAT, {"n": 1, "best_of": 1}, None),
        (CHAT, {"n": 2}, None),
        (TEXT, {"n": 3, "best_of": 3}, None),
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"n": 2, "best_of": 3}, "best_of"),
        (TEXT, {"prompt": ["one", "two"]}, None),
        (TEXT, {"prompt": [[1], [2]]}, None),
        (CHAT, {"response_format": {"type": "json_object"}}, None),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, None),
        (TEXT, {"use_beam_search": False}, None),
        (TEXT, {"use_beam_search": True}, "beam_search"),
        (TEXT, {"prompt": "a", "echo": True}, None),
        (CHAT, {"echo": True, "logprobs": True}, None),
        (TEXT, {"prompt": "a", "echo": True, "logprobs": 0}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": None}, None),
        (TEXT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"logprobs": True, "stop": ["x"], "seed": 1, "min_tokens": 3, "frequency_penalty": 1}, None),
        (RESPONSES, {"input": "a"}, None),
        (RESPONSES, {"input": "a", "store": True}, None),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response"),
        (RESPONSES, {"input": "a", "tools": [{"type": "function"}, {"type": "custom"}]}, None),
        (RESPONSES, {"input": "a", "tools": [{"type": "function"}, {"type": "mcp"}]}, "server_tools"),
        (RESPONSES, {"input": "a", "tools": [{"type": "custom"}], "stream": True}, "custom_tools"),
        (RESPONSES, {"input": "a", "tools": [{"type": "custom"}], "tool_choice": "none", "stream": True}, None),
        (RESPONSES, {"input": "a", "include": ["message.output_text.logprobs"]}, None),
        (
            RESPONSES,
            {"input": "a", "include": ["message.output_text.logprobs"], "stream": True},
            "logprobs_follow_events",
        ),
        (MESSAGES, {"messages": [{"role": "user", "content": "a"}]}, None),
    ],
)
def test_what_moves_and_what_stays(path: str, fields: dict[str, Any], code: str | None) -> None:
    refused = refusal(path, {"model": "tiny", **fields})
    assert (refused and refused.code) == code
    assert refused is None or refused.message.endswith(".")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_an_answer_in_one_piece_moves_behind_any_parser(path: str) -> None:
    assert refusal(path, {"model": "tiny", "tools": [{"type": "function"}]}, **UNPROVEN) is None


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_stream_behind_a_parser_that_nobody_has_proved_stays_even_without_tools(path: str) -> None:
    refused = refusal(path, {"model": "tiny", "stream": True}, **UNPROVEN)
    assert refused is not None and refused.code == "parser_not_chunk_invariant"
    assert "'nobody' and 'knows'" in refused.message


def test_a_text_completion_has_no_parser() -> None:
    assert refusal(TEXT, {"prompt": "a", "stream": True}, **UNPROVEN) is None


@pytest.mark.parametrize(
    ("path", "choice", "parsers", "moves"),
    [
        (CHAT, "auto", ("good", ""), True),
        (CHAT, "auto", ("half", ""), False),
        (CHAT, "none", ("half", ""), True),
        (CHAT, {"type": "function", "function": {"name": "f"}}, ("half", ""), True),
        (CHAT, "auto", ("", ""), True),
        (MESSAGES, {"type": "auto"}, ("good", ""), False),
        (MESSAGES, None, ("good", ""), False),
        (MESSAGES, {"type": "any"}, ("good", ""), True),
        (MESSAGES, {"type": "tool", "name": "f"}, ("half", ""), True),
        (MESSAGES, {"type": "none"}, ("good", ""), True),
        (RESPONSES, "auto", ("good", ""), False),
        (RESPONSES, "required", ("good", ""), True),
        (RESPONSES, "required", ("half", ""), False),
    ],
)
def test_streamed_tools_move_where_events_do_not_depend_on_grouping(
    path: str, choice: Any, parsers: tuple[str, str], moves: bool
) -> None:
    body = {"model": "tiny", "stream": True, "tools": [{"type": "function"}], "tool_choice": choice}
    refused = refusal(path, body, *parsers)
    assert (refused and refused.code) == (None if moves else "parser_not_chunk_invariant")


def test_empty_reasoning_is_an_item_of_a_response_and_nothing_elsewhere() -> None:
    codes = [refusal(path, {"stream": True}, "", "thinks") for path in (CHAT, MESSAGES, RESPONSES)]
    assert [code and code.code for code in codes] == [None, None, "parser_not_chunk_invariant"]


@pytest.mark.parametrize(("path", "field"), [(CHAT, "stop"), (MESSAGES, "stop_sequences")])
def test_a_stream_whose_text_lags_behind_its_tokens_stays_behind_a_parser(path: str, field: str) -> None:
    body = {"stream": True, field: ["END"]}
    for parsers in (("good", ""), ("", "thinks")):
        refused = refusal(path, body, *parsers)
        assert refused is not None and refused.code == "parser_not_chunk_invariant"
    assert refusal(path, body) is None
    assert refusal(path, {**body, "stream": False}, "good", "") is None
    assert refusal(path, {**body, field: []}, "good", "") is None


def test_a_stream_that_tells_its_number_of_reasoning_tokens_stays() -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}}
    refused = refusal(CHAT, body, "", "thinks")
    assert refused is not None and refused.code == "parser_not_chunk_invariant"
    assert refusal(CHAT, body, "good", "") is None
    assert refusal(CHAT, {**body, "stream": False}, "", "thinks") is None
    assert refusal(CHAT, {**body, "stream_options": {"include_usage": False}}, "", "thinks") is None
    # Anthropic's usage has no such number.
    assert refusal(MESSAGES, {"stream": True}, "", "thinks") is None


def test_tools_that_a_message_adds_are_tools() -> None:
    addition = {"type": "tool_addition", "tool": {"type": "tool_definition"}}
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": [addition]}]
    refused = refusal(MESSAGES, {"stream": True, "messages": messages}, "good", "")
    assert refused is not None and refused.code == "parser_not_chunk_invariant"


async def test_a_request_that_cannot_move_is_refused_before_anything_is_opened(rig: Rig) -> None:
    rig.client.chat(tools=TOOLS)
    on_a = await rig.a.generation()
    rig.a.send(OpenLeg(1, on_a.stream_id, TICKET, rig.b.base_url, "half", ""))
    opened = await rig.a.expect(LegOpened)
    assert (opened.ok, opened.code) == (False, "parser_not_chunk_invariant") and opened.message
    assert not rig.b.generations
