"""Reads answers of Anthropic's `/v1/messages`, streamed and whole. They carry no token ids."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.answers import Answer, ToolCall

__all__ = ["MessagesReader"]


class MessagesReader:
    """Fills an answer; text, thinking and tool use of all content blocks go to one choice."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._seen: set[str] = set()
        self._open: int | None = None
        self._started: set[int] = set()

    def event(self, name: str, data: bytes, now: float) -> None:
        """Takes one event of the stream."""
        answer = self.answer
        if data == b"[DONE]":
            answer.fault("[DONE] is no part of this API")
            return
        event = json.loads(data)
        kind = str(event.get("type", ""))
        if name and name != kind:
            answer.fault(f"the event named {name} says that it is {kind}")
        if kind == "error":
            answer.error = f"error event: {event.get('error')}"
            return
        if "message_stop" in self._seen:
            answer.fault("an event came after message_stop")
        if kind.startswith("message_"):
            self._message(kind, event)
        elif kind.startswith("content_block_"):
            self._block(kind, event)

    def end(self) -> None:
        """The connection was closed by the other side."""
        answer = self.answer
        if answer.error:
            return
        if "message_stop" not in self._seen:
            answer.error = "the stream ended without message_stop"
        elif "message_delta" not in self._seen:
            answer.fault("there was no message_delta with a stop reason")

    def document(self, document: dict[str, Any]) -> None:
        """Takes an answer in one piece."""
        answer = self.answer
        answer.document = document
        answer.name(document.get("id"))
        answer.usage = document.get("usage") or {}
        choice = answer.choice(0)
        for number, block in enumerate(document.get("content") or []):
            choice.text += block.get("text") or ""
            choice.reasoning += block.get("thinking") or ""
            if block["type"] == "tool_use":
                arguments = json.dumps(block.get("input"), sort_keys=True)
                choice.tools[number] = ToolCall(block.get("id", ""), block.get("name", ""), arguments)
        choice.finish_reason = document.get("stop_reason")
        choice.stop_reason = document.get("stop_sequence")

    def _message(self, kind: str, event: dict[str, Any]) -> None:
        answer = self.answer
        if kind in self._seen:
            answer.fault(f"{kind} came twice")
        self._seen.add(kind)
        if kind == "message_start":
            answer.name(event["message"].get("id"))
            return
        if self._open is not None:
            answer.fault(f"content block {self._open} was not stopped")
        if kind == "message_delta":
            answer.usage = event.get("usage") or answer.usage
            choice = answer.choice(0)
            choice.finish_reason = event["delta"].get("stop_reason")
            choice.stop_reason = event["delta"].get("stop_sequence")

    def _block(self, kind: str, event: dict[str, Any]) -> None:
        answer = self.answer
        choice = answer.choice(0)
        index = int(event.get("index") or 0)
        if "message_start" not in self._seen:
            answer.fault("a content block came before message_start")
        if kind == "content_block_start":
            if index in self._started:
                answer.fault(f"content block {index} was started twice")
            if self._open is not None:
                answer.fault(f"content block {self._open} was not stopped")
            self._started.add(index)
            self._open = index
            block = event["content_block"]
            if block["type"] == "tool_use":
                choice.tools[index] = ToolCall(block.get("id", ""), block.get("name", ""))
            return
        if self._open != index:
            answer.fault(f"{kind} for content block {index}, which is not open")
        if kind == "content_block_stop":
            self._open = None
            return
        delta = event["delta"]
        answer.deltas += 1
        choice.text += delta.get("text") or ""
        choice.reasoning += delta.get("thinking") or ""
        if delta.get("partial_json"):
            choice.tools.setdefault(index, ToolCall()).arguments += delta["partial_json"]
