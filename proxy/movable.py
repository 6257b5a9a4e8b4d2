"""Which requests can have a second leg: those whose answer a front end repeats exactly from all tokens at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_plugin.parsers import Kind, chunk_invariant, tool_choice_kind

__all__ = ["COMPLETION_PATHS", "MOVABLE_PATHS", "Refusal", "refusal"]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
#: Those that have choices, and token ids when they are asked for.
COMPLETION_PATHS = frozenset({CHAT, TEXT})
MOVABLE_PATHS = COMPLETION_PATHS | {MESSAGES, RESPONSES}

#: Tools that the client runs; all others run in the front end, between one engine request and the next.
_CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})


@dataclass(frozen=True)
class Refusal:
    """Why a request stays where it is: a code for programs, one sentence for people."""

    code: str
    message: str


def refusal(path: str, body: dict[str, Any], tool_parser: str = "", reasoning_parser: str = "") -> Refusal | None:
    """Returns why the request must not get a second leg, None if it may.

    Args:
        path: without a query string.
        body: as the client sent it; an absent field and a null one mean the same.
        tool_parser, reasoning_parser: names of the parsers in the instance's front end, "" for none.
    """
    if path not in MOVABLE_PATHS:
        return Refusal("not_a_movable_route", f"Requests to {path} are relayed, but never moved.")
    if path == RESPONSES and (refused := _of_responses(body)):
        return refused
    if path in COMPLETION_PATHS and (refused := _of_completions(path, body)):
        return refused
    if body.get("stream") and path != TEXT:
        return _of_parsers(path, body, tool_parser, reasoning_parser)
    return None


def _of_completions(path: str, body: dict[str, Any]) -> Refusal | None:
    choices = body.get("n") or 1
    best_of = body.get("best_of")
    if isinstance(best_of, int) and isinstance(choices, int) and best_of > choices:
        return Refusal("best_of", "The request asks for more candidates than choices, which vLLM does not do.")
    if body.get("use_beam_search"):
        return Refusal("beam_search", "The request uses beam search, whose state lives in the front end.")
    # A text completion's echo with log probabilities (0 asks for them, too) comes with those of the prompt.
    echoes = path == TEXT and bool(body.get("echo")) and body.get("logprobs") is not None
    if echoes or body.get("prompt_logprobs") is not None:
        return Refusal("prompt_logprobs", "The request asks for prompt log probabilities, which only its instance has.")
    return None


def _of_responses(body: dict[str, Any]) -> Refusal | None:
    if body.get("background"):
        return Refusal("background", "The response is made in the background, where no client holds it.")
    if body.get("previous_response_id") is not None:
        return Refusal("previous_response", "The request continues a response that only its instance has stored.")
    tools = body.get("tools")
    kinds = {tool.get("type") for tool in tools if isinstance(tool, dict)} if isinstance(tools, list) else set()
    if kinds - _CLIENT_TOOLS:
        return Refusal("server_tools", "The request offers tools that the instance itself runs between two turns.")
    if body.get("stream") and "custom" in kinds and tool_choice_kind(body) != "none":
        return Refusal("custom_tools", "The events of a custom tool's input depend on how its tokens are grouped.")
    if body.get("stream") and "message.output_text.logprobs" in (body.get("include") or ()):
        # vLLM leaves out the log probabilities of an event without text, so they depend on how tokens are grouped.
        text = "A streamed response leaves out log probabilities depending on how tokens are grouped into events."
        return Refusal("logprobs_follow_events", text)
    return None


def _of_parsers(path: str, body: dict[str, Any], tool_parser: str, reasoning_parser: str) -> Refusal | None:
    kind: Kind = "auto" if path == MESSAGES and _adds_tools(body) else tool_choice_kind(body)
    if not chunk_invariant(tool_parser, reasoning_parser, kind):
        named = " and ".join(repr(name) for name in (tool_parser, reasoning_parser) if name)
        text = f"The events of parser {named} depend on how tokens are grouped."
        return Refusal("parser_not_chunk_invariant", text)
    if (tool_parser or reasoning_parser) and (body.get("stop") or body.get("stop_sequences")):
        # Stop strings hold text back while its tokens go on: parsers were proved with both in step only.
        text = "Where stop strings hold text back, the events of a parser may depend on how tokens are grouped."
        return Refusal("parser_not_chunk_invariant", text)
    options = body.get("stream_options")
    if path == CHAT and reasoning_parser and isinstance(options, dict) and options.get("include_usage"):
        # Counted delta by delta, with a different result where one begins inside a character (docs/parsers.md).
        text = "The number of reasoning tokens in the usage depends on how tokens are grouped."
        return Refusal("parser_not_chunk_invariant", text)
    if path == RESPONSES and reasoning_parser:
        # Empty reasoning, which some groupings give and others do not, opens an item of its own here.
        return Refusal(
            "parser_not_chunk_invariant", "Whether there is a reasoning item depends on how tokens are grouped."
        )
    if kind == "auto" and tool_parser and path not in COMPLETION_PATHS:
        # In a chat, text and tool calls are apart; here they share one order of blocks, and a delta of many tokens has
        # the text first, whatever came first.
        text = "Text and tool calls are put in order by how tokens are grouped into events."
        return Refusal("parser_not_chunk_invariant", text)
    return None


def _adds_tools(body: dict[str, Any]) -> bool:
    """Whether a message adds tools in mid-conversation, which `tools` does not name."""
    for message in body.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(isinstance(x, dict) and x.get("type") == "tool_addition" for x in content):
            return True
    return False
