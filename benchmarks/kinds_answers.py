"""Rows about what shape an answer has: structure, tools, reasoning, several choices, other routes."""

from __future__ import annotations

from typing import Any

from benchmarks.kinds import CHAT, MESSAGES, REASONING_PARSER, RESPONSES, TEXT, TOOL_PARSER, Kind, prompt
from vllm_plugin.parsers import chunk_invariant, tool_choice_kind

__all__ = ["ANSWERS", "END_OF_REASONING", "REASONING"]

#: The token that ends the reasoning in the model of the stack `reasoning`.
END_OF_REASONING = 7
_STORY: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "text": {"type": "string", "minLength": 400}},
    "required": ["title", "text"],
    "additionalProperties": False,
}
_STORY_FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": _STORY}}
_PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 40}, "why": {"type": "string", "minLength": 200}},
    "required": ["city", "why"],
    "additionalProperties": False,
}
_FUNCTION: dict[str, Any] = {"name": "weather", "description": "Weather at a place.", "parameters": _PLACE}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
#: Forced calls follow the schema, so that they are long enough to be cut.
_STRICT = [{"type": "function", "function": {**_FUNCTION, "strict": True}}]
_NAMED = {"type": "function", "function": {"name": "weather"}}
_RESPONSES_TOOLS = [{"type": "function", **_FUNCTION}]
_RESPONSES_STRICT = [{"type": "function", **_FUNCTION, "strict": True}]
_MESSAGES_TOOLS = [{"name": "weather", "description": "Weather at a place.", "input_schema": _PLACE}]
_MESSAGES_STRICT = [{**_MESSAGES_TOOLS[0], "strict": True}]
#: A model as small as this one calls no tool of its own accord: a regular expression makes it write one call.
_CALL = r'[a-z ]{40}<tool_call>\n\{"name": "weather", "arguments": \{"city": "[a-z ]{120}"\}\}\n</tool_call>'
_CHOICES = [
    "Yes. " + "The ship has left the harbour, and nobody on the bridge looked back at the lighthouse. " * 5,
    "No. " + "The ship is still at anchor, because the fog came in from the east before the morning. " * 5,
]
#: All tokens of SmolLM2 with a closing brace.
# fmt: off
_CLOSING = [
    109, 4029, 4548, 6150, 6663, 7950, 8148, 15009, 15201, 16124, 17243, 17859, 17984, 18206, 18292, 19181, 19526,
    19747, 20039, 20685, 21692, 21770, 21924, 23597, 23817, 23964, 24362, 24885, 25027, 26629, 27688, 27852, 28370,
    28586, 28852, 29394, 30000, 30856, 31845, 32790, 32938, 37078, 37581, 38310, 38894, 39949, 40343, 41217, 41322,
    41466, 41541, 41824, 43144, 43331, 46389, 46845, 48312, 48781,
]
# fmt: on
_NO_END = {str(token): -100 for token in _CLOSING}
_CJK = "[\u4e00-\u9fa5\U0001f600-\U0001f64f]"


def _emoji(number: int) -> str:
    return f"Story {number} 🌊⛵️ 海の話を続けてください。🐉 {prompt(number)}"


