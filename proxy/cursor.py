"""What every cut of a streamed answer has in common: events, positions on channels, and what a client already has.

Every leg of a stream carries the same answer from its beginning, cut into events in its own way: a second leg starts
with one event that repeats all that was generated elsewhere, and an instance may merge several tokens into one event.
So nothing here goes by events. An answer has channels (the text of a choice or of a block, reasoning, arguments of each
tool call, token ids, log probabilities); each leg has a position on every channel and the client has one; what lies
behind the client's position is dropped, the rest is forwarded.

Invariant: on every channel the client's position is what it has been sent, and no position ever moves back. Text that a
later leg repeats is compared with what the client has: a leg that tells another story is never joined to it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

import msgspec

from proxy.errors import ApiError, upstream_lost

__all__ = ["AnswerCut", "Cursor", "Json", "LegsDiffer", "Passed", "encode_event"]

log = logging.getLogger(__name__)

Json = dict[str, Any]

_DATA = b"data:"
_DONE = b"[DONE]"


class LegsDiffer(Exception):
    """A leg does not repeat what the client has: better a broken answer than a wrong one."""


class Cursor:
    """Where one leg is.

    Attributes:
        first: the client has had nothing from another leg, so this one is never trimmed.
        failed: it has carried its instance's error event.
        differs: it does not repeat what the client has, so nothing of it is used any more.
        tokens: output tokens it has carried, over all choices.
    """

    def __init__(self, first: bool) -> None:
        self.first = first
        self.failed = False
        self.differs = False
        self.tokens = 0
        self._at: dict[Hashable, int] = {}
        self._tail = b""

    def events(self, chunk: bytes) -> list[bytes]:
        """Returns the events that `chunk` completes, each with the blank line that ends it."""
        data = self._tail + chunk if self._tail else chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *whole, self._tail = data.split(b"\n\n")
        return [event + b"\n\n" for event in whole]

    def advance(self, channel: Hashable, count: int) -> tuple[int, int]:
        """Moves on by `count` on one channel and returns (old, new) position."""
        start = self._at.get(channel, 0)
        self._at[channel] = start + count
        return start, start + count


class Passed(msgspec.Struct):
    """What of a chunk goes to the client: `ready`, and `failed`, which begins with the leg's own error event."""

    ready: bytes = b""
    failed: bytes = b""


class AnswerCut(ABC):
    """The client's side of one stream.

    Attributes:
        done: the client has the event that ends the stream.
        advances: grows whenever the client gets something new on a channel.
    """

    def __init__(self) -> None:
        self.done = False
        self.advances = 0
        self._have: dict[Hashable, int] = {}
        self._texts: dict[Hashable, list[str]] = {}
        self._begun = False

    @property
    def counted(self) -> bool:
        """Whether the events carry token ids, so that `tokens` and `Cursor.tokens` are exact."""
        return False

    @property
    def tokens(self) -> int:
        """Output tokens the client has been sent, over all choices.

        Without token ids on the wire: events that brought it something. That is right one token per event, and too low
        for the events that carry several, so it must not be compared with what an instance has counted.
        """
        return self.advances

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the client knows how the answer, all of it, ended."""

    def cursor(self) -> Cursor:
        """Returns the position of a leg that starts now."""
        return Cursor(first=not self._begun)

    def feed(self, cursor: Cursor, chunk: bytes) -> Passed:
        """Takes the next bytes of a leg; what is returned counts as sent."""
        passed = Passed()
        for event in cursor.events(chunk):
            if cursor.differs:
                break
            if cursor.failed:
                passed.failed += event
                continue
            out = self._event(cursor, event)
            if cursor.failed:
                passed.failed += out
            else:
                passed.ready += out
        return passed

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Returns `error` as the event that ends a stream of this kind."""

    @abstractmethod
    def _is_failure(self, event: Json) -> bool:
        """Whether `event` says that the instance itself has failed."""

    @abstractmethod
    def _passes(self, cursor: Cursor, event: Json) -> bool:
        """Trims `event` in place; says whether anything is left for the client.

        Raises:
            LegsDiffer: it cannot be fitted to what the client has.
        """

    def _event(self, cursor: Cursor, raw: bytes) -> bytes:
        lines = raw.rstrip(b"\n").split(b"\n")
        data = b"\n".join(line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA))
        if not data:  # a comment
            return raw if cursor.first else b""
        if data == _DONE:
            self.done = True
            return raw
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return raw
        if not isinstance(event, dict):
            return raw
        if self._is_failure(event):
            cursor.failed = True
            return raw
        before = msgspec.json.encode(event)
        try:
            if not self._passes(cursor, event):
                return b""
        except LegsDiffer as error:
            log.error("the second leg does not repeat the first one: %s", error)
            cursor.failed = cursor.differs = True
            return self.failure(upstream_lost())
        self._begun = True
        after = msgspec.json.encode(event)
        if after == before:
            return raw
        head = b"".join(line + b"\n" for line in lines if not line.startswith(_DATA))
        return head + b"data: " + after + b"\n\n"

    def _trim_text(self, cursor: Cursor, channel: Hashable, owner: Json, name: str) -> bool:
        """Removes what the client has from the text `owner[name]`; says whether something is left.

        Raises:
            LegsDiffer: what it removes is not what the client has.
        """
        text = owner.get(name)
        if not isinstance(text, str):
            return False
        start, skip = self._skip(cursor, channel, len(text))
        pieces = self._texts.setdefault(channel, [])
        if skip:
            pieces[:] = ["".join(pieces)]
            if pieces[0][start : start + skip] != text[:skip]:
                raise LegsDiffer(f"the text of {channel} is another one within characters {start} to {start + skip}")
            owner[name] = text[skip:]
        if skip < len(text):
            pieces.append(text[skip:])
        return skip < len(text)

    def _skip(self, cursor: Cursor, channel: Hashable, count: int) -> tuple[int, int]:
        """Moves the leg on by `count`; returns where it was, and how much of that the client has."""
        start, end = cursor.advance(channel, count)
        have = self._have.get(channel, 0)
        if end > have:
            self._have[channel] = end
            self.advances += 1
        return start, min(max(have - start, 0), count)


def encode_event(kind: str, document: Json) -> bytes:
    """Returns a server-sent event whose name is also the document's type."""
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(document) + b"\n\n"
