"""What a row of the fidelity matrix is: a kind of request, how to build one, and what must become of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.answers import Request

__all__ = [
    "CHAT",
    "MESSAGES",
    "REASONING_PARSER",
    "RESPONSES",
    "TEXT",
    "TOKENS",
    "TOOL_PARSER",
    "Kind",
    "prompt",
]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
#: What the stacks `tools` and `reasoning` are started with.
TOOL_PARSER, REASONING_PARSER = "hermes", "qwen3"
#: Output tokens of most requests: enough for two moves in mid-answer.
TOKENS = 110
#: Fields that bring structure, whose end is the answer's end.
_STRUCTURED = frozenset({"structured_outputs", "response_format", "tools", "text"})
# fmt: off
_WORDS = [
    "harbour", "fog", "bridge", "letter", "oranges", "clock", "river", "lighthouse", "copper", "market",
    "winter", "seeds", "musician", "platform", "recipe", "engine", "water", "patience", "map", "pencil",
    "library", "rain", "door", "shade", "green", "rules", "game", "keeper", "village", "stone",
]
# fmt: on


@dataclass(frozen=True)
class Kind:
    """One row.

    Attributes:
        name: the row's name; unique.
        path: the route.
        fields: of the body, beside the usual ones; a field that is None is left out.
        refused: the code it must be refused with; empty means that it must move exactly.
        repeatable: greedy or seeded.
        streamed: whether the answer is a stream of events.
        text: makes the prompt from a number, another one for each request.
        prompts: how many prompts the request has (`/v1/completions`).
        stack: the instances that it needs (`benchmarks.stacks`).
        warm: the prompt is in the target's prefix cache before the move.
        copies: requests of this kind that travel together, with the first block of their prompts in common.
        ends: the answer ends about when it is frozen, so that it may end before it has moved.
    """

    name: str
    path: str
    fields: dict[str, Any]
    refused: str = ""
    repeatable: bool = True
    streamed: bool = True
    text: Callable[[int], str] | None = None
    prompts: int = 1
    stack: str = "plain"
    warm: bool = False
    copies: int = 1
    ends: bool = False

    @property
    def sequences(self) -> int:
        """Sequences that one request of this kind runs side by side."""
        return int(self.fields.get("n", 1)) * self.prompts

    def request(self, number: int) -> Request:
        """Builds the request with a prompt of its own for each `number`."""
        text = (self.text or prompt)(number)
        body = {**_usual(self.path, self.streamed), **_prompted(self.path, text)}
        if self.prompts > 1:
            body["prompt"] = [text, *(prompt(number * 10 + extra) for extra in range(1, self.prompts))]
        if self.path != MESSAGES and not _STRUCTURED & self.fields.keys():
            body["ignore_eos"] = True
        body |= self.fields
        if self.ends:
            # Lengths around the one at which the requests beside it are frozen.
            body["max_tokens"] += number * 7 % 40
        return Request(
            f"{self.name} #{number}",
            self.path,
            {name: value for name, value in body.items() if value is not None},
            self.repeatable,
        )

    def but(self, **changes: Any) -> Kind:
        """Returns the same kind with some attributes changed."""
        return replace(self, **changes)


def _usual(path: str, streamed: bool) -> dict[str, Any]:
    if path == RESPONSES:
        return {"max_output_tokens": TOKENS, "store": False, "stream": streamed or None}
    if path == MESSAGES:
        return {"max_tokens": TOKENS, "stream": streamed or None}
    body: dict[str, Any] = {"max_tokens": TOKENS, "return_token_ids": True}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if streamed else {})


def _prompted(path: str, text: str) -> dict[str, Any]:
    if path == TEXT:
        return {"prompt": text}
    if path == RESPONSES:
        return {"input": text}
    return {"messages": [{"role": "user", "content": text}]}


def prompt(number: int) -> str:
    """A prompt of 60 to 400 tokens, another one for each number."""
    source = random.Random(number)
    words = [source.choice(_WORDS) for _ in range(source.randint(40, 260))]
    return f"Chapter {number}. {' '.join(words)}. Continue this story at length."