ANSWERS: list[Kind] = [
    Kind("emoji and CJK in the prompt", CHAT, {"temperature": 0}, text=_emoji),
    Kind(
        "output cut inside multi-byte characters",
        TEXT,
        {"temperature": 1.0, "seed": 19, "structured_outputs": {"regex": _CJK + "{90}"}},
    ),
    Kind(
        "output cut inside multi-byte characters, chat, logprobs",
        CHAT,
        {"temperature": 1.0, "seed": 29, "logprobs": True, "structured_outputs": {"regex": _CJK + "{90}"}},
    ),
    Kind(
        "structured output: regex",
        TEXT,
        {"temperature": 1.0, "seed": 20, "structured_outputs": {"regex": "[a-z ]{600}"}},
    ),
    Kind("structured output: JSON schema", CHAT, {"temperature": 0, "response_format": _STORY_FORMAT}),
    Kind(
        "structured output: JSON schema, not streamed",
        CHAT,
        {"temperature": 0.8, "seed": 30, "response_format": _STORY_FORMAT},
        streamed=False,
    ),
    Kind(
        "structured output: any JSON object",
        CHAT,
        # Without a brace to close it, the object goes on.
        {"temperature": 0.9, "seed": 31, "response_format": {"type": "json_object"}, "logit_bias": _NO_END},
    ),
    Kind("structured output: choice", TEXT, {"temperature": 0, "structured_outputs": {"choice": _CHOICES}}),
    Kind(
        "structured output: grammar",
        TEXT,
        {"temperature": 1.0, "seed": 21, "structured_outputs": {"grammar": 'root ::= ("ab" | "cd " | [0-9]){200}'}},
    ),
    Kind("tools, tool_choice none", CHAT, {"temperature": 0, "tools": _TOOLS, "tool_choice": "none"}),
    Kind(
        "tools, auto",
        CHAT,
        {"temperature": 0.8, "seed": 32, "tools": _TOOLS, "structured_outputs": {"regex": _CALL}},
    ),
    Kind(
        "tools, auto, not streamed",
        CHAT,
        {"temperature": 0.8, "seed": 33, "tools": _TOOLS, "structured_outputs": {"regex": _CALL}},
        streamed=False,
    ),
    Kind("tools, auto, none called", CHAT, {"temperature": 0, "tools": _TOOLS}),
    Kind(
        "tools, required",
        CHAT,
        {"temperature": 0.8, "seed": 34, "tools": _STRICT, "tool_choice": "required"},
    ),
    Kind(
        "tools, required, not streamed",
        CHAT,
        {"temperature": 0, "tools": _STRICT, "tool_choice": "required"},
        streamed=False,
    ),
    Kind("tools, named", CHAT, {"temperature": 0, "tools": _STRICT, "tool_choice": _NAMED}),
    Kind(
        "tools, named, not streamed",
        CHAT,
        {"temperature": 0.8, "seed": 35, "tools": _STRICT, "tool_choice": _NAMED},
        streamed=False,
    ),
    Kind("echo", TEXT, {"temperature": 0, "echo": True}),
    Kind("echo, client asks for no token ids", TEXT, {"temperature": 0, "echo": True, "return_token_ids": None}),
    Kind("echo, not streamed", TEXT, {"temperature": 0, "echo": True}, streamed=False),
    Kind("n = 2, seeded", TEXT, {"temperature": 0.8, "seed": 22, "n": 2}),
    Kind("n = 2, chat, not streamed", CHAT, {"temperature": 0.8, "seed": 36, "n": 2}).but(streamed=False),
    Kind(
        "n = 3, some of which end early",
        CHAT,
        {"temperature": 1.0, "seed": 37, "n": 3, "stop": [" with ", " from "], "min_tokens": 4},
    ),
    Kind("several prompts", TEXT, {"temperature": 0}, prompts=2),
    Kind(
        "several prompts, n = 2, logprobs, not streamed",
        TEXT,
        {"temperature": 0.8, "seed": 38, "n": 2, "logprobs": 1},
        prompts=2,
        streamed=False,
    ),
    Kind("responses", RESPONSES, {"temperature": 0}),
    Kind("responses, not streamed", RESPONSES, {"temperature": 0}, streamed=False),
    Kind("responses, seeded, penalties", RESPONSES, {"temperature": 0.8, "seed": 39, "presence_penalty": 0.5}),
    Kind(
        "responses, JSON schema",
        RESPONSES,
        {"temperature": 0, "text": {"format": {"type": "json_schema", "name": "story", "schema": _STORY}}},
    ),
    Kind(
        "responses, tools required",
        RESPONSES,
        {"temperature": 0, "tools": _RESPONSES_STRICT, "tool_choice": "required"},
    ),
    Kind(
        "responses, tools auto",
        RESPONSES,
        {"temperature": 0, "tools": _RESPONSES_TOOLS},
        refused="parser_not_chunk_invariant",
    ),
    Kind(
        "responses, tools auto, not streamed",
        RESPONSES,
        {"temperature": 0, "tools": _RESPONSES_TOOLS},
        streamed=False,
    ),
    Kind(
        "responses, logprobs",
        RESPONSES,
        {"temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        refused="logprobs_follow_events",
    ),
    Kind(
        "responses, logprobs, not streamed",
        RESPONSES,
        {"temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        streamed=False,
    ),
    Kind("messages", MESSAGES, {"temperature": 0}),
    Kind("messages, not streamed", MESSAGES, {"temperature": 0}, streamed=False),
    Kind(
        "messages, stop_sequences",
        MESSAGES,
        {"temperature": 0, "stop_sequences": ["end of all things"]},
    ),
    Kind(
        "messages, a tool is required",
        MESSAGES,
        {"temperature": 0, "tools": _MESSAGES_STRICT, "tool_choice": {"type": "any"}},
    ),
]


ANSWERS += [
    Kind(
        "messages, tools auto",
        MESSAGES,
        {"temperature": 0, "tools": _MESSAGES_TOOLS},
        refused="parser_not_chunk_invariant",
    ),
    Kind("messages, tools auto, not streamed", MESSAGES, {"temperature": 0, "tools": _MESSAGES_TOOLS}, streamed=False),
]


ANSWERS.append(Kind("no tools, on an instance with a tool parser", CHAT, {"temperature": 0}, stack="tools"))


def _parsed(kind: Kind, tool_parser: str, reasoning_parser: str) -> Kind:
    """The kind on the instances with these parsers: a streamed answer moves if they have been proved not to mind how
    its tokens are grouped."""
    kind = kind.but(stack="tools" if tool_parser else "reasoning")
    choice = tool_choice_kind(kind.fields)
    if not kind.streamed or kind.path == TEXT or chunk_invariant(tool_parser, reasoning_parser, choice):
        return kind
    return kind.but(refused="parser_not_chunk_invariant")


ANSWERS = [
    _parsed(kind, TOOL_PARSER, "") if "tools" in kind.fields or kind.stack == "tools" else kind for kind in ANSWERS
]


def _thinking(bias: float, **fields: Any) -> dict[str, Any]:
    """Sampling in which the reasoning ends: seldom, sooner or at once, as the bias for its last token says."""
    # Usage counts the tokens of the reasoning delta by delta, so that a stream with usage is refused.
    return {"temperature": 1.0, "logit_bias": {str(END_OF_REASONING): bias}, "stream_options": None, **fields}


REASONING: list[Kind] = [
    Kind("reasoning parser, cut inside the reasoning", CHAT, _thinking(-50, seed=40)),
    Kind("reasoning parser, cut inside or behind", CHAT, _thinking(17, seed=41)),
    Kind("reasoning parser, cut behind the reasoning", CHAT, _thinking(21, seed=42)),
    Kind("reasoning parser, not streamed", CHAT, _thinking(17, seed=43), streamed=False),
    Kind("reasoning parser, logprobs", CHAT, _thinking(17, seed=44, logprobs=True)),
    Kind(
        "reasoning parser, usage",
        CHAT,
        _thinking(17, seed=49, stream_options={"include_usage": True}),
        refused="parser_not_chunk_invariant",
    ),
    Kind("reasoning parser, text completion", TEXT, _thinking(17, seed=45)),
    Kind("reasoning parser, JSON schema", CHAT, _thinking(19, seed=46, response_format=_STORY_FORMAT, max_tokens=150)),
    Kind("reasoning parser, responses", RESPONSES, _thinking(17, seed=47), refused="parser_not_chunk_invariant"),
    Kind("reasoning parser, responses, not streamed", RESPONSES, _thinking(17, seed=48), streamed=False),
    Kind("reasoning parser, messages", MESSAGES, {"temperature": 0}),
]
REASONING = [_parsed(kind, "", REASONING_PARSER) for kind in REASONING]
