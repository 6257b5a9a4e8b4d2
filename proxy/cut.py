"""What a client has of one streamed answer, and what it still needs of each leg.

Every leg of a stream carries the same answer from its beginning, cut into events in its own way: a second leg starts
with one event that repeats all that was generated elsewhere, and an instance may merge several tokens into one event.
So nothing here goes by events. Each choice has channels (text, reasoning, arguments of each tool call, token ids, log
probabilities); each leg has a position on every channel and the client has one; what lies behind the client's position
is dropped, the rest is forwarded.

Invariant: on every channel the client's position is what it has been sent, and no position ever moves back.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Cursor", "Cut", "Passed"]

Json = dict[str, Any]

_DATA = b"data:"
_DONE = b"[DONE]"
_IDENTITY = ("id", "created", "system_fingerprint")
_TOKENS = "token_ids"


class Cursor:
    """Where one leg is. `first`: the client has had nothing from another leg, so this one is never trimmed."""

    def __init__(self, first: bool) -> None:
        self.first = first
        self.failed = False
        self._at: dict[tuple[int, str], int] = {}
        self._tail = b""

    def events(self, chunk: bytes) -> list[bytes]:
        """Returns the events that `chunk` completes, each with the blank line that ends it."""
        data = self._tail + chunk if self._tail else chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *whole, self._tail = data.split(b"\n\n")
        return [event + b"\n\n" for event in whole]

    def advance(self, key: tuple[int, str], count: int) -> tuple[int, int]:
        """Moves on by `count` on one channel and returns (old, new) position."""
        start = self._at.get(key, 0)
        self._at[key] = start + count
        return start, start + count

    @property
    def tokens(self) -> int:
        """Output tokens this leg has carried so far, over all choices."""
        return sum(count for (_, channel), count in self._at.items() if channel == _TOKENS)


class Passed(msgspec.Struct):
    """What of a chunk goes to the client: `ready`, and `failed`, which begins with the leg's own error event."""

    ready: bytes = b""
    failed: bytes = b""


