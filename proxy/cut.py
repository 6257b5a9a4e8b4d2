"""The cut of a streamed chat or text completion: choices, each with channels of its own."""

from __future__ import annotations

from proxy.cursor import AnswerCut, Cursor, Json
from proxy.errors import ApiError, error_event

__all__ = ["Cut"]

_IDENTITY = ("id", "created", "system_fingerprint")
_TOKENS = "token_ids"


class Cut(AnswerCut):
    """The client's side of one stream of `choices` choices, which ends with `[DONE]`.

    Args:
        wants_token_ids: the client asked for them.
        choices: how many choices the answer will have.
        asked: the instance was asked for token ids; if only by us, they are taken out.
    """

    def __init__(self, wants_token_ids: bool, choices: int = 1, asked: bool = True) -> None:
        super().__init__()
        self._strips_token_ids = asked and not wants_token_ids
        self._choices = choices
        self._token_ids: dict[int, int] = {}
        self._roles: set[int] = set()
        self._tool_calls: set[tuple[int, int]] = set()
        self._finished: set[int] = set()
        self._prompt_sent: set[tuple[bool, int]] = set()
        self._usage_sent = False
        self._identity: Json = {}

    @property
    def counted(self) -> bool:
        # Behind a parser, a chat that hides its reasoning hides its token ids, too, whoever asks for them.
        return bool(self._token_ids)

    @property
    def tokens(self) -> int:
        return sum(self._token_ids.values()) if self.counted else super().tokens

    @property
    def finished(self) -> bool:
        """Whether the client has the finish reason of every choice."""
        return self.done or len(self._finished) >= self._choices

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def _is_failure(self, event: Json) -> bool:
        return event.get("error") is not None and not event.get("choices")

    def _passes(self, cursor: Cursor, event: Json) -> bool:
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
        return not self._strips_token_ids or not choices or not _is_hollow(choices)

    def _trim_choice(self, cursor: Cursor, choice: Json) -> bool:
        """Removes what the client has from one choice; says whether something new is in it."""
        index = choice.get("index", 0)
        news = self._trim_text(cursor, (index, "text"), choice, "text")
        delta = choice.get("delta")
        if isinstance(delta, dict):
            news |= self._trim_delta(cursor, index, delta)
        news |= self._trim_logprobs(cursor, index, choice)
        news |= self._trim_token_ids(cursor, index, choice)
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
            news |= self._trim_text(cursor, (index, name), delta, name)
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
        return self._trim_text(cursor, (index, number, "arguments"), function, "arguments") or news

    def _trim_logprobs(self, cursor: Cursor, index: int, choice: Json) -> bool:
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return False
        entries = logprobs.get("content", logprobs.get("tokens"))
        if not isinstance(entries, list):
            return False
        count = len(entries)
        _, skip = self._skip(cursor, (index, "logprobs"), count)
        if skip == count and count:
            choice["logprobs"] = None
        elif skip:
            # Chat has one list of entries, text completions have parallel lists of the same length.
            choice["logprobs"] = {k: v[skip:] if isinstance(v, list) else v for k, v in logprobs.items()}
        return skip < count

    def _trim_token_ids(self, cursor: Cursor, index: int, choice: Json) -> bool:
        ids = choice.get(_TOKENS)
        if not isinstance(ids, list):
            return False
        count = len(ids)
        cursor.tokens += count
        _, skip = self._skip(cursor, (index, _TOKENS), count)
        self._token_ids[index] = self._token_ids.get(index, 0) + count - skip
        if skip:
            choice[_TOKENS] = ids[skip:]
        return skip < count

    # -- the event around the choices ----------------------------------------------------------------------------------

    def _settle_identity(self, cursor: Cursor, event: Json) -> None:
        for name in _IDENTITY:
            if name in self._identity and not cursor.first:
                if name in event:
                    event[name] = self._identity[name]
            elif event.get(name) is not None:
                self._identity[name] = event[name]

    def _settle_token_ids(self, cursor: Cursor, event: Json, choices: list[Json]) -> None:
        # A chat has the prompt's ids beside the choices, in the event of each choice's role; a text completion in them.
        around = choices[0].get("index", 0) if choices else 0
        for key, owner in [((True, around), event), *(((False, x.get("index", 0)), x) for x in choices)]:
            if self._strips_token_ids:
                owner.pop(_TOKENS, None)
                owner.pop("prompt_token_ids", None)
            elif owner.get("prompt_token_ids") is not None:
                if key in self._prompt_sent and not cursor.first:
                    del owner["prompt_token_ids"]
                self._prompt_sent.add(key)


def _is_hollow(choices: list[Json]) -> bool:
    """Whether an event existed only to carry token ids: without those the instance would not have sent it."""
    return all(
        choice.get("delta") == {} and choice.get("finish_reason") is None and not choice.get("logprobs")
        for choice in choices
    )
