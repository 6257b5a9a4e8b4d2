"""Reads answers of `/v1/responses`, streamed and whole. They carry no token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.answers import Answer, ToolCall

__all__ = ["ResponsesReader"]

_ONCE = frozenset({"response.created", "response.in_progress", "response.completed"})
_DELTAS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
}


@dataclass
class _Item:
    """One output item under way. `collected`: what its deltas add up to."""

    id: str
    kind: str
    collected: str = ""
    over: bool = False


class ResponsesReader:
    """Fills an answer; text, reasoning and tool calls of all output items go to one choice."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._next = 0
        self._seen: set[str] = set()
        self._items: dict[int, _Item] = {}
        self._created: set[Any] = set()
        self._completed: dict[str, Any] | None = None

    def event(self, name: str, data: bytes, now: float) -> None:
        """Takes one event of the stream."""
        answer = self.answer
        if data == b"[DONE]":
            return
        event = json.loads(data)
        kind = str(event.get("type", ""))
        if name and name != kind:
            answer.fault(f"the event named {name} says that it is {kind}")
        if kind == "error" or event.get("error") is not None or kind == "response.failed":
            answer.error = f"error event: {event}"
            return
        if self._completed is not None:
            answer.fault("an event came after response.completed")
        number = event.get("sequence_number")
        if number != self._next:
            answer.fault("the sequence numbers have a gap or repeat")
        self._next = (number if isinstance(number, int) else self._next) + 1
        if kind in _ONCE:
            self._state(kind, event["response"])
        else:
            self._item(kind, event)

    def end(self) -> None:
        """The connection was closed by the other side."""
        answer = self.answer
        if answer.error:
            return
        if self._completed is None:
            answer.error = "the stream ended without response.completed"
            return
        streamed = answer.choice(0)
        whole = Answer(answer.request)
        ResponsesReader(whole).document(self._completed)
        answer.usage = whole.usage
        if whole.text != streamed.text or whole.choice(0).reasoning != streamed.reasoning:
            answer.fault("the completed response says something else than its deltas")
        streamed.finish_reason = whole.finish_reason
        if any(not item.over for item in self._items.values()):
            answer.fault("an output item was never done")

    def document(self, document: dict[str, Any]) -> None:
        """Takes an answer in one piece."""
        answer = self.answer
        answer.document = document
        answer.name(document.get("id"))
        answer.usage = document.get("usage") or {}
        choice = answer.choice(0)
        for number, item in enumerate(document.get("output") or []):
            if item["type"] == "function_call":
                choice.tools[number] = ToolCall(item.get("call_id", ""), item["name"], item["arguments"])
            for part in item.get("content") or []:
                if item["type"] == "reasoning":
                    choice.reasoning += part.get("text") or ""
                else:
                    choice.text += part.get("text") or ""
                    self._logprobs(part)
        details = document.get("incomplete_details") or {}
        choice.finish_reason = details.get("reason") or document.get("status")

    # -- one event -----------------------------------------------------------------------------------------------------

    def _state(self, kind: str, response: dict[str, Any]) -> None:
        answer = self.answer
        if kind in self._seen:
            answer.fault(f"{kind} came twice")
        self._seen.add(kind)
        answer.name(response.get("id"))
        self._created.add(response.get("created_at"))
        if len(self._created) > 1:
            answer.fault("`created_at` changes")
        if kind == "response.completed":
            self._completed = response

    def _item(self, kind: str, event: dict[str, Any]) -> None:
        answer = self.answer
        index = event.get("output_index", 0)
        if kind == "response.output_item.added":
            if index in self._items:
                answer.fault(f"output item {index} was added twice")
            item = event["item"]
            self._items[index] = _Item(str(item.get("id")), str(item["type"]))
            if item["type"] == "function_call":
                answer.choice(0).tools[index] = ToolCall(item.get("call_id", ""), item["name"])
            return
        item = self._items.get(index)
        if item is None or item.over:
            answer.fault(f"{kind} for an output item that is not open")
            return
        named = event.get("item_id") or (event.get("item") or {}).get("id")
        if named is not None and str(named) != item.id:
            answer.fault(f"the id of output item {index} changes")
        if kind == "response.output_item.done":
            item.over = True
            self._done_item(index, event["item"])
            return
        base, _, last = kind.rpartition(".")
        if base in _DELTAS and last == "delta":
            item.collected += event["delta"]
            self._delta(base, index, event)
        elif base in _DELTAS and last == "done" and event.get(_DELTAS[base]) != item.collected:
            answer.fault(f"{kind} says something else than its deltas")

    def _delta(self, base: str, index: int, event: dict[str, Any]) -> None:
        answer = self.answer
        choice = answer.choice(0)
        answer.deltas += 1
        if base == "response.output_text":
            choice.text += event["delta"]
            self._logprobs(event)
        elif base == "response.reasoning_text":
            choice.reasoning += event["delta"]
        else:
            choice.tools.setdefault(index, ToolCall()).arguments += event["delta"]

    def _done_item(self, index: int, item: dict[str, Any]) -> None:
        call = self.answer.choice(0).tools.get(index)
        if call is not None and (item.get("call_id"), item.get("name")) != (call.id, call.name):
            self.answer.fault(f"the tool call of output item {index} changes its id or name")

    def _logprobs(self, owner: dict[str, Any]) -> None:
        choice = self.answer.choice(0)
        for token in owner.get("logprobs") or []:
            choice.logprobs.append(token["logprob"])
            choice.alternatives.append({other["token"]: other["logprob"] for other in token.get("top_logprobs") or []})