class Cut:
    """The client's side of one stream.

    Attributes:
        done: the client has the final `[DONE]`.
        advances: grows whenever the client gets something new on a channel.
    """

    def __init__(self, wants_token_ids: bool, choices: int = 1) -> None:
        self.done = False
        self.advances = 0
        self._wants_token_ids = wants_token_ids
        self._choices = choices
        self._have: dict[tuple[int, str], int] = {}
        self._roles: set[int] = set()
        self._tool_calls: set[tuple[int, int]] = set()
        self._finished: set[int] = set()
        self._prompt_sent: set[int] = set()
        self._usage_sent = False
        self._identity: Json = {}

    @property
    def tokens(self) -> int:
        """Output tokens the client has been sent, over all choices; 0 while the instance reports no token ids."""
        return sum(count for (_, channel), count in self._have.items() if channel == _TOKENS)

    @property
    def finished(self) -> bool:
        """Whether the client has the finish reason of every choice."""
        return self.done or len(self._finished) >= self._choices

    def cursor(self) -> Cursor:
        """Returns the position of a leg that starts now."""
        return Cursor(first=not self._have and not self._roles)

    def feed(self, cursor: Cursor, chunk: bytes) -> Passed:
        """Takes the next bytes of a leg; what is returned counts as sent."""
        passed = Passed()
        for event in cursor.events(chunk):
            if cursor.failed:
                passed.failed += event
                continue
            out = self._event(cursor, event)
            if cursor.failed:
                passed.failed += out
            else:
                passed.ready += out
        return passed

    # -- one event -----------------------------------------------------------------------------------------------------

    def _event(self, cursor: Cursor, raw: bytes) -> bytes:
        if not raw.startswith(_DATA):  # a comment
            return raw if cursor.first else b""
        data = raw[len(_DATA) :].strip()
        if data == _DONE:
            self.done = True
            return raw
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return raw
        if not isinstance(event, dict):
            return raw
        if event.get("error") is not None and not event.get("choices"):
            cursor.failed = True
            return raw
        before = msgspec.json.encode(event)
        if not self._passes(cursor, event):
            return b""
        after = msgspec.json.encode(event)
        return raw if after == before else b"data: " + after + b"\n\n"

    def _passes(self, cursor: Cursor, event: Json) -> bool:
        """Trims `event` in place; says whether anything is left for the client."""
        choices = event.get("choices")
        if not isinstance(choices, list):
            return True
        if choices:
            kept = [choice for choice in choices if self._trim_choice(cursor, choice)]
            if not kept and not cursor.first:
                return False
            if not cursor.first:
                event["choices"] = choices = kept
        elif event.get("usage") is not None:
            if self._usage_sent:
                return False
            self._usage_sent = True
        self._settle_identity(cursor, event)
        self._settle_token_ids(cursor, event, choices)
        return self._wants_token_ids or not choices or event.get("usage") is not None or not _is_hollow(choices)

    def _trim_choice(self, cursor: Cursor, choice: Json) -> bool:
        """Removes what the client has from one choice; says whether something new is in it."""
        index = choice.get("index", 0)
        news = self._trim_text(cursor, index, choice, "text")
        delta = choice.get("delta")
        if isinstance(delta, dict):
            news |= self._trim_delta(cursor, index, delta)
        news |= self._trim_logprobs(cursor, index, choice)
        ids = choice.get(_TOKENS)
        if isinstance(ids, list):
            skip = self._skip(cursor, (index, _TOKENS), len(ids))
            news |= skip < len(ids)
            if skip:
                choice[_TOKENS] = ids[skip:]
        if choice.get("finish_reason") is not None and index not in self._finished:
            self._finished.add(index)
            news = True
        return news

    def _trim_delta(self, cursor: Cursor, index: int, delta: Json) -> bool:
        news = False
        if delta.get("role") is not None:
            if index not in self._roles:
                self._roles.add(index)
                news = True
            elif not cursor.first:
                del delta["role"]
        for name in [name for name, value in delta.items() if isinstance(value, str) and name != "role"]:
            news |= self._trim_text(cursor, index, delta, name)
        calls = delta.get("tool_calls")
        if isinstance(calls, list) and calls:
            kept = [call for call in calls if self._trim_tool_call(cursor, index, call)]
            news |= bool(kept)
            if kept and not cursor.first:
                delta["tool_calls"] = kept
            elif not cursor.first:
                del delta["tool_calls"]
        return news

    def _trim_tool_call(self, cursor: Cursor, index: int, call: Json) -> bool:
        number = call.get("index", 0)
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        news = False
        if call.get("id") is not None or function.get("name") is not None:
            if (index, number) not in self._tool_calls:
                self._tool_calls.add((index, number))
                news = True
            elif not cursor.first:
                # Each run makes up ids of its own; the client keeps the first.
                for owner, name in ((call, "id"), (call, "type"), (function, "name")):
                    owner.pop(name, None)
        return self._trim_text(cursor, index, function, "arguments", f"tool_calls[{number}]") or news

    def _trim_text(self, cursor: Cursor, index: int, owner: Json, name: str, channel: str | None = None) -> bool:
        text = owner.get(name)
        if not isinstance(text, str):
            return False
        skip = self._skip(cursor, (index, channel or name), len(text))
        if skip:
            owner[name] = text[skip:]
        return skip < len(text)

    def _trim_logprobs(self, cursor: Cursor, index: int, choice: Json) -> bool:
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return False
        entries = logprobs.get("content", logprobs.get("tokens"))
        if not isinstance(entries, list):
            return False
        count = len(entries)
        skip = self._skip(cursor, (index, "logprobs"), count)
        if skip == count and count:
            choice["logprobs"] = None
        elif skip:
            # Chat has one list of entries, text completions have parallel lists of the same length.
            choice["logprobs"] = {k: v[skip:] if isinstance(v, list) else v for k, v in logprobs.items()}
        return skip < count

    def _skip(self, cursor: Cursor, key: tuple[int, str], count: int) -> int:
        """Moves the leg on by `count`; returns how much of that the client has."""
        start, end = cursor.advance(key, count)
        have = self._have.get(key, 0)
        if end > have:
            self._have[key] = end
            self.advances += 1
        return min(max(have - start, 0), count)

    # -- the event around the choices ----------------------------------------------------------------------------------

    def _settle_identity(self, cursor: Cursor, event: Json) -> None:
        for name in _IDENTITY:
            if name in self._identity and not cursor.first:
                if name in event:
                    event[name] = self._identity[name]
            elif event.get(name) is not None:
                self._identity[name] = event[name]

    def _settle_token_ids(self, cursor: Cursor, event: Json, choices: list[Json]) -> None:
        for index, owner in [(-1, event), *((choice.get("index", 0), choice) for choice in choices)]:
            if not self._wants_token_ids:
                owner.pop(_TOKENS, None)
                owner.pop("prompt_token_ids", None)
            elif owner.get("prompt_token_ids") is not None:
                if index in self._prompt_sent and not cursor.first:
                    del owner["prompt_token_ids"]
                self._prompt_sent.add(index)


def _is_hollow(choices: list[Json]) -> bool:
    """Whether an event existed only to carry token ids: without those the instance would not have sent it."""
    return all(
        choice.get("delta") == {} and choice.get("finish_reason") is None and not choice.get("logprobs")
        for choice in choices
    )
