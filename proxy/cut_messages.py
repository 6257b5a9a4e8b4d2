"""The cut of a streamed answer of Anthropic's `/v1/messages`.

A message has blocks by index, each announced, filled by deltas and stopped. Deltas name the index only, so the ids of
the first announcement (message, tool use) stay. A thinking block ends with a signature that each instance makes up:
the client gets one. vLLM makes these events out of its own chat events and leaves the token ids out, so tokens are not
counted.
"""

from __future__ import annotations

from proxy.cursor import AnswerCut, Cursor, Json, LegsDiffer, encode_event
from proxy.errors import ApiError

__all__ = ["MessagesCut"]

#: What grows within a block, by the type of the delta.
_TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


class MessagesCut(AnswerCut):
    """The client's side of one message, which ends with `message_stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: set[tuple[str, int]] = set()
        self._blocks: dict[int, object] = {}

    @property
    def finished(self) -> bool:
        """Whether the client has the stop reason."""
        return self.done or ("message_delta", -1) in self._sent

    def failure(self, error: ApiError) -> bytes:
        return encode_event("error", error.as_anthropic())

    def _is_failure(self, event: Json) -> bool:
        return event.get("type") == "error" or (event.get("error") is not None and "type" not in event)

    def _passes(self, cursor: Cursor, event: Json) -> bool:
        kind, index = event.get("type"), event.get("index", -1)
        delta = event.get("delta")
        if kind == "ping":
            return cursor.first
        if kind == "content_block_delta" and isinstance(delta, dict):
            name = _TEXTS.get(delta.get("type", ""))
            if name is not None:
                return self._trim_text(cursor, (index, name), delta, name) or cursor.first
            kind = delta.get("type")
        block = event.get("content_block")
        if isinstance(block, dict) and self._blocks.setdefault(index, block.get("type")) != block.get("type"):
            raise LegsDiffer(f"block {index} is {self._blocks[index]}, and now {block.get('type')}")
        if (kind, index) in self._sent and not cursor.first:
            return False
        self._sent.add((str(kind), index))
        self.done |= kind == "message_stop"
        return True
