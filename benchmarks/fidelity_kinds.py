"""The rows of the fidelity matrix: one kind of request each, and whether it must move exactly or be refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.streams import Request

__all__ = ["KINDS", "Kind"]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENS = 150
# fmt: off
_WORDS = [
    "harbour", "fog", "bridge", "letter", "oranges", "clock", "river", "lighthouse", "copper", "market",
    "winter", "seeds", "musician", "platform", "recipe", "engine", "water", "patience", "map", "pencil",
    "library", "rain", "door", "shade", "green", "rules", "game", "keeper", "village", "stone",
]
# fmt: on
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
_STORY = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "text": {"type": "string", "minLength": 400}},
    "required": ["title", "text"],
    "additionalProperties": False,
}
_STORY_FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": _STORY}}


@dataclass(frozen=True)
class Kind:
    """One row. `refused`: the code it must be refused with; empty means that it must move exactly."""

    name: str
    path: str
    fields: dict[str, Any]
    refused: str = ""
    repeatable: bool = True
    streamed: bool = True
    prompt: Callable[[int], str] | None = None

    def request(self, number: int) -> Request:
        """Builds the request with a prompt of its own for each `number`."""
        text = self.prompt(number) if self.prompt else _prompt(number)
        body: dict[str, Any] = {"max_tokens": TOKENS, "return_token_ids": True}
        if "structured_outputs" not in self.fields and "response_format" not in self.fields:
            body["ignore_eos"] = True
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": text}]} if self.path == CHAT else {"prompt": text}
        return Request(f"{self.name}-{number}", self.path, {**body, **self.fields}, self.repeatable)


def _prompt(number: int) -> str:
    source = random.Random(number)
    words = [source.choice(_WORDS) for _ in range(source.randint(40, 260))]
    return f"Chapter {number}. {' '.join(words)}. Continue this story at length."


def _emoji(number: int) -> str:
    return f"Story {number} 🌊⛵️ 海の話を続けてください。🐉 {_prompt(number)}"


KINDS: list[Kind] = [
    Kind("greedy, chat", CHAT, {"temperature": 0}),
    Kind("greedy, text completion", TEXT, {"temperature": 0}),
    Kind("greedy, chat, not streamed", CHAT, {"temperature": 0}, streamed=False),
    Kind("seeded, text completion, not streamed", TEXT, {"temperature": 1.0, "seed": 11}, streamed=False),
    Kind("seeded, temperature 1", TEXT, {"temperature": 1.0, "seed": 12}),
    Kind("seeded, temperature, top_p, top_k", CHAT, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 13}),
    Kind("seeded, min_p", TEXT, {"temperature": 1.2, "min_p": 0.05, "seed": 14}),
    Kind("unseeded", TEXT, {"temperature": 1.0, "logprobs": 0}, repeatable=False),
    Kind("presence and frequency penalty", CHAT, {"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.5}),
    Kind("repetition penalty, seeded", TEXT, {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 15}),
    Kind("logit_bias", CHAT, {"temperature": 0, "logit_bias": {"260": 3, "282": -100, "28": 2}}),
    Kind("bad_words", TEXT, {"temperature": 0, "bad_words": ["the", "and", "story"]}),
    Kind("allowed_token_ids", TEXT, {"temperature": 1.0, "seed": 16, "allowed_token_ids": list(range(200, 1200))}),
    Kind("min_tokens", TEXT, {"temperature": 1.0, "seed": 17, "min_tokens": TOKENS - 20, "ignore_eos": False}),
    Kind("stop strings that straddle the cut", CHAT, {"temperature": 0, "stop": ["end of all things", "\n\n\n\n"]}),
    Kind("stop_token_ids", TEXT, {"temperature": 0, "stop_token_ids": [49150, 49151]}),
    Kind("logprobs, chat, top_logprobs 4", CHAT, {"temperature": 0, "logprobs": True, "top_logprobs": 4}),
    Kind("logprobs, text completion", TEXT, {"temperature": 0.9, "seed": 18, "logprobs": 2}),
    Kind(
        "continuous usage",
        CHAT,
        {"temperature": 0, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    Kind("cache_salt", CHAT, {"temperature": 0, "cache_salt": "tenant-7"}),
    Kind("emoji and CJK in the prompt", CHAT, {"temperature": 0}, prompt=_emoji),
    Kind(
        "output cut inside multi-byte characters",
        TEXT,
        {"temperature": 1.0, "seed": 19, "structured_outputs": {"regex": "[\u4e00-\u9fa5\U0001f600-\U0001f64f]{90}"}},
    ),
    Kind(
        "structured output: regex",
        TEXT,
        {"temperature": 1.0, "seed": 20, "structured_outputs": {"regex": "[a-z ]{600}"}},
    ),
    Kind("structured output: JSON schema", CHAT, {"temperature": 0, "response_format": _STORY_FORMAT}),
    Kind(
        "structured output: grammar",
        TEXT,
        {"temperature": 1.0, "seed": 21, "structured_outputs": {"grammar": 'root ::= ("ab" | "cd " | [0-9]){200}'}},
    ),
    Kind("n = 2", TEXT, {"temperature": 0.8, "seed": 22, "n": 2}, refused="several_choices"),
    Kind("tools, tool_choice none", CHAT, {"temperature": 0, "tools": [_TOOL], "tool_choice": "none"}),
    Kind("echo", TEXT, {"temperature": 0, "echo": True}, refused="echo"),
    Kind("prompt_logprobs", TEXT, {"temperature": 0, "prompt_logprobs": 0}, refused="prompt_logprobs", streamed=False),
]
