"""The cut of a streamed answer of `/v1/responses`.

A response has items by output index, each announced, filled by deltas and ended; every event names its item and has a
number. Each instance makes up the ids of response, items and calls: the client keeps those of the first announcement,
also in the final events, which repeat the whole text. Events are numbered on from where the client is. There are no
token ids on the wire, so tokens are not counted.
"""

from __future__ import annotations

from proxy.cursor import AnswerCut, Cursor, Json, LegsDiffer, encode_event
from proxy.errors import ApiError

__all__ = ["ResponsesCut"]

_LAST = frozenset({"response.completed", "response.incomplete"})
_FAILED = frozenset({"error", "response.failed"})
_RESPONSE_IDS = ("id", "created_at")
_ITEM_IDS = ("id", "call_id")
#: What tells two events of one type apart.
_PLACE = ("output_index", "content_index", "summary_index")


class ResponsesCut(AnswerCut):
    """The client's side of one response, which ends with `response.completed`."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: set[tuple[object, ...]] = set()
        self._response: Json = {}
        self._items: dict[int, Json] = {}
        self._number = 0

    @property
    def finished(self) -> bool:
        """Whether the client has the final event."""
        return self.done

    def failure(self, error: ApiError) -> bytes:
        fields = error.fields
        document = {"type": "error", "code": fields["code"], "message": fields["message"], "param": fields["param"]}
        return encode_event("error", {**document, "sequence_number": self._number})

    def _is_failure(self, event: Json) -> bool:
        return event.get("type") in _FAILED or (event.get("error") is not None and "type" not in event)

    def _passes(self, cursor: Cursor, event: Json) -> bool:
        kind = str(event.get("type"))
        place = (kind, *(event.get(name) for name in _PLACE))
        grows = kind.endswith(".delta")
        if grows and not self._trim_text(cursor, place, event, "delta") and not cursor.first:
            return False
        if cursor.first:
            self._learn(event)
        else:
            self._settle_ids(event)
            if place in self._sent and not grows:
                return False
            event["sequence_number"] = self._number
        self._number = event.get("sequence_number", self._number) + 1
        self._sent.add(place)
        self.done |= kind in _LAST
        return True

    def _learn(self, event: Json) -> None:
        """Remembers the ids that a first leg's instance has made up."""
        response, item, index = event.get("response"), event.get("item"), event.get("output_index")
        if isinstance(response, dict):
            for name in _RESPONSE_IDS:
                self._response.setdefault(name, response.get(name))
        if isinstance(item, dict) and isinstance(index, int):
            known = self._items.setdefault(index, {"type": item.get("type")})
            for name in _ITEM_IDS:
                known.setdefault(name, item.get(name))

    def _settle_ids(self, event: Json) -> None:
        """Replaces what a later leg's instance has made up by what the client knows; what is new to it stays."""
        response, item, index = event.get("response"), event.get("item"), event.get("output_index")
        if isinstance(response, dict):
            _keep(self._response, response, *_RESPONSE_IDS)
            for number, output in enumerate(response.get("output") or ()):
                self._settle_item(number, output)
        if isinstance(index, int):
            if isinstance(item, dict):
                self._settle_item(index, item)
            if "item_id" in event:
                event["item_id"] = self._items.get(index, {}).get("id", event["item_id"])

    def _settle_item(self, index: int, item: Json) -> None:
        known = self._items.setdefault(index, {"type": item.get("type")})
        if known["type"] != item.get("type"):
            raise LegsDiffer(f"item {index} is {known['type']}, and now {item.get('type')}")
        _keep(known, item, *_ITEM_IDS)


def _keep(known: Json, owner: Json, *names: str) -> None:
    for name in names:
        if owner.get(name) is not None:
            if known.get(name) is None:
                known[name] = owner[name]
            owner[name] = known[name]
