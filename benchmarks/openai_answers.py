"""Reads answers of `/v1/chat/completions` and `/v1/completions`, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.answers import Answer, Choice, ToolCall

__all__ = ["OpenAIReader"]


class OpenAIReader:
    """Fills an answer from what arrives, and notes what a strict client would stumble over."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._done = False
        self._usage_seen = False
        self._created: set[Any] = set()
        self._roles: set[int] = set()
        self._usage_of: dict[int, int] = {}

    def event(self, name: str, data: bytes, now: float) -> None:
        """Takes one event; `name` is empty in this API."""
        answer = self.answer
        if self._done:
            answer.fault("[DONE] came twice" if data == b"[DONE]" else "an event came after [DONE]")
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if event.get("error") is not None:
            answer.error = f"error event: {event['error']}"
            return
        answer.name(event.get("id"))
        self._created.add(event.get("created"))
        if len(self._created) > 1:
            answer.fault("`created` changes")
        choices = event.get("choices") or []
        tokens = sum(self._choice(event, choice) for choice in choices)
        if tokens:
            answer.arrivals.append((now, tokens))
        if event.get("usage"):
            self._usage(event["usage"], choices)

    def end(self) -> None:
        """The connection was closed by the other side."""
        answer = self.answer
        if not self._done and not answer.error:
            answer.error = "the stream ended without [DONE]"
        self._check_ends()

    def document(self, document: dict[str, Any]) -> None:
        """Takes an answer in one piece."""
        answer = self.answer
        answer.document = document
        answer.name(document.get("id"))
        answer.usage = document.get("usage") or {}
        for entry in document["choices"]:
            index = entry.get("index", 0)
            choice = answer.choice(index)
            ids = entry.get("prompt_token_ids") or document.get("prompt_token_ids")
            if ids and not choice.prompt_token_ids:
                choice.prompt_token_ids = ids
            message = entry.get("message", entry)
            self._take(choice, entry, message)
            for number, call in enumerate(message.get("tool_calls") or []):
                self._tool_call(index, choice, {**call, "index": number})
        self._check_ends()

    def _check_ends(self) -> None:
        if not self.answer.error:
            for index, choice in self.answer.choices.items():
                if choice.finish_reason is None:
                    self.answer.fault(f"choice {index} has no finish reason")

    # -- one event -----------------------------------------------------------------------------------------------------

    def _choice(self, event: dict[str, Any], entry: dict[str, Any]) -> int:
        """Takes one choice of an event and returns how many tokens it brought."""
        answer = self.answer
        index = entry.get("index", 0)
        choice = answer.choice(index)
        delta = entry.get("delta", entry)
        if delta.get("role"):
            if index in self._roles:
                answer.fault(f"choice {index} has a second role")
            self._roles.add(index)
        prompt = entry.get("prompt_token_ids") or event.get("prompt_token_ids")
        if prompt:
            if choice.prompt_token_ids and "prompt_token_ids" in entry:
                answer.fault(f"choice {index} has its prompt token ids twice")
            choice.prompt_token_ids = prompt
        if choice.finish_reason is not None and _brings_something(entry, delta):
            answer.fault(f"choice {index} goes on after its finish reason")
        answer.deltas += _brings_something(entry, delta)
        self._take(choice, entry, delta)
        for call in delta.get("tool_calls") or []:
            self._tool_call(index, choice, call)
        return len(entry.get("token_ids") or [])

    def _take(self, choice: Choice, entry: dict[str, Any], content: dict[str, Any]) -> None:
        choice.text += content.get("content") or content.get("text") or ""
        choice.reasoning += content.get("reasoning") or content.get("reasoning_content") or ""
        choice.token_ids += entry.get("token_ids") or []
        if entry.get("finish_reason") is not None:
            if choice.finish_reason is not None:
                self.answer.fault("a choice has two finish reasons")
            choice.finish_reason = entry["finish_reason"]
            choice.stop_reason = entry.get("stop_reason")
        _take_logprobs(choice, entry.get("logprobs") or {})

    def _tool_call(self, index: int, choice: Choice, call: dict[str, Any]) -> None:
        known = choice.tools.setdefault(call.get("index", 0), ToolCall())
        function = call.get("function") or {}
        if call.get("id"):
            if known.id:
                self.answer.fault(f"a tool call of choice {index} has its id twice")
            known.id = call["id"]
        elif not known.id:
            self.answer.fault(f"a tool call of choice {index} begins without an id")
        if function.get("name"):
            if known.name:
                self.answer.fault(f"a tool call of choice {index} has its name twice")
            known.name = function["name"]
        known.arguments += function.get("arguments") or ""

    def _usage(self, usage: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        answer = self.answer
        answer.usage = usage
        if not choices:
            if self._usage_seen:
                answer.fault("the final usage came twice")
            self._usage_seen = True
            return
        for entry in choices:
            index, completed = entry.get("index", 0), usage.get("completion_tokens", 0)
            if completed < self._usage_of.get(index, 0):
                answer.fault(f"the running usage of choice {index} goes back")
            self._usage_of[index] = completed
            delivered = len(answer.choice(index).token_ids)
            if delivered and delivered != completed:
                answer.fault(f"the running usage of choice {index} is not what was delivered")


def _brings_something(entry: dict[str, Any], delta: dict[str, Any]) -> bool:
    names = ("content", "text", "reasoning", "reasoning_content", "tool_calls")
    return bool(entry.get("token_ids")) or any(delta.get(name) for name in names)


def _take_logprobs(choice: Choice, logprobs: dict[str, Any]) -> None:
    for token in logprobs.get("content") or []:
        choice.logprobs.append(token["logprob"])
        choice.alternatives.append({other["token"]: other["logprob"] for other in token.get("top_logprobs") or []})
    # Text completions have parallel lists instead.
    choice.logprobs += logprobs.get("token_logprobs") or []
    choice.alternatives += [row or {} for row in logprobs.get("top_logprobs") or []]
    choice.offsets += logprobs.get("text_offset") or []
